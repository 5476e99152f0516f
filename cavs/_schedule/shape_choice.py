"""Chooses the padded `Shape` of batches: one batch's own, rounded up to buckets, or a few for all batches of a data set.

Batches of equal shape share compiled code. The number of leaves, inner vertices and edges of a batch is the sum over its
graphs, so the sizes of all batches of an epoch are known without a schedule. The largest of a few shapes has room for the
largest graphs that a batch can have: every batch fits one of the shapes, whatever is drawn later.
"""

import bisect
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.graphs import SMALL_FAN_IN, Graphs
from cavs._schedule.shape import Shape
from cavs._schedule.tasks import Cut, decomposition, power_of_two, task_classes

PerKind: TypeAlias = tuple[int, ...]
Kinds: TypeAlias = bool | str | None  # see `cavs.schedule`; after validation not `None`

FEWEST_LEVELS = 32  # levels of scripts are padded to a power of two, at least to this one
# One more shape is one more compilation. It must save this fraction of the rows.
WORTH_A_SHAPE = 0.1
# A shape for the largest batch that can be drawn costs nothing until such a batch comes. It is left out if another shape grows
# by at most this fraction.
WORTH_A_BOUND = 0.01
# Thresholds are chosen among this many quantiles of the sizes of the batches.
QUANTILES = 256
_SPLIT = 4096  # rows, up to which XLA for GPUs does not split a sum
_MANY = 1 << 24  # rows, from which on divisors are not looked for
_POWERS_OF_4 = [4**k for k in range(20)]


class Options(NamedTuple):
    """The options of `cavs.schedule`. After validation, `fields` is a tuple and `scripts` a bool."""

    policy: str = "batching"
    kinds: Kinds = None
    exact: bool = False
    shapes: list[Shape] | tuple[Shape, ...] | None = None
    fields: Sequence[str] = ()
    scripts: bool | None = None


class BatchSizes(NamedTuple):
    """What decides the shape of a batch besides its tasks. `leaves`, `inner` and `edges` are numbers of each kind."""

    graphs: int
    vertices: int
    height: int  # the largest height of a vertex
    fan_in: int  # the largest number of children of a vertex
    rooted: bool  # every graph has exactly one root
    forest: bool  # no vertex has two parents
    leaves: PerKind
    inner: PerKind
    edges: PerKind


class NoRoom(ValueError):
    """A batch does not fit a shape."""


def no_room(graphs: np.ndarray, shape: Shape) -> NoRoom:
    """Returns the error to raise if a batch of these graphs does not fit a shape that was chosen for it."""
    return NoRoom(f"the graphs {graphs.tolist()} do not fit the shape {shape}.")


def kind_names(graphs: Graphs, kinds: Kinds) -> tuple[str, ...]:
    """Returns the names of the kinds; kinds without names are numbered. Without `kinds` all vertices have one kind."""
    if graphs.kind is None or not kinds:
        return ("",)
    return graphs.kind_names or tuple(map(str, range(int(graphs.kind.max(initial=0)) + 1)))


def scheduled_kinds(graphs: Graphs, kinds: Kinds) -> np.ndarray | None:
    """Returns the number of the kind by which each vertex is scheduled; `None` if that is the same for all."""
    if graphs.kind is None or not kinds:
        return None
    return np.where(graphs.height > 0, 0, graphs.kind) if kinds == "mixed" else graphs.kind


# --- numbers of rows ---


