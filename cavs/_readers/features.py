"""`Graphs.x` in files: arrays by name, where `a/b` is the array `b` of the dict `a`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cavs._graphs.pytree import PyTree


def flat_features(x: PyTree, name: str, function: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of nested dicts, and their names. Raises a `TypeError` for other containers."""
    if isinstance(x, dict):
        for key, own in x.items():
            if not isinstance(key, str) or "/" in key or not key:
                raise TypeError(f"{function}: x: got a dict with the key {key!r}; expected names without '/'.")
            yield from flat_features(own, f"{name}/{key}", function)
    elif isinstance(x, np.ndarray):
        yield name, x
    else:
        raise TypeError(f"{function}: x: got a {type(x).__name__}; expected an array, or dicts of arrays.")


def nested_features(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dicts whose arrays `flat_features` named.

    Raises `ValueError` if an array and a dict have the same name.
    """
    out: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split("/")
        own = out
        for key in path:
            own = own.setdefault(key, {})
            if not isinstance(own, dict):
                break
        if not isinstance(own, dict) or last in own:
            raise ValueError(f"{name}: got an array beside one whose name begins with it; expected either")
        own[last] = array
    return out
