"""`Segments`: the fields of many schedules, collected and then written into one vector of integers at once."""

from typing import NamedTuple

import numpy as np

# A field whose runs are of so many integers or more on average is copied run after run, any others are scattered at once.
LONG_RUNS = 100


class _Field(NamedTuple):
    """Runs of one field of many schedules; see `Segments.add`."""

    start: np.ndarray
    length: np.ndarray
    values: np.ndarray
    size: np.ndarray
    fill: np.ndarray | None


class Segments:
    """Runs of integers to be written into one vector: where each begins and how long it is, and the values of all of them
    one after another."""

    def __init__(self) -> None:
        self._fields: list[_Field] = []

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
        self._fields.append(_Field(start, length, values, length if size is None else size, fill))

    def write(self, data: np.ndarray) -> None:
        """Writes all runs into `data`, int32 zeros; what is in none stays so."""
        short = []
        for field in self._fields:
            if len(field.values) < LONG_RUNS * field.start.size:
                short.append(field)
            else:
                _copy(data, field)
        if short:
            _scatter(data, short)


def _copy(data: np.ndarray, field: _Field) -> None:
    # A slice of a memoryview takes half as long as one of an array.
    target, source = data.data, np.ascontiguousarray(field.values, np.int32).data
    begin = 0
    runs = zip(field.start.ravel().tolist(), field.length.ravel().tolist(), field.size.ravel().tolist(), strict=True)
    for i, (start, length, size) in enumerate(runs):
        end = begin + length
        target[start : start + length] = source[begin:end]
        if length < size and (length or field.fill is not None):
            data[start + length : start + size] = source[begin] if field.fill is None else field.fill.flat[i]
        begin = end


def _scatter(data: np.ndarray, fields: list[_Field]) -> None:
    starts, lengths, all_values, sizes, _ = zip(*fields, strict=True)
    start, length, size = (np.concatenate(x, axis=None) for x in (starts, lengths, sizes))
    values = np.concatenate(all_values)
    data[ranges(start, length)] = values
    # Padding: of a run without values and `fill` it is nothing.
    fill = np.zeros(len(start), np.int64)
    some = length > 0
    fill[some] = values[(length.cumsum() - length)[some]]
    end = 0
    for f in fields:
        begin, end = end, end + f.start.size
        if f.fill is not None:
            fill[begin:end] = f.fill.ravel()
    rest = size - length
    data[ranges(start + length, rest)] = fill.repeat(rest)


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`start[i]`, `start[i] + 1` ... `start[i] + length[i] - 1` for every i, one after another."""
    out = (start - length.cumsum() + length).repeat(length)
    out += np.arange(len(out))
    return out
