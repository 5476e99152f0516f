"""The places of vertices in pictures: their levels are the heights, and their places within a level are computed here."""

import numpy as np

from cavs._graphs.graphs import Graphs

GAP = 1.5  # between neighbouring graphs; vertices of a level are at least 1 apart


def layout_of_batch(graphs: Graphs) -> np.ndarray:
    """Returns the x of every vertex of a batch, (V,): the layouts of its graphs, side by side."""
    places, begin = [np.zeros(0)], 0.0
    for graph in graphs:
        x = layout(graph)
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
    owner, children = graph._edges
    counts, parents = np.diff(graph.child_offsets), np.bincount(children, minlength=n)
    children_of = np.split(children, graph.child_offsets[1:-1])
    x = np.full(n, -1.0)
    seen, stack, leaves = np.zeros(n, bool), np.flatnonzero(parents == 0)[::-1].tolist(), 0
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if counts[v] == 0:
            x[v], leaves = leaves, leaves + 1
        stack.extend(children_of[v][::-1].tolist())
    levels = np.split(np.argsort(height, kind="stable"), np.bincount(height).cumsum()[:-1])
    for row in levels[1:]:
        x[row] = _apart(np.array([x[children_of[v]].mean() for v in row]))
    if parents.max(initial=0) > 1:
        degree = np.maximum(counts + parents, 1)
        for _ in range(12):
            pull = np.bincount(owner, x[children], minlength=n) + np.bincount(children, x[owner], minlength=n)
            x = np.where(counts + parents > 0, pull / degree, x)
            for row in levels:
                x[row] = _apart(x[row])
    return x


def _apart(x: np.ndarray) -> np.ndarray:
    """Returns the places that are nearest to `x` (least squares), in the same order and at least 1 apart.

    This is isotonic regression, computed by pooling adjacent violators.
    """
    order = np.argsort(x, kind="stable")
    target = x[order] - np.arange(len(x))
    pools: list[tuple[float, int]] = []  # mean, size
    for mean in target.tolist():
        size = 1
        while pools and pools[-1][0] >= mean:
            other, count = pools.pop()
            mean, size = (other * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    means, sizes = zip(*pools, strict=True)
    out = np.empty(len(x))
    out[order] = np.repeat(means, sizes) + np.arange(len(x))
    return out
