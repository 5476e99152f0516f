"""The static `Shape` of a batch: sizes rounded up to ladders of buckets, so that batches share compiled code."""

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from cavs._schedule import Shape
from cavs._tasks import SMALL_FAN_IN, Tasks, cut_windows, power_of_two

_LADDER = np.array([int(x * 2**k) for k in range(3, 40) for x in (1.0, 1.19, 1.415, 1.682)])
# Large sizes in multiples of 32: on GPUs XLA splits the sums of weight gradients eightfold, and pads copies where it cannot.
_LADDER = np.unique(np.where(_LADDER < 512, -(-_LADDER // 8) * 8, -(-_LADDER // 32) * 32))
_POWERS = 1 << np.arange(62)


class Options(NamedTuple):
    """The options of `cavs.schedule`."""

    policy: str
    kinds: bool
    exact: bool
    window: int
    shapes: list[Shape] | tuple[Shape, ...] | None
    fields: tuple[str, ...] = ()
    scripts: bool = False  # those of the persistent engine come along


def bucket(n: int) -> int:
    """`n` rounded up to a ladder of ratio 2^(1/4), in multiples of 8 (from 512 on, of 32): at most 19 % and that more."""
    return int(_LADDER[np.searchsorted(_LADDER, n)])


def padded_sizes(leaves: np.ndarray, inner: np.ndarray, edges: np.ndarray, exact: bool) -> np.ndarray:
    """(K, 3, kinds) leaf rows, inner rows and edges of K batches, padded unless `exact`; each of the arguments (K, kinds)."""
    sizes = np.array([leaves, inner, edges])
    vertices = sizes[:2]
    if not exact:  # a kind of which a batch has none takes no room, unless it is the only one
        vertices[:] = np.where((vertices > 0) | (vertices.shape[2] == 1), _LADDER[_LADDER.searchsorted(vertices)], 0)
    edges_a_row = -(-edges // np.maximum(vertices[1], 1))
    sizes[2] = vertices[1] * _POWERS[_POWERS.searchsorted(edges_a_row)]
    return sizes.swapaxes(0, 1)


def shapes_of(
    options: Options,
    names: tuple[str, ...],
    sizes: np.ndarray,
    graphs: list[int],
    rooted: list[bool],
    fan_in: list[int],
    classes: list[tuple[tuple[int, int], ...]],
    tasks: Tasks,
) -> tuple[list[Shape], list[int], np.ndarray]:
    """The shapes of K batches, which of them each has, and the window of each task.

    `names` of the kinds; `sizes` (K, 3, kinds), padded; per batch how many `graphs` it has, whether each has one root
    (`rooted`), its largest `fan_in` and its `classes` of tasks.
    """
    found: list[Shape] = []
    which: list[int] = []
    window_of = np.zeros(len(tasks.cls), np.int64)
    # Batches alike in all this have the same shape, until a new one joins `options.shapes`.
    before: dict[Any, tuple[int, int]] = {}
    known = 0 if options.shapes is None else len(options.shapes)
    padded_tasks = tasks.count
    if not options.exact:
        padded_tasks = np.maximum(128, _POWERS[::2][_POWERS[::2].searchsorted(tasks.count)])
    facts = zip(*sizes.reshape(len(graphs), -1).T.tolist(), padded_tasks.tolist(), graphs, rooted, fan_in, strict=True)
    for b, key in enumerate(facts):
        same = before.get(key)
        if same is not None and same[1] == known:
            which.append(same[0])
            continue
        leaves, inner, edges = (tuple(n) for n in sizes[b].tolist())
        windows = (1, max(inner), max(edges))
        if sum(inner) > options.window:
            mine = slice(tasks.first[b], tasks.first[b] + tasks.count[b])
            args = tasks.size[mine], tasks.edges[mine], inner, edges, classes[b], options.window
            windows, window_of[mine] = cut_windows(*args)
        shape = Shape(
            vertices=sum(leaves) + sum(inner),
            leaves=leaves,
            inner=inner,
            edges=edges,
            tasks=int(padded_tasks[b]),
            graphs=graphs[b],
            classes=classes[b],
            kinds=names,
            rooted=rooted[b],
            fan_in=min(power_of_two(fan_in[b]), 2 * SMALL_FAN_IN),
            windows=windows,
            fields=options.fields,
        )
        if options.shapes is not None:
            shape = _known(shape, options.shapes)
            known = len(options.shapes)
        if windows[0] == 1:  # else they depend on its tasks, too
            before[key] = len(found), known
        which.append(len(found))
        found.append(shape)
    return found, which, window_of


def _known(shape: Shape, shapes: list[Shape] | tuple[Shape, ...]) -> Shape:
    """The smallest of `shapes` that `shape` fits into without much waste; itself, then added to a list, where there is none."""
    (same, needed), most = _compared(shape), 4 * shape.vertices
    fits = [
        s
        for s, (fixed, sizes) in zip(shapes, map(_compared, shapes), strict=True)
        if fixed == same and 3 * s.vertices <= most and all(map(operator.ge, sizes, needed))
    ]
    if fits:
        return min(fits, key=lambda s: s.vertices)
    if isinstance(shapes, list):
        shapes.append(shape)
    return shape


@functools.lru_cache(maxsize=1024)
def _compared(s: Shape) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """In what a shape must equal another that takes its place, and in what it may be smaller."""
    fixed = s.graphs, s.classes, s.kinds, s.rooted, s.fan_in, s.windows[0] == 1 or s.windows[1:], s.fields
    return fixed, (*s.leaves, *s.inner, *s.edges, s.tasks, s.windows[0])
