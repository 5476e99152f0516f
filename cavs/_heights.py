"""Heights of vertices: the level of each in Cavs Algorithm 1, computed once, when graphs are made."""

import numpy as np


def offsets(counts: np.ndarray) -> np.ndarray:
    """(N + 1,) int64: where each of N runs of `counts` begins, and the end of the last."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def heights(owner: np.ndarray, child: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(V,) int32: the longest path to a leaf, by peeling whole levels (Kahn, 1962); -1 for vertices on or above a cycle.

    `owner` and `child` (E,) are the flat rows of each edge's ends, `counts` (V,) how many children each vertex has. A round
    handles every activated vertex at once, so the Python loop runs once per level, not per vertex.
    """
    height = np.where(counts == 0, 0, -1).astype(np.int32)
    by_child = np.argsort(child, kind="stable")
    parent = owner[by_child]
    start = np.searchsorted(child[by_child], np.arange(len(counts) + 1))
    waiting = counts.copy()
    level = np.flatnonzero(counts == 0)
    h = 0
    while len(level):
        h += 1
        lengths = start[level + 1] - start[level]
        picks = np.arange(lengths.sum()) + np.repeat(start[level] - offsets(lengths)[:-1], lengths)
        parents, times = np.unique(parent[picks], return_counts=True)
        waiting[parents] -= times
        level = parents[waiting[parents] == 0]
        height[level] = h
    return height
