"""Arrays of integers that a caller gave."""

from typing import Any

import numpy as np


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
