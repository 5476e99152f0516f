"""`stacked`: several training steps in one dispatch, for steps that are shorter on the GPU than their dispatch in Python."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np


def stacked(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Stacks batches of equal shapes, `count` at a time. Each array gains a leading axis: (count, ...).

    ```python
    def step(state, batch):
        sched, words, labels = batch.unpack()
        ...
        return state, loss

    @cavs.concurrent_jit
    def steps(state, batches):
        return jax.lax.scan(step, state, batches, unroll=4)  # one dispatch and one transfer; four steps per CUDA graph

    prepared = (pack((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1))) for batch, sched in schedules)
    for batches in stacked(prepared, 8):
        state, losses = steps(state, batches)
    ```

    The graphs of the batches may differ; only their padded shapes are equal. Stacking is useful if there are few shapes (see
    `shapes` of `schedules`). A dispatch costs about 0.1 ms of host time, and a transfer up to twice as much.

    Args:
        batches: an iterable, which may be infinite, of pytrees of NumPy arrays.
        count: the number of batches to stack, at least 1.

    Returns:
        An iterator over stacked batches. Batches of one shape keep their order, but the order among shapes changes: at most
        `count - 1` batches of each shape wait. The remaining batches come last, one by one, with arrays (1, ...).

    Raises:
        ValueError: at the call, if `count` is not an int >= 1.
        TypeError: while iterating, if a batch has leaves that are not NumPy arrays.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"stacked: count: got {count!r}; expected an int >= 1, the number of batches to stack.")
    return _stacked(iter(batches), count)


def _stacked(batches: Iterator[Any], count: int) -> Iterator[Any]:
    waiting: dict[Any, tuple[list[np.ndarray], int]] = {}  # stacks, and the number of batches in them
    for batch in batches:
        leaves, treedef = jax.tree.flatten(batch)
        for x in leaves:
            if not isinstance(x, np.ndarray):
                raise TypeError(
                    f"stacked: batches: got a leaf of type {type(x).__name__}; expected NumPy arrays, as batches are stacked "
                    "on the host and transferred together. Omit jax.device_put."
                )
        key = treedef, *((x.shape, x.dtype) for x in leaves)
        stacks, n = waiting.pop(key, None) or ([np.empty((count, *x.shape), x.dtype) for x in leaves], 0)
        for stack, x in zip(stacks, leaves, strict=True):  # now: `batches` may take long to yield the next one
            stack[n] = x
        if n + 1 == count:
            yield treedef.unflatten(stacks)
        else:
            waiting[key] = stacks, n + 1
    for (treedef, *_), (stacks, n) in waiting.items():
        for i in range(n):
            yield treedef.unflatten([x[i : i + 1] for x in stacks])
