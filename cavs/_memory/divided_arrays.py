"""What `plan` divides into parts: a batch of arrays, along their axis of samples. See `divided_graphs`, too."""

from typing import Any

import jax
import jax.numpy as jnp

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.search import FEW, Choice, Loss, numbers_of_parts
from cavs._memory.sub_batches import summed_over_parts

_TIME_OF_PART = 0.01  # what one more part adds to the time of a step: an estimate


class DividedArrays:
    """A batch of arrays that have an axis of samples, or of `jax.ShapeDtypeStruct`s.

    Args:
        arrays: A pytree.
        axis: The axis of samples: an integer, or a tree prefix of `arrays` of integers, and of `None` for what is shared.

    Raises:
        ValueError: The arrays have different numbers of samples, or none.
        TypeError: `arrays` has other leaves than arrays.
    """

    noun = "sample"

    def __init__(self, arrays: PyTree, axis: Any):
        self._arrays, self._axis = arrays, axis
        self._axes, self._count = _axes_of(arrays, axis)

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self._count

    @property
    def whole(self) -> PyTree:
        """The batch itself."""
        return self._arrays

    @property
    def text(self) -> str:
        """Says how large the batch is."""
        return counted(len(self), "sample")

    @property
    def cause(self) -> str:
        """Says what else makes the smallest plan large."""
        return ""

    def choices(self, parts: int | None, segments: int | None) -> list[Choice]:
        """Returns how the batch can be computed, the fastest first, with a given number of parts or segments."""
        if segments not in (None, 1):
            raise ValueError(f"plan: segments: got {segments!r} for arrays, which have no levels; expected 1. Leave it out.")
        return [Choice(n) for n in ([parts] if parts else numbers_of_parts(len(self)))]

    def time(self, choice: Choice) -> float:
        """Returns the estimated time of a choice, in any unit."""
        return 1 + _TIME_OF_PART * (choice.parts - 1)

    def in_parts(self, loss: Loss, choice: Choice) -> Loss:
        """Returns the loss of the whole batch, as `arranged` returns it."""
        axes, count = self._axes, choice.parts

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            if count == 1:
                return loss(params, batch)
            leaves, tree = jax.tree.flatten(batch)
            pairs = list(zip(leaves, axes, strict=True))
            shared = [x for x, axis in pairs if axis is None]

            def one(known: tuple[PyTree, list[jax.Array]], part: list[jax.Array]) -> jax.Array:
                rest, own = iter(known[1]), iter(part)
                return loss(known[0], tree.unflatten([next(rest) if axis is None else next(own) for axis in axes]))

            stack = [_in_parts(x, axis, count) for x, axis in pairs if axis is not None]
            return summed_over_parts("plan", one)((params, shared), [stack])

        return summed

    def structs(self, choice: Choice) -> PyTree:
        """Returns the shapes and dtypes of the batch as `arranged` returns it."""
        del choice
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._arrays)

    def few(self, parts: int) -> tuple[PyTree, PyTree, int]:
        """Returns some samples in one part and in two, as `arranged` does, and their number; as many as in two of `parts`."""
        count = 2 * len(self) // parts
        while 2 * count <= len(self) and count < FEW:
            count *= 2
        leaves, tree = jax.tree.flatten(values(self._arrays))
        pairs = zip(leaves, self._axes, strict=True)
        some = tree.unflatten([x if axis is None else x[(*[slice(None)] * axis, slice(count))] for x, axis in pairs])
        return some, some, count

    def arranged(self, batch: Any, choice: Choice) -> PyTree:
        """Returns another batch as `in_parts` gets it. The shapes are the same while it is no larger than earlier ones."""
        _, count = _axes_of(batch, self._axis)
        if count % choice.parts:
            raise ValueError(
                f"batch: got {counted(count, 'sample')}; expected a multiple of {choice.parts}, the parts of the plan."
            )
        return batch


def _axes_of(arrays: PyTree, axis: Any) -> tuple[list[int | None], int]:
    """Returns the axis of samples of each array, and their number."""
    leaves = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, Graphs))
    wrong = [x for x in leaves or [arrays] if not hasattr(x, "shape") or not hasattr(x, "dtype")]
    if wrong:
        got, write = f"a {type(wrong[0]).__name__}", "graphs[:64] of cavs.read(...), or (x, y)"
        if isinstance(arrays, Graphs):
            got = "no graphs"
        elif isinstance(wrong[0], Graphs):
            got = "graphs among other things"
            write = "plan(loss, params, graphs, collate=lambda sample: (sample.sched, x[sample.numbers]))"
        raise TypeError(
            f"plan: batch: got {got}; expected cavs.Graphs, or a pytree of arrays with an axis of samples. Write {write}."
        )
    try:
        tree = jax.tree.broadcast(axis, arrays, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"plan: axis: got {axis!r}; expected an int, None, or such a prefix of the batch.") from error
    found = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    pairs = [(x, a) for x, a in zip(jax.tree.leaves(arrays), found, strict=True) if a is not None]
    if any(not isinstance(a, int) or not -len(x.shape) <= a < len(x.shape) for x, a in pairs):
        raise ValueError(
            f"plan: axis: got {axis!r} for arrays of shapes {[x.shape for x, _ in pairs]}; expected the axis of samples of "
            "each array. Write None for an array that all samples share."
        )
    counts = {x.shape[a] for x, a in pairs}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"plan: batch: got arrays of {sorted(counts) or 'no'} samples along axis {axis!r}; expected one number of samples. "
            "Write axis=..., with None for an array that all samples share."
        )
    axes = iter([a % len(x.shape) for x, a in pairs])
    return [None if a is None else next(axes) for a in found], counts.pop()


def _in_parts(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns an array with a leading axis of parts."""
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def values(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree; where shapes alone are known, random numbers."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    pairs = zip(leaves, keys, strict=False)
    return treedef.unflatten([_drawn(x, key) if isinstance(x, jax.ShapeDtypeStruct) else x for x, key in pairs])


def _drawn(x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    return (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype)
