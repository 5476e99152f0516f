"""`stacked`: several training steps in one dispatch, for steps that take a GPU less time than Python takes to start them."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np


def stacked(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Batches of equal shapes, `count` at a time, each array of them with one axis more: (count, ...).

    ```python
    def step(state, batch):
        sched, words, labels = batch.unpack()
        ...
        return state, loss

    @cavs.concurrent_jit
    def steps(state, batches):
        return jax.lax.scan(step, state, batches, unroll=4)  # one dispatch, and one transfer; four steps a CUDA graph

    prepared = (cavs.data.pack((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1))) for batch, sched in schedules)
    for batches in cavs.data.stacked(prepared, 8):
        state, losses = steps(state, batches)
    ```

    Every batch has a structure of its own, as before; what equal batches share is their padded shape, so it pays where
    shapes are few (`shapes` of `cavs.data.schedules`). A dispatch costs about 0.1 ms of the host's time, and a transfer up to
    twice as much.

    **Arguments:** `batches`, an iterable of pytrees of NumPy arrays, may be endless; `count`, at least 1.

    **Returns:** an iterator. Batches of one shape keep their order; those of different shapes are collected side by side (at
    most `count - 1` of each shape wait), so order among shapes changes. What is left at the end comes one by one, (1, ...).

    **Raises:** `ValueError` at the call for a `count` below 1; `TypeError` for a batch with leaves that are not NumPy arrays.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"stacked: count is {count!r}, wanted an int >= 1: how many batches go together.")
    return _stacked(iter(batches), count)


def _stacked(batches: Iterator[Any], count: int) -> Iterator[Any]:
    waiting: dict[Any, tuple[list[np.ndarray], int]] = {}  # stacks, and how many batches are in them
    for batch in batches:
        leaves, treedef = jax.tree.flatten(batch)
        for x in leaves:
            if not isinstance(x, np.ndarray):
                raise TypeError(
                    f"stacked: a batch has a leaf of type {type(x).__name__}, wanted NumPy arrays: batches are stacked on the "
                    "host and cross to the device together. Leave jax.device_put away."
                )
        key = treedef, *((x.shape, x.dtype) for x in leaves)
        stacks, n = waiting.pop(key, None) or ([np.empty((count, *x.shape), x.dtype) for x in leaves], 0)
        for stack, x in zip(stacks, leaves, strict=True):  # at once: the next batch may still be on its way
            stack[n] = x
        if n + 1 == count:
            yield treedef.unflatten(stacks)
        else:
            waiting[key] = stacks, n + 1
    for (treedef, *_), (stacks, n) in waiting.items():
        for i in range(n):
            yield treedef.unflatten([x[i : i + 1] for x in stacks])