def rounded_up(n: int) -> int:
    """Rounds a number of rows up to a multiple of 8, from 512 on to one that XLA for GPUs sums over without padding.

    It splits the sums of weight gradients eightfold, so these are multiples of 32. It splits other sums of over 4,096 rows by a
    divisor between half the root of their number and the root. If there is none, a sum of rows is not fused with their
    conversion to float16, and both read the rows.
    """
    step = 8 if n < 512 else 32
    rows = max(-(-n // step), 1) * step
    while _SPLIT < rows < _MANY and not _divided(rows):
        rows += 32
    return rows


@functools.lru_cache(maxsize=4096)
def _divided(n: int) -> bool:
    root = math.isqrt(n)
    return any(n % k == 0 for k in range(root, root // 2, -1))


_LADDER = sorted({rounded_up(int(x * 2**k)) for k in range(3, 40) for x in (1.0, 1.19, 1.415, 1.682)})


def bucket(n: int) -> int:
    """Rounds up to a shape bucket: a ladder of ratio 2^(1/4), of numbers as `rounded_up` returns."""
    return _LADDER[bisect.bisect_left(_LADDER, n)]


# --- the shape of sizes ---


def _shape(sizes: BatchSizes, names: tuple[str, ...], graphs: Graphs, options: Options, rounded: Callable[[int], int]) -> Shape:
    """Returns the shape of batches of these sizes, with as many tasks as vertices with children.

    `sizes`: the sizes, or upper bounds of them. `graphs`: a part of the data set. `rounded`: rounds up numbers of rows.
    """
    # A kind that a batch does not contain has no rows, unless it is the only one.
    leaves, inner = (tuple(rounded(n) if n or len(names) == 1 else 0 for n in rows) for rows in (sizes.leaves, sizes.inner))
    per_row = [power_of_two(-(-n // max(rows, 1))) for n, rows in zip(sizes.edges, inner, strict=True)]
    total, scripted = sum(inner), options.scripts and sum(n > 0 for n in sizes.inner) == 1
    return Shape(
        vertices=sum(leaves) + total,
        leaves=leaves,
        inner=inner,
        edges=tuple(rows * n for rows, n in zip(inner, per_row, strict=True)),
        tasks=total,
        graphs=sizes.graphs,
        classes=task_classes(total, sizes.fan_in, options.policy, max(per_row), bool(options.scripts)),
        kinds=names,
        rooted=sizes.rooted,
        forest=sizes.forest,
        fan_in=sizes.fan_in if sizes.fan_in <= SMALL_FAN_IN else 2 * SMALL_FAN_IN,
        arity=graphs._arity,
        fields=tuple(options.fields),
        levels=max(FEWEST_LEVELS, power_of_two(sizes.height)) if scripted else 0,
        mixed=graphs._inner_kinds if options.kinds == "mixed" else (),
    )


def shape_of(sizes: BatchSizes, cut: Callable[[Cut], int], names: tuple[str, ...], graphs: Graphs, options: Options) -> Shape:
    """Chooses the shape of the batch of some graphs. `cut` cuts it into tasks, and returns their number."""
    shape = _shape(sizes, names, graphs, options, int if options.exact else bucket)
    tasks = cut(Cut(shape.classes, options.policy == "serial"))
    if not options.exact:
        tasks = max(128, next(n for n in _POWERS_OF_4 if n >= tasks))
        tasks = min(tasks, max(8, shape.tasks))  # a task has a vertex
    levels, shape = shape.levels, shape._replace(tasks=tasks, levels=0)
    if options.shapes is not None:
        shape = _known(shape, options.shapes)
    # Scripts are of one kind, and a known shape may have room for several.
    return shape._replace(levels=levels if sum(map(bool, shape.inner)) == 1 else 0)


def shape_for(graphs: Graphs, names: tuple[str, ...], sizes: np.ndarray, batch: int, options: Options) -> Shape:
    """Returns the shape of batches of `batch` graphs that have at most these `sizes` (3, kinds): leaves, inner vertices, edges.

    All else is as in the whole data set: whether it is rooted, whether it is a forest, its fan-in and height.
    """
    facts, roots = graphs._facts, int(graphs._facts.roots.sum())
    most = BatchSizes(
        graphs=batch,
        vertices=int(sizes[:2].sum()),
        height=int(graphs.height.max(initial=0)),
        fan_in=int(facts.fan_in.max(initial=0)),
        rooted=bool((facts.roots == 1).all()),
        forest=graphs.num_vertices - roots == graphs.num_edges,
        **dict(zip(("leaves", "inner", "edges"), map(tuple, sizes.tolist()), strict=True)),
    )
    shape = _shape(most, names, graphs, options, rounded_up)
    tasks, widths = shape.tasks, tuple(w for w, _ in shape.classes)
    if options.policy != "serial" and not Cut(shape.classes).limited:
        # Levels are cut into tasks of the largest width, and a few smaller ones.
        per_level = int(decomposition(widths)[:, -1].max())
        tasks = min(tasks, tasks // widths[0] + most.height * len(names) * per_level)
    return shape._replace(tasks=max(8, -(-tasks // 8) * 8))


# --- whether batches fit shapes ---


def _known(shape: Shape, shapes: list[Shape] | tuple[Shape, ...]) -> Shape:
    """Returns the smallest of `shapes` with room and little waste. If there is none, returns `shape`, which a list gains."""
    fits = [s for s in shapes if covers(s, shape) and 3 * s.vertices <= 4 * shape.vertices]
    if fits:
        return min(fits, key=lambda s: s.vertices)
    if isinstance(shapes, list):
        shapes.append(shape)
    return shape


def covers(shape: Shape, needed: Shape) -> bool:
    """Returns whether a batch that needs the shape `needed` fits into `shape`."""
    (fixed, sizes), (needed_fixed, needed_sizes) = _compared(shape), _compared(needed)
    return fixed == needed_fixed and all(map(operator.ge, sizes, needed_sizes))


@functools.lru_cache(maxsize=1024)
def _compared(s: Shape) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Returns what must be equal in a shape that replaces another, and what may be larger."""
    fixed = s.graphs, s.classes, s.kinds, s.rooted, s.forest, s.fan_in, s.arity, s.fields, s.mixed
    return fixed, (*s.leaves, *s.inner, *s.edges, s.tasks, s.levels)


def has_room(shape: Shape, sizes: BatchSizes, tasks: int) -> bool:
    """Returns whether a batch of these sizes, cut into so many tasks, fits `shape`."""
    limits = zip((sizes.leaves, sizes.inner, sizes.edges), (shape.leaves, shape.inner, shape.edges), strict=True)
    return (
        all(all(map(operator.le, numbers, most)) for numbers, most in limits)
        and sizes.vertices <= shape.vertices
        and sizes.graphs <= shape.graphs
        and sizes.fan_in <= shape.most_children
        and tasks <= shape.tasks
        and (not shape.arity or sum(sizes.edges) == shape.arity * sum(sizes.inner))
        and (not shape.levels or sizes.height <= shape.levels and sum(n > 0 for n in sizes.inner) <= 1)
        and sizes.rooted >= shape.rooted
        and sizes.forest >= shape.forest
    )


def fits(shapes: Sequence[Shape], sizes: np.ndarray) -> np.ndarray:
    """Returns (batches, shapes) bool: whether batches of `sizes` (batches, 3, kinds), see `sums`, fit shapes."""
    room = np.array([[s.leaves, s.inner, s.edges] for s in shapes]).reshape(len(shapes), *sizes.shape[1:])
    return np.all(sizes[:, None] <= room, (2, 3))


# --- a few shapes for a data set ---


def counts_of(graphs: Graphs, kinds: Kinds) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of the kinds, and (3, G, kinds) int64: the leaves, inner vertices and edges of each graph, by kind."""
    facts, names = graphs._facts, kind_names(graphs, kinds)
    kind = scheduled_kinds(graphs, kinds)
    key = np.arange(len(graphs)).repeat(facts.sizes) * len(names) + (0 if kind is None else kind)
    inner = facts.num_children > 0
    counts = [np.bincount(key, weights, len(graphs) * len(names)) for weights in (~inner, inner, facts.num_children)]
    return names, np.array(counts, np.int64).reshape(3, len(graphs), len(names))


def sums(counts: np.ndarray, batches: Sequence[np.ndarray]) -> np.ndarray:
    """Returns (batches, 3, kinds) int64: the sums of `counts_of` over the graphs of each batch; none may be empty."""
    index = np.concatenate(batches)
    begin = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    return np.add.reduceat(counts[:, index], begin, axis=1).swapaxes(0, 1)


def bound(counts: np.ndarray, batch: int, strata: np.ndarray | None = None) -> np.ndarray:
    """Returns (3, kinds): an upper bound of the counts of any batch of `batch` different graphs.

    `counts`: as `counts_of` returns them. `strata`: (batch, 2) if a batch has one graph of each stratum: its graphs are those
    from `strata[i, 0]` to `strata[i, 1] - 1`.
    """
    if strata is None:
        return np.sort(counts, axis=1)[:, ::-1][:, :batch].sum(1)
    return np.sum([counts[:, a:b].max(1) for a, b in strata.tolist()], 0)


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
    chosen, end = [], len(sizes)
    for before in reversed(choices):
        chosen.append(int(sizes[end - 1]))
        end = before[end - 1]
    return chosen[::-1] if sizes[-1] >= highest else [*chosen[::-1], highest]


def few_shapes(
    members: Sequence[tuple[Graphs, Options]],
    batches: Sequence[Sequence[np.ndarray]],
    most: int,
    bounds: Sequence[np.ndarray] | None = None,
    worth: float = WORTH_A_SHAPE,
) -> list[tuple[Shape, ...]]:
    """Returns at most `most` shapes, ascending, for batches of one number of graphs each.

    Returns:
        For each shape, one `Shape` for each member. All batches within the bounds fit the last one.

    Args:
        members: data sets, and the options of their schedules; a batch has a part of each.
        batches: for each member, the graphs of a sample of batches. All have the same length.
        most: the most shapes.
        bounds: for each member, (3, kinds), the most leaves, inner vertices and edges of any batch; `None` if the sample
            contains all batches that will ever occur.
        worth: the fraction of the rows that one more shape must save.
    """
    counts = [counts_of(graphs, options.kinds) for graphs, options in members]
    samples = [sums(graph_counts, drawn) for (_, graph_counts), drawn in zip(counts, batches, strict=True)]
    caps = [sample.max(0) for sample in samples] if bounds is None else bounds
    totals = np.sum([sample[:, :2].sum((1, 2)) for sample in samples], 0)
    levels = thresholds(totals, most, int(sum(cap[:2].sum() for cap in caps)), worth)
    shapes = []
    for level in levels:
        inside = totals <= level
        shape = []
        for (graphs, options), (names, _), sample, cap, drawn in zip(members, counts, samples, caps, batches, strict=True):
            sizes = cap
            if level is not levels[-1]:
                sizes = sample[inside].max(0)
                if inside.all():  # batches to come may be a little larger than in the sample
                    sizes = np.minimum(sizes + np.ceil(sample.std(0) / 2).astype(int), cap)
            shape.append(shape_for(graphs, names, sizes, len(drawn[0]), options))
        shapes.append(tuple(shape))
    return list(dict.fromkeys(shapes))
