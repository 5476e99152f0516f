"""Plain text for a language model, one sentence per line: a chain reads `<s> w1 w2` and predicts `w1 w2 </s>`."""

import dataclasses

import numpy as np

from cavs._graphs.converters import from_lengths
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError
from cavs._readers.source import bare_suffix, read_lines
from cavs._train.config import TrainError

BEGIN, END = MARKS = ("<s>", "</s>")
UNKNOWN = "<unk>"
# The ends of names of files that hold graphs and never plain text.
GRAPHS = (".ptb", ".trees", ".mrg", ".conllu", ".jsonl", ".bench", ".blif", ".npz")


def read_text(path: str) -> Graphs:
    """Reads a UTF-8 text, decompressed if its name ends in `.gz`, as a chain of words per line. Blank lines are skipped.

    Words are separated by white space. `vocab` begins with `<s>` and `</s>`. The `label` of a vertex is the next word, also
    an index of `vocab`.

    Raises:
        TrainError: the name is that of another format, or the text has no words, contains `<s>` or `</s>`, or is not UTF-8.
    """
    if bare_suffix(path) in GRAPHS:
        raise TrainError(f"{path}: got a file of graphs, by the end of its name; expected a text, one sentence per line.")
    try:
        sentences = [words for line in read_lines(path) if (words := line.split())]
    except FormatError as error:
        raise TrainError(str(error)) from error
    if not sentences:
        raise TrainError(f"{path}: got no words; expected a text, one sentence per line.")
    flat = [word for words in sentences for word in words]
    ids, names = number_names([*MARKS, *flat])
    if (ids[2:] < 2).any():
        raise TrainError(
            f"{path}: got the word <s> or </s>; expected a text without them, because cavs adds them to each sentence."
        )
    lengths = np.array([len(words) for words in sentences]) + 1
    starts = np.cumsum(lengths) - lengths
    inner = np.ones(lengths.sum(), bool)
    inner[starts] = False
    inputs = np.zeros(len(inner), np.int32)
    inputs[inner] = ids[2:]
    labels = np.append(inputs[1:], 0)
    labels[starts + lengths - 1] = 1
    return from_lengths(lengths, input_id=inputs, label=labels, vocab=names, label_names=names)


def relabel(graphs: Graphs, words: tuple[str, ...]) -> Graphs:
    """The same chains with inputs and labels as indices of `words`; other words become `<unk>`."""
    assert graphs.label is not None and graphs.label_names is not None
    index = {word: i for i, word in enumerate(words)}
    table = np.array([index.get(name, index[UNKNOWN]) for name in graphs.label_names], np.int32)
    renamed = graphs.with_vocab(words, UNKNOWN)
    return dataclasses.replace(renamed, label=table[graphs.label], label_names=words)
