"""The training step of a batch, as a `cavs.data.step`, and the evaluation of a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.batches import Batches
from cavs._function.asked import keep
from cavs._graphs.pytree import PyTree
from cavs._memory.search import FASTEST, Choice
from cavs._run.concurrent_jit import concurrent_jit
from cavs._run.manual_axes import checked_axes, unchecked, untyped
from cavs._step.step import Step, divided, step
from cavs._train import gradients, optimiser
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights

if TYPE_CHECKING:
    from cavs._train.task import Metrics, Model


class State(NamedTuple):
    """Everything that training changes, a pytree of arrays: what a checkpoint stores so that resuming is bitwise exact.

    There is no random state: the dropout key of a step depends on the seed and `count`, and the batches of an epoch depend on
    the seed and the epoch.

    Attributes:
        params: the dense parameters.
        optimiser: their optimiser state.
        table: (words, size) word vectors.
        slots: the optimiser state of the table.
        count: the number of steps done.
    """

    params: PyTree
    optimiser: PyTree
    table: jax.Array
    slots: dict[str, jax.Array]
    count: jax.Array

    @property
    def weights(self) -> Weights:
        """The weights of the model."""
        return Weights(self.params, self.table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceMetrics:
    """The metrics of a batch as one vector, so that one asynchronous transfer copies them to the host."""

    values: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(metrics: "Metrics") -> "DeviceMetrics":
        """Stacks a NamedTuple of scalars."""
        return DeviceMetrics(jnp.stack([jnp.asarray(x, jnp.float32) for x in metrics]), metrics._fields)

    def added_to(self, total: dict[str, float]) -> dict[str, float]:
        """Adds the metrics, of one batch or of several, to `total` on the host, in double precision."""
        sums = np.asarray(self.values, np.float64).reshape(-1, len(self.names)).sum(0)
        return {name: total.get(name, 0.0) + float(x) for name, x in zip(self.names, sums, strict=True)}


# Compiles in a third of the time. The values are the same.
RUNS_ONCE = {"xla_backend_optimization_level": 0}


def begin(model: "Model", config: Config, vectors: Vectors | None) -> tuple[State, Callable[[], State]]:
    """The state before the first step as `jax.ShapeDtypeStruct`s, and a function that compiles and computes it."""
    build = jax.jit(lambda vectors: first_state(model, config, vectors), compiler_options=RUNS_ONCE)
    traced = build.trace(vectors)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)
    return like, lambda: traced.lower().compile()(vectors)


def first_state(model: "Model", config: Config, vectors: Vectors | None) -> State:
    """The state before the first step, which depends on the seed. Not compiled."""
    params, table = model.init(jax.random.key(config.seed), vectors)
    slots = optimiser.init_rows(config, table)
    return State(params, optimiser.dense(config).init(params), table, slots, jnp.zeros((), jnp.int32))


def build_step(
    model: "Model",
    config: Config,
    total: int = 0,
    choice: Choice = FASTEST,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """Builds `step(state, batches)`: loss, gradients and updates. `state` is donated. Other arguments are as of `one_step`."""
    return step(one_step(model, config, total, choice), compiler_options=compiler_options)


def one_step(
    model: "Model", config: Config, total: int, choice: Choice
) -> Callable[[State, PyTree], tuple[State, DeviceMetrics]]:
    """The step of one batch, not compiled.

    Args:
        model: the model.
        config: the settings.
        total: the number of steps of the run, at which the schedule of the learning rate ends.
        choice: the parts in which a batch comes, and what the backward keeps.
    """
    rule = optimiser.dense(config)

    def train(state: State, batch: PyTree) -> tuple[State, DeviceMetrics]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.count) if config.dropout else None
        gradient_of = gradients.of_batch if choice.parts == 1 else gradients.of_parts
        if axes := checked_axes():
            gradient_of = functools.partial(gradients.of_devices, axes=axes)
        with keep(least=choice.keep != "fast"):
            words, rows, metrics, *found = gradient_of(model, state.weights, batch, key)
        by_params, by_rows = optimiser.clip(tuple(found), config.clip)
        updates, rule_state = rule.update(by_params, state.optimiser, state.params)
        factor = optimiser.factor(config, state.count, total)
        params = jax.tree.map(lambda p, u: p + factor * u, state.params, updates)
        count = state.count + 1
        table, slots = optimiser.update_rows(config, state.table, state.slots, words, rows, by_rows, count, factor)
        return State(params, rule_state, table, slots, count), DeviceMetrics.of(metrics)

    return train


def build_evaluation(model: "Model") -> Callable[[Weights, PyTree], DeviceMetrics]:
    """Builds `evaluate(weights, batch)`: the metrics without dropout. `Batches` with a mesh run on its devices."""
    one = one_evaluation(model)

    def evaluate(weights: Weights, batch: PyTree) -> DeviceMetrics:
        return divided(one, batch)(weights, batch.tree) if isinstance(batch, Batches) else one(weights, batch)

    return concurrent_jit(evaluate)


def one_evaluation(model: "Model") -> Callable[[Weights, PyTree], DeviceMetrics]:
    """The evaluation of one batch, not compiled."""

    def evaluate(weights: Weights, batch: PyTree) -> DeviceMetrics:
        if not (axes := checked_axes()):
            return DeviceMetrics.of(model.metrics(weights, batch))
        with unchecked():
            metrics = model.metrics(*untyped((weights, batch)))
            return DeviceMetrics.of(jax.lax.psum(metrics, axes))

    return evaluate
