"""Host memory that is used again: what streams of batches are read into and stacked in.

The system clears the pages of fresh memory one fault at a time, which can take several times as long as the copy into it (a
stack of 16 batches of 0.9 MB: 10 ms in fresh pages of a virtual machine, 0.6 ms in used ones). So a block whose arrays are all
gone, and whose transfer to a device is over, is lent again.
"""

import math
import weakref
from typing import Any

import numpy as np

_ALIGNED = 64  # at which XLA reads NumPy's memory in place on a CPU
_SMALL = 1 << 16  # bytes below which malloc has used memory at hand
_KEPT = 1 << 28  # bytes that wait at most


class _Lease:
    """The owner of an array, and so of all its views: gone when they are."""

    __slots__ = ("__array_interface__", "__weakref__")


class Blocks:
    """Blocks of memory, of powers of two in size."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._bytes = 0  # that wait

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array like that of `np.empty`, in memory that is lent again when no array refers to it any more."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize * math.prod(shape)
        if size < _SMALL:
            return np.empty(shape, dtype)
        capacity = 1 << (size - 1).bit_length()
        try:
            block = self._free[capacity].pop()
            self._bytes -= capacity
        except (KeyError, IndexError):
            block = np.empty(capacity + _ALIGNED, np.uint8)
        lease = _Lease()
        lease.__array_interface__ = block[-block.ctypes.data % _ALIGNED :][:size].__array_interface__
        # A collector of garbage may end a lease on any thread: a list's append and pop are atomic, and the count may be rough.
        weakref.finalize(lease, self._back, capacity, block).atexit = False
        return np.asarray(lease).view(dtype).reshape(shape)

    def _back(self, capacity: int, block: np.ndarray) -> None:
        if self._bytes + capacity <= _KEPT:
            self._bytes += capacity
            self._free.setdefault(capacity, []).append(block)


BLOCKS = Blocks()
