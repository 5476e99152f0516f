"""Text with one sentence per line, and pairs of sentences: chains of words."""

import os
from collections.abc import Sequence

from cavs._graphs.converters import from_lengths
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers import BY_SUFFIX
from cavs._readers.source import Path, bare_suffix, format_error, read_lines as lines_of

SEPARATORS = ("\t", " ||| ")


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a UTF-8 text, which is decompressed if its name ends in `.gz`. Blank lines are among them.

    Raises:
        FormatError: the text is not UTF-8, or not a whole gzip file.
    """
    lines = lines_of(path)
    return lines[:-1] if lines and not lines[-1] else lines


def chains_of(sentences: Sequence[Sequence[str]]) -> Graphs:
    """The chain of each sentence: `input_id` is an index of `vocab`, the words by first appearance."""
    ids, names = number_names([word for words in sentences for word in words])
    return from_lengths([len(words) for words in sentences], input_id=ids, vocab=names)


def read_text(path: Path | Sequence[str]) -> Graphs:
    """Reads a text as a chain of words per line. Blank lines are skipped; words are separated by white space.

    Args:
        path: a UTF-8 text, which is decompressed if its name ends in `.gz`; or its lines.

    Returns:
        The chains. `input_id` is an index of `vocab`, the words by first appearance.

    Raises:
        FormatError: the text has no words or is not UTF-8, or its name ends like that of a file of graphs.
    """
    is_path = isinstance(path, str | os.PathLike)
    if is_path and bare_suffix(path) in BY_SUFFIX.keys() - {".txt"}:
        raise format_error(path, None, bare_suffix(path), "a text, one sentence per line; files of this name hold graphs")
    sentences = [words for line in (read_lines(path) if is_path else path) if (words := line.split())]
    if not sentences:
        raise format_error(path if is_path else "lines", None, "", "words, one sentence per line")
    return chains_of(sentences)


def read_pairs(path: Path) -> tuple[Graphs, Graphs]:
    """Reads lines `source TAB target` or `source ||| target`. Blank lines are skipped; words are separated by white space.

    Args:
        path: a UTF-8 text, which is decompressed if its name ends in `.gz`.

    Returns:
        The chains of the sources and those of the targets, as [`cavs.io.read_text`][] returns chains.

    Raises:
        FormatError: a line is not a pair, or one of its sides is empty. The message names the line.
    """
    pairs: list[list[list[str]]] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        cells = next((line.split(s) for s in SEPARATORS if s in line), [line])
        if len(cells) != 2:
            raise format_error(path, number, line, "`source TAB target` or `source ||| target`")
        pairs.append([cell.split() for cell in cells])
        if not all(pairs[-1]):
            side = "target" if pairs[-1][0] else "source"
            raise format_error(path, number, line, f"`source TAB target` or `source ||| target`; the {side} is empty")
    if not pairs:
        raise format_error(path, None, "", "pairs, `source TAB target` on each line")
    return chains_of([pair[0] for pair in pairs]), chains_of([pair[1] for pair in pairs])
