"""Tagged sentences: CoNLL-U, columns, `word|TAG`, and plain text without tags."""

import re
from collections.abc import Sequence

import numpy as np

from cavs._graphs.checks import check_bool
from cavs._graphs.converters import from_lengths
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers.conllu import LABEL_COLUMNS, read_words
from cavs._readers.source import ASCII_SPACE, Path, bare_suffix, format_error, read_lines, words_in

# Files with these suffixes always contain columns. A `.txt` may contain any of the formats; its content tells which.
COLUMN_SUFFIXES = (".bio", ".bmes", ".col", ".conll", ".iob", ".iob2", ".ner", ".tsv")


def read_tagged(path: Path, column: str | None = None, *, labelled: bool = True) -> Graphs:
    """Reads tagged sentences as chains. The file's name, or else its content, determines the format:

    - `.conllu`: CoNLL-U. The label is UPOS, or the `column` "xpos" or "deprel". Heads are not read, and may be `_`.
    - Columns (such as CoNLL-2003): one word per line, blank lines between sentences. Tabs separate the cells if every line has
      one, else white space. Lines `-DOCSTART-` and comments (`# ...`) are skipped. The word is the first cell. The label is the
      last cell, or cell number `column`, from 1; -1 if the cell is empty.
    - `word|TAG` (WikiNER): one sentence per line, split at the last `|`; or `word|POS|TAG` if every word has two `|`.
    - Any other text, if `labelled` is false: one sentence per line, words separated by spaces, no labels.

    Args:
        path: a UTF-8 file, which is decompressed if its name ends in `.gz`.
        column: the column of the label.
        labelled: whether the sentences must have tags.

    Returns:
        The chains. `input_id` is an index of `vocab`, `label` of `label_names`, both by first appearance.

    Raises:
        FormatError: a line is invalid, or the file contains no sentences. The message names the line.
        TypeError: `labelled` is no bool.
        ValueError: the format does not have the column.
    """
    check_bool("read_tagged: labelled", labelled)
    suffix = bare_suffix(path)
    if suffix == ".conllu":
        if column not in (None, *LABEL_COLUMNS):
            raise ValueError(f"column: got {column!r}; expected one of {', '.join(LABEL_COLUMNS)} for {path}.")
        words = read_words(path, read_lines(path), column or "upos", parsed=False)
        tags = [None if label == "_" else label for label in words.labels]
        return _chains(path, words.num_vertices, words.forms, tags)
    lines = read_lines(path)
    rows = list(map(words_in, lines))
    nonempty = [cells for cells in rows if cells]
    if suffix in COLUMN_SUFFIXES or _is_columns(lines, rows):
        return _columns(path, lines, rows, column)
    if nonempty and (any if labelled else all)("|" in cell[1:] for cell in nonempty[0]):
        if column is not None:
            raise ValueError(f"column: got {column!r}, but {path} contains word|TAG, not columns. Omit it.")
        return _piped(path, rows)
    if labelled:
        filled = [i for i, cells in enumerate(rows, 1) if cells]
        number = next((i for i in filled if len(rows[i - 1]) == 1), filled[0] if filled else None)
        expected = (
            "tags: CoNLL-U (.conllu), a word and its tag on each line with blank lines between sentences, or word|TAG "
            "word|TAG, one sentence per line"
        )
        raise format_error(path, number, "" if number is None else lines[number - 1], expected)
    return _chains(path, list(map(len, nonempty)), [word for cells in nonempty for word in cells], None)


def _is_word(cells: list[str]) -> bool:
    return bool(cells) and cells[0] != "-DOCSTART-"


def _without_comments(lines: list[str], rows: list[list[str]]) -> list[list[str]]:
    """The cells of each line, `-DOCSTART-` for a comment: `# ...` with other cells than the other lines. `#` may be a word."""
    content = [(line, cells) for line, cells in zip(lines, rows, strict=True) if _is_word(cells) and not line.startswith("# ")]
    counts, tabs = {len(cells) for _, cells in content}, any("\t" in line for line, _ in content)

    def is_comment(line: str, cells: list[str]) -> bool:
        return bool(content) and line.startswith("# ") and (len(cells) not in counts or "\t" in line and not tabs)

    return [["-DOCSTART-"] if is_comment(line, cells) else cells for line, cells in zip(lines, rows, strict=True)]


def _is_columns(lines: list[str], rows: list[list[str]]) -> bool:
    """Whether all lines have the same number of cells, at least two, and there are tabs or blank lines."""
    counts = {len(cells) for cells in _without_comments(lines, rows) if _is_word(cells)}
    if len(counts) != 1 or counts == {1}:
        return False
    inner = "\n".join(lines).strip(ASCII_SPACE)
    return "\t" in inner or re.search(r"\n[ \t\r]*\n", inner) is not None


def _columns(path: Path, lines: list[str], rows: list[list[str]], column: str | None) -> Graphs:
    if column is not None and not (column.isascii() and column.isdigit() and int(column) >= 2):
        raise ValueError(f"column: got {column!r}; expected a number >= 2: in {path} column 1 contains the words.")
    index = None if column is None else int(column) - 1
    # At the end of a line, a tab separates a word from its empty label, or follows other cells by mistake.
    words_and_lines = ((cells, line) for cells, line in zip(rows, lines, strict=True) if _is_word(cells))
    if all("\t" in (line if len(cells) == 1 else line.strip(ASCII_SPACE)) for cells, line in words_and_lines):
        rows = [[cell.strip(ASCII_SPACE) for cell in line.split("\t")] if line.strip(ASCII_SPACE) else [] for line in lines]
    rows = _without_comments(lines, rows)
    words: list[str] = []
    tags: list[str | None] = []
    ends = [0]
    for number, cells in enumerate([*rows, []], 1):
        if _is_word(cells):
            if len(cells) < (2 if index is None else index + 1) or not cells[0]:
                expected = "a word and its label" if index is None else f"at least {index + 1} cells"
                raise format_error(path, number, lines[number - 1], expected)
            words.append(cells[0])
            tags.append(cells[-1 if index is None else index] or None)
        elif len(words) > ends[-1]:
            ends.append(len(words))
    return _chains(path, np.diff(ends).tolist(), words, tags)


def _piped(path: Path, rows: list[list[str]]) -> Graphs:
    for number, cells in enumerate(rows, 1):
        bad = next((cell for cell in cells if not cell.rpartition("|")[0] or cell.endswith("|")), None)
        if bad is not None:
            raise format_error(path, number, bad, "word|TAG")
    parts = [cell.rsplit("|", 2) for row in rows for cell in row]
    has_pos = all(len(p) == 3 and p[0] for p in parts)
    words = ["|".join(p[: 1 if has_pos else -1]) for p in parts]
    return _chains(path, [len(row) for row in rows if row], words, [p[-1] for p in parts])


def _chains(path: Path, lengths: Sequence[int], words: Sequence[str], tags: Sequence[str | None] | None) -> Graphs:
    if not len(lengths):
        raise format_error(path, None, "", "at least one sentence")
    ids, vocab = number_names(words)
    label, names = (None, None) if tags is None else number_names(tags)
    return from_lengths(lengths, input_id=ids, vocab=vocab, label=label, label_names=names)
