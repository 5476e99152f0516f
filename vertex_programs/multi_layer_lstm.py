"""LSTM layers as nets of nets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class MultiLayerLSTM:
    """Stacked LSTMs: Graves, 2013 (arXiv 1308.0850), section 2; Cavs, section 3.1 for the composition.

    Layer l + 1 pulls what layer l pushes: one `cavs.run` a layer over the same schedule, so each layer's products with
    its inputs are one batch over all positions. Layers above the first are equal and share compiled code.

    **Fields:** `hidden`, H; `inputs`, E; `layers`, at least 1; `dtype` of the initial parameters.
    **Parameters:** a list of those of `LSTM`, one a layer.
    """

    hidden: int
    inputs: int
    layers: int = 2
    dtype: Any = jnp.float32

    def layer(self, index: int) -> LSTM:
        """The program of one layer."""
        return LSTM(self.hidden, self.inputs if index == 0 else self.hidden, self.dtype)

    def init(self, key: jax.Array) -> list[dict[str, jax.Array]]:
        """Initial parameters."""
        return [self.layer(i).init(k) for i, k in enumerate(jax.random.split(key, self.layers))]

    def run(self, params: list[dict[str, jax.Array]], sched: cavs.Schedule, inputs: Any, *, select: Any = None) -> Any:
        """h of the top layer; arguments and result as those of `cavs.run`."""
        for i, layer in enumerate(params):
            last = i == len(params) - 1
            inputs = cavs.run(self.layer(i).vertex_function(), layer, sched, inputs, select=select if last else None)
        return inputs
