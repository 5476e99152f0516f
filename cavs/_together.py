"""`together`: all that a step is sent as one vector, so that one transfer does."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax


class _Parts(NamedTuple):
    """What lies in the vector, one array after another."""

    tree: Any
    arrays: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype


@jax.tree_util.register_pytree_node_class
class Together:
    """Arrays as ONE int32 vector, `data`; a pytree. Made by [`cavs.together`][], taken apart by `apart`."""

    def __init__(self, data: Any, parts: "_Interned"):
        self.data, self._parts = data, parts

    def tree_flatten(self) -> tuple[tuple[Any], "_Interned"]:
        return (self.data,), self._parts

    @classmethod
    def tree_unflatten(cls, parts: "_Interned", children: tuple[Any]) -> "Together":
        return cls(children[0], parts)

    def apart(self) -> Any:
        """What `together` was given; under `jax.jit` by slices, which cost next to nothing."""
        tree, arrays = self._parts.parts
        out, end = [], 0
        for shape, dtype in arrays:
            begin, end = end, end + math.prod(shape)
            x = self.data[begin:end].reshape(shape)
            if dtype != "int32":
                x = x.view(dtype) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, dtype)
            out.append(x)
        return tree.unflatten(out)


def together(tree: Any) -> Together:
    """The host arrays of `tree` (a tuple of a schedule, words, labels, ...) as one vector: one transfer to the device.

    ```python
    @jax.jit
    def step(params, batch):
        sched, words, labels = batch.apart()
        ...

    params = step(params, cavs.together((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1))))
    ```

    A transfer costs tens of microseconds of the host's time however small it is, which shows where a step takes less than
    a millisecond. Equal trees of equal shapes share compiled code.

    **Raises:** `TypeError` for a leaf that is no array of int32, uint32 or float32, or is not in host memory.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for x in leaves:
        if not isinstance(x, np.ndarray) or x.dtype.char not in "ilILf" or x.dtype.itemsize != 4:
            dtype = getattr(x, "dtype", None)
            raise TypeError(
                f"together: a leaf is a {type(x).__name__}{'' if dtype is None else f' of dtype {dtype}'}; wanted NumPy arrays "
                "of int32, uint32 or float32, such as np.asarray(x, np.int32)."
            )
    parts = _Parts(treedef, tuple((x.shape, x.dtype.name) for x in leaves))
    vectors = [np.ascontiguousarray(x).view(np.int32).reshape(-1) for x in leaves]
    return Together(np.concatenate(vectors) if vectors else np.zeros(0, np.int32), _interned(parts))


class _Interned:
    """`_Parts` with one object for equal ones: compared and hashed by identity at every call of a jitted step."""

    def __init__(self, parts: _Parts):
        self.parts = parts


@functools.lru_cache(maxsize=1024)
def _interned(parts: _Parts) -> _Interned:
    return _Interned(parts)
