"""Names of a pytree's leaves, as weights files want them: "cell.w", "layers.0.b"."""

from typing import Any

import jax


def named_leaves(tree: Any, where: str) -> dict[str, Any]:
    """Leaf by name: keys, indices and fields from the root, joined by dots; "" for a tree that is one leaf.

    A dict, an Equinox module and an NNX state of the same names give the same names.

    **Raises:** `ValueError`, in the name of the argument `where`, where two leaves get one name.
    """
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = ".".join(str(key_of(entry)) for entry in path)
        if name in out:
            raise ValueError(f"{where} has two leaves of the name {name!r}; wanted keys without dots.")
        out[name] = leaf
    return out


def key_of(entry: Any) -> Any:
    """The key, index or field that an entry of a leaf's path stands for."""
    return next(getattr(entry, field) for field in ("key", "idx", "name") if hasattr(entry, field))
