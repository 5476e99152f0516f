"""One step of training as one jitted function over donated state, and its evaluation counterpart."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.packed import Packed
from cavs._run.concurrent_jit import concurrent_jit
from cavs._train import optimiser
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights, read_rows

if TYPE_CHECKING:
    from cavs._train.task import Model


class State(NamedTuple):
    """All that training changes, a pytree of arrays: what a checkpoint must hold to go on bit for bit.

    There is no random state: a step's dropout key follows from the seed and `count`, the steps done; an epoch's batches
    follow from the seed and the epoch's number.
    """

    params: Any
    optimiser: Any
    table: Any
    slots: Any
    count: Any

    @property
    def weights(self) -> Weights:
        """What the model itself needs of this."""
        return Weights(self.params, self.table)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Metrics as one vector, which crosses to the host in one piece while the next steps run."""

    values: Any
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(metrics: Any) -> "Sums":
        """A NamedTuple of scalars."""
        return Sums(jnp.stack([jnp.asarray(x, jnp.float32) for x in metrics]), metrics._fields)

    def added_to(self, total: dict[str, float]) -> dict[str, float]:
        """Sums on the host, in double precision."""
        return {name: total.get(name, 0.0) + float(x) for name, x in zip(self.names, np.asarray(self.values), strict=True)}


def init_state(model: "Model", config: Config, vectors: Vectors | None) -> State:
    """The state before the first step; a function of the seed."""
    params, table = model.init(jax.random.key(config.seed), vectors)
    slots = optimiser.init_rows(config, table)
    return State(params, optimiser.dense(config).init(params), table, slots, jnp.zeros((), jnp.int32))


def make_step(model: "Model", config: Config) -> Callable[[State, Packed], tuple[State, Sums]]:
    """`step(state, batch)`: loss, gradients and updates. `state` is donated."""
    rule = optimiser.dense(config)

    def step(state: State, sent: Packed) -> tuple[State, Sums]:
        batch = sent.unpack()
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state.count) if config.dropout else None
        rows = read_rows(state.table, batch)
        value_and_grad = jax.value_and_grad(model.objective, argnums=(0, 1), has_aux=True)
        (_, metrics), gradients = value_and_grad(state.params, rows, batch, key)
        by_params, by_rows = optimiser.clip(gradients, config.clip)
        updates, rule_state = rule.update(by_params, state.optimiser, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        count = state.count + 1
        table, slots = optimiser.update_rows(config, state.table, state.slots, batch.words, rows, by_rows, count)
        return State(params, rule_state, table, slots, count), Sums.of(metrics)

    return concurrent_jit(step, donate_argnums=0)


def make_evaluate(model: "Model") -> Callable[[Weights, Packed], Sums]:
    """`evaluate(weights, batch)`: metrics without dropout."""
    return concurrent_jit(lambda weights, sent: Sums.of(model.metrics(weights, sent.unpack())))
