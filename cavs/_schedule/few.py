"""A few shapes for all batches of a data set, chosen before the first batch is scheduled.

The number of leaves, inner vertices and edges of a batch is the sum over its graphs, so the sizes of all batches of an epoch
are known without a schedule. The largest shape has room for the largest graphs that a batch can have: every batch fits one
of the shapes, whatever is drawn later.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule.shape import Shape
from cavs._schedule.shapes import FEWEST_LEVELS, Options, fan_in_of, kind_names, rounded_up
from cavs._schedule.tasks import Cut, decomposition, power_of_two, task_classes

# One more shape is one more compilation. It must save this fraction of the rows.
WORTH_A_SHAPE = 0.1
# A shape for the largest batch that can be drawn costs nothing until such a batch comes. It is left out if another shape grows
# by at most this fraction.
WORTH_A_BOUND = 0.01
# Thresholds are chosen among this many quantiles of the sizes of the batches.
QUANTILES = 256


class Counts(NamedTuple):
    """Leaves, inner vertices and edges of each of G graphs, by kind: each (G, kinds)."""

    leaves: np.ndarray
    inner: np.ndarray
    edges: np.ndarray


def counts_of(graphs: Graphs, kinds: bool) -> tuple[tuple[str, ...], Counts]:
    """Returns the names of the kinds, and the counts of each graph. Without `kinds` all vertices have one kind."""
    facts, names = graphs._facts, kind_names(graphs, kinds)
    kind = graphs.kind if kinds else None
    key = np.arange(len(graphs)).repeat(facts.sizes) * len(names) + (0 if kind is None else kind)
    size = len(graphs) * len(names)

    def count(weights: np.ndarray | None, of: np.ndarray) -> np.ndarray:
        return np.bincount(of, weights, minlength=size).astype(np.int64).reshape(len(graphs), len(names))

    deep = facts.num_children > 0
    edges = count(facts.num_children.astype(np.float64), key)
    return names, Counts(count(None, key[~deep]), count(None, key[deep]), edges)


def sums(counts: Counts, batches: Sequence[np.ndarray]) -> np.ndarray:
    """Returns (batches, 3, kinds) int64: the sums of `counts` over the graphs of each batch; none may be empty."""
    index = np.concatenate(batches)
    begin = np.cumsum([0, *(len(some) for some in batches[:-1])])
    return np.stack([np.add.reduceat(of[index], begin, axis=0) for of in counts], 1)


def bound(counts: Counts, batch: int, strata: np.ndarray | None = None) -> np.ndarray:
    """Returns (3, kinds): an upper bound of the counts of any batch of `batch` different graphs.

    Args:
        counts: the counts of each graph.
        batch: graphs per batch.
        strata: (batch, 2) if a batch has one graph of each stratum: its graphs are those from `strata[i, 0]` to
            `strata[i, 1] - 1`.
    """
    if strata is None:
        return np.stack([np.sort(of, axis=0)[::-1][:batch].sum(0) for of in counts])
    return np.stack([sum((of[a:b].max(0) for a, b in strata.tolist()), np.zeros(of.shape[1], int)) for of in counts])


def thresholds(totals: np.ndarray, most: int, highest: int, worth: float = WORTH_A_SHAPE) -> list[int]:
    """Returns at most `most` ascending sizes up to which batches are padded, the last one `highest`, with little padding.

    Args:
        totals: (N,) the sizes of a sample of batches.
        most: the most sizes.
        highest: an upper bound of the sizes of all batches.
        worth: the fraction of the rows that one more size must save.
    """
    sizes, weight = np.unique(totals, return_counts=True)
    if len(sizes) > QUANTILES:
        picked = np.unique(np.linspace(0, len(sizes) - 1, QUANTILES).astype(int))
        weight = np.add.reduceat(weight, np.append(0, picked[:-1] + 1))
        sizes = sizes[picked]
    if highest <= (1 + WORTH_A_BOUND) * sizes[-1]:
        sizes[-1] = highest
    # `highest` may never occur. A shape for it comes on top of those for the sizes that do, and is then never compiled.
    limit = most if sizes[-1] >= highest else most - 1
    if not limit:
        return [highest]
    number, upto = np.arange(len(sizes)), np.append(0, weight.cumsum())
    # cost[j]: the rows of the batches of the first j sizes, with the best thresholds so far; the last of them is sizes[j - 1].
    cost, choices, rows = np.append(0, np.full(len(sizes), np.inf)), [], []
    while not choices or len(choices) < limit:
        added = cost[:, None] + (upto[1:] - upto[:, None]) * sizes  # with a threshold sizes[j] after the first i sizes
        added[np.arange(len(upto))[:, None] > number] = np.inf
        choices.append(added.argmin(0))
        cost = np.append(np.inf, added.min(0))
        if rows and cost[-1] > (1 - worth) * rows[-1]:
            choices.pop()
            break
        rows.append(cost[-1])
    found, end = [], len(sizes)
    for before in reversed(choices):
        found.append(int(sizes[end - 1]))
        end = before[end - 1]
    return found[::-1] if sizes[-1] >= highest else [*found[::-1], highest]


def few_shapes(
    members: Sequence[tuple[Graphs, Options]],
    batches: Sequence[Sequence[np.ndarray]],
    most: int,
    bounds: Sequence[np.ndarray] | None = None,
    worth: float = WORTH_A_SHAPE,
) -> list[tuple[Shape, ...]]:
    """Returns at most `most` shapes, ascending, for batches of one number of graphs each.

    Args:
        members: data sets, and the options of their schedules; a batch has a part of each.
        batches: for each member, the graphs of a sample of batches. All have the same length.
        most: the most shapes.
        bounds: for each member, (3, kinds), the most leaves, inner vertices and edges of any batch; `None` if the sample
            contains all batches that will ever occur.
        worth: the fraction of the rows that one more shape must save.

    Returns:
        For each shape, one `Shape` for each member. All batches within the bounds fit the last one.
    """
    counts = [counts_of(graphs, options.kinds) for graphs, options in members]
    samples = [sums(of, some) for (_, of), some in zip(counts, batches, strict=True)]
    caps = [sample.max(0) for sample in samples] if bounds is None else bounds
    totals = np.sum([sample[:, :2].sum((1, 2)) for sample in samples], 0)
    levels = thresholds(totals, most, int(sum(cap[:2].sum() for cap in caps)), worth)
    shapes = []
    for level in levels:
        inside = totals <= level
        shape = []
        for (graphs, options), (names, _), sample, cap, some in zip(members, counts, samples, caps, batches, strict=True):
            sizes = cap
            if level is not levels[-1]:
                sizes = sample[inside].max(0)
                if inside.all():  # batches to come may be a little larger than those of the sample
                    sizes = np.minimum(sizes + np.ceil(sample.std(0) / 2).astype(int), cap)
            shape.append(shape_for(graphs, names, sizes, len(some[0]), options))
        shapes.append(tuple(shape))
    return list(dict.fromkeys(shapes))


def shape_for(graphs: Graphs, names: tuple[str, ...], sizes: np.ndarray, batch: int, options: Options) -> Shape:
    """Returns the shape of batches of `batch` graphs that have at most these `sizes` (3, kinds): leaves, inner vertices, edges.

    All else is as in the whole data set: whether it is rooted, whether it is a forest, its fan-in and height.
    """
    facts = graphs._facts
    leaves, inner, edges = sizes
    leaves, inner = (np.where((n > 0) | (len(names) == 1), rounded_up(n), 0) for n in (leaves, inner))
    per_row = [power_of_two(int(n)) if n else 0 for n in -(-edges // np.maximum(inner, 1))]
    edges, total = inner * np.array(per_row), int(inner.sum())
    fan_in, height = int(facts.fan_in.max(initial=0)), int(graphs.height.max(initial=0))
    classes = task_classes(total, fan_in, options.policy, max(per_row), options.scripts)
    tasks, widths = total, tuple(w for w, _ in classes)
    if options.policy != "serial" and not Cut(classes).limited:
        # Levels are cut into tasks of the largest width, and a few smaller ones.
        tasks = min(total, total // widths[0] + height * len(names) * int(decomposition(widths)[:, -1].max()))
    roots = int(facts.roots.sum())
    scripted = options.scripts and (np.asarray(sizes[1]) > 0).sum() == 1
    return Shape(
        vertices=int(leaves.sum()) + total,
        leaves=tuple(leaves.tolist()),
        inner=tuple(inner.tolist()),
        edges=tuple(edges.tolist()),
        tasks=max(8, -(-tasks // 8) * 8),
        graphs=batch,
        classes=classes,
        kinds=names,
        rooted=bool((facts.roots == 1).all()),
        forest=graphs.num_vertices - roots == graphs.num_edges,
        fan_in=fan_in_of(fan_in),
        arity=graphs._arity,
        fields=options.fields,
        levels=max(FEWEST_LEVELS, power_of_two(height)) if scripted else 0,
    )


def fits(shapes: Sequence[Shape], sizes: np.ndarray) -> np.ndarray:
    """Returns (batches, shapes) bool: whether batches of `sizes` (batches, 3, kinds), see `sums`, fit shapes."""
    room = np.array([[s.leaves, s.inner, s.edges] for s in shapes])
    return np.all(sizes[:, None] <= room, (2, 3))
