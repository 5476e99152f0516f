"""What `plan` divides into parts: a batch of arrays, along their axis of samples, or of graphs.

Each part of a batch of graphs is scheduled, in one shape for all.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.batches import check_bits
from cavs._feed.settings import Sample, carried_by
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.fit import values
from cavs._memory.sub_batches import deal, summed_over_parts
from cavs._schedule.batches import StackScheduler
from cavs._schedule.level_segments import SegmentedSchedule, in_segments
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Options, covers, few_shapes
from cavs.kernels import Target

Loss: TypeAlias = Callable[[PyTree, PyTree], jax.Array]
Collate: TypeAlias = Callable[[Sample], PyTree]
Part: TypeAlias = tuple[np.ndarray, Graphs, Schedule]  # the numbers of its graphs, the graphs, and the schedule
_SMALL = 4096  # vertices that take little memory
_ROWS_PER_TASK = {"cpu": 16, "gpu": 256}  # a task takes as long as so many rows, whatever its size: an estimate
# Segments take longer: the forward runs twice, and on a GPU on engine `scan` rather than a faster one (chains of 5,000 steps).
_IN_SEGMENTS = {"cpu": 1.7, "gpu": 20}
_SEGMENTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SMALLEST_SEGMENT = 64  # vertices: with fewer, the loop over segments takes more time than it saves memory
_LEVELS_OF_SEGMENT = 4
_FEW = 16  # samples that are compared even if a part has fewer
_TIME_OF_PART = 0.01  # what one more part adds to the time of a step: an estimate


class Choice(NamedTuple):
    """One way to compute a batch: the number of its parts, and of the segments of levels in which a part runs."""

    parts: int = 1
    segments: int = 1

    @property
    def divisor(self) -> int:
        """How often the batch is divided. Segments divide levels as parts divide graphs."""
        return self.parts * self.segments

    def __str__(self) -> str:
        return counted(self.parts, "part") + (f" in {self.segments} segments of levels" if self.segments > 1 else "")


class DividedArrays:
    """A pytree of arrays that have an axis of samples, or of `jax.ShapeDtypeStruct`s; `axis` as in `cavs.memory.plan`."""

    noun = "sample"  # the word for a sample
    cause = ""  # says what else makes the smallest plan large

    def __init__(self, arrays: PyTree, axis: Any):
        self.whole, self._axis = arrays, axis  # the batch itself
        self._axes, self._count = _axes_of(arrays, axis)
        self.text = counted(self._count, "sample")  # says how large the batch is

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self._count

    def choices(self, parts: int | None, segments: int | None) -> list[Choice]:
        """Returns how the batch can be computed, the fastest first, with a given number of parts or segments."""
        if segments not in (None, 1):
            raise ValueError(f"plan: segments: got {segments!r} for arrays, which have no levels; expected 1. Leave it out.")
        return [Choice(n) for n in ([parts] if parts else numbers_of_parts(len(self)))]

    def time(self, choice: Choice) -> float:
        """Returns the estimated time of a choice, in any unit."""
        return 1 + _TIME_OF_PART * (choice.parts - 1)

    def in_parts(self, loss: Loss, choice: Choice) -> Loss:
        """Returns the loss of the whole batch, as `arranged` returns it."""
        axes, count = self._axes, choice.parts

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            if count == 1:
                return loss(params, batch)
            leaves, tree = jax.tree.flatten(batch)
            pairs = list(zip(leaves, axes, strict=True))
            shared = [x for x, axis in pairs if axis is None]

            def one(common: tuple[PyTree, list[jax.Array]], part: list[jax.Array]) -> jax.Array:
                unsplit, split = iter(common[1]), iter(part)
                return loss(common[0], tree.unflatten([next(unsplit) if axis is None else next(split) for axis in axes]))

            stack = [
                jnp.moveaxis(x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]), axis, 0)
                for x, axis in pairs
                if axis is not None
            ]
            return summed_over_parts("plan", one)((params, shared), [stack])

        return summed

    def structs(self, choice: Choice) -> PyTree:
        """Returns the shapes and dtypes of the batch as `arranged` returns it."""
        return jax.eval_shape(lambda batch: batch, self.whole)

    def few(self, parts: int) -> tuple[PyTree, PyTree, int]:
        """Returns some samples in one part and in two, as `arranged` does, and their number; as many as in two of `parts`."""
        count = 2 * len(self) // parts
        while 2 * count <= len(self) and count < _FEW:
            count *= 2
        leaves, tree = jax.tree.flatten(values(self.whole))
        pairs = zip(leaves, self._axes, strict=True)
        samples = tree.unflatten([x if axis is None else x[(*[slice(None)] * axis, slice(count))] for x, axis in pairs])
        return samples, samples, count

    def arranged(self, batch: Any, choice: Choice) -> PyTree:
        """Returns another batch as `in_parts` gets it. The shapes are the same while it is no larger than earlier ones."""
        _, count = _axes_of(batch, self._axis)
        check_bits(batch, "plan: batch")
        if count % choice.parts:
            raise ValueError(
                f"batch: got {counted(count, 'sample')}; expected a multiple of {choice.parts}, the parts of the plan."
            )
        return batch


def _axes_of(arrays: PyTree, axis: Any) -> tuple[list[int | None], int]:
    """Returns the axis of samples of each array, and their number."""
    leaves = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, Graphs | Schedule))
    not_arrays = [x for x in leaves or [arrays] if not hasattr(x, "shape") or not hasattr(x, "dtype")]
    if not_arrays:
        got, write = f"a {type(not_arrays[0]).__name__}", "graphs[:64] of cavs.read(...), or (x, y)"
        if isinstance(arrays, Graphs):
            got = "graphs for a plan of arrays" if len(arrays) else "no graphs"
        elif isinstance(not_arrays[0], Graphs):
            got = "graphs among other things"
            write = "plan(loss, params, graphs, collate=lambda sample: (sample.sched, x[sample.numbers]))"
        raise TypeError(
            f"plan: batch: got {got}; expected cavs.Graphs, or a pytree of arrays with an axis of samples. Write {write}."
        )
    try:
        tree = jax.tree.broadcast(axis, arrays, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"plan: axis: got {axis!r}; expected an int, None, or such a prefix of the batch.") from error
    leaf_axes = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    pairs = [(x, a) for x, a in zip(jax.tree.leaves(arrays), leaf_axes, strict=True) if a is not None]
    if any(not isinstance(a, int) or not -len(x.shape) <= a < len(x.shape) for x, a in pairs):
        raise ValueError(
            f"plan: axis: got {axis!r} for arrays of shapes {[x.shape for x, _ in pairs]}; expected the axis of samples of "
            "each array. Write None for an array that all samples share."
        )
    counts = {x.shape[a] for x, a in pairs}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"plan: batch: got arrays of {sorted(counts) or 'no'} samples along axis {axis!r}; expected one number of samples. "
            "Write axis=..., with None for an array that all samples share."
        )
    axes = iter([a % len(x.shape) for x, a in pairs])
    return [None if a is None else next(axes) for a in leaf_axes], counts.pop()


class DividedGraphs:
    """A batch of graphs; `collate` as in `cavs.memory.plan`. Methods and attributes are those of `DividedArrays`."""

    noun = "graph"

    def __init__(self, graphs: Graphs, collate: Collate):
        self.whole, self.collate = graphs, collate
        self._largest = int(np.diff(graphs.vertex_offsets).max())
        self._firsts: dict[Choice, Part] = {}
        self.text = f"{counted(len(graphs), 'graph')}, {counted(graphs.num_vertices, 'vertex')}"
        self.cause = f"; the largest graph has {counted(self._largest, 'vertex')}"

    def __len__(self) -> int:
        return len(self.whole)

    def choices(self, parts: int | None, segments: int | None) -> list[Choice]:
        """See `DividedArrays`. Deep graphs may run in segments if the budget does not suffice for one graph at a time."""
        counts = [parts] if parts else numbers_of_parts(len(self))
        if segments is not None:
            return [Choice(n, segments) for n in counts]
        levels = int(self.whole.height.max())
        useful = [n for n in _SEGMENTS if _SMALLEST_SEGMENT * n <= self._largest and _LEVELS_OF_SEGMENT * n <= levels]
        return [*map(Choice, counts), *(Choice(counts[-1], n) for n in useful)]

    def time(self, choice: Choice) -> float:
        device = "cpu" if Target.here().is_cpu else "gpu"
        levels = np.maximum.reduceat(self.whole.height, self.whole.vertex_offsets[:-1]) + 1
        tasks = int(levels[_dealt(self.whole, choice.parts)].max(1).sum()) + choice.divisor
        rows = self.whole.num_vertices + tasks * _ROWS_PER_TASK[device]
        return rows * (_IN_SEGMENTS[device] if choice.segments > 1 else 1)

    def in_parts(self, loss: Loss, choice: Choice) -> Loss:
        total = summed_over_parts("plan", loss)

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            if choice.parts == 1:
                return loss(params, jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            return total(params, [batch])

        return summed

    def structs(self, choice: Choice) -> PyTree:
        part = jax.eval_shape(lambda batch: batch, _stacked([self._first(choice)], self.collate))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((choice.parts, *x.shape[1:]), x.dtype), part)

    def _first(self, choice: Choice) -> Part:
        if choice not in self._firsts:
            parts = list(_dealt(self.whole, choice.parts))
            self._firsts[choice] = next(_scheduled(self.whole, parts, choice.segments))
        return self._firsts[choice]

    def few(self, parts: int) -> tuple[PyTree, PyTree, int]:
        by_part, sizes = _dealt(self.whole, parts), np.diff(self.whole.vertex_offsets)
        count = 2
        while 2 * count <= parts and by_part[:count].size < _FEW and sizes[by_part[: 2 * count]].sum() <= _SMALL:
            count *= 2
        halves = [by_part[: count // 2].ravel(), by_part[count // 2 : count].ravel()]
        at_once, in_two = (_stacked(_scheduled(self.whole, of), self.collate) for of in ([np.concatenate(halves)], halves))
        return at_once, in_two, by_part[:count].size

    def arranged(self, batch: Any, choice: Choice) -> PyTree:
        check_graphs(batch, "plan.batch(graphs)")
        parts = list(_scheduled(batch, list(_dealt(batch, choice.parts)), choice.segments, self._first(choice)[2]))
        self._firsts[choice] = parts[0]
        return _stacked(parts, self.collate)


def _dealt(graphs: Graphs, parts: int) -> np.ndarray:
    """Returns the graphs of each part, (parts, graphs)."""
    return deal(graphs, parts) if parts > 1 else np.arange(len(graphs))[None]


def _scheduled(graphs: Graphs, parts: list[np.ndarray], segments: int = 1, like: Schedule | None = None) -> Iterator[Part]:
    """Schedules parts of a batch, whose graphs are given, in one shape: that of `like` if they fit into it."""
    options = options_of("plan", graphs, Options(fields=carried_by(graphs)))
    ((needed,),) = few_shapes([(graphs, options)], [parts], 1)
    shape = like.shape if like is not None and covers(like.shape, needed) else needed
    part_graphs = [graphs[part] for part in parts]
    scheds = [Schedule(data, shape) for data in StackScheduler(graphs, options).stack(parts, shape)]
    if segments > 1:
        segment_shape = like.segment_shape if isinstance(like, SegmentedSchedule) else None
        scheds = in_segments(list(zip(part_graphs, scheds, strict=True)), options, segments, segment_shape)
    return zip(parts, part_graphs, scheds, strict=True)


def _stacked(parts: Iterable[Part], collate: Collate) -> PyTree:
    """Returns the batches of all parts, whose arrays gain a leading axis of parts."""
    batches = [collate(Sample(part, np.ones(len(part), bool), lambda g=g: g, sched)) for part, g, sched in parts]
    check_bits(batches, "plan: collate")
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)


def is_count(x: object) -> bool:
    """Returns whether `x` is an int >= 1."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def numbers_of_parts(count: int) -> list[int]:
    """Returns the numbers of parts to try for so many graphs: the divisors nearest the powers of two."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return sorted({min(divisors, key=lambda n, p=p: abs(math.log2(n) - p)) for p in range(count.bit_length() + 1)})
