"""A training step within a memory budget: its loss is computed in as many parts as the compiled step needs."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from cavs._feed.batches import Batches
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.divided import Collate, Loss
from cavs._memory.plan_batch import BatchPlan, chosen, divided
from cavs._memory.search import BatchGradient
from cavs._step.concurrent_jit import shapes_of

OneStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
State = TypeVar("State")
Metrics = TypeVar("Metrics")


class StepInBudget(Generic[State, Metrics]):
    """A training step whose batches come in parts, see `memory` of [`cavs.data.step`][].

    Args:
        fun: `fun(state, batch, loss)`, which returns the new state and metrics.
        loss: as in `cavs.memory.plan`.
        budget: as `bytes_of` returns it.
        how: `collate` and `axis`.
        compiled: from a step of a state and a batch to one that runs compiled, with a method `lower`.
    """

    def __init__(
        self,
        fun: Callable[[PyTree, PyTree, Loss], tuple[PyTree, PyTree]],
        loss: Loss,
        budget: int | str,
        how: tuple[Collate | None, Any],
        compiled: Callable[[OneStep], OneStep],
    ):
        self._fun, self._loss, self._budget, self._how, self._compiled = fun, loss, budget, how, compiled
        self._known: dict[Hashable, tuple[BatchPlan, OneStep]] = {}

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        plan, step = self._planned(state, batch)
        return step(state, plan.batch(batch))

    def plan(self, state: State, batch: Any) -> BatchPlan:
        """Returns the plan of a batch, which prints as a table: the parts, and the bytes of the steps that were compiled."""
        return self._planned(state, batch)[0]

    def _planned(self, state: State, batch: Any) -> tuple[BatchPlan, OneStep]:
        if isinstance(batch, Batches):
            raise TypeError(
                "step: batch: got batches of a Loader, which are scheduled already; expected cavs.Graphs or arrays, as memory "
                "is given. Write step(state, graphs), or Loader(graphs, size, parts=...) and no memory."
            )
        key = len(batch) if isinstance(batch, Graphs) else shapes_of(batch)
        if key not in self._known:
            self._known[key] = self._search(state, batch)
        return self._known[key]

    def _search(self, state: State, batch: Any) -> tuple[BatchPlan, OneStep]:
        data, arrays = divided(batch, *self._how), jax.tree.map(jnp.asarray, state)
        found = BatchGradient(self._loss, arrays, data, (), data.choices(None, None), {}, self._of_loss, self._compiled)
        choice = chosen(found, self._budget, "step: memory")
        found.params = jax.eval_shape(lambda: arrays)  # the arrays themselves change with each step
        return BatchPlan(found, choice, self._budget), found.compiles(choice)

    def _of_loss(self, loss: Loss) -> Callable[[PyTree, PyTree], Any]:
        return lambda state, batch: self._fun(state, batch, loss)
