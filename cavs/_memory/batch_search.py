"""The ways to compute a batch within a memory budget, their predicted memory, and their time."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from cavs._feed.schedules import planned_schedules
from cavs._feed.settings import Sample
from cavs._function.keeping import keep_least
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.buffers import Peak, peak_of
from cavs._memory.sub_batches import deal, sub_batched
from cavs._schedule.buckets import covers
from cavs._schedule.few import few_shapes
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape import Shape
from cavs._schedule.tasks import LAZY_WINDOW

Collate: TypeAlias = Callable[[Sample], PyTree]
Part: TypeAlias = tuple[np.ndarray, Graphs, Schedule]  # the numbers of its graphs, the graphs, and the schedule

# The time of a task that does not depend on its size, in rows that could be computed meanwhile: an estimate.
_ROWS_PER_TASK = {"cpu": 16, "gpu": 256}
_AGAIN = {"fast": 1.0, "least": 1.1, "window": 1.35}  # work of a keeping, relative to the fastest: an estimate
_WINDOWS = {"fast": LAZY_WINDOW, "least": LAZY_WINDOW, "window": 256}  # rows, as in `cavs.schedule(window=)`
_LEAST_SHARE = 1 / 8  # of the memory of another keeping
_PADDING = 0.7  # parts may have less padding than a larger part
KEEPINGS = tuple(_AGAIN)


class Choice(NamedTuple):
    """One way to compute a batch: the number of parts, and what the backward of F keeps of the forward."""

    parts: int
    keep: str


class Candidate(NamedTuple):
    """A choice, its predicted time in rows, and its predicted peak of temporary memory."""

    choice: Choice
    time: float
    peak: Peak


@dataclasses.dataclass(eq=False)
class Search:
    """The candidates for one batch, each predicted when it is first asked for."""

    loss: Callable[..., Any]
    params: PyTree
    graphs: Graphs
    collate: Collate
    choices: list[Choice]
    found: dict[Choice, Candidate] = dataclasses.field(default_factory=dict)
    known: dict[Choice, tuple[Part, float]] = dataclasses.field(default_factory=dict)

    def first_and_time(self, choice: Choice) -> tuple[Part, float]:
        """The first part of the batch, and the predicted time of all, in rows. Schedules the batch, and traces nothing."""
        if choice not in self.known:
            parts = list(schedule_parts(self.graphs, choice))
            scheds = [sched for _, _, sched in parts]
            rows, tasks = sum(sched.shape.vertices for sched in scheds), sum(int(sched.num_tasks) for sched in scheds)
            latency = _ROWS_PER_TASK.get(jax.default_backend(), _ROWS_PER_TASK["gpu"])
            self.known[choice] = parts[0], rows * _AGAIN[choice.keep] + tasks * latency
        return self.known[choice]

    def time(self, choice: Choice) -> float:
        """The predicted time, in rows."""
        return self.first_and_time(choice)[1]

    def candidate(self, choice: Choice) -> Candidate:
        """The prediction for one choice."""
        if choice not in self.found:
            time = self.time(choice)
            traced = jax.make_jaxpr(jax.value_and_grad(loss_of(self.loss, choice)))(self.params, self.batch(choice))
            self.found[choice] = Candidate(choice, time, peak_of(traced))
        return self.found[choice]

    def batch(self, choice: Choice) -> PyTree:
        """The shapes and dtypes of the batch that the loss gets."""
        one = stacked([self.first_and_time(choice)[0]], self.collate)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((choice.parts, *x.shape[1:]), x.dtype), one)

    def fastest(self, budget: float) -> Candidate | None:
        """The fastest candidate whose predicted peak is at most `budget`; `None` if there is none."""
        for choice in sorted(self.choices, key=self.time):
            if self._bound(choice) <= budget and (found := self.candidate(choice)).peak.bytes <= budget:
                return found
        return least if (least := self.smallest()).peak.bytes <= budget else None

    def smallest(self) -> Candidate:
        """The candidate with the smallest predicted peak."""
        most = max(choice.parts for choice in self.choices)
        found = [self.candidate(choice) for choice in self.choices if choice.parts == most]
        return min(found, key=lambda c: (c.peak.bytes, c.time))

    def _bound(self, choice: Choice) -> float:
        """About the least that a candidate can need: half of a batch needs half of the memory, or more."""

        def at_least(known: Candidate) -> float:
            share = _PADDING if known.choice.keep == choice.keep else _LEAST_SHARE
            return share * known.peak.bytes * min(1.0, known.choice.parts / choice.parts)

        return max(map(at_least, self.found.values()), default=0.0)


def schedule_parts(graphs: Graphs, choice: Choice, shape: Shape | None = None) -> Iterator[Part]:
    """Schedules the parts of a batch in one shape: `shape` if they fit into it."""
    parts = list(deal(graphs, choice.parts)) if choice.parts > 1 else [np.arange(len(graphs))]
    fields = tuple(name for name in ("input_id", "label") if getattr(graphs, name) is not None)
    options = options_of("plan", graphs, "batching", True, False, _WINDOWS[choice.keep], None, fields, None)
    ((needed,),) = few_shapes([(graphs, options)], [parts], 1)
    shape = shape if shape is not None and covers(shape, needed) else needed
    found = planned_schedules(graphs, ((part, 0) for part in parts), options._replace(fixed=(shape,)), 0)
    return ((part, *some) for part, some in zip(parts, found, strict=True))


def stacked(parts: Iterable[Part], collate: Collate) -> PyTree:
    """The batches of all parts, whose arrays gain a leading axis of parts."""
    batches = [collate(Sample(part, np.ones(len(part), bool), graphs, sched)) for part, graphs, sched in parts]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)


def loss_of(loss: Callable[..., Any], choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
    """The loss of all parts of a batch, whose derivative keeps what `choice` says."""
    total = sub_batched(loss)

    def summed(params: PyTree, batch: PyTree) -> jax.Array:
        with contextlib.nullcontext() if choice.keep == "fast" else keep_least():
            if choice.parts == 1:
                return loss(params, jax.tree.map(lambda x: x.reshape(x.shape[1:]), batch))
            return total(params, [batch])

    return summed


def numbers_of_parts(count: int) -> list[int]:
    """The numbers of parts that are tried for so many graphs: the divisors nearest the powers of two."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return sorted({min(divisors, key=lambda n, p=p: abs(math.log2(n) - p)) for p in range(count.bit_length() + 1)})
