"""Heights of vertices: the level of each in Cavs Algorithm 1, computed once, when graphs are made."""

import numpy as np


def offsets(counts: np.ndarray) -> np.ndarray:
    """(N + 1,) int64: where each of N runs of `counts` begins, and the end of the last."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


# A round of NumPy's costs as much as so many vertices and edges in a loop of Python's.
ROUND = 512


def heights(owner: np.ndarray, child: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(V,) int32: the longest path to a leaf, by peeling whole levels (Kahn, 1962); -1 for vertices on or above a cycle.

    `owner` and `child` (E,) are the flat rows of each edge's ends, `counts` (V,) how many children each vertex has. NumPy
    handles all vertices of a level at once, as long as there are no more levels than that pays for; the levels above, of a
    chain or another deep graph, are left to a loop over vertices. The time is linear in V + E, whatever the depth.
    """
    height = np.where(counts == 0, 0, -1).astype(np.int32)
    by_child = np.argsort(child, kind="stable")
    parent = owner[by_child]
    start = np.searchsorted(child[by_child], np.arange(len(counts) + 1))
    waiting = counts.copy()
    level = np.flatnonzero(counts == 0)
    h = 0
    while len(level) and h * ROUND <= len(counts) + len(owner):
        h += 1
        lengths = start[level + 1] - start[level]
        picks = np.arange(lengths.sum()) + np.repeat(start[level] - offsets(lengths)[:-1], lengths)
        parents, times = np.unique(parent[picks], return_counts=True)
        waiting[parents] -= times
        level = parents[waiting[parents] == 0]
        height[level] = h
    if len(level):
        _deep(height, parent, start, waiting, level, h)
    return height


def _deep(height: np.ndarray, parent: np.ndarray, start: np.ndarray, waiting: np.ndarray, level: np.ndarray, h: int) -> None:
    """The heights above `level`, the vertices of height `h`, vertex by vertex: lists, as they are read one by one."""
    parents, first, left = parent.tolist(), start.tolist(), waiting.tolist()
    ready = level.tolist()
    rows, its = [], []
    while ready:
        h += 1
        above = []
        for row in ready:
            for up in parents[first[row] : first[row + 1]]:
                left[up] -= 1
                if not left[up]:
                    above.append(up)
        ready = above
        rows += ready
        its += [h] * len(ready)
    height[rows] = its
