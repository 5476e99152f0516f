"""Names of the leaves of a pytree in files: "x/a/b" in files of graphs, "cell.w" or "layers.0.b" in files of weights."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs.pytree import PyTree


def leaves_by_name(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the names and leaves of nested dicts. Raises a `TypeError` for a key that is no name without '/'."""
    if not isinstance(x, dict):
        yield name, x
        return
    for key, subtree in x.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise TypeError(f"got a dict with the key {key!r:.40}; expected names without '/'")
        yield from leaves_by_name(subtree, f"{name}/{key}")


def arrays_by_name(x: PyTree, function: str) -> dict[str, np.ndarray]:
    """Returns the arrays of `Graphs.x` by name, none for `None`. Raises a `TypeError` for other containers than dicts."""
    try:
        arrays = {} if x is None else dict(leaves_by_name(x, "x"))
        for leaf in arrays.values():
            if not isinstance(leaf, np.ndarray):
                raise TypeError(f"got a {type(leaf).__name__}; expected an array, or dicts of arrays")
    except TypeError as error:
        raise TypeError(f"{function}: x: {error}.") from error
    return arrays


def nested(arrays: dict[str, Any], separator: str = "/") -> dict[str, Any]:
    """Returns nested dicts of arrays, by their names. Raises `ValueError` if an array and a dict have the same name."""
    out: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(separator)
        parent = out
        for key in path:
            parent = parent.setdefault(key, {})
            if not isinstance(parent, dict):
                break
        if not isinstance(parent, dict) or last in parent:
            raise ValueError(f"{name}: got an array beside one whose name begins with it; expected either")
        parent[last] = array
    return out


def named_leaves(tree: PyTree, argument: str) -> dict[str, Any]:
    """Returns the leaves of a pytree by `name_of` their paths; "" if the tree is one leaf.

    A dict, an Equinox module and an NNX state with the same keys or fields have the same names. Raises `ValueError` if two
    leaves have the same name; its message names the `argument`.
    """
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = name_of(path)
        if name in out:
            raise ValueError(f"{argument}: got two leaves with the name {name!r}; expected keys without dots.")
        out[name] = leaf
    return out


def name_of(path: tuple[Any, ...]) -> str:
    """The keys, indices and field names of a leaf's path, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def aval_of(x: Any, argument: str, name: str) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf, and the dtype that it has in JAX.

    Raises `TypeError` if it is neither an array nor a number. The message names the `argument`, and the leaf by its name.
    """
    if hasattr(x, "dtype"):
        extended = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)  # keys of `jax.random`
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype if extended else jax.dtypes.canonicalize_dtype(x.dtype))
    if isinstance(x, int | float | complex):
        return jax.ShapeDtypeStruct((), jnp.result_type(x), weak_type=True)
    raise TypeError(f"{argument}: got a {type(x).__name__} at {name!r}; expected arrays and numbers.")


def describe_array(x: Any) -> str:
    """The dtype and shape of an array for messages; "nothing" for `None`."""
    return "nothing" if x is None else f"{x.dtype}{list(x.shape)}"
