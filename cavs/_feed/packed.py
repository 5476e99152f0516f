"""`pack`: all arrays that a step receives as one vector, in one transfer."""

import functools
import math
from typing import TypeAlias

import jax
import numpy as np
from jax import lax

from cavs._graphs.pytree import PyTree

# NumPy's on the host, JAX's on a device or traced.
Vector: TypeAlias = np.ndarray | jax.Array


class _Parts:
    """The arrays in the vector. Equal ones are one object, so that a jitted step compares identities."""

    def __init__(self, tree: PyTree, arrays: tuple[tuple[tuple[int, ...], str], ...]):
        self.tree, self.arrays = tree, arrays  # shape and dtype of each


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree of arrays as one int32 vector. Created by `pack`; a pytree itself.

    Attributes:
        data: (N,) int32, the concatenated bits of all arrays.
    """

    def __init__(self, data: Vector, parts: _Parts):
        self.data, self._parts = data, parts

    def tree_flatten(self) -> tuple[tuple[Vector], _Parts]:
        return (self.data,), self._parts

    @classmethod
    def tree_unflatten(cls, parts: _Parts, children: tuple[Vector]) -> "Packed":
        return cls(children[0], parts)

    def unpack(self) -> PyTree:
        """Returns the pytree that was passed to `pack`. Under `jax.jit` its arrays are slices, which cost almost nothing."""
        out, end = [], 0
        for shape, dtype in self._parts.arrays:
            begin, end = end, end + math.prod(shape)
            x = self.data[begin:end].reshape(shape)
            if dtype != "int32":
                x = x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)
            out.append(x)
        return self._parts.tree.unflatten(out)


def pack(tree: PyTree) -> Packed:
    """Concatenates all arrays of a pytree into one vector, for one transfer to the device.

    ```python
    @jax.jit
    def step(params, batch):
        sched, words, labels = batch.unpack()
        ...

    params = step(params, pack((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1))))
    ```

    Each transfer costs the host 50 to 200 microseconds, however small it is, which matters if a step takes less than a
    millisecond. Equal trees of equal shapes share compiled code.

    Args:
        tree: a pytree of NumPy arrays of int32, uint32 or float32, such as a tuple of a schedule, words and labels.

    Returns:
        The packed arrays. `batch.unpack()` returns the tree.

    Raises:
        TypeError: a leaf is not a NumPy array of these dtypes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays, vectors = [], []
    for x in leaves:
        name = _DTYPES.get(x.dtype) if isinstance(x, np.ndarray) else None
        if name is None:
            dtype = getattr(x, "dtype", None)
            raise TypeError(
                f"pack: tree: got a leaf {type(x).__name__}{'' if dtype is None else f' of dtype {dtype}'}; expected NumPy "
                "arrays of int32, uint32 or float32. Write, for instance, np.asarray(x, np.int32)."
            )
        arrays.append((x.shape, name))
        vectors.append(x if name == "int32" and x.ndim == 1 else x.ravel().view(np.int32))
    data = np.concatenate(vectors) if vectors else np.zeros(0, np.int32)
    return Packed(data, _interned(treedef, tuple(arrays)))


_DTYPES = {np.dtype(name): name for name in ("int32", "uint32", "float32")}


@functools.lru_cache(maxsize=1024)
def _interned(tree: PyTree, arrays: tuple[tuple[tuple[int, ...], str], ...]) -> _Parts:
    return _Parts(tree, arrays)
