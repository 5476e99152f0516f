"""Flat arrays over many graphs: the heights of vertices, runs of rows, children from parents, and ids from names."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)

# One round of NumPy calls costs as much as a Python loop over this many vertices and edges.
VERTICES_PER_ROUND = 512


def offsets(counts: np.ndarray) -> np.ndarray:
    """(N + 1,) int64: where each of N consecutive runs of length `counts` begins, and where the last one ends."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def heights(owner: np.ndarray, child: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Computes the level of each vertex in Cavs' Algorithm 1, level by level (Kahn, 1962), in time linear in V + E.

    NumPy processes all vertices of a level at once, while the number of levels is small enough for that to pay. The remaining
    levels, those of a chain or another deep graph, are processed by a loop over vertices.

    Returns (V,) int32, the length of the longest path to a leaf; -1 for vertices on a cycle or above one. `owner`: (E,) flat
    row of each edge's parent. `child`: (E,) flat row of each edge's child. `counts`: (V,) number of children of each vertex.
    """
    height = np.where(counts == 0, 0, -1).astype(np.int32)
    by_child = np.argsort(child, kind="stable")
    parent = owner[by_child]
    start = np.searchsorted(child[by_child], np.arange(len(counts) + 1))
    waiting = counts.copy()
    level = np.flatnonzero(counts == 0)
    h = 0
    while len(level) and h * VERTICES_PER_ROUND <= len(counts) + len(owner):
        h += 1
        lengths = start[level + 1] - start[level]
        picks = np.arange(lengths.sum()) + np.repeat(start[level] - offsets(lengths)[:-1], lengths)
        parents, times = np.unique(parent[picks], return_counts=True)
        waiting[parents] -= times
        level = parents[waiting[parents] == 0]
        height[level] = h
    if len(level):
        _set_heights_above(height, parent, start, waiting, level, h)
    return height


def _set_heights_above(
    height: np.ndarray, parent: np.ndarray, start: np.ndarray, waiting: np.ndarray, level: np.ndarray, h: int
) -> None:
    """Sets the heights of all vertices above `level`, the vertices of height `h`, in a loop over vertices."""
    # Lists: Python reads single elements of lists faster than of arrays.
    parents, first, pending = parent.tolist(), start.tolist(), waiting.tolist()
    ready = level.tolist()
    rows, row_heights = [], []
    while ready:
        h += 1
        above = []
        for row in ready:
            for up in parents[first[row] : first[row + 1]]:
                pending[up] -= 1
                if not pending[up]:
                    above.append(up)
        ready = above
        rows += ready
        row_heights += [h] * len(ready)
    height[rows] = row_heights


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenates `start[i]`, `start[i] + 1`, ..., `start[i] + length[i] - 1` for every i."""
    out = (start - length.cumsum() + length).repeat(length)
    out += np.arange(len(out))
    return out


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
