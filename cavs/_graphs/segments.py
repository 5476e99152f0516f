"""`Segments` collects integer fields of many schedules and writes them into one vector at once."""

from typing import NamedTuple

import numpy as np

# Runs of at least this average length are copied one by one; shorter ones are scattered in one NumPy call.
LONG_RUNS = 64


class _Runs(NamedTuple):
    """Runs of integers: where each begins, its length, and the concatenated values of all of them."""

    start: np.ndarray
    length: np.ndarray
    values: np.ndarray


class Segments:
    """Runs of integers to be written into one vector."""

    def __init__(self) -> None:
        self._runs: list[_Runs] = []

    def add(
        self,
        start: np.ndarray,
        length: np.ndarray,
        values: np.ndarray,
        size: np.ndarray | None = None,
        fill: np.ndarray | None = None,
    ) -> None:
        """Adds runs of `length` integers that begin at `start`.

        If `size` is given, each run is padded to that size with its `fill`, by default its first value, so that padding
        computes what a real row computes. Empty runs without a `fill` are not padded.
        """
        start, length = start.ravel(), length.ravel()
        self._runs.append(_Runs(start, length, values))
        if size is not None:
            rest = size.ravel() - length
            if fill is None and len(values):
                rest *= length > 0
                fill = values.take(length.cumsum() - length, mode="clip")
            if fill is not None:
                self._runs.append(_Runs(start + length, rest, fill.ravel().repeat(rest)))

    def write(self, data: np.ndarray) -> None:
        """Writes all runs into `data` (int32). Elements that belong to no run keep their value."""
        short = []
        for runs in self._runs:
            if len(runs.values) < LONG_RUNS * runs.start.size:
                short.append(runs)
            else:
                _copy(data, runs)
        if short:
            start, length, values = (np.concatenate(x) for x in zip(*short, strict=True))
            data[ranges(start, length)] = values


def _copy(data: np.ndarray, runs: _Runs) -> None:
    # Slicing a memoryview takes half as long as slicing an array.
    target, source = data.data, np.ascontiguousarray(runs.values, np.int32).data
    begin = 0
    for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True):
        end = begin + length
        target[start : start + length] = source[begin:end]
        begin = end


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenates `start[i]`, `start[i] + 1`, ..., `start[i] + length[i] - 1` for every i."""
    out = (start - length.cumsum() + length).repeat(length)
    out += np.arange(len(out))
    return out
