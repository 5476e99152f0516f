"""CoNLL-U, the dependency trees of Universal Dependencies."""

import dataclasses
import re

import numpy as np

from cavs._graphs.checks import CycleError, check_choice
from cavs._graphs.flat import children_of_parents, number_names
from cavs._graphs.graphs import Graphs
from cavs._readers.source import ASCII_SPACE, Path, format_error, read_lines

LABEL_COLUMNS = {"upos": 3, "xpos": 4, "deprel": 7}
_SKIPPED_ID = re.compile(r"[0-9]+[-.][0-9]+")


def read_conllu(path: Path, *, label: str = "upos") -> Graphs:
    """Reads dependency trees: a graph per sentence and a vertex per word, in the order of the sentence.

    A word line has ten columns, separated by tabs: ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC. IDs run 1, 2, ...
    Multiword tokens (`3-4`), empty nodes (`3.1`) and comments (`#`) are skipped. A blank line ends a sentence. The file is
    UTF-8, and a file without sentences gives no graphs.

    The children of a word are the words whose HEAD it is, from left to right. A word with HEAD 0 is a root; a sentence may
    have several. `input_id` is the FORM, in `vocab` in the order of first appearance. `label` is the chosen column, in
    `label_names` in the order of first appearance, and -1 if the column is `_`.

    Args:
        path: the file; it is decompressed if its name ends in `.gz`.
        label: the column for `label`: "upos", "xpos" or "deprel".

    Returns:
        The graphs.

    Raises:
        FormatError: a line does not have ten non-empty columns, an ID is out of order, a HEAD is not a word of the sentence,
            or the heads form a cycle. The message names the line.
        ValueError: `label` is another column.
    """
    check_choice("read_conllu: label", label, LABEL_COLUMNS)
    lines = read_lines(path)
    words = read_words(path, lines, label)
    sizes = np.array(words.num_vertices, np.int64)
    starts = np.cumsum(sizes) - sizes
    heads = np.array(words.heads, np.int64)
    parents = np.where(heads > 0, heads - 1 + np.repeat(starts, sizes), -1)

    word_ids, vocab = number_names(words.forms)
    label_ids, label_names = number_names([None if text == "_" else text for text in words.labels])
    num_children, children = children_of_parents(sizes, parents)
    fields = {"label": label_ids, "label_names": label_names, "input_id": word_ids, "vocab": vocab}
    try:
        return Graphs.build(sizes, num_children, children, **fields)
    except CycleError as error:
        i = words.line[int(starts[error.graph]) + error.vertex]
        expected = f"heads that lead to a root (HEAD 0); word {error.vertex + 1} depends on itself"
        raise format_error(path, i + 1, lines[i], expected) from None


@dataclasses.dataclass
class Words:
    """The words of all sentences."""

    forms: list[str] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    heads: list[int] = dataclasses.field(default_factory=list)  # 0 for a root, otherwise an ID of the sentence
    line: list[int] = dataclasses.field(default_factory=list)  # index of each word's line
    num_vertices: list[int] = dataclasses.field(default_factory=list)  # words of each sentence


def read_words(path: Path, lines: list[str], label: str, parsed: bool = True) -> Words:
    """Reads the words, with the column `label`. Their heads are read and checked if the sentences are `parsed`, else 0."""
    words, column = Words(), LABEL_COLUMNS[label]
    n = 0  # words of the current sentence
    for i, line in enumerate([*lines, ""]):  # a blank line ends the last sentence
        if line.startswith("#"):
            continue
        if not line.strip(ASCII_SPACE):
            for head, k in zip(words.heads[-n:], words.line[-n:], strict=True) if n else ():
                if head > n:
                    raise format_error(path, k + 1, lines[k], f"a HEAD from 0 to {n}, the ID of the last word")
            words.num_vertices += [n] if n else []
            n = 0
            continue
        cells = line.split("\t")
        if len(cells) != 10 or "" in cells:
            raise format_error(path, i + 1, line, "ten columns separated by tabs, none of them empty")
        if cells[0] != str(n + 1):
            if _SKIPPED_ID.fullmatch(cells[0]):
                continue
            raise format_error(path, i + 1, line, f"the ID {n + 1} in the first column (or a range 3-4, or 3.1)")
        head = cells[6]
        # `isdigit` alone accepts "²". Nine digits are enough for any sentence.
        if parsed and not (head.isascii() and head.isdigit() and len(head) < 10):
            hint = "; cavs.io.read_tagged (--task tag) needs no heads" if head == "_" else ""
            raise format_error(path, i + 1, line, f"0 or the ID of a word as HEAD in column 7, not {head[:20]!r}{hint}")
        n += 1
        words.forms.append(cells[1])
        words.labels.append(cells[column])
        words.heads.append(int(head) if parsed else 0)
        words.line.append(i)
    return words
