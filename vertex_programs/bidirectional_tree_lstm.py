"""A Tree-LSTM from the leaves to the root and back, as nets of nets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.child_sum_tree_lstm import ChildSumTreeLSTM
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class BidirectionalTreeLSTM:
    """Bottom-up and top-down together: Teng and Zhang, 2017 (arXiv 1611.06788); Miwa and Bansal, 2016, section 3.3.

    Bottom-up a child-sum Tree-LSTM over trees with any number of children; then top-down an LSTM from the root to each
    vertex, over `cavs.schedule(graphs.reversed())`, where a vertex's one child is its parent. The way down pulls
    [x, h of the way up], so every vertex learns of the whole tree.

    **Fields:** `hidden`, H of each way; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** `up`, those of `ChildSumTreeLSTM`; `down`, those of `LSTM` of inputs E + H.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    @property
    def up(self) -> ChildSumTreeLSTM:
        """The program of the way up."""
        return ChildSumTreeLSTM(self.hidden, self.inputs, self.dtype)

    @property
    def down(self) -> LSTM:
        """The program of the way down."""
        return LSTM(self.hidden, self.inputs + self.hidden, self.dtype)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters."""
        keys = jax.random.split(key)
        return {"up": self.up.init(keys[0]), "down": self.down.init(keys[1])}

    def run(
        self, params: dict[str, Any], sched: cavs.Schedule, reversed_sched: cavs.Schedule, inputs: Any, *, select: Any = None
    ) -> jax.Array:
        """[h up, h down] of all vertices, or `select` some: (V, 2H). `inputs` (V, E) as of `cavs.run`.

        Under `jax.jit` both schedules must have as many padded vertices, as those of the same graphs do.
        """
        up = cavs.run(self.up.vertex_function(), params["up"], sched, inputs)
        both = jnp.concatenate([jnp.asarray(inputs), up], 1)
        down = cavs.run(self.down.vertex_function(), params["down"], reversed_sched, both, select=select)
        return jnp.concatenate([up if select is None else up[jnp.asarray(select)], down], 1)
