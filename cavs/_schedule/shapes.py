"""Chooses the `Shape` of a batch: sizes are rounded up to shape buckets, so that batches share compiled code."""

import bisect
import functools
import math
import operator
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from cavs._graphs.facts import SMALL_FAN_IN
from cavs._graphs.graphs import Graphs
from cavs._schedule.shape import Shape
from cavs._schedule.tasks import Cut, power_of_two, task_classes

PerKind: TypeAlias = tuple[int, ...]

FEWEST_LEVELS = 32  # levels of scripts are padded to a power of two, at least to this one
_SPLIT = 4096  # rows, up to which XLA for GPUs does not split a sum
_MANY = 1 << 24  # rows, from which on divisors are not looked for


def rounded_up(n: np.ndarray) -> np.ndarray:
    """Rounds numbers of rows up to multiples of 8, from 512 on to those that XLA for GPUs sums over without padding.

    It splits the sums of weight gradients eightfold, so these are multiples of 32. It splits other sums of over 4,096 rows by
    a divisor between half the root of their number and the root. If there is none, a sum of rows is not fused with their
    conversion to float16, and both read the rows.
    """
    step = np.where(n < 512, 8, 32)
    found = np.maximum(-(-n // step), 1) * step
    for i, rows in np.ndenumerate(found):
        while _SPLIT < rows < _MANY and not _divided(int(rows)):
            rows += 32
        found[i] = rows
    return found


@functools.lru_cache(maxsize=4096)
def _divided(n: int) -> bool:
    root = math.isqrt(n)
    return any(n % k == 0 for k in range(root, root // 2, -1))


_LADDER = np.unique(rounded_up(np.array([int(x * 2**k) for k in range(3, 40) for x in (1.0, 1.19, 1.415, 1.682)]))).tolist()


def bucket(n: int) -> int:
    """Rounds up to a shape bucket: a ladder of ratio 2^(1/4), of numbers as `rounded_up` returns."""
    return _LADDER[bisect.bisect_left(_LADDER, n)]


class Options(NamedTuple):
    """The options of `cavs.schedule`, after validation."""

    policy: str
    kinds: bool
    exact: bool
    shapes: list[Shape] | tuple[Shape, ...] | None
    fields: tuple[str, ...] = ()
    scripts: bool = False


def kind_names(graphs: Graphs, kinds: bool) -> tuple[str, ...]:
    """Returns the names of the kinds; kinds without names are numbered. Without `kinds` all vertices have one kind."""
    if graphs.kind is None or not kinds:
        return ("",)
    return graphs.kind_names or tuple(map(str, range(int(graphs.kind.max(initial=0)) + 1)))


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


class SortedBatch(Protocol):
    """A batch whose vertices are sorted: in C++ (`compiled`), or in NumPy (`reference`)."""

    sizes: BatchSizes

    def cut(self, cut: Cut) -> int:
        """Cuts the levels into tasks. Returns their number."""
        ...

    def write(self, shape: Shape) -> np.ndarray:
        """Returns the integers of the schedule, after `cut`. Raises `NoRoom` if the batch does not fit `shape`."""
        ...


class NoRoom(ValueError):
    """A batch does not fit a shape."""


def no_room(graphs: np.ndarray, shape: Shape) -> NoRoom:
    """Returns the error to raise if a batch of these graphs does not fit a shape that was chosen for it."""
    return NoRoom(f"the graphs {graphs.tolist()} do not fit the shape {shape}.")


def shape_of(batch: SortedBatch, options: Options, names: tuple[str, ...], arity: int) -> Shape:
    """Cuts a batch into tasks, and chooses its shape.

    Args:
        batch: the batch.
        options: the options of the schedule.
        names: the names of the kinds.
        arity: the number of children of every inner vertex of the data set; 0 if it varies.
    """
    sizes = batch.sizes
    leaves, inner = sizes.leaves, sizes.inner
    if not options.exact:
        leaves, inner = _padded(leaves), _padded(inner)
    per_row = [power_of_two(-(-n // max(rows, 1))) for n, rows in zip(sizes.edges, inner, strict=True)]
    edges = tuple(rows * n for rows, n in zip(inner, per_row, strict=True))
    total = sum(inner)
    classes = task_classes(total, sizes.fan_in, options.policy, max(per_row), options.scripts)
    tasks = batch.cut(Cut(classes, options.policy == "serial"))
    if not options.exact:
        tasks = max(128, next(n for n in _POWERS_OF_4 if n >= tasks))
        tasks = min(tasks, max(8, total))  # a task has a vertex
    shape = Shape(
        vertices=sum(leaves) + total,
        leaves=leaves,
        inner=inner,
        edges=edges,
        tasks=tasks,
        graphs=sizes.graphs,
        classes=classes,
        kinds=names,
        rooted=sizes.rooted,
        forest=sizes.forest,
        fan_in=fan_in_of(sizes.fan_in),
        arity=arity,
        fields=options.fields,
    )
    if options.shapes is not None:
        shape = _known(shape, options.shapes)
    return shape._replace(levels=_levels(sizes)) if options.scripts else shape


_POWERS_OF_4 = [4**k for k in range(20)]


def _padded(rows: PerKind) -> PerKind:
    """Rounds up to buckets. A kind that a batch does not contain has no rows, unless it is the only one."""
    return tuple(bucket(n) if n or len(rows) == 1 else 0 for n in rows)


def fan_in_of(most: int) -> int:
    """Returns the fan-in of a shape, given the largest number of children of a vertex."""
    return most if most <= SMALL_FAN_IN else 2 * SMALL_FAN_IN


def _levels(sizes: BatchSizes) -> int:
    """Returns the padded number of levels of scripts. Batches in which exactly one kind has children have scripts."""
    return max(FEWEST_LEVELS, power_of_two(sizes.height)) if sum(n > 0 for n in sizes.inner) == 1 else 0


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
    (fixed, sizes), (same, least) = _compared(shape), _compared(needed)
    return fixed == same and all(map(operator.ge, sizes, least))


@functools.lru_cache(maxsize=1024)
def _compared(s: Shape) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Returns what must be equal in a shape that replaces another, and what may be larger."""
    fixed = s.graphs, s.classes, s.kinds, s.rooted, s.forest, s.fan_in, s.arity, s.fields
    return fixed, (*s.leaves, *s.inner, *s.edges, s.tasks, s.levels)


def has_room(shape: Shape, sizes: BatchSizes, tasks: int) -> bool:
    """Returns whether a batch of these sizes, cut into so many tasks, fits `shape`."""
    limits = zip((sizes.leaves, sizes.inner, sizes.edges), (shape.leaves, shape.inner, shape.edges), strict=True)
    return (
        all(all(map(operator.le, found, most)) for found, most in limits)
        and sizes.vertices <= shape.vertices
        and sizes.graphs <= shape.graphs
        and sizes.fan_in <= shape.most_children
        and tasks <= shape.tasks
        and (not shape.arity or sum(sizes.edges) == shape.arity * sum(sizes.inner))
        and (not shape.levels or sizes.height <= shape.levels and sum(n > 0 for n in sizes.inner) <= 1)
        and sizes.rooted >= shape.rooted
        and sizes.forest >= shape.forest
    )
