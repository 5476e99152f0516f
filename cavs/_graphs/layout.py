"""The places of vertices in pictures: their levels are the heights, and their places within a level are computed here."""

import numpy as np

from cavs._graphs.graphs import Graphs

GAP = 1.5  # between neighbouring graphs; vertices of a level are at least 1 apart


def layout_of_batch(graphs: Graphs) -> np.ndarray:
    """Returns the x of every vertex of a batch, (V,): the layouts of its graphs, side by side."""
    places, begin = [np.zeros(0)], 0.0
    for graph in graphs:
        x = layout(graph)
        if len(x):
            x += begin - x.min()
            begin = x.max() + GAP
        places.append(x)
    return np.concatenate(places)


def layout(graph: Graphs) -> np.ndarray:
    """Returns the x of every vertex of ONE graph, (V,).

    The leaves follow each other in the order in which a depth-first search from the roots reaches them. Every other vertex is
    above the middle of its children. Vertices of a level are at least 1 apart. If the graph is not a tree, some sweeps then
    move vertices towards their neighbours (Sugiyama, 1981).
    """
    n, height = graph.num_vertices, graph.height
    counts = np.diff(graph.child_offsets)
    owner = np.repeat(np.arange(n), counts)
    parents = np.bincount(graph.children, minlength=n)
    x = np.full(n, -1.0)
    seen, stack, leaves = np.zeros(n, bool), np.flatnonzero(parents == 0)[::-1].tolist(), 0
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if counts[v] == 0:
            x[v], leaves = leaves, leaves + 1
        stack.extend(graph.children[graph.child_offsets[v] : graph.child_offsets[v + 1]][::-1].tolist())
    by_level = np.argsort(height, kind="stable")
    bounds = np.searchsorted(height[by_level], np.arange(int(height.max(initial=0)) + 2))
    rows = [by_level[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    for row in rows[1:]:
        for v in row:
            x[v] = x[graph.children[graph.child_offsets[v] : graph.child_offsets[v + 1]]].mean()
        x[row] = _apart(x[row])
    if parents.max(initial=0) > 1:
        degree = np.maximum(counts + parents, 1)
        for _ in range(12):
            pull = np.bincount(owner, x[graph.children], minlength=n) + np.bincount(graph.children, x[owner], minlength=n)
            x = np.where(counts + parents > 0, pull / degree, x)
            for row in rows:
                x[row] = _apart(x[row])
    return x


def _apart(x: np.ndarray) -> np.ndarray:
    """Returns the places that are nearest to `x` (least squares), in the same order and at least 1 apart.

    This is isotonic regression, computed by pooling adjacent violators.
    """
    order = np.argsort(x, kind="stable")
    target = x[order] - np.arange(len(x))
    means: list[float] = []
    sizes: list[int] = []
    for value in target.tolist():
        mean, size = value, 1
        while means and means[-1] >= mean:
            other = sizes.pop()
            mean = (means.pop() * other + mean * size) / (other + size)
            size += other
        means.append(mean)
        sizes.append(size)
    out = np.empty(len(x))
    out[order] = np.repeat(means, sizes) + np.arange(len(x))
    return out
