"""Labels in JSON lines that are numbers to predict: decimals, or lists of numbers, on vertices or on graphs."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

TargetShape: TypeAlias = tuple[int, ...] | None


def target_shape(values: Sequence[object]) -> TargetShape | str:
    """The shape of each value, if values are targets: decimals, lists of numbers, or null.

    Returns:
        The shape; `None` if the values are integers, strings or null, which are not (yet) targets; a text that describes the
        values if they are neither.
    """
    given = [value for value in values if value is not None]
    types = set(map(type, given))
    if not types & {float, list}:
        return None
    try:
        array = np.array(given)
    except ValueError:  # lists of different lengths
        return "lists of different lengths"
    if array.dtype.kind not in "iuf" or types & {list} and types != {list} or bool in types:
        return " and ".join(sorted(t.__name__ for t in types))
    return "an infinite number" if np.isinf(array).any() else array.shape[1:]


def targets(values: Sequence[object], shape: tuple[int, ...]) -> np.ndarray:
    """(N, *shape) float64, NaN for null. All values have the shape."""
    out = np.full((len(values), *shape), np.nan)
    given = [i for i, value in enumerate(values) if value is not None]
    out[given] = np.array([values[i] for i in given], np.float64).reshape(len(given), *shape)
    return out


def as_values(array: np.ndarray) -> list[object]:
    """The rows of an array for JSON, null for NaN."""
    missing = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    gone = np.flatnonzero(missing.any(tuple(range(1, missing.ndim))))
    values: list[object] = list(array.tolist())
    for i in gone.tolist():
        values[i] = None
    return values
