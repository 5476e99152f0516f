"""The choice of a batch's `Shape`: sizes are rounded up to shape buckets, so that batches share compiled code."""

import functools
import math
import operator
from typing import NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.facts import SMALL_FAN_IN
from cavs._schedule.rounds import cut_windows
from cavs._schedule.schedule import Shape
from cavs._schedule.tasks import Classes, Tasks, task_classes


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


_SPLIT = 4096  # rows, up to which XLA for GPUs does not split a sum
_MANY = 1 << 24  # rows, from which on divisors are not looked for


@functools.lru_cache(maxsize=4096)
def _divided(n: int) -> bool:
    root = math.isqrt(n)
    return any(n % k == 0 for k in range(root, root // 2, -1))


_LADDER = np.unique(rounded_up(np.array([int(x * 2**k) for k in range(3, 40) for x in (1.0, 1.19, 1.415, 1.682)])))
_POWERS = 1 << np.arange(62)


class NoRoom(ValueError):
    """A batch does not fit the fixed shape that was chosen for it."""


class Options(NamedTuple):
    """The options of `cavs.schedule`, after validation."""

    policy: str
    kinds: bool
    exact: bool
    window: int
    shapes: list[Shape] | tuple[Shape, ...] | None
    fields: tuple[str, ...] = ()
    scripts: bool = False
    fixed: tuple[Shape, ...] = ()  # if given, the shape of each batch is one of these, which the caller chose


def bucket(n: int) -> int:
    """Rounds up to a shape bucket: a ladder of ratio 2^(1/4), of numbers as `rounded_up` returns."""
    return int(_LADDER[np.searchsorted(_LADDER, n)])


def padded_sizes(leaves: np.ndarray, inner: np.ndarray, edges: np.ndarray, exact: bool) -> np.ndarray:
    """(K, 3, kinds) leaf rows, inner rows and edges of K batches, padded unless `exact`. The arguments are (K, kinds)."""
    sizes = np.array([leaves, inner, edges])
    vertices = sizes[:2]
    if not exact:  # a kind that a batch does not contain has no rows, unless it is the only one
        vertices[:] = np.where((vertices > 0) | (vertices.shape[2] == 1), _LADDER[_LADDER.searchsorted(vertices)], 0)
    edges_per_row = -(-edges // np.maximum(vertices[1], 1))
    sizes[2] = vertices[1] * _POWERS[_POWERS.searchsorted(edges_per_row)]
    return sizes.swapaxes(0, 1)


Sizes: TypeAlias = list[list[int]]  # padded leaf rows, inner rows and edges, of each kind


class Groups(NamedTuple):
    """K batches, grouped by everything that decides a `Shape` except their tasks."""

    group: np.ndarray  # (K,) the group of each batch
    inner: np.ndarray  # of each group: inner rows of all kinds
    sizes: list[Sizes]  # of each group
    graphs: list[int]  # of each group: number of graphs
    rooted: list[bool]  # of each group: whether each graph has one root
    forest: list[bool]  # of each group: whether no vertex has two parents
    fan_in: list[int]  # of each group: the largest number of children
    classes: list[Classes]  # the distinct classes of tasks
    class_of: np.ndarray  # (K,) index into `classes` of each batch
    num_classes: np.ndarray  # (K,) number of classes of each batch


def groups_of(
    sizes: np.ndarray, graphs: np.ndarray, rooted: np.ndarray, forest: np.ndarray, fan_in: np.ndarray, options: Options
) -> Groups:
    """The groups of K batches with these padded `sizes` (K, 3, kinds). The other arrays are (K,)."""
    each = (*sizes.reshape(len(graphs), math.prod(sizes.shape[1:])).T, graphs, rooted, forest, fan_in)
    number: dict[tuple[int, ...], int] = {}
    group = np.array([number.setdefault(key, len(number)) for key in zip(*(x.tolist() for x in each), strict=True)])
    first = np.unique(group, return_index=True)[1]
    sizes, graphs, rooted, forest, fan_in = (x[first] for x in (sizes, graphs, rooted, forest, fan_in))
    inner, edges = sizes[:, 1], sizes[:, 2]
    rooms, inner = (edges // np.maximum(inner, 1)).max(1), inner.sum(1)
    of = [
        task_classes(n, f, options.policy, r, options.window, options.scripts)
        for n, f, r in zip(*(x.tolist() for x in (inner, fan_in, rooms)), strict=True)
    ]
    classes = list(dict.fromkeys(of))
    class_of = np.array([classes.index(c) for c in of])[group]
    num_classes = np.array([len(c) for c in classes])[class_of]
    return Groups(
        group=group,
        inner=inner,
        sizes=sizes.tolist(),
        graphs=graphs.tolist(),
        rooted=rooted.tolist(),
        forest=forest.tolist(),
        fan_in=fan_in.tolist(),
        classes=classes,
        class_of=class_of,
        num_classes=num_classes,
    )


def shapes_of(
    options: Options, names: tuple[str, ...], arity: int, groups: Groups, tasks: Tasks
) -> tuple[list[Shape], list[int], np.ndarray]:
    """Chooses the shapes of K batches.

    Args:
        options: the options of the schedule.
        names: names of the kinds.
        arity: see `Facts`.
        groups: the groups of the batches.
        tasks: the tasks of the batches.

    Returns:
        The shapes, the index of each batch's shape, and the window of each task.
    """
    found: list[Shape] = []
    which: list[int] = []
    window_of = np.zeros(len(tasks.cls), np.int64)
    # Batches of one group and number of tasks have the same shape, until a new shape is added to `options.shapes`.
    before: dict[tuple[int, int], tuple[int, int]] = {}
    known = 0 if options.shapes is None else len(options.shapes)
    padded_tasks = tasks.count
    if not options.exact:
        padded_tasks = np.maximum(128, _POWERS[::2][_POWERS[::2].searchsorted(tasks.count)])
        padded_tasks = np.minimum(padded_tasks, np.maximum(8, groups.inner)[groups.group])  # a task has a vertex
    for b, key in enumerate(zip(groups.group.tolist(), padded_tasks.tolist(), strict=True)):
        same = before.get(key)
        if same is not None and same[1] == known:
            which.append(same[0])
            continue
        group, num_tasks = key
        leaves, inner, edges = map(tuple, groups.sizes[group])
        classes = groups.classes[groups.class_of[b]]
        windows = (1, max(inner), max(edges))
        if sum(inner) > options.window:
            mine = slice(tasks.first[b], tasks.first[b] + tasks.count[b])
            args = tasks.size[mine], tasks.edges[mine], inner, edges, classes, options.window
            windows, window_of[mine] = cut_windows(*args)
        shape = Shape(
            vertices=sum(leaves) + sum(inner),
            leaves=leaves,
            inner=inner,
            edges=edges,
            tasks=num_tasks,
            graphs=groups.graphs[group],
            classes=classes,
            kinds=names,
            rooted=groups.rooted[group],
            forest=groups.forest[group],
            fan_in=groups.fan_in[group] if groups.fan_in[group] <= SMALL_FAN_IN else 2 * SMALL_FAN_IN,
            arity=arity,
            windows=windows,
            fields=options.fields,
        )
        if options.shapes is not None:
            shape = _known(shape, options.shapes)
            known = len(options.shapes)
        if windows[0] == 1:  # several windows depend on the sizes of the tasks, too
            before[key] = len(found), known
        which.append(len(found))
        found.append(shape)
    return found, which, window_of


def fixed_windows(options: Options, numbers: np.ndarray, tasks: Tasks) -> np.ndarray:
    """The window of each task of K batches whose shapes are `options.fixed[numbers]`.

    Raises:
        NoRoom: a shape has no room for the tasks.
    """
    window_of = np.zeros(len(tasks.cls), np.int64)
    for b, number in enumerate(numbers.tolist()):
        shape, needed = options.fixed[number], 1
        if shape.windows[0] > 1:
            mine = slice(tasks.first[b], tasks.first[b] + tasks.count[b])
            (needed, *_), window_of[mine] = cut_windows(
                tasks.size[mine], tasks.edges[mine], shape.inner, shape.edges, shape.classes, options.window
            )
        if tasks.count[b] > shape.tasks or needed > shape.windows[0]:
            raise NoRoom(f"a batch needs {tasks.count[b]} tasks and {needed} windows; its shape is {shape}.")
    return window_of


def _known(shape: Shape, shapes: list[Shape] | tuple[Shape, ...]) -> Shape:
    """The smallest of `shapes` with room for `shape` and little waste. If there is none, `shape`, which a list gains."""
    fits = [s for s in shapes if covers(s, shape) and 3 * s.vertices <= 4 * shape.vertices]
    if fits:
        return min(fits, key=lambda s: s.vertices)
    if isinstance(shapes, list):
        shapes.append(shape)
    return shape


def covers(shape: Shape, needed: Shape) -> bool:
    """Whether a batch that needs the shape `needed` fits into `shape`."""
    (fixed, sizes), (same, least) = _compared(shape), _compared(needed)
    return fixed == same and all(map(operator.ge, sizes, least))


@functools.lru_cache(maxsize=1024)
def _compared(s: Shape) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """What must be equal in a shape that replaces another, and what may be larger."""
    fixed = s.graphs, s.classes, s.kinds, s.rooted, s.forest, s.fan_in, s.arity, s.windows[0] == 1 or s.windows[1:], s.fields
    return fixed, (*s.leaves, *s.inner, *s.edges, s.tasks, s.windows[0], s.levels)
