"""What `plan` divides into parts: a batch of graphs. Each part is scheduled, in one shape for all."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from cavs._feed.settings import Sample
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.search import FEW, Choice, Loss, numbers_of_parts
from cavs._memory.sub_batches import deal, summed_over_parts
from cavs._schedule.batches import StackScheduler
from cavs._schedule.level_segments import SegmentedSchedule, in_segments
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Options, covers, few_shapes
from cavs.kernels import Target

Collate: TypeAlias = Callable[[Sample], PyTree]
Part: TypeAlias = tuple[np.ndarray, Graphs, Schedule]  # the numbers of its graphs, the graphs, and the schedule
_SMALL = 4096  # vertices that take little memory
_ROWS_PER_TASK = {"cpu": 16, "gpu": 256}  # a task takes as long as so many rows, whatever its size: an estimate
# Segments take longer: the forward runs twice, and on a GPU on engine `scan` rather than a faster one (chains of 5,000 steps).
_IN_SEGMENTS = {"cpu": 1.7, "gpu": 20}
_SEGMENTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SMALLEST_SEGMENT = 64  # vertices: with fewer, the loop over segments takes more time than it saves memory
_LEVELS_OF_SEGMENT = 4


@dataclasses.dataclass(eq=False)
class DividedGraphs:
    """A batch of graphs; `collate` as in `cavs.memory.plan`. Methods are those of `DividedArrays`."""

    graphs: Graphs
    collate: Collate
    _firsts: dict[Choice, Part] = dataclasses.field(default_factory=dict)
    _like: dict[Choice, Schedule] = dataclasses.field(default_factory=dict)
    noun: ClassVar[str] = "graph"

    def __len__(self) -> int:
        return len(self.graphs)

    @property
    def whole(self) -> Graphs:
        return self.graphs

    @property
    def text(self) -> str:
        return f"{counted(len(self), 'graph')}, {counted(self.graphs.num_vertices, 'vertex')}"

    @property
    def cause(self) -> str:
        return f"; the largest graph has {counted(int(np.diff(self.graphs.vertex_offsets).max()), 'vertex')}"

    def choices(self, parts: int | None, segments: int | None) -> list[Choice]:
        """See `DividedArrays`. Deep graphs may run in segments if the budget does not suffice for one graph at a time."""
        counts = [parts] if parts else numbers_of_parts(len(self))
        if segments is not None:
            return [Choice(n, segments) for n in counts]
        vertices, levels = int(np.diff(self.graphs.vertex_offsets).max()), int(self.graphs.height.max())
        useful = [n for n in _SEGMENTS if _SMALLEST_SEGMENT * n <= vertices and _LEVELS_OF_SEGMENT * n <= levels]
        return [*map(Choice, counts), *(Choice(counts[-1], n) for n in useful)]

    def time(self, choice: Choice) -> float:
        device = "cpu" if Target.here().is_cpu else "gpu"
        levels = np.maximum.reduceat(self.graphs.height, self.graphs.vertex_offsets[:-1]) + 1
        tasks = int(levels[_dealt(self.graphs, choice.parts)].max(1).sum()) + choice.divisor
        rows = self.graphs.num_vertices + tasks * _ROWS_PER_TASK[device]
        return rows * (_IN_SEGMENTS[device] if choice.segments > 1 else 1)

    def in_parts(self, loss: Loss, choice: Choice) -> Loss:
        total = summed_over_parts("plan", loss)

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            if choice.parts == 1:
                return loss(params, jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            return total(params, [batch])

        return summed

    def structs(self, choice: Choice) -> PyTree:
        one = _stacked([self._first(choice)], self.collate)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((choice.parts, *x.shape[1:]), x.dtype), one)

    def _first(self, choice: Choice) -> Part:
        if choice not in self._firsts:
            parts = list(_dealt(self.graphs, choice.parts))
            self._firsts[choice] = next(_scheduled(self.graphs, parts, choice.segments))
        return self._firsts[choice]

    def few(self, parts: int) -> tuple[PyTree, PyTree, int]:
        each, sizes = _dealt(self.graphs, parts), np.diff(self.graphs.vertex_offsets)
        count = 2
        while 2 * count <= parts and each[:count].size < FEW and sizes[each[: 2 * count]].sum() <= _SMALL:
            count *= 2
        halves = [each[: count // 2].ravel(), each[count // 2 : count].ravel()]
        one, two = (_stacked(_scheduled(self.graphs, of), self.collate) for of in ([np.concatenate(halves)], halves))
        return one, two, each[:count].size

    def arranged(self, batch: Any, choice: Choice) -> PyTree:
        like = self._like[choice] if choice in self._like else self._first(choice)[2]
        parts = list(_scheduled(batch, list(_dealt(batch, choice.parts)), choice.segments, like))
        self._like[choice] = parts[0][2]
        return _stacked(parts, self.collate)


def _dealt(graphs: Graphs, parts: int) -> np.ndarray:
    """Returns the graphs of each part, (parts, graphs)."""
    return deal(graphs, parts) if parts > 1 else np.arange(len(graphs))[None]


def _scheduled(graphs: Graphs, parts: list[np.ndarray], segments: int = 1, like: Schedule | None = None) -> Iterator[Part]:
    """Schedules parts of a batch, whose graphs are given, in one shape: that of `like` if they fit into it."""
    fields = tuple(name for name in ("input_id", "label") if getattr(graphs, name) is not None)
    options = options_of("plan", graphs, Options(fields=fields))
    ((needed,),) = few_shapes([(graphs, options)], [parts], 1)
    shape = like.shape if like is not None and covers(like.shape, needed) else needed
    each = [graphs[part] for part in parts]
    scheds = [Schedule(data, shape) for data in StackScheduler(graphs, options).stack(parts, shape)]
    if segments > 1:
        known = like.segment_shape if isinstance(like, SegmentedSchedule) else None
        scheds = in_segments(list(zip(each, scheds, strict=True)), options, segments, known)
    return zip(parts, each, scheds, strict=True)


def _stacked(parts: Iterable[Part], collate: Collate) -> PyTree:
    """Returns the batches of all parts, whose arrays gain a leading axis of parts."""
    batches = [collate(Sample(part, np.ones(len(part), bool), graphs, sched)) for part, graphs, sched in parts]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)
