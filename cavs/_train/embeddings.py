"""Word vectors from a text file (GloVe, word2vec's text format): one word a line, then its numbers."""

import gzip
import os
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cavs._train.config import TrainError

# Bytes of a line; a file in .gz could hold one that takes all memory.
LONGEST = 1 << 20


class Vectors(NamedTuple):
    """The vectors of a file for the words asked for: `found` (N,) bool, `rows` (N, size) with zeros where not found."""

    found: np.ndarray
    rows: np.ndarray


def read_vectors(path: str, words: Iterable[str]) -> Vectors:
    """The vectors of `words`, in that order; a word that the file lacks is looked up in lower case.

    Only wanted lines are parsed, so a file of gigabytes costs its reading. `.gz` by name. A first line of two numbers
    (word2vec's counts) is passed over.

    **Raises:** `TrainError` that names the line, for a line without numbers or of another length.
    """
    words = list(words)
    exact = {word: i for i, word in enumerate(words)}
    lower: dict[str, list[int]] = {}
    for i, word in enumerate(words):
        if word.lower() != word:
            lower.setdefault(word.lower(), []).append(i)
    found = np.zeros(len(words), np.int8)  # 2 as written, 1 in lower case
    rows: np.ndarray | None = None
    try:
        with gzip.open(path, "rb") if os.fspath(path).lower().endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                if len(line) == LONGEST:
                    raise TrainError(f"{path}, line {number}: over {LONGEST} bytes, wanted a word and then its numbers.")
                word, _, rest = line.partition(b" ")
                name = word.decode("utf-8", "replace")
                at = exact.get(name)
                others = lower.get(name, ())
                first = rows is None and not (number == 1 and len(line.split()) == 2)
                if at is None and not others and not first:
                    continue
                # Some words of GloVe's largest files hold spaces: the numbers are what stands last.
                try:
                    vector = np.array(rest.split(), np.float32)
                except ValueError:
                    if rows is not None and len(line.split()) > rows.shape[1] + 1:
                        continue
                    vector = np.zeros(0, np.float32)
                if rows is None and vector.size:
                    rows = np.zeros((len(words), vector.size), np.float32)
                if rows is None or vector.size != rows.shape[1]:
                    want = "numbers" if rows is None else f"{rows.shape[1]} numbers"
                    raise TrainError(f"{path}, line {number}: read {line[:60]!r}, wanted a word and then {want}.")
                if at is not None:
                    rows[at], found[at] = vector, 2
                for i in others:
                    if not found[i]:
                        rows[i], found[i] = vector, 1
    except FileNotFoundError:
        raise TrainError(f"--embeddings: there is no file {path}.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TrainError(f"--embeddings: {path} cannot be read ({error}).") from error
    if rows is None:
        raise TrainError(f"--embeddings: {path} holds no vectors; wanted lines of a word and its numbers.")
    return Vectors(found > 0, rows)
