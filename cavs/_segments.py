"""`Segments`: the fields of many schedules, collected and then written into one vector of integers at once."""

import itertools
from collections.abc import Iterator

import numpy as np

# Integers are scattered all at once, or copied run after run: what the first costs once, and for so many integers, runs cost.
SCATTER_RUNS, SCATTER_INTEGERS = 100, 100


class Segments:
    """Runs of integers to be written into one vector: starts and lengths, the values of all of them one after another.

    With a `size`, padding up to it repeats a run's first value (it computes what a real row computes), or `fill`.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]] = []

    def add(
        self,
        start: np.ndarray,
        length: np.ndarray,
        values: np.ndarray,
        size: np.ndarray | None = None,
        fill: np.ndarray | None = None,
    ) -> None:
        """Runs of `length` integers from `start` on; `size`, with the padding, and `fill` have as many entries."""
        self._runs.append((start, length, values, length if size is None else size, fill))

    def write(self, data: np.ndarray) -> None:
        """Writes all runs into `data`, which is zeros; what is in none stays so."""
        starts, lengths, values, sizes, _ = zip(*self._runs, strict=True)
        start, length, size = (np.concatenate(x, axis=None) for x in (starts, lengths, sizes))
        if len(start) < SCATTER_RUNS + sum(map(len, values)) / SCATTER_INTEGERS:
            self._copy(data, zip(start.tolist(), length.tolist(), size.tolist(), strict=True))
        else:
            self._scatter(data, start, length, size)

    def _scatter(self, data: np.ndarray, start: np.ndarray, length: np.ndarray, size: np.ndarray) -> None:
        values = np.concatenate([run[2] for run in self._runs])
        pad = np.where(length > 0, values[np.minimum(length.cumsum() - length, len(values) - 1)], 0)
        end = 0
        for first, *_, fill in self._runs:
            begin, end = end, end + first.size
            if fill is not None:
                pad[begin:end] = fill.ravel()
        rest = size - length
        start, length = np.concatenate([start, start + length]), np.concatenate([length, rest])
        at = (start - length.cumsum() + length).repeat(length)
        at += np.arange(len(at))
        data[at] = np.concatenate([values, pad.repeat(rest)])

    def _copy(self, data: np.ndarray, bounds: Iterator[tuple[int, int, int]]) -> None:
        for first, _, values, _, fill in self._runs:
            begin = 0
            for i, (start, length, size) in enumerate(itertools.islice(bounds, first.size)):
                end = begin + length
                data[start : start + length] = values[begin:end]
                if length < size and (length or fill is not None):
                    data[start + length : start + size] = values[begin] if fill is None else fill.flat[i]
                begin = end
