"""Arrays of integers that a caller gave."""

from typing import Any

import numpy as np

MOST_ROWS = 2**31 - 1


def integers(name: str, value: Any, dtype: Any = np.int64) -> np.ndarray:
    """`value` as a 1-d array of `dtype`; `ValueError` that names it where it is none, or does not fit."""
    array = np.asarray(value)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} has dtype {array.dtype} and shape {array.shape}, wanted a 1-d array of integers.")
    out = array.astype(dtype)
    if (out != array).any():
        i = int(np.argmax(out != array))
        raise ValueError(f"{name}[{i}] is {array[i]}, wanted integers that fit {np.dtype(dtype).name}.")
    return out


def check_total(name: str, counts: np.ndarray) -> None:
    """**Raises:** `ValueError` for counts, each at least 0, of 2^31 or more vertices or edges in all.

    Rows are int32 in schedules. And sums of hostile counts overflow: NumPy would then write where it must not.
    """
    # One after another: sums of what passes the first check do not overflow.
    large = np.flatnonzero(counts > MOST_ROWS)
    if len(large) or counts.sum() > MOST_ROWS:
        got = f"{name}[{large[0]}] is {counts[large[0]]}" if len(large) else f"{name} add up to {counts.sum()}"
        raise ValueError(f"{got}, wanted less than 2**31 in all. Make several `Graphs` of them.")
