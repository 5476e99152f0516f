"""`Batches`: one training batch, or several of equal shapes, as a loader yields them."""

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cavs._function.arrays import beyond_32_bits
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree

Batch = TypeVar("Batch")  # the pytree of one batch


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stack", "filled"], meta_fields=["count", "mesh"])
@dataclasses.dataclass(eq=False, repr=False)
class Batches(Generic[Batch]):
    """One or more batches of equal shapes, for [`cavs.data.step`][]. Created by [`cavs.data.Loader`][]; a pytree itself.

    Attributes:
        tree: the pytree of a batch. If `count` is set, its arrays have a leading axis of the batches. With a mesh, the next
            axis has an entry per device; with `parts`, one per part.
        stack: as `tree`, with an axis of length `count`.
        count: the length of the axis of a stack; `None` for one batch without such an axis.
        filled: the number of batches in a stack that has room for `count`, an int32 scalar; the rest of the stack is zeros and
            does not run. `None`: the stack is full.
        mesh: the mesh over whose axis the batch is divided, or `None`.
        loader: the loader that created it, while it exists; not a part of the pytree.
    """

    stack: Batch
    count: int | None
    mesh: Mesh | None = None
    filled: Any = None
    _loader: weakref.ref[Any] | None = dataclasses.field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are of no loader."""
        return vars(self) | {"_loader": None}

    @property
    def loader(self) -> Any:
        """The loader, while it exists; else `None`."""
        return None if self._loader is None else self._loader()

    @property
    def tree(self) -> Batch:
        """The pytree of a batch, or of all batches without the rest of the stack. Raises `ValueError` if that is traced.

        Of `jax.ShapeDtypeStruct`s, the pytree of a full stack.
        """
        if self.filled is None or isinstance(self.filled, jax.ShapeDtypeStruct):
            return self.stack
        if isinstance(self.filled, Tracer):
            raise ValueError(
                "Batches.tree: got batches as an argument of jax.jit, which does not know how many there are; expected their "
                "tree as the argument. Write fn(batches.tree), or decorate the function of one batch with @cavs.data.step."
            )
        return self.stack if self.filled == self.count else jax.tree.map(lambda x: x[: self.filled], self.stack)

    def __len__(self) -> int:
        """Returns the number of training steps."""
        if self.count is None:
            return 1
        return self.count if self.filled is None else int(self.filled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        held = "batches" if isinstance(self.filled, Tracer) else counted(len(self), "batch")
        raise AttributeError(
            f"Batches has no attribute {name!r}; it holds {held} for one dispatch. Decorate the function of one batch "
            "with @cavs.data.step, without jax.jit, or write Loader(..., steps=1) for loops over single batches."
        )

    def __repr__(self) -> str:
        known = self.filled is None or np.isscalar(self.filled)
        count = len(self) if known else f"up to {self.count}"  # traced, or an example of shapes
        return f"Batches({count}, arrays {[x.shape for x in jax.tree.leaves(self.stack)]})"


MSG_DIFFERENT = (
    "Loader: collate: got {} for one batch and {} for another; expected equal structures, shapes and dtypes, as batches are "
    "stacked. Pad to the same shapes, for example by sample.sched.pad(rows), or write steps=1."
)


def check_bits(tree: PyTree, where: str) -> None:
    """Raises `ValueError`, which names the argument `where`, for arrays with values that JAX's 32 bits cannot hold.

    Raises `TypeError` for texts and arrays that JAX does not know, such as of another byte order, which compiled code misreads.
    """
    for x in jax.tree.leaves(tree):
        if text := beyond_32_bits(x):
            raise ValueError(f"{where}: got a leaf of {text}")
        if isinstance(x, str | bytes) or isinstance(x, np.ndarray) and not _is_known(x):
            masked = "masked " * np.ma.is_masked(x)
            got = f"{masked}values of dtype {x.dtype}" if isinstance(x, np.ndarray) else repr(x)[:60]
            expected = "numbers, none of them masked, in the byte order of this machine"
            write = "rows.filled(0)" if masked else "np.asarray(rows, np.float32)"
            raise TypeError(f"{where}: got a leaf of {got}; expected {expected}. Write {write}.")


def _is_known(x: np.ndarray) -> bool:
    """Whether JAX reads the values of an array as they are."""
    numbers = x.dtype.kind in "biufc" and x.dtype.char not in "gG"  # these are np.longdouble
    return x.dtype.isnative and (numbers or x.dtype.isbuiltin == 2) and not np.ma.is_masked(x)


def joined(trees: Iterable[PyTree], axes: tuple[int, ...]) -> PyTree:
    """Joins batches in host memory.

    Args:
        trees: pytrees of NumPy arrays: batch by batch, and for each batch device by device, or part by part.
        axes: the leading axes of the result, whose rows are `trees`, and then zeros. Without any, the only one of `trees` is
            returned, whose leaves may be of any type.

    Raises:
        TypeError: a leaf is not a NumPy array.
        ValueError: the trees differ in structure, shapes or dtypes, or a number does not fit JAX's 32 bits.
    """
    stacks, first = [], None
    for i, tree in enumerate(trees):
        check_bits(tree, "Loader: collate")
        leaves, treedef = jax.tree.flatten(tree)
        for x in leaves:
            if axes and not isinstance(x, np.ndarray):
                write = "Omit jnp.asarray and jax.device_put" if isinstance(x, jax.Array) else "Write np.asarray(x)"
                raise TypeError(
                    f"Loader: collate: got a leaf of type {type(x).__name__}; expected NumPy arrays, as batches are stacked on "
                    f"the host and transferred together. {write}."
                )
        if not axes:
            return tree
        like = treedef, [f"{x.dtype}{list(x.shape)}" for x in leaves]
        if first is None:
            first = like
            stacks = [np.zeros((*axes, *x.shape), x.dtype) for x in leaves]
        if like != first:
            raise ValueError(MSG_DIFFERENT.format(*(f"{arrays} in {structure}" for structure, arrays in (first, like))))
        for stack, x in zip(stacks, leaves, strict=True):
            stack.reshape(math.prod(axes), *x.shape)[i] = x
    assert first is not None
    return first[0].unflatten(stacks)


def send(batches: Batches) -> Batches:
    """Transfers batches to the device or the devices of their mesh. Each process sends the parts of its own devices."""
    if batches.mesh is None:
        return Batches(jax.device_put(batches.stack), batches.count, None, batches.filled)  # `len` reads `filled` on the host
    sharding = NamedSharding(batches.mesh, PartitionSpec(*(None,) * (batches.count is not None), *batches.mesh.axis_names))

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, x)

    return Batches(jax.tree.map(put, batches.stack), batches.count, batches.mesh)


def struct_of(x: Any) -> Any:
    """Returns the type of an array as a `jax.ShapeDtypeStruct`; such a type, and a Python number, as they are."""
    if not isinstance(x, np.ndarray | np.generic | jax.Array):
        return x
    weak = getattr(x, "weak_type", False)  # keys of jax.random have no such attribute
    sharding = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak, sharding=sharding)
