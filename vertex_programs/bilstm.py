"""The bidirectional LSTM, as a net of nets: two LSTMs over the same chains, one of them over the chains turned round."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class BiLSTM:
    """LSTMs in both directions: Graves and Schmidhuber, 2005, section 2; layers as in Graves, 2013 (arXiv 1308.0850).

    Layer l + 1 pulls what both directions of layer l push at its vertex. A schedule of `graphs` and one of
    `graphs.reversed()` hold all there is of the two directions:

    ```python
    program = cavs.vertex_programs.BiLSTM(hidden=50, inputs=128)
    sched, back = cavs.schedule(chains), cavs.schedule(chains.reversed())
    h = program.run(params, sched, back, x)         # (V, 100)
    ```

    **Fields:** `hidden`, H of each direction; `inputs`, E; `layers`, at least 1; `dtype` of the initial parameters.
    **Parameters:** a list of `{"forward": ..., "backward": ...}`, one a layer, each with those of `LSTM`.
    """

    hidden: int
    inputs: int
    layers: int = 1
    dtype: Any = jnp.float32

    def layer(self, index: int) -> LSTM:
        """The program of each direction of one layer."""
        return LSTM(self.hidden, self.inputs if index == 0 else 2 * self.hidden, self.dtype)

    def init(self, key: jax.Array) -> list[dict[str, dict[str, jax.Array]]]:
        """Initial parameters."""
        keys = jax.random.split(key, (self.layers, 2))
        return [{"forward": self.layer(i).init(k[0]), "backward": self.layer(i).init(k[1])} for i, k in enumerate(keys)]

    def run(self, params: Any, sched: cavs.Schedule, back: cavs.Schedule, inputs: Any, *, ends: bool = False) -> jax.Array:
        """h of the top layer: (V, 2H), forward beside backward, rows as those of `cavs.run`.

        With `ends` what each direction knows of a whole chain: (G, 2H), forward at the last vertex beside backward at the
        first.
        """
        for i, layer in enumerate(params):
            F = self.layer(i).vertex_function()
            select = (sched.roots, back.roots) if ends and i == len(params) - 1 else (None, None)
            forward = cavs.run(F, layer["forward"], sched, inputs, select=select[0])
            inputs = jnp.concatenate([forward, cavs.run(F, layer["backward"], back, inputs, select=select[1])], -1)
        return inputs
