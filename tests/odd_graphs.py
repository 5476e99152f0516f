"""Unusual graphs by name (`GRAPHS`), batches of them (`BATCHES`), and the functions that build them."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

import cavs
from cavs import vertex_programs as vp


def chain(length: int) -> cavs.Graphs:
    """Returns one chain; each vertex depends on the previous one."""
    return cavs.Graphs.build([length], [0] + [1] * (length - 1), np.arange(length - 1))


def star(children: int) -> cavs.Graphs:
    """Returns one vertex over `children` leaves. The leaves come first."""
    return cavs.Graphs.build([children + 1], [children] + [0] * children, np.arange(1, children + 1))


def from_children(children: Sequence[Sequence[int]]) -> cavs.Graphs:
    """Returns one graph from the list of children of each vertex."""
    return cavs.Graphs.build([len(children)], [len(c) for c in children], [k for c in children for k in c])


def random_binary_tree(leaves: int, seed: int) -> cavs.Graphs:
    """Returns a binary tree of random shape with vertices in random order."""
    rng = np.random.default_rng(seed)
    children: list[list[int]] = [[] for _ in range(leaves)]
    roots = list(range(leaves))
    while len(roots) > 1:
        left, right = (roots.pop(int(rng.integers(len(roots)))) for _ in range(2))
        roots.append(len(children))
        children.append([left, right])
    return renumbered(children, rng.permutation(len(children)))


def random_dag(vertices: int, fan_ins: Sequence[int], seed: int) -> cavs.Graphs:
    """Returns a directed acyclic graph with repeated children and vertices in random order."""
    rng = np.random.default_rng(seed)
    children = [list(rng.integers(0, r, rng.choice(fan_ins))) if r else [] for r in range(vertices)]
    return renumbered(children, rng.permutation(vertices))


def renumbered(children: Sequence[Sequence[int]], number: np.ndarray) -> cavs.Graphs:
    """Returns one graph in which vertex r of `children` gets the index `number[r]`."""
    out: list[list[int]] = [[] for _ in children]
    for r, kids in enumerate(children):
        out[number[r]] = [int(number[k]) for k in kids]
    return from_children(out)


def children_of(graphs: cavs.Graphs, graph: int = 0) -> list[list[int]]:
    """Returns the children of each vertex of one graph."""
    one = graphs[graph]
    return [children.tolist() for children in np.split(one.children, one.child_offsets[1:-1])]


def joined(graphs: Sequence[cavs.Graphs]) -> cavs.Graphs:
    """Returns all graphs as one batch."""
    return functools.reduce(lambda a, b: a + b, graphs)


def with_kinds(graphs: cavs.Graphs, names: tuple[str, ...], seed: int = 0) -> cavs.Graphs:
    """Returns the same graphs with random kinds."""
    kind = np.random.default_rng(seed).integers(0, len(names), graphs.num_vertices).astype(np.int32)
    return dataclasses.replace(graphs, kind=kind, kind_names=names)


GRAPHS = {
    "one vertex": from_children([[]]),
    "two of one vertex": joined([from_children([[]])] * 2),
    "chain of 60": chain(60),
    "chain of 500": chain(500),
    "star of 40": star(40),
    "star of 300": star(300),
    # Several roots, a vertex with one child, the same child twice, children of different heights, several parents.
    "shared children": from_children([[], [], [0, 1], [0, 0], [2, 3], [2], [4, 5], [4], [7, 0]]),
    "wide DAG": random_dag(15, (0, 1, 2, 4), seed=1),
    "trees": joined([random_binary_tree(n, seed=n) for n in (2, 9, 5, 1, 12)]),
}

BATCHES = {
    "chains": joined([chain(n) for n in (1, 17, 1, 6, 2)]),
    "long chain": GRAPHS["chain of 60"],
    "very long chain": GRAPHS["chain of 500"],
    "binary": joined([GRAPHS[g] for g in ("one vertex", "trees", "shared children", "two of one vertex")] + [chain(6)]),
    "forest": joined([GRAPHS[g] for g in ("one vertex", "trees", "two of one vertex")] + [chain(6)]),
    "one vertex": GRAPHS["one vertex"],
    "wide": joined([GRAPHS[g] for g in ("star of 40", "one vertex", "shared children", "wide DAG")] + [chain(4)]),
    "few": GRAPHS["shared children"],
    "very wide": joined([GRAPHS["star of 300"], chain(3)]),
}
BATCHES["leaf and inner"] = vp.RvNN.add_kinds(BATCHES["binary"])
BATCHES["three kinds"] = with_kinds(BATCHES["binary"], ("word", "phrase", "root"))
BATCHES["few of three kinds"] = with_kinds(BATCHES["few"], ("word", "phrase", "root"))
BATCHES["forest of leaf and inner"] = vp.RvNN.add_kinds(BATCHES["forest"])
BATCHES["forest of three kinds"] = with_kinds(BATCHES["forest"], ("word", "phrase", "root"))
BATCHES["pyramids"] = vp.TDRNN.graphs([1, 5, 2])
# One character; words that share first and last characters, a word of two vertices; no words.
BATCHES["lattices"] = vp.LatticeLSTM.graphs([1, 7, 3], [[], [(0, 2), (0, 3), (2, 3), (1, 6), (3, 6), (3, 6)], []])
BATCHES["sentence pairs"] = vp.EncoderDecoder.graphs([1, 5, 3], [3, 4, 1])[1]


# Wide levels, and fan-in of all sizes.
WIDE = {
    "star of 300": star(300),
    "stars of all sizes": joined([star(n) for n in (1, 3, 4, 5, 17, 63, 64, 65, 66, 130, 300, 2)]),
    "one level of mixed fan-in": from_children([[]] + [[0] * n for n in (1, 200, 2, 64, 65, 3, 90, 1, 40, 40, 40)]),
    "wide below narrow": joined([star(70), chain(9), random_binary_tree(60, seed=3)]),
    "many wide": from_children([[]] * 8 + [list(range(8)) * 5] * 50),
}
