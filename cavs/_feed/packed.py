"""`pack`: all that a step is sent as one vector, so that one transfer does."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax


class _Parts:
    """What lies in the vector, array after array: one object for equal ones, so that a jitted step compares identities."""

    def __init__(self, tree: Any, arrays: tuple[tuple[tuple[int, ...], str], ...]):
        self.tree, self.arrays = tree, arrays  # shape and dtype of each


@jax.tree_util.register_pytree_node_class
class Packed:
    """Arrays as ONE int32 vector, `data`; a pytree. Made by [`cavs.data.pack`][], taken apart by `unpack`."""

    def __init__(self, data: Any, parts: _Parts):
        self.data, self._parts = data, parts

    def tree_flatten(self) -> tuple[tuple[Any], _Parts]:
        return (self.data,), self._parts

    @classmethod
    def tree_unflatten(cls, parts: _Parts, children: tuple[Any]) -> "Packed":
        return cls(children[0], parts)

    def unpack(self) -> Any:
        """What `pack` was given; under `jax.jit` by slices, which cost next to nothing."""
        out, end = [], 0
        for shape, dtype in self._parts.arrays:
            begin, end = end, end + math.prod(shape)
            x = self.data[begin:end].reshape(shape)
            if dtype != "int32":
                x = x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)
            out.append(x)
        return self._parts.tree.unflatten(out)


def pack(tree: Any) -> Packed:
    """The host arrays of `tree` (a tuple of a schedule, words, labels, ...) as one vector: one transfer to the device.

    ```python
    @jax.jit
    def step(params, batch):
        sched, words, labels = batch.unpack()
        ...

    params = step(params, cavs.data.pack((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1))))
    ```

    A transfer costs the host 50 to 200 microseconds however small it is, which shows where a step takes less than a
    millisecond. Equal trees of equal shapes share compiled code.

    **Raises:** `TypeError` for a leaf that is no array of int32, uint32 or float32, or is not in host memory.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays, vectors = [], []
    for x in leaves:
        name = _DTYPES.get(x.dtype) if isinstance(x, np.ndarray) else None
        if name is None:
            dtype = getattr(x, "dtype", None)
            raise TypeError(
                f"pack: a leaf is a {type(x).__name__}{'' if dtype is None else f' of dtype {dtype}'}; wanted NumPy arrays "
                "of int32, uint32 or float32, such as np.asarray(x, np.int32)."
            )
        arrays.append((x.shape, name))
        vectors.append(x if name == "int32" and x.ndim == 1 else x.ravel().view(np.int32))
    data = np.concatenate(vectors) if vectors else np.zeros(0, np.int32)
    return Packed(data, _interned(treedef, tuple(arrays)))


_DTYPES = {np.dtype(name): name for name in ("int32", "uint32", "float32")}


@functools.lru_cache(maxsize=1024)
def _interned(*parts: Any) -> _Parts:
    return _Parts(*parts)
