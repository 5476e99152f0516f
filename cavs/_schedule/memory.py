"""The host memory of schedules' integers: aligned for a CPU, pinned for a GPU, and used again."""

import ctypes
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

# The length of the vector is a multiple of this many integers: 64 bytes, the alignment at which XLA reads NumPy's memory in
# place on a CPU.
ALIGNED = 16
_marks = itertools.count(2)  # a number for each array that is pinned; no schedule is full of its negative


def aligned(*dims: int) -> np.ndarray:
    """Returns an int32 array of this shape, not initialised, which begins where XLA reads it in place."""
    count = math.prod(dims)
    memory = np.empty(count + ALIGNED, np.int32)
    begin = -(memory.__array_interface__["data"][0] // memory.itemsize) % ALIGNED
    return memory[begin : begin + count].reshape(dims)


def pinned(*dims: int) -> np.ndarray:
    """Returns an int32 array of this shape in pinned memory, from which a GPU copies without a copy on the host in between.

    If JAX has no such memory, it returns an array as `aligned` does.
    """
    device, mark = jax.local_devices()[0], -next(_marks)
    if "pinned_host" not in (space.kind for space in device.addressable_memories()):
        return aligned(*dims)
    try:
        buffer = jax.device_put(np.full(dims, mark, np.int32), SingleDeviceSharding(device, memory_kind="pinned_host"))
        memory = (ctypes.c_int32 * buffer.size).from_address(buffer.block_until_ready().unsafe_buffer_pointer())
    except jax.errors.JaxRuntimeError:  # there is no more of it
        return aligned(*dims)
    memory.owner = buffer  # NumPy's array keeps `memory`
    view = np.frombuffer(memory, np.int32).reshape(dims)
    # JAX writes the marks on a thread of its own. Any that came later would overwrite a schedule.
    return view if (view == mark).all() else aligned(*dims)


class _Use(weakref.ref):
    """Refers to what lends `memory`, until that is freed.

    What it calls then is a method in C: Python loses a Ctrl-C that arrives in a callback of a reference written in Python.
    """

    __slots__ = ("memory",)
    memory: np.ndarray


class Recycled:
    """Reuses the memory of int32 arrays to which nothing refers any more, because writing to new pages takes longer.

    It keeps the memory of at most eight such arrays. Several threads may use it.

    `allocate`: returns new arrays, as `aligned` or `pinned` do.
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] = aligned) -> None:
        self._allocate = allocate
        self._free: deque[_Use] = deque(maxlen=8)  # more than the stacks of a loader that wait, are sent and are made

    def empty(self, *dims: int) -> np.ndarray:
        """Returns an array of this shape, not initialised, in the memory of an earlier one if that was large enough."""
        count = math.prod(dims)
        try:
            memory = self._free.pop().memory
        except IndexError:
            memory = None
        if memory is None or memory.size < count:
            # Twice as much as is needed at most: an epoch's stacks differ in size, and pinned memory takes long to get.
            memory = self._allocate(1 << max(count - 1, 0).bit_length())
        # The array and its views keep `lent` alive, and not `memory` alone; so does JAX until it has copied them.
        lent: Any = (ctypes.c_int32 * memory.size).from_buffer(memory.data)
        lent.use = _Use(lent, self._free.append)
        lent.use.memory = memory
        return np.frombuffer(lent, np.int32, count).reshape(dims)
