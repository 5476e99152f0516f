"""What several readers and converters need to flatten: parents to children, and words to numbers."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1


def children_of_parents(num_vertices: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`num_children` (V,) and `children` (E,) for `Graphs.build`, each vertex's children in the order of their numbers.

    `parents` (V,) are flat rows over all graphs, -1 at a root.
    """
    base = np.repeat(np.cumsum(num_vertices) - num_vertices, num_vertices)
    child_rows = np.flatnonzero(parents >= 0)
    owner = parents[child_rows]
    order = np.argsort(owner, kind="stable")
    return np.bincount(owner, minlength=len(parents)), (child_rows - base[child_rows])[order]


def number_names(values: Sequence[Hashable]) -> tuple[np.ndarray, list[Any]]:
    """Ids (N,) int32 and the distinct values they stand for, in order of first appearance."""
    names = list(dict.fromkeys(values))
    index = {name: i for i, name in enumerate(names)}
    return np.fromiter(map(index.__getitem__, values), np.int32, len(values)), names


def ids_and_names(values: Sequence[int | str | None]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Ids (N,) int32 and their names: integers stand for themselves, str are numbered by first appearance, `None` is -1.

    The values are of `value_type` int or str.
    """
    given = np.fromiter((value is not None for value in values), bool, len(values))
    ids = np.full(len(values), -1, np.int32)
    present = [value for value in values if value is not None]
    if not present or type(present[0]) is int:
        ids[given] = np.array(present, np.int32)
        return ids, None
    ids[given], names = number_names(present)
    return ids, tuple(names)


def value_type(values: Iterable[Any], *, optional: bool) -> type | None | str:
    """`int` or `str` where all values are of that type, `None` where there are none, else a str that names a wrong one.

    Integers are 0 to 2**31 - 1 (`bool` is none); `None` among the values is passed over if `optional`.
    """
    types = set(map(type, values))
    if optional:
        types.discard(type(None))
    if types - {int, str} or len(types) > 1:
        return " and ".join(sorted("null" if t is type(None) else t.__name__ for t in types))
    if types == {int}:
        for value in values:
            if value is not None and not 0 <= value <= INT32_MAX:
                # A number of a million digits is not worth printing, and Python refuses to.
                return f"the integer {value}" if abs(value) < 10**30 else "an integer of over 30 digits"
    return types.pop() if types else None
