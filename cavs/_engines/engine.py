"""The interface of an engine: it decides what the backward keeps, and runs the levels of a batch, forward and backward."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax

from cavs._function.keep_options import NO_OPTIONS, MemoryOptions
from cavs._function.plan import FunctionPlan
from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Arrays
from cavs._schedule.schedule import Schedule, Shape
from cavs._stages.batched import eager_function, pull, without_cotangents
from cavs._stages.saved import Saved, Transpose
from cavs._stages.segment import with_vjp
from cavs._stages.tensors import Rows, Values, Zeros, rows_of_kinds, rows_of_leaves
from cavs.kernels import Target


class Job(NamedTuple):
    """F over all schedules of one shape, on one device: what an engine is chosen for."""

    plan: FunctionPlan  # F, traced and split
    shape: Shape  # the shape of the schedules
    kinds: tuple[str | None, ...]  # for each kind of the schedules, the name of the function that evaluates it
    target: Target  # the device
    options: MemoryOptions = NO_OPTIONS  # what a memory plan asks for
    exported: bool = False  # whether the code is to run in other processes, which do not have the library of engine `native`

    @property
    def inner_kinds(self) -> dict[str | None, int]:
        """Maps the kinds that have vertices with children to their numbers."""
        return {name: k for k, name in enumerate(self.kinds) if self.shape.inner[k]}


class Batch(NamedTuple):
    """A batch of vertices, as an engine runs it."""

    job: Job  # what the engine was chosen for; its plan is the one that the engine runs
    sched: Schedule
    # For each kind, where its vertices with children are in the batch; then for each kind where its leaves are, if the
    # engine runs leaves as a level. "For each kind" means these, too.
    rows: list[Rows]
    zeros: Zeros  # creates dynamic tensors

    @property
    def plan(self) -> FunctionPlan:
        """F, traced and split."""
        return self.job.plan

    @property
    def kinds(self) -> tuple[str | None, ...]:
        """The kinds of vertices, in the schedule's order."""
        return self.job.kinds

    @property
    def has_leaves(self) -> bool:
        """Whether the engine runs the leaves as a level."""
        return len(self.rows) > len(self.kinds)

    @property
    def parts(self) -> list[Split]:
        """F at vertices with children, for each kind; then F at leaves, if the engine runs them."""
        inner = [self.plan.inner[name] for name in self.kinds]
        return [*inner, *map(self.plan.leaf_part, self.kinds)] if self.has_leaves else inner


def batch_of(job: Job, sched: Schedule, leaves: bool) -> Batch:
    """Returns the batch of a schedule. `leaves`: whether the engine runs the leaves as a level."""
    arity = job.plan.function.arity
    rows = rows_of_kinds(sched, arity, job.plan.reads_edges)
    return Batch(job, sched, rows + rows_of_leaves(sched, arity) if leaves else rows, Zeros(sched))


class ForwardLevels(NamedTuple):
    """What the forward's levels compute."""

    states: Arrays  # the dynamic tensors of the states, one per leaf of the state
    kept: list[Arrays]  # for each kind, the values that the backward reads
    extras: list[Arrays]  # for each kind, the values that the lazy part reads
    # (1,) int32, nonzero if a thread block gave up waiting, for `kernels.checked`; `None` if no block waits.
    gave_up: jax.Array | None


class Cotangents(NamedTuple):
    """The cotangents that are known before the backward's levels run."""

    # By the index of a state leaf: what the pushes contribute, in rows of the dynamic tensors, or as `row` says.
    states: dict[int, jax.Array]
    # For each row of the dynamic tensors its row in `states`, negative for none; `None` if they are the same.
    row: jax.Array | None
    eager: list[list[Any]]  # for each kind, of the eager part's outputs
    extras: list[list[Any]]  # for each kind, of the values that the lazy part reads; empty if pushes are states
    statics: list[dict[int, jax.Array]]  # for each kind, of the static values so far, by their index
    inputs: list[Any]  # of the inputs so far
    edges: list[Any]  # of the edges so far


class Gradients(NamedTuple):
    """The cotangents of static values, for each kind by their index, of the inputs, and of the edges."""

    statics: list[dict[int, jax.Array]]
    inputs: list[Any]
    edges: list[Any]


class BackwardLevels(NamedTuple):
    """What the backward's levels compute."""

    states: dict[int, jax.Array]  # the cotangents of states, at the leaves
    rest: Callable[[Arrays], Gradients]  # returns the others, which may be computed after the arrays that it is given


class Engine:
    """Runs the levels. An engine is a hashable value: it is part of the key under which compiled functions are cached."""

    name: ClassVar[str]  # what users write for it
    # Whether one kernel launch runs all levels of a kind. The stages around a launch may then build whole tensors rather
    # than write into them.
    one_launch: ClassVar[bool] = False
    # The engine that replaces it where `jax.vmap` or a second derivative transforms a pass; `None` if it can be transformed
    # itself.
    stand_in: "ClassVar[Engine | None]" = None
    local: ClassVar[bool] = False  # whether it runs in this process alone: code that is exported for others gets the stand-in

    def unfit(self, job: Job) -> str | None:
        """Returns why the engine cannot run a job, as words that follow "but"; `None` if it can."""
        raise NotImplementedError

    def is_best_for(self, job: Job) -> bool:
        """Returns whether to run a job for which the user chose no engine, unless an engine before it is the best."""
        raise NotImplementedError

    def plan_for(self, job: Job) -> FunctionPlan:
        """Returns the plan that the engine runs for a job: how F is split, and what the backward keeps."""
        raise NotImplementedError

    def explain(self, plan: FunctionPlan, target: Target, shape: Shape | None = None) -> tuple[bool, list[str]]:
        """Returns whether the engine can run F at all, and lines that say how it would on a device, or why it cannot.

        `shape`: the shape of the schedules, if known.
        """
        raise NotImplementedError

    def batch(self, job: Job, sched: Schedule) -> Batch:
        """Returns the batch of a schedule. XLA runs its leaves before the levels, unless the engine runs them as a level."""
        return batch_of(job, sched, leaves=False)

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, edges: Arrays, save: bool
    ) -> tuple[list[Values], list[Transpose]]:
        """Computes the eager part of a kind. Unless an engine does better, XLA computes it in one batch.

        `save`: whether to return the transpose. Returns the rows of `part.eager.outs`, and with `save` the transpose, as in
        `Saved.eager`.
        """
        part, rows = batch.parts[k], batch.rows[k]

        def pulled() -> tuple[Arrays, Arrays]:
            of_vertices = pull(part, part.role.inputs, inputs, rows.vertex)
            return of_vertices, pull(part, part.role.edges, edges, rows.edge_row)

        eager = eager_function(part, rows.inner(rows.num_children), rows)
        fixed = {len(statics) + i for i, v in enumerate((*part.role.inputs, *part.role.edges)) if v in part.role.fixed}
        return with_vjp(eager, save, (statics,), pulled, without_cotangents(part) | fixed)

    def forward_levels(
        self, batch: Batch, states: Arrays, statics: list[Arrays], eager: list[list[Values]], save: bool
    ) -> ForwardLevels:
        """Runs the forward's levels.

        `states`: the dynamic tensors with the states of the leaves; none if the engine runs the leaves. `statics`, `eager`: for
        each kind, the static values, and the outputs of the eager part. `save`: whether to keep what the backward reads.
        """
        raise NotImplementedError

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels and the transpose of the eager part."""
        raise NotImplementedError
