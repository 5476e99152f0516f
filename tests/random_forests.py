"""Random batches of graphs, each the list of every vertex's children."""

from collections.abc import Callable

import numpy as np

from tests.per_vertex import Graph

Rng = np.random.Generator


def renumbered(rng: Rng, graph: Graph) -> Graph:
    """Returns the same graph with its vertices in random order."""
    number = rng.permutation(len(graph))
    out: Graph = [[] for _ in graph]
    for vertex, children in enumerate(graph):
        out[number[vertex]] = [int(number[child]) for child in children]
    return out


def single(rng: Rng, arity: int, size: int) -> Graph:
    return [[]]


def chain(rng: Rng, arity: int, size: int) -> Graph:
    return [[i - 1] if i else [] for i in range(size)]


def star(rng: Rng, arity: int, size: int) -> Graph:
    children = list(range(min(size, arity)))
    return [*([] for _ in children), children]


def tree(rng: Rng, arity: int, size: int) -> Graph:
    """A tree: each step puts one to `arity` roots below a new root."""
    graph: Graph = [[] for _ in range(max(1, size // 2))]
    roots = list(range(len(graph)))
    while len(roots) > 1 and len(graph) < 2 * size:
        count = int(rng.integers(1, min(len(roots), arity, 4) + 1))
        picked = [roots.pop(int(rng.integers(len(roots)))) for _ in range(count)]
        roots.append(len(graph))
        graph.append(picked)
    return graph


def dag(rng: Rng, arity: int, size: int) -> Graph:
    """Children are drawn with repetition: shared ones, and some that occur twice below one parent."""
    graph: Graph = []
    counts = (0, *rng.integers(1, min(arity, 5) + 1, 2))  # few, because the reference compiles for each
    for i in range(size):
        count = int(rng.choice(counts))
        graph.append([int(k) for k in rng.integers(0, i, count)] if i else [])
    return graph


def twice(rng: Rng, arity: int, size: int) -> Graph:
    """A chain in which every vertex repeats its child as often as the arity permits, at most three times."""
    return [[i - 1] * int(rng.integers(1, min(arity, 3) + 1)) if i else [] for i in range(size)]


SHAPES: list[Callable[[Rng, int, int], Graph]] = [single, chain, star, tree, dag, twice]


def random_forest(rng: Rng, arity: int, most: int) -> list[Graph]:
    """At most `most` vertices, of at most `arity` children each. Now and then no graph at all, or leaves alone."""
    draw = rng.random()
    if draw < 0.03:
        return []
    if draw < 0.06 or arity == 0:
        return [[[]] for _ in range(int(rng.integers(1, 5)))]
    forest: list[Graph] = []
    total = int(rng.integers(1, most + 1))
    while (left := total - sum(map(len, forest))) > 0:
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        graph = shape(rng, arity, int(rng.integers(1, left + 1)))
        forest.append(renumbered(rng, graph) if rng.random() < 0.5 else graph)
    return forest
