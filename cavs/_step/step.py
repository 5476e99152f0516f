"""`step`: a training step of one batch becomes one dispatch of several, on one device or many."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.batches import Batches
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_bool
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.bytes import bytes_of
from cavs._memory.divided import Collate, Loss
from cavs._memory.fit import compiler_options as compiler_options_of
from cavs._memory.plan_batch import BatchPlan, chosen, divided
from cavs._memory.search import BatchGradient
from cavs._step.compiled_step import Metrics, OneStep, State, Step
from cavs._step.concurrent_jit import shapes_of

TUNE = 10.0  # seconds of tuning


class StepOptions(TypedDict, total=False):
    """The arguments of `step` on which its type does not depend."""

    unroll: int | None
    donate: bool
    compiler_options: Mapping[str, Any] | None
    tune: float


class BudgetOptions(StepOptions, total=False):
    """The arguments of `step` with `memory` on which its type does not depend."""

    collate: Collate | None
    axis: Any


class StepInBudget(Generic[State, Metrics]):
    """A training step that computes batches in parts. Created by [`cavs.data.step`][] with `memory`.

    A call `step(state, batch)` takes one batch, as `plan` does.

    Args:
        fun: `fun(state, batch, loss)`, which returns the new state and metrics.
        loss: as in [`cavs.memory.plan`][].
        budget: as [`cavs.memory.bytes_of`][] returns it.
        how: the arguments `collate` and `axis` of [`cavs.memory.plan`][].
        compiled: compiles a step of a state and a batch. The result has a method `lower`.
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
        gradient = BatchGradient(self._loss, arrays, data, (), data.choices(None, None), {}, self._of_loss, self._compiled)
        choice = chosen(gradient, self._budget, "step: memory")
        gradient.params = jax.eval_shape(lambda: arrays)  # the arrays themselves change with each step
        return BatchPlan(gradient, choice, self._budget), gradient.compiles(choice)

    def _of_loss(self, loss: Loss) -> Callable[[PyTree, PyTree], Any]:
        return lambda state, batch: self._fun(state, batch, loss)


