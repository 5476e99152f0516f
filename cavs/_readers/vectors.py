"""Word vectors from a text file (GloVe or word2vec's text format): on each line a word and its values."""

import codecs
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cavs._readers.source import Path, decompressed, format_error, is_compressed, open_file

# The most bytes of a line: a line of a small .gz file could otherwise expand to fill the memory.
LONGEST = 1 << 20


class Vectors(NamedTuple):
    """The vectors of N words, as [`cavs.io.read_vectors`][] returns them.

    Attributes:
        found: bool[N], whether the file contains the word.
        rows: float32[N, size], the vectors; 0 if not found.
    """

    found: np.ndarray
    rows: np.ndarray


def read_vectors(path: Path, words: Iterable[str]) -> Vectors:
    """Reads the vectors of words. A word that the file lacks is looked up in lower case.

    A word ends at the first space or tab. Only the lines of these words are parsed, so a large file takes little more than the
    time to read it. A first line of two numbers (word2vec's counts) is skipped. Of several lines with a word, the first one
    counts.

    Args:
        path: a text with a word and its values on each line, which is decompressed if its name ends in `.gz`.
        words: the N words.

    Raises:
        TypeError: `words` is a str, a set or no sequence, or has a word that is no str.
        FormatError: the file contains no vectors, or a line has no values, another number of values, or NaN or infinity.
        OSError: the file cannot be read, or is a pipe or a device.
    """
    listed = isinstance(words, Iterable) and not isinstance(words, str | set | frozenset)  # a set has another order each time
    names = list(words) if listed else []
    if not listed or not all(isinstance(word, str) for word in names):
        raise TypeError(
            f"read_vectors: words: got {words!r:.60}; expected a list of words. Write read_vectors(path, graphs.vocab)."
        )
    exact: dict[str, list[int]] = {}
    lower: dict[str, list[int]] = {}
    for i, word in enumerate(names):
        exact.setdefault(word, []).append(i)
        if word.lower() != word:
            lower.setdefault(word.lower(), []).append(i)
    found = np.zeros(len(names), np.int8)  # 2: found as written, 1: found in lower case
    rows: np.ndarray | None = None  # the first vector of the file determines the size
    for number, line in _lines(path):
        word, _, rest = line.partition(b" ")
        if b"\t" in word:
            word, _, rest = line.partition(b"\t")
        name = word.decode("utf-8", "replace")
        exact_rows, lower_rows = exact.get(name, ()), lower.get(name, ())
        wanted = bool(exact_rows or lower_rows)
        # The counts may be a word of the file, too.
        counts = number == 1 and len(pair := line.split()) == 2 and (not wanted or all(map(bytes.isdigit, pair)))
        if counts or rows is not None and not wanted:
            continue
        cells = rest.split()
        if rows is not None and len(cells) > rows.shape[1]:
            continue  # some words of GloVe's largest files contain spaces, also before a number
        try:
            vector = np.array(cells, np.float32)
        except ValueError:
            vector = np.zeros(0, np.float32)
        if rows is None and vector.size:
            rows = np.zeros((len(names), vector.size), np.float32)
        if rows is None or vector.size != rows.shape[1] or not np.isfinite(vector).all():
            size = "" if rows is None else f"{rows.shape[1]} "
            raise format_error(path, number, line, f"a word and then {size}finite values")
        for best, of_word in ((2, exact_rows), (1, lower_rows)):
            for i in of_word:
                if found[i] < best:
                    rows[i], found[i] = vector, best
    if rows is None:
        raise format_error(path, None, "", "a word and then its values on each line")
    return Vectors(found > 0, rows)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file, and their numbers."""
    with open_file(path) as raw, decompressed(path, raw) if is_compressed(path) else raw as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            if len(line) == LONGEST:
                raise format_error(path, number, line, f"a word and then its values in less than {LONGEST} bytes")
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
