"""Word vectors from a text file (GloVe or word2vec's text format): on each line a word and its values."""

import gzip
import os
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cavs._graphs.counted import counted
from cavs._train.config import TrainError, check_file

# The most bytes of a line: a line of a small .gz file could otherwise expand to fill the memory.
LONGEST = 1 << 20


class Vectors(NamedTuple):
    """The vectors of N words.

    Attributes:
        found: (N,) bool, whether the file contains the word.
        rows: (N, size) float32, the vectors; 0 if not found.
    """

    found: np.ndarray
    rows: np.ndarray


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

    def parse(self, path: str, number: int, line: bytes) -> None:
        """Stores the vector of line `number` if a word needs it. The first vector of the file determines the size."""
        word, _, rest = line.partition(b" ")
        name = word.decode("utf-8", "replace")
        at, others = self.exact.get(name), self.lower.get(name, ())
        first = self.rows is None and not (number == 1 and len(line.split()) == 2)
        if at is None and not others and not first:
            return
        # Some words in GloVe's largest files contain spaces: only the last cells are values.
        try:
            vector = np.array(rest.split(), np.float32)
        except ValueError:
            if self.rows is not None and len(line.split()) > self.rows.shape[1] + 1:
                return
            vector = np.zeros(0, np.float32)
        if self.rows is None and vector.size:
            self.rows = np.zeros((len(self.found), vector.size), np.float32)
        if self.rows is None or vector.size != self.rows.shape[1]:
            values = "values" if self.rows is None else counted(self.rows.shape[1], "value")
            raise TrainError(f"--embeddings: {path}, line {number}: got {line[:60]!r}; expected a word and then {values}.")
        if at is not None:
            self.rows[at], self.found[at] = vector, 2
        for i in others:
            if not self.found[i]:
                self.rows[i], self.found[i] = vector, 1


def read_vectors(path: str, words: Iterable[str]) -> Vectors:
    """Reads the vectors of `words`, in that order. A word that the file lacks is looked up in lower case.

    Only the lines of requested words are parsed, so a large file takes little more than the time to read it. A name that ends
    in `.gz` is decompressed. A first line of two numbers (word2vec's counts) is skipped.

    Raises:
        TrainError: the file cannot be read or contains no vectors, or a line has no values or another number of values.
    """
    wanted = _Wanted(list(words))
    try:
        with gzip.open(path, "rb") if os.fspath(path).lower().endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise TrainError(
                        f"--embeddings: {path}, line {number}: got over {LONGEST} bytes; expected a word and then its values."
                    )
                wanted.parse(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        check_file("embeddings", path)
        raise TrainError(f"--embeddings: {path} cannot be read ({error}).") from error
    if wanted.rows is None:
        raise TrainError(f"--embeddings: got {path} without vectors; expected a word and then its values on each line.")
    return Vectors(wanted.found > 0, wanted.rows)
