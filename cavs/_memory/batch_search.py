"""A batch in parts: its schedules, its loss, and the memory of its gradient."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from cavs._feed.settings import Sample
from cavs._function.asked import keep
from cavs._function.names import Names, check_known
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.fit import compiled_step
from cavs._memory.no_collections import no_collections
from cavs._memory.search import Choice
from cavs._memory.sub_batches import deal, summed_over_parts
from cavs._schedule.batches import StackScheduler
from cavs._schedule.few import few_shapes
from cavs._schedule.level_segments import SegmentedSchedule, in_segments
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shapes import covers
from cavs._schedule.tasks import LAZY_WINDOW

Collate: TypeAlias = Callable[[Sample], PyTree]
Part: TypeAlias = tuple[np.ndarray, Graphs, Schedule]  # the numbers of its graphs, the graphs, and the schedule


@dataclasses.dataclass(eq=False)
class BatchGradient:
    """The gradient of a loss over one batch: what `Search` looks for a way to compute."""

    loss: Callable[..., Any]
    params: PyTree
    graphs: Graphs
    collate: Collate
    names: Names = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the compiler
    firsts: dict[Choice, Part] = dataclasses.field(default_factory=dict)
    traced: dict[Choice, set[str]] = dataclasses.field(default_factory=dict)  # the engines that run

    def size(self, choice: Choice) -> tuple[int, int]:
        """Returns the rows and the tasks of all parts."""
        graphs, starts = self.graphs, self.graphs.vertex_offsets[:-1]
        levels = np.maximum.reduceat(graphs.height, starts) + 1
        depth = int(levels[dealt(graphs, choice.parts)].max(1).sum())
        return graphs.num_vertices, depth + choice.parts * choice.segments

    def first(self, choice: Choice) -> Part:
        """Returns the first part of the batch."""
        if choice not in self.firsts:
            self.firsts[choice] = next(schedule_parts(self.graphs, choice))
        return self.firsts[choice]

    def compiled(self, choice: Choice) -> tuple[Any, int]:
        """Compiles the loss and its gradient. Returns them, and the bytes of their temporary memory."""
        with no_collections():
            return compiled_step(jax.value_and_grad(self.loss_of(choice)), (self.params, self.structs(choice)), self.options)

    def measure(self, choice: Choice) -> int:
        """Returns the bytes of temporary memory as compiled."""
        return self.compiled(choice)[1]

    def engines(self, choice: Choice) -> list[str]:
        """Returns the names of the engines that run."""
        if choice not in self.traced:
            jax.eval_shape(self.loss_of(choice), self.params, self.structs(choice))
        return sorted(self.traced[choice])

    def loss_of(self, choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
        """Returns the loss of all parts of a batch, whose derivative keeps what `names` say."""
        total = summed_over_parts("plan", self.loss)

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            with keep(False, self.names, in_parts=choice.parts > 1) as inside:
                if choice.parts == 1:
                    value = self.loss(params, jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
                else:
                    value = total(params, [batch])
            check_known(self.names, inside.seen, "plan")
            self.traced.setdefault(choice, set()).update(inside.engines)
            return value

        return summed

    def structs(self, choice: Choice) -> PyTree:
        """Returns the shapes and dtypes of the batch that the loss gets."""
        one = stacked([self.first(choice)], self.collate)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((choice.parts, *x.shape[1:]), x.dtype), one)


def dealt(graphs: Graphs, parts: int) -> np.ndarray:
    """Returns the graphs of each part, (parts, graphs)."""
    return deal(graphs, parts) if parts > 1 else np.arange(len(graphs))[None]


def schedule_parts(graphs: Graphs, choice: Choice, like: Schedule | None = None) -> Iterator[Part]:
    """Schedules the parts of a batch in one shape: that of `like` if they fit into it."""
    return scheduled(graphs, list(dealt(graphs, choice.parts)), choice.segments, like)


def scheduled(graphs: Graphs, parts: list[np.ndarray], segments: int = 1, like: Schedule | None = None) -> Iterator[Part]:
    """Schedules parts of a batch, whose graphs are given, in one shape: that of `like` if they fit into it."""
    fields = tuple(name for name in ("input_id", "label") if getattr(graphs, name) is not None)
    options = options_of("plan", graphs, "batching", True, False, LAZY_WINDOW, None, fields, None)
    ((needed,),) = few_shapes([(graphs, options)], [parts], 1)
    shape = like.shape if like is not None and covers(like.shape, needed) else needed
    each = [graphs[part] for part in parts]
    scheds = [Schedule(data, shape) for data in StackScheduler(graphs, options).stack(parts, shape)]
    if segments > 1:
        known = like.segment_shape if isinstance(like, SegmentedSchedule) else None
        scheds = in_segments(list(zip(each, scheds, strict=True)), options, segments, known)
    return zip(parts, each, scheds, strict=True)


def stacked(parts: Iterable[Part], collate: Collate) -> PyTree:
    """Returns the batches of all parts, whose arrays gain a leading axis of parts."""
    batches = [collate(Sample(part, np.ones(len(part), bool), graphs, sched)) for part, graphs, sched in parts]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)
