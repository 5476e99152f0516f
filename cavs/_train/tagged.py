"""Sentences with a label a word, and files of them: CoNLL-U, columns, `word|TAG`; for `cavs predict` plain text too."""

import re
from collections.abc import Sequence

import numpy as np

from cavs._graphs.converters import from_lengths
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers import read_conllu
from cavs._readers.source import ASCII_SPACE, bare_suffix, format_error, read_lines
from cavs._train.config import TrainError

CONLLU_COLUMNS = ("upos", "xpos", "deprel")
# Names that always hold columns; a `.txt` may hold any of the formats, and is known by its content.
COLUMN_SUFFIXES = (".bio", ".bmes", ".col", ".conll", ".iob", ".iob2", ".ner", ".tsv")
_SPACE = re.compile(f"[{ASCII_SPACE}]+")


def read_tagged(path: str, column: str | None = None, *, labelled: bool = True) -> Graphs:
    """Chains of words: `input_id` names a word of `vocab`, `label` a tag of `label_names`, both by first appearance.

    By the name, else by the content; UTF-8, `.gz` by name:

    - `.conllu`: CoNLL-U; the label is UPOS, or the `column` "xpos" or "deprel".
    - columns (CoNLL-2003 and its kin): a word a line, cells apart by tabs or spaces, blank lines between sentences, lines
      `-DOCSTART-` passed over; the word is the first cell, the label the last, or the one of number `column`, from 1.
    - `word|TAG` (WikiNER): a sentence a line, split at the last `|`; where each has two, `word|POS|TAG`.
    - with `labelled=False`, any other text: a sentence a line, words apart by spaces, no labels.

    **Raises:** `FormatError` that names the line, `TrainError` for a column that the format does not have or a file without
    sentences.
    """
    suffix = bare_suffix(path)
    if suffix == ".conllu":
        if column not in (None, *CONLLU_COLUMNS):
            raise TrainError(f"--column is {column!r}, wanted one of {', '.join(CONLLU_COLUMNS)} for {path}.")
        trees = read_conllu(path, label=column or "upos")
        tags = _names(trees.label_names, trees.label)
        return _chains(path, np.diff(trees.vertex_offsets), _names(trees.vocab, trees.input_id), tags)
    lines = read_lines(path)
    rows = [_split(line) for line in lines]
    some = [cells for cells in rows if cells]
    if suffix in COLUMN_SUFFIXES or _is_columns(lines, rows):
        return _columns(path, lines, rows, column)
    if some and all("|" in cell[1:] for cell in some[0]):
        if column is not None:
            raise TrainError(f"--column is {column!r}, but {path} has word|TAG and no columns.")
        return _piped(path, lines, rows)
    if labelled:
        raise TrainError(
            f"{path} has no tags that can be read; wanted CoNLL-U (.conllu), a word and its tag a line with blank lines between"
            " sentences, or word|TAG word|TAG, a sentence a line."
        )
    return _chains(path, np.array([len(cells) for cells in some]), [word for cells in some for word in cells], None)


def _split(line: str) -> list[str]:
    line = line.strip(ASCII_SPACE)
    return _SPACE.split(line) if line else []


def _is_columns(lines: list[str], rows: list[list[str]]) -> bool:
    """Equally many cells in every line, at least two, and tabs or blank lines between sentences."""
    counts = {len(cells) for cells in rows if cells and cells[0] != "-DOCSTART-"}
    if len(counts) != 1 or counts == {1}:
        return False
    inner = "\n".join(lines).strip(ASCII_SPACE)
    return "\t" in inner or re.search(r"\n[ \t\r]*\n", inner) is not None


def _columns(path: str, lines: list[str], rows: list[list[str]], column: str | None) -> Graphs:
    if column is not None and not (column.isascii() and column.isdigit() and int(column) >= 2):
        raise TrainError(f"--column is {column!r}, wanted a number from 2: {path} has columns, the first holds the words.")
    at = None if column is None else int(column) - 1
    words: list[str] = []
    tags: list[str | None] = []
    lengths, length = [], 0
    for number, cells in enumerate(rows, 1):
        if cells and cells[0] != "-DOCSTART-":
            if len(cells) < (2 if at is None else at + 1):
                wanted = "a word and its label" if at is None else f"at least {at + 1} cells"
                raise format_error(path, number, lines[number - 1], wanted)
            words.append(cells[0])
            tags.append(cells[-1 if at is None else at])
            length += 1
        elif length:
            lengths.append(length)
            length = 0
    if length:
        lengths.append(length)
    return _chains(path, np.array(lengths, int), words, tags)


def _piped(path: str, lines: list[str], rows: list[list[str]]) -> Graphs:
    for number, cells in enumerate(rows, 1):
        bad = next((cell for cell in cells if not cell.rpartition("|")[0] or cell.endswith("|")), None)
        if bad is not None:
            raise format_error(path, number, bad, "word|TAG")
    cells = [cell for row in rows for cell in row]
    parts = [cell.rsplit("|", 2) for cell in cells]
    three = all(len(p) == 3 and p[0] for p in parts)
    words = [p[0] if three else cell.rpartition("|")[0] for p, cell in zip(parts, cells, strict=True)]
    return _chains(path, np.array([len(row) for row in rows if row]), words, [p[-1] for p in parts])


def _names(names: tuple[str, ...] | None, ids: np.ndarray | None) -> list[str | None]:
    assert names is not None and ids is not None
    return [*map([*names, None].__getitem__, ids.tolist())]


def _chains(path: str, lengths: np.ndarray, words: Sequence[str | None], tags: Sequence[str | None] | None) -> Graphs:
    if not len(lengths):
        raise TrainError(f"{path} holds no sentences.")
    ids, vocab = number_names(words)
    if tags is None:
        return from_lengths(lengths, input_id=ids, vocab=vocab)
    numbers, names = number_names([*(tag for tag in tags if tag is not None)])
    label = np.full(len(tags), -1, np.int32)
    label[np.fromiter((tag is not None for tag in tags), bool, len(tags))] = numbers
    return from_lengths(lengths, input_id=ids, vocab=vocab, label=label, label_names=names)
