"""The multi-layer LSTM, composed of one vertex function per layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import one_program
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class MultiLayerLSTM:
    """Stacked LSTMs: Graves, 2013 (arXiv 1308.0850), section 2; composed as in Cavs, section 3.1.

    Layer l + 1 pulls the pushes of layer l. Each layer is one `cavs.run` over the same schedule, so the products of a layer
    with its inputs are one batch over all positions. All layers above the first are equal and share compiled code.

    `init` returns a list with the parameters of `LSTM` for each layer.

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        layers: The number of layers, at least 1.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    layers: int = 2
    dtype: DTypeLike = jnp.float32

    def layer(self, index: int) -> LSTM:
        """Returns the program of one layer."""
        return LSTM(self.hidden, self.inputs if index == 0 else self.hidden, self.dtype)

    @one_program
    def init(self, key: jax.Array) -> list[dict[str, jax.Array]]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        return [self.layer(i).init(k) for i, k in enumerate(jax.random.split(key, self.layers))]

    def run(self, params: list[dict[str, jax.Array]], sched: cavs.Schedule, inputs: Any, *, select: Any = None) -> Any:
        """Runs all layers. Takes the arguments of `cavs.run`, and returns h of the top layer."""
        for i, layer in enumerate(params):
            last = i == len(params) - 1
            inputs = cavs.run(self.layer(i).vertex_function(), layer, sched, inputs, select=select if last else None)
        return inputs
