"""A batch in parts: its schedules, its loss, and the memory of its gradient."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from cavs._engines.choose import EngineError
from cavs._feed.settings import Sample
from cavs._function.keep_options import MemoryOptions
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.names import Names, check_known
from cavs._jaxpr.tunable import TunableRules, tuned
from cavs._memory.search import Choice, estimate, fewest
from cavs._memory.sub_batches import deal, summed_over_parts
from cavs._remat.fit import compiled_step
from cavs._schedule.batches import StackScheduler
from cavs._schedule.level_segments import SegmentedSchedule, in_segments
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Options, covers, few_shapes

Collate: TypeAlias = Callable[[Sample], PyTree]
Part: TypeAlias = tuple[np.ndarray, Graphs, Schedule]  # the numbers of its graphs, the graphs, and the schedule


@dataclasses.dataclass(eq=False)
class BatchGradient:
    """The gradient of a loss over one batch, and the choices of how to compute it.

    Attributes:
        loss, params, graphs, collate, names: as in `cavs.memory.plan`.
        choices: from the fastest on; each divides the batch more than the one before.
        options: of the compiler.
        sizes: the bytes of temporary memory of the choices that were compiled.
        traced: the engines that run, of the choices that were traced.
        firsts: the first part of the batch, for each choice that was scheduled.
    """

    loss: Callable[..., Any]
    params: PyTree
    graphs: Graphs
    collate: Collate
    names: Names
    choices: list[Choice]
    options: dict[str, Any]
    sizes: dict[Choice, int] = dataclasses.field(default_factory=dict)
    traced: dict[Choice, set[str]] = dataclasses.field(default_factory=dict)
    firsts: dict[Choice, Part] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        by_time, self.choices = sorted(self.choices, key=self.time), []
        for choice in by_time:
            if not self.choices or choice.divisor > self.choices[-1].divisor:
                self.choices.append(choice)

    def time(self, choice: Choice) -> float:
        """Returns the estimated time, in rows."""
        levels = np.maximum.reduceat(self.graphs.height, self.graphs.vertex_offsets[:-1]) + 1
        return choice.time(self.graphs.num_vertices, int(levels[dealt(self.graphs, choice.parts)].max(1).sum()))

    def fastest(self, budget: int) -> Choice | None:
        """Returns the fastest choice that fits a budget, as far as it is compiled; `None` if nothing fits."""
        by = {choice.divisor: choice for choice in self.choices}
        found, _ = fewest(lambda n: self.measure(by[n]), by, budget)
        return by.get(found or 0)

    def smallest(self) -> Choice:
        """Returns the smallest of three choices: the one that divides the batch the most, the one before, and the fastest."""
        runs = (choice for choice in reversed(self.choices) if self.measure(choice) is not None)
        return min([*itertools.islice(runs, 2), self.choices[0]], key=lambda choice: self.measure(choice) or np.inf)

    def estimate(self, choice: Choice) -> int:
        """Returns the bytes of a choice that other choices suggest."""
        known = {other.divisor: size for other, size in self.sizes.items() if other != choice}
        return round(estimate(known, choice.divisor)) or self.sizes[choice]

    def measure(self, choice: Choice) -> int | None:
        """Returns the bytes of temporary memory as compiled; `None` if the engine that the loss asks for cannot run it."""
        if choice not in self.sizes:
            try:
                self.sizes[choice] = self.compiled(choice)[1]
            except EngineError:
                return None
        return self.sizes[choice]

    def compiled(self, choice: Choice) -> tuple[Any, int]:
        """Compiles the loss and its gradient. Returns them, and the bytes of their temporary memory."""
        return compiled_step(jax.value_and_grad(self.loss_of(choice)), (self.params, self.structs(choice)), self.options)

    def runs(self, choice: Choice) -> bool:
        """Returns whether the engine that the loss asks for can run a choice."""
        with contextlib.suppress(EngineError):
            return self.engines(choice) is not None
        return False

    def engines(self, choice: Choice) -> list[str]:
        """Returns the names of the engines that run. Raises an `EngineError` if the one that the loss asks for cannot."""
        if choice not in self.traced:
            jax.eval_shape(self.loss_of(choice), self.params, self.structs(choice))
        return sorted(self.traced[choice])

    def loss_of(self, choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
        """Returns the loss of all parts of a batch, whose derivative keeps what `names` say."""
        loss = tuned(self.loss, MemoryOptions(False, self.names, choice.parts > 1), lambda calls: self._note(choice, calls))
        total = summed_over_parts("plan", loss)

        def summed(params: PyTree, batch: PyTree) -> jax.Array:
            if choice.parts == 1:
                return loss(params, jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            return total(params, [batch])

        return summed

    def _note(self, choice: Choice, calls: list[TunableRules]) -> None:
        """Checks the names of values, and notes the engines that run."""
        check_known(self.names, {name for call in calls for name in call.names}, "plan")
        self.traced[choice] = {call.engine for call in calls if call.engine}

    def structs(self, choice: Choice) -> PyTree:
        """Returns the shapes and dtypes of the batch that the loss gets."""
        one = stacked([self.first(choice)], self.collate)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((choice.parts, *x.shape[1:]), x.dtype), one)

    def first(self, choice: Choice) -> Part:
        """Returns the first part of the batch."""
        if choice not in self.firsts:
            self.firsts[choice] = next(schedule_parts(self.graphs, choice))
        return self.firsts[choice]


def dealt(graphs: Graphs, parts: int) -> np.ndarray:
    """Returns the graphs of each part, (parts, graphs)."""
    return deal(graphs, parts) if parts > 1 else np.arange(len(graphs))[None]


def schedule_parts(graphs: Graphs, choice: Choice, like: Schedule | None = None) -> Iterator[Part]:
    """Schedules the parts of a batch in one shape: that of `like` if they fit into it."""
    return scheduled(graphs, list(dealt(graphs, choice.parts)), choice.segments, like)


def scheduled(graphs: Graphs, parts: list[np.ndarray], segments: int = 1, like: Schedule | None = None) -> Iterator[Part]:
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


def stacked(parts: Iterable[Part], collate: Collate) -> PyTree:
    """Returns the batches of all parts, whose arrays gain a leading axis of parts."""
    batches = [collate(Sample(part, np.ones(len(part), bool), graphs, sched)) for part, graphs, sched in parts]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)
