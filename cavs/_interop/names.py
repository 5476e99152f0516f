"""Names of the leaves of a pytree, as in weights files: "cell.w", "layers.0.b"."""

from typing import Any

import jax

from cavs._graphs.pytree import PyTree


def named_leaves(tree: PyTree, argument: str) -> dict[str, Any]:
    """The leaves of a pytree by name: keys, indices and fields from the root, joined by dots; "" if the tree is one leaf.

    A dict, an Equinox module and an NNX state with the same keys or fields have the same names.

    `tree`: the pytree. `argument`: the argument's name for the error message. Raises `ValueError` if two leaves have the same
    name.
    """
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = name_of(path)
        if name in out:
            raise ValueError(f"{argument}: got two leaves with the name {name!r}; expected keys without dots.")
        out[name] = leaf
    return out


def name_of(path: tuple[Any, ...]) -> str:
    """The keys, indices and field names of a leaf's path, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def describe_array(x: Any) -> str:
    """The dtype and shape of an array for messages; "nothing" for `None`."""
    return "nothing" if x is None else f"{x.dtype}{list(x.shape)}"
