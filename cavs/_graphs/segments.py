"""`ranges`: the rows of several runs."""

import numpy as np


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenates `start[i]`, `start[i] + 1`, ..., `start[i] + length[i] - 1` for every i."""
    out = (start - length.cumsum() + length).repeat(length)
    out += np.arange(len(out))
    return out