@overload
def step(fun: Callable[[State, Any], tuple[State, Metrics]], /, **how: Unpack[StepOptions]) -> Step[State, Metrics]: ...
@overload
def step(
    fun: None = None, /, **how: Unpack[StepOptions]
) -> Callable[[Callable[[State, Any], tuple[State, Metrics]]], Step[State, Metrics]]: ...
@overload
def step(
    fun: None = None, /, *, memory: int | float | str, loss: Loss, **how: Unpack[BudgetOptions]
) -> Callable[[Callable[[State, Any, Loss], tuple[State, Metrics]]], StepInBudget[State, Metrics]]: ...
def step(
    fun: Callable[..., tuple[PyTree, PyTree]] | None = None,
    /,
    *,
    unroll: int | None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    tune: float = TUNE,
    memory: int | float | str | None = None,
    loss: Loss | None = None,
    collate: Collate | None = None,
    axis: Any = 0,
) -> Any:
    """Compiles the training step of one batch, to run over the batches of a [`cavs.data.Loader`][].

    ```python
    @cavs.data.step
    def step(state, sched):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, sched)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    for batches in loader:
        state, values = step(state, batches)                          # values: (n,), of n training steps
    ```

    One call is one dispatch. It runs all batches that the loader yields together, one after another (a loop in XLA), updates
    the state in place (donation), lets a GPU run independent kernels at the same time, and runs on all devices of the loader's
    mesh (`jax.shard_map`). The results are the same as of `jax.jit(fun)` for one batch after another, up to rounding.

    While the first batches train, the programs for the other shapes of the epoch are compiled in the background.

    On a Hopper GPU, the first call tunes the launches of engine `persistent` (VPPS, section III-A). If no layout of a launch is
    on record for this GPU, it times a few and keeps the fastest in the user's cache, `~/.cache/cavs`. This happens once: later
    steps and processes use the record, so a run that is resumed computes what it would have computed without a stop. If the
    cache is deleted, launches are tuned again, perhaps to other layouts, and sums may round differently.

    With `memory`, the step takes what [`cavs.memory.plan`][] takes, graphs or arrays of any network, and computes the loss of a
    batch in the fewest parts with which the compiled step, optimiser included, fits:

    ```python
    @cavs.data.step(memory="8GiB", loss=loss)                         # loss(params, (images, labels)), as for plan
    def step(state, batch, loss):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        return update(state, grads), value

    state, value = step(state, (images, labels))
    print(step.plan(state, (images, labels)))                         # the parts, and the bytes of the compiled steps
    ```

    With a mesh, `fun` runs on each device with the graphs of that device. The loss must cover the whole batch: write
    [`cavs.data.mean`][] for `jnp.mean`. Gradients of it are summed over the devices by JAX.

    Args:
        fun: `fun(state, batch)` returns the new state and metrics, two pytrees of arrays. The new state has the shapes and
            dtypes of the old one.
        unroll: training steps in one iteration of the scan, on a GPU or a mesh. `None`: 4 on a GPU, which makes them one CUDA
            graph, else 1.
        donate: whether to update the state in place. A state that another function created is copied first, so it stays valid;
            one that the step returned is not valid after the next call.
        compiler_options: options of XLA, as for `jax.jit`, such as `plan.compiler_options` of [`cavs.memory.plan`][].
        tune: the seconds for tuning. Launches that are not timed by then, and those of other shapes of batches, keep the layout
            of a cost model or of similar batches, until [`cavs.tune`][] or `Step.tune` times them. 0: no layout is timed or
            recorded; so it is if several processes train together, and with `memory`, as tuning needs memory of its own.
        memory: the temporary memory of the step, as `budget` of [`cavs.memory.plan`][]. The first call with arrays of new
            shapes, or with another number of graphs, compiles up to five steps: begin with the largest batch of graphs.
        loss: with `memory`: `loss(params, batch)`, as in [`cavs.memory.plan`][]. `fun` gets it in parts, as its third argument.
        collate, axis: with `memory`, as in [`cavs.memory.plan`][].

    Returns:
        `step(state, batches)`, which returns the new state and the metrics of all steps, with a leading axis of steps. A single
        batch, as a loader with `steps=1` yields it, gives metrics without this axis. Without `fun`, a decorator is returned.

    Raises:
        TypeError: `fun` is no function of two arguments (three with `memory`), `donate` no bool, or `compiler_options` no dict;
            or when called, an argument is something else, `fun` does not return a state and metrics, or the state has other
            shapes or dtypes.
        ValueError: `unroll` is not an int >= 1, or `tune` no number of seconds; or when called on several devices, if the
            metrics or the new state differ between them; or when called with `memory`, if the loss would not be the same in
            parts.
        BudgetError: when called with `memory`, if the smallest step does not fit.
    """
    if fun is None:
        how = {"memory": memory, "loss": loss, "collate": collate, "axis": axis}
        return functools.partial(step, unroll=unroll, donate=donate, compiler_options=compiler_options, tune=tune, **how)
    unroll = int(unroll) if isinstance(unroll, np.integer) else unroll
    tune = float(tune) if isinstance(tune, np.integer | np.floating) else tune
    if unroll is not None and (isinstance(unroll, bool) or not isinstance(unroll, int) or unroll < 1):
        raise ValueError(f"step: unroll: got {unroll!r}; expected an int >= 1 or None, the training steps of an iteration.")
    check_bool("step: donate", donate)
    if compiler_options is not None and not isinstance(compiler_options, Mapping):
        got = repr(compiler_options)
        raise TypeError(f"step: compiler_options: got {got}; expected a dict or None. Write compiler_options={{name: value}}.")
    if tune is True or not isinstance(tune, int | float) or not tune >= 0:
        raise ValueError(f"step: tune: got {tune!r}; expected seconds >= 0. Write tune=10, or tune=0 for no tuning.")
    if (memory is None) != (loss is None):
        given, other = ("loss", "memory='2GiB'") if memory is None else ("memory", "loss=loss")
        raise TypeError(f"step: {given}: got it alone; expected memory and loss together. Write {other}, too, or neither.")
    check_takes("step: fun", fun, "state", "batch", *["loss"] * (loss is not None), write="@cavs.data.step")
    budget = bytes_of(memory, "step", "memory")
    if budget is None or loss is None:
        return Step(fun, unroll, donate, compiler_options, tune)
    options = compiler_options_of(budget) | dict(compiler_options or {})
    return StepInBudget(fun, loss, budget, (collate, axis), lambda one_step: Step(one_step, unroll, donate, options))
