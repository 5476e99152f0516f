"""`Graphs.x` in files: arrays by name, where `a/b` is the array `b` of the dict `a`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cavs._graphs.pytree import PyTree


def leaves_by_name(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the names and leaves of nested dicts. Raises a `TypeError` for a key that is no name without '/'."""
    if not isinstance(x, dict):
        yield name, x
        return
    for key, own in x.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise TypeError(f"got a dict with the key {key!r:.40}; expected names without '/'")
        yield from leaves_by_name(own, f"{name}/{key}")


def arrays_by_name(x: PyTree, function: str) -> dict[str, np.ndarray]:
    """Returns the arrays of `Graphs.x` by name, none for `None`. Raises a `TypeError` for other containers than dicts."""
    try:
        found = {} if x is None else dict(leaves_by_name(x, "x"))
        for leaf in found.values():
            if not isinstance(leaf, np.ndarray):
                raise TypeError(f"got a {type(leaf).__name__}; expected an array, or dicts of arrays")
    except TypeError as error:
        raise TypeError(f"{function}: x: {error}.") from error
    return found


def nested(arrays: dict[str, Any], separator: str = "/") -> dict[str, Any]:
    """Returns nested dicts of arrays, by their names. Raises `ValueError` if an array and a dict have the same name."""
    out: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(separator)
        own = out
        for key in path:
            own = own.setdefault(key, {})
            if not isinstance(own, dict):
                break
        if not isinstance(own, dict) or last in own:
            raise ValueError(f"{name}: got an array beside one whose name begins with it; expected either")
        own[last] = array
    return out
