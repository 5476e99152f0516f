"""The bidirectional LSTM: one LSTM over chains and one over the reversed chains."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import check_switch, one_program
from cavs.vertex_programs._types import Array
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class BiLSTM:
    """Bidirectional LSTM: Graves and Schmidhuber, 2005, section 2; stacked layers as in Graves, 2013 (arXiv 1308.0850).

    Layer l + 1 pulls the pushes of both directions of layer l. The backward direction is an LSTM over
    `graphs.reversed()`.

    ```python
    program = cavs.vertex_programs.BiLSTM(hidden=50, inputs=128)
    sched, back = cavs.schedule(chains), cavs.schedule(chains.reversed())
    h = program.run(params, sched, back, x)         # (V, 100)
    ```

    `init` returns a list with one dict per layer, `{"forward": ..., "backward": ...}`, each with the parameters of `LSTM`.

    Attributes:
        hidden: H, the size of the state of each direction.
        inputs: E, the size of x.
        layers: The number of layers, at least 1.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    layers: int = 1
    dtype: DTypeLike = jnp.float32

    def layer(self, index: int) -> LSTM:
        """Returns the program of both directions of one layer."""
        return LSTM(self.hidden, self.inputs if index == 0 else 2 * self.hidden, self.dtype)

    @one_program
    def init(self, key: jax.Array) -> list[dict[str, dict[str, jax.Array]]]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key, (self.layers, 2))
        return [{"forward": self.layer(i).init(k[0]), "backward": self.layer(i).init(k[1])} for i, k in enumerate(keys)]

    def run(
        self,
        params: list[dict[str, dict[str, jax.Array]]],
        sched: cavs.Schedule,
        back: cavs.Schedule,
        inputs: Array,
        *,
        ends: bool = False,
    ) -> Array:
        """Runs all layers.

        Args:
            params: The parameters, as returned by `init`.
            sched: A schedule of the chains.
            back: A schedule of `chains.reversed()`.
            inputs: x of each vertex, float[V, E], as for `cavs.run`.
            ends: If True, return one row per chain instead of one per vertex.

        Returns:
            h of the top layer, (V, 2H), forward beside backward, in the order of the rows of `cavs.run`. With `ends`, the
            final states (G, 2H): forward at the last vertex of each chain, beside backward at the first.

        Raises:
            TypeError: If `ends` is not a bool.
        """
        check_switch("BiLSTM.run: ends", ends)
        for i, layer in enumerate(params):
            F = self.layer(i).vertex_function()
            select = (sched.roots, back.roots) if ends and i == len(params) - 1 else (None, None)
            forward = cavs.run(F, layer["forward"], sched, inputs, select=select[0])
            inputs = jnp.concatenate([forward, cavs.run(F, layer["backward"], back, inputs, select=select[1])], -1)
        return inputs
