"""The bidirectional Tree-LSTM, composed of two vertex functions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import one_program
from cavs.vertex_programs._types import Array, Integers
from cavs.vertex_programs.child_sum_tree_lstm import ChildSumTreeLSTM
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class BidirectionalTreeLSTM:
    """Bidirectional Tree-LSTM: Teng and Zhang, 2017 (arXiv 1611.06788); Miwa and Bansal, 2016, section 3.3.

    A child-sum Tree-LSTM runs bottom-up over trees with any number of children. An LSTM then runs top-down from the root
    to each vertex, over `cavs.schedule(graphs.reversed())`, in which the only child of a vertex is its parent. It pulls
    [x, h of the bottom-up pass], so the state of every vertex depends on the whole tree.

    `init` returns a dict of two groups of parameters:

    - `up`: the parameters of `ChildSumTreeLSTM`
    - `down`: the parameters of `LSTM` with E + H inputs

    Attributes:
        hidden: H, the size of the state of each direction.
        inputs: E, the size of x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    dtype: DTypeLike = jnp.float32

    @property
    def up(self) -> ChildSumTreeLSTM:
        """The bottom-up program."""
        return ChildSumTreeLSTM(self.hidden, self.inputs, self.dtype)

    @property
    def down(self) -> LSTM:
        """The top-down program."""
        return LSTM(self.hidden, self.inputs + self.hidden, self.dtype)

    @one_program
    def init(self, key: jax.Array) -> dict[str, Any]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key)
        return {"up": self.up.init(keys[0]), "down": self.down.init(keys[1])}

    def run(
        self,
        params: dict[str, Any],
        sched: cavs.Schedule,
        reversed_sched: cavs.Schedule,
        inputs: Array,
        *,
        select: Integers | None = None,
    ) -> jax.Array:
        """Runs both directions.

        Under `jax.jit`, both schedules must have the same number of padded vertices. Schedules of the same graphs do.

        Args:
            params: The parameters, as returned by `init`.
            sched: A schedule of the graphs.
            reversed_sched: A schedule of `graphs.reversed()`.
            inputs: x of each vertex, float[V, E], as for `cavs.run`.
            select: The vertices to return, or None for all.

        Returns:
            [h bottom-up, h top-down] of each vertex, (V, 2H).
        """
        up = cavs.run(self.up.vertex_function(), params["up"], sched, inputs)
        both = jnp.concatenate([jnp.asarray(inputs), up], 1)
        down = cavs.run(self.down.vertex_function(), params["down"], reversed_sched, both, select=select)
        return jnp.concatenate([up if select is None else up[jnp.asarray(select)], down], 1)
