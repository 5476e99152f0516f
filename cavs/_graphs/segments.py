"""`Segments`: the fields of many schedules, collected and then written into one vector of integers at once."""

from typing import NamedTuple

import numpy as np

# Runs of so many integers or more on average are copied one after another, any others are scattered at once.
LONG_RUNS = 64


class _Runs(NamedTuple):
    """Runs of integers: where each begins, how long it is, and the values of all of them one after another."""

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
        """Runs of `length` integers from `start` on. With a `size`, padding up to it repeats a run's first value (it computes
        what a real row computes), or `fill`; there is none for a run of no values without a `fill`."""
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
        """Writes all runs into `data`, int32 zeros; what is in none stays so."""
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
    # A slice of a memoryview takes half as long as one of an array.
    target, source = data.data, np.ascontiguousarray(runs.values, np.int32).data
    begin = 0
    for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True):
        end = begin + length
        target[start : start + length] = source[begin:end]
        begin = end


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`start[i]`, `start[i] + 1` ... `start[i] + length[i] - 1` for every i, one after another."""
    out = (start - length.cumsum() + length).repeat(length)
    out += np.arange(len(out))
    return out
