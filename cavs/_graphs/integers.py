"""Validation of integer arrays that a caller passes."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

INT32_MAX = 2**31 - 1


def integers(name: str, value: ArrayLike | Iterable[int], dtype: DTypeLike = np.int64) -> np.ndarray:
    """Returns `value` as a 1-d array of `dtype`.

    Raises `ValueError` if `value` is not a 1-d array of integers, or does not fit `dtype`. The message begins with `name`.
    """
    array = np.asarray(value)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        names = array.dtype.kind in "UO" and array.ndim == 1
        hint = " Number the names: write names, ids = np.unique(array, return_inverse=True)." if names else ""
        raise ValueError(f"{name}: got dtype {array.dtype} and shape {array.shape}; expected a 1-d array of integers.{hint}")
    out = array.astype(dtype)
    if (out != array).any():
        i = int(np.argmax(out != array))
        raise ValueError(f"{name}[{i}]: got {array[i]}; expected an integer that fits {np.dtype(dtype).name}.")
    return out


def check_total(name: str, counts: np.ndarray) -> None:
    """Checks that non-negative counts of vertices or edges add up to less than 2^31.

    Schedules store rows as int32. The check also protects from overflow: with a sum that overflows, NumPy would write outside
    its arrays.

    Raises `ValueError` if one count, or the sum of all, is 2^31 or more.
    """
    # Each count first: if all of them pass, their sum cannot overflow int64.
    large = np.flatnonzero(counts > INT32_MAX)
    if len(large) or counts.sum() > INT32_MAX:
        got = f"{name}[{large[0]}]: got {counts[large[0]]}" if len(large) else f"{name}: got a sum of {counts.sum()}"
        raise ValueError(f"{got}; expected a sum below 2**31. Split the graphs into several `Graphs`.")
