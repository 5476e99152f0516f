"""The interface of an engine: it runs the levels of a batch, forward and backward. The stages around them are the same."""

from typing import Any, NamedTuple, Protocol

import jax

from cavs._function.plan import FunctionPlan
from cavs._function.split import Split
from cavs._schedule.schedule import Schedule, Shape
from cavs._stages.pulled import Values
from cavs._stages.saved import Saved, Transpose
from cavs._stages.tensors import Rows, Zeros, rows_of_kinds, rows_of_leaves

Arrays = list[jax.Array]


class Batch(NamedTuple):
    """A batch of vertices, as an engine runs it.

    Attributes:
        plan: F, traced and split.
        sched: The schedule.
        kinds: The kinds of vertices, in the schedule's order.
        rows: For each kind, where its vertices with children are in the batch; then for each kind where its leaves are, if the
            engine runs leaves as a level. "For each kind" means these, too.
        zeros: Creates dynamic tensors.
    """

    plan: FunctionPlan
    sched: Schedule
    kinds: tuple[str | None, ...]
    rows: list[Rows]
    zeros: Zeros

    @property
    def has_leaves(self) -> bool:
        """Whether the engine runs the leaves as a level."""
        return len(self.rows) > len(self.kinds)

    @property
    def parts(self) -> list[Split]:
        """F at vertices with children, for each kind; then F at leaves, if the engine runs them."""
        inner = [self.plan.inner[name] for name in self.kinds]
        return [*inner, *map(self.plan.leaf_part, self.kinds)] if self.has_leaves else inner

    @property
    def without_leaves(self) -> "Batch":
        """The batch without the leaves that the engine runs."""
        return self._replace(rows=self.rows[: len(self.kinds)])


class ForwardLevels(NamedTuple):
    """What the forward's levels compute.

    Attributes:
        states: The dynamic tensors of the states, one per leaf of the state.
        kept: For each kind, the values that the backward reads.
        extras: For each kind, the values that the lazy part reads.
        gave_up: (1,) int32, nonzero if a thread block gave up waiting, for `kernels.checked`; `None` if no block waits.
    """

    states: Arrays
    kept: list[Arrays]
    extras: list[Arrays]
    gave_up: jax.Array | None


class Cotangents(NamedTuple):
    """The cotangents that are known before the backward's levels run.

    Attributes:
        states: By the index of a state leaf: what the pushes contribute, in rows of the dynamic tensors, or as `row` says.
        row: For each row of the dynamic tensors its row in `states`, negative for none; `None` if they are the same.
        eager: For each kind, of the eager part's outputs.
        extras: For each kind, of the values that the lazy part reads; empty if pushes are states.
        statics: For each kind, of the static values so far, by their index.
        inputs: Of the inputs so far.
        edges: Of the edges so far.
    """

    states: dict[int, jax.Array]
    row: jax.Array | None
    eager: list[list[Any]]
    extras: list[list[Any]]
    statics: list[dict[int, jax.Array]]
    inputs: list[Any]
    edges: list[Any]


class BackwardLevels(NamedTuple):
    """The cotangents after the backward's levels: of states (at the leaves), of static values, of the inputs, of the edges."""

    states: dict[int, jax.Array]
    statics: list[dict[int, jax.Array]]
    inputs: list[Any]
    edges: list[Any]


def batch_of(plan: FunctionPlan, sched: Schedule, kinds: tuple[str | None, ...], leaves: bool) -> Batch:
    """Returns the batch of a schedule. `leaves`: whether the engine runs the leaves as a level."""
    rows = rows_of_kinds(sched, plan.function.arity, plan.reads_edges)
    if leaves:
        rows += rows_of_leaves(sched, plan.function.arity)
    return Batch(plan, sched, kinds, rows, Zeros(sched))


class Engine(Protocol):
    """Runs the levels. An engine is a hashable value: it is part of the key under which compiled functions are cached."""

    @property
    def launches(self) -> bool:
        """Whether one kernel launch runs all levels of a kind.

        The stages around a launch may then build whole tensors rather than write into them. A launch cannot be batched by
        `jax.vmap`.
        """
        ...

    @property
    def pulls_in_levels(self) -> bool:
        """Whether the levels read inputs that F pulls where they lie (`Pulled`). Otherwise they get copies, in their order."""
        ...

    def runs_leaves(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> bool:
        """Whether the engine runs the leaves of schedules of a shape as a level. Otherwise XLA runs them before the levels."""
        ...

    def prefers(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> FunctionPlan:
        """Returns the plan of the same F that the engine runs fastest on schedules of a shape."""
        ...

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, save: bool
    ) -> tuple[Arrays, list[Transpose]] | None:
        """Computes the eager part of kind `k`, or returns `None`: then XLA does.

        Args:
            batch: The batch.
            k: The number of the kind.
            statics: Its static values.
            inputs: The leaves of the inputs, (Vp, ...).
            save: Whether to return the transpose.

        Returns:
            The rows of `part.eager.outs`, and with `save` the transpose, as in `Saved.eager`.
        """
        ...

    def forward_levels(
        self,
        batch: Batch,
        states: Arrays,
        statics: list[Arrays],
        eager: list[list[Values]],
        save: bool,
    ) -> ForwardLevels:
        """Runs the forward's levels.

        Args:
            batch: The batch.
            states: The dynamic tensors with the states of the leaves; none if the engine runs the leaves.
            statics: For each kind, the static values.
            eager: For each kind, the outputs of the eager part.
            save: Whether to keep what the backward reads.
        """
        ...

    def backward_levels(
        self,
        batch: Batch,
        saved: Saved,
        cotangents: Cotangents,
    ) -> BackwardLevels:
        """Runs the backward's levels and the transpose of the eager part."""
        ...


class StagesInXla:
    """The part of an engine for which XLA runs the leaves and the eager part."""

    def runs_leaves(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> bool:
        """False."""
        return False

    def prefers(self, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> FunctionPlan:
        """This plan."""
        return plan

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, save: bool
    ) -> tuple[Arrays, list[Transpose]] | None:
        """None."""
        return None
