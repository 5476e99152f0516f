"""What several readers and converters need to flatten graphs: children from parents, and ids from names."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from cavs._graphs.checks import INT32_MAX

Name = TypeVar("Name", bound=Hashable)


def children_of_parents(num_vertices: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Converts parents to the arguments `num_children` (V,) and `children` (E,) of `Graphs.build`.

    `parents` (V,) holds flat rows over all graphs, -1 at a root. Children of a vertex are ordered by vertex number.
    """
    base = np.repeat(np.cumsum(num_vertices) - num_vertices, num_vertices)
    child_rows = np.flatnonzero(parents >= 0)
    owner = parents[child_rows]
    order = np.argsort(owner, kind="stable")
    return np.bincount(owner, minlength=len(parents)), (child_rows - base[child_rows])[order]


def number_names(values: Sequence[Name]) -> tuple[np.ndarray, list[Name]]:
    """Returns an id for each value, (N,) int32, and the distinct values in the order of first appearance."""
    names = list(dict.fromkeys(values))
    index = {name: i for i, name in enumerate(names)}
    return np.fromiter(map(index.__getitem__, values), np.int32, len(values)), names


def ids_and_names(values: Sequence[int | str | None]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Returns ids (N,) int32 and their names.

    Integers are ids themselves, and have no names. Strings are numbered by first appearance. `None` becomes -1. All values are
    of one type, as `value_type` checks.
    """
    given = np.fromiter((value is not None for value in values), bool, len(values))
    ids = np.full(len(values), -1, np.int32)
    present = [value for value in values if value is not None]
    if not present or type(present[0]) is int:
        ids[given] = np.array(present, np.int32)
        return ids, None
    ids[given], names = number_names(present)
    return ids, tuple(map(str, names))


def value_type(values: Sequence[object], *, optional: bool) -> type | None | str:
    """Checks that all values are `int`, or all are `str`.

    Integers are 0 to 2**31 - 1; a `bool` is not an integer here. `None` is allowed if `optional`.

    Returns `int` or `str`; `None` if there are no values; a text that describes the invalid values otherwise.
    """
    types = set(map(type, values))
    if optional:
        types.discard(type(None))
    if types - {int, str} or len(types) > 1:
        return " and ".join(sorted("null" if t is type(None) else t.__name__ for t in types))
    if types == {int}:
        for value in values:
            if isinstance(value, int) and not 0 <= value <= INT32_MAX:
                # Python refuses to print integers of thousands of digits.
                return f"the integer {value}" if abs(value) < 10**30 else "an integer of over 30 digits"
    return types.pop() if types else None
