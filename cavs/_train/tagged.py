"""Readers of tagged sentences: CoNLL-U, columns, `word|TAG`, and, for `cavs predict`, plain text."""

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
# Files with these suffixes always contain columns. A `.txt` may contain any of the formats; its content tells which.
COLUMN_SUFFIXES = (".bio", ".bmes", ".col", ".conll", ".iob", ".iob2", ".ner", ".tsv")
_SPACE = re.compile(f"[{ASCII_SPACE}]+")


def read_tagged(path: str, column: str | None = None, *, labelled: bool = True) -> Graphs:
    """Reads sentences as chains: `input_id` is an index of `vocab`, `label` of `label_names`, both by first appearance.

    The file's name, or else its content, determines the format. Files are UTF-8, and decompressed if named `.gz`:

    - `.conllu`: CoNLL-U. The label is UPOS, or the `column` "xpos" or "deprel".
    - Columns (such as CoNLL-2003): one word per line, cells separated by tabs or spaces, blank lines between sentences.
      `-DOCSTART-` lines are skipped. The word is the first cell. The label is the last cell, or cell number `column`, from 1.
    - `word|TAG` (WikiNER): one sentence per line, split at the last `|`; or `word|POS|TAG` if every word has two `|`.
    - Any other text, if `labelled` is false: one sentence per line, words separated by spaces, no labels.

    Raises:
        FormatError: a line is invalid; the message names it.
        TrainError: the format does not have the column, or the file contains no sentences.
    """
    suffix = bare_suffix(path)
    if suffix == ".conllu":
        if column not in (None, *CONLLU_COLUMNS):
            raise TrainError(f"--column: got {column!r}; expected one of {', '.join(CONLLU_COLUMNS)} for {path}.")
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
            raise TrainError(f"--column: got {column!r}, but {path} contains word|TAG, not columns. Omit --column.")
        return _piped(path, lines, rows)
    if labelled:
        raise TrainError(
            f"{path}: got no tags; expected CoNLL-U (.conllu), a word and its tag on each line with blank lines between "
            "sentences, or word|TAG word|TAG, one sentence per line."
        )
    return _chains(path, np.array([len(cells) for cells in some]), [word for cells in some for word in cells], None)


def _split(line: str) -> list[str]:
    line = line.strip(ASCII_SPACE)
    return _SPACE.split(line) if line else []


def _is_columns(lines: list[str], rows: list[list[str]]) -> bool:
    """Whether all lines have the same number of cells, at least two, and there are tabs or blank lines."""
    counts = {len(cells) for cells in rows if cells and cells[0] != "-DOCSTART-"}
    if len(counts) != 1 or counts == {1}:
        return False
    inner = "\n".join(lines).strip(ASCII_SPACE)
    return "\t" in inner or re.search(r"\n[ \t\r]*\n", inner) is not None


def _columns(path: str, lines: list[str], rows: list[list[str]], column: str | None) -> Graphs:
    if column is not None and not (column.isascii() and column.isdigit() and int(column) >= 2):
        raise TrainError(f"--column: got {column!r}; expected a number >= 2: in {path} column 1 contains the words.")
    at = None if column is None else int(column) - 1
    words: list[str] = []
    tags: list[str | None] = []
    lengths, length = [], 0
    for number, cells in enumerate(rows, 1):
        if cells and cells[0] != "-DOCSTART-":
            if len(cells) < (2 if at is None else at + 1):
                expected = "a word and its label" if at is None else f"at least {at + 1} cells"
                raise format_error(path, number, lines[number - 1], expected)
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
        raise TrainError(f"{path}: got no sentences; expected at least one.")
    ids, vocab = number_names(words)
    if tags is None:
        return from_lengths(lengths, input_id=ids, vocab=vocab)
    numbers, names = number_names([*(tag for tag in tags if tag is not None)])
    label = np.full(len(tags), -1, np.int32)
    label[np.fromiter((tag is not None for tag in tags), bool, len(tags))] = numbers
    return from_lengths(lengths, input_id=ids, vocab=vocab, label=label, label_names=names)
