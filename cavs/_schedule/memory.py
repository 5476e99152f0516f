"""The host memory of schedules' integers: aligned, and used again."""

import math
import weakref
from collections import deque

import numpy as np

# The length of the vector is a multiple of this many integers: 64 bytes, the alignment at which XLA reads NumPy's memory in
# place on a CPU.
ALIGNED = 16


def aligned(*dims: int) -> np.ndarray:
    """Returns an int32 array of this shape, not initialised, which begins where XLA reads it in place."""
    count = math.prod(dims)
    memory = np.empty(count + ALIGNED, np.int32)
    begin = -(memory.__array_interface__["data"][0] // memory.itemsize) % ALIGNED
    return memory[begin : begin + count].reshape(dims)


class Recycled:
    """Reuses the memory of int32 arrays to which nothing refers any more, because writing to new pages takes longer.

    It keeps the memory of at most four such arrays. Several threads may use it.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=4)  # a loader's batches that wait, that are sent, and that are made

    def empty(self, *dims: int) -> np.ndarray:
        """Returns an array of this shape as `aligned` does, in the memory of an earlier one if that was large enough."""
        count = math.prod(dims)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = aligned(count)
        if memory.size < count:
            memory = aligned(count)
        # Its views keep this array alive, and not `memory` alone; so does JAX until it has copied it.
        array = np.frombuffer(memory.data, np.int32, count)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array.reshape(dims)
