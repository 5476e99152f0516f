"""What several readers and converters need to flatten graphs: children from parents, and ids from names."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

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


def number_names(values: Sequence[Name | None]) -> tuple[np.ndarray, list[Name]]:
    """Returns an id for each value, (N,) int32, -1 for `None`, and the distinct values in the order of first appearance."""
    names = list(dict.fromkeys(value for value in values if value is not None))
    index: dict[Name | None, int] = {None: -1} | {name: i for i, name in enumerate(names)}
    return np.fromiter(map(index.__getitem__, values), np.int32, len(values)), names
