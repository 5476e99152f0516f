"""Word vectors from a text file (GloVe or word2vec's text format): on each line a word and its values."""

import gzip
import os
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cavs._readers.source import Path, format_error

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

    Only the lines of these words are parsed, so a large file takes little more than the time to read it. A first line of two
    numbers (word2vec's counts) is skipped.

    Args:
        path: a text with a word and its values on each line, which is decompressed if its name ends in `.gz`.
        words: the N words.

    Raises:
        FormatError: the file contains no vectors, or a line has no values, another number of values, or NaN or infinity.
        OSError: the file cannot be read.
    """
    wanted = _Wanted(list(words))
    try:
        with gzip.open(path, "rb") if os.fspath(path).lower().endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise format_error(path, number, line, f"a word and then its values in less than {LONGEST} bytes")
                wanted.parse(path, number, line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise format_error(path, None, error, "a whole gzip file, as the name ends in .gz") from error
    if wanted.rows is None:
        raise format_error(path, None, "", "a word and then its values on each line")
    return Vectors(wanted.found > 0, wanted.rows)


class _Wanted:
    """The words to look up, and the vectors found so far."""

    def __init__(self, words: list[str]):
        self.exact = {word: i for i, word in enumerate(words)}
        self.lower: dict[str, list[int]] = {}
        for i, word in enumerate(words):
            if word.lower() != word:
                self.lower.setdefault(word.lower(), []).append(i)
        self.found = np.zeros(len(words), np.int8)  # 2: found as written, 1: found in lower case
        self.rows: np.ndarray | None = None

    def parse(self, path: Path, number: int, line: bytes) -> None:
        """Stores the vector of line `number` if a word needs it. The first vector of the file determines the size."""
        word, _, rest = line.partition(b" ")
        name = word.decode("utf-8", "replace")
        at, others = self.exact.get(name), self.lower.get(name, ())
        first = self.rows is None and not (number == 1 and len(line.split()) == 2)
        if at is None and not others and not first:
            return
        cells = rest.split()
        if self.rows is not None and len(cells) > self.rows.shape[1]:
            return  # some words of GloVe's largest files contain spaces, also before a number
        try:
            vector = np.array(cells, np.float32)
        except ValueError:
            vector = np.zeros(0, np.float32)
        if self.rows is None and vector.size:
            self.rows = np.zeros((len(self.found), vector.size), np.float32)
        if self.rows is None or vector.size != self.rows.shape[1] or not np.isfinite(vector).all():
            size = "" if self.rows is None else f"{self.rows.shape[1]} "
            raise format_error(path, number, line, f"a word and then {size}finite values")
        if at is not None:
            self.rows[at], self.found[at] = vector, 2
        for i in others:
            if not self.found[i]:
                self.rows[i], self.found[i] = vector, 1
