"""The BiLSTM tagger: a label for every vertex of a chain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._dropout import Key, dropout, split_key
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs._types import Array
from cavs.vertex_programs.bilstm import BiLSTM


@dataclasses.dataclass(frozen=True)
class BiLSTMTagger:
    """BiLSTM tagger: Huang, Xu and Yu, 2015 (arXiv 1508.01991), section 2.2.

    The hidden layer is that of the application BiLSTM of VPPS (Khorasani et al., 2018, section IV) and of DyNet's benchmark:

        h      = BiLSTM(x)
        m      = tanh(h W + b)
        logits = m V + c

    `init` returns a dict of parameters:

    - `bilstm`: the parameters of `BiLSTM`
    - `w` (2H, M), `b` (M,)
    - `v` (M, C), `c` (C,)

    Attributes:
        labels: C, the number of labels.
        hidden: H, the size of the state of each direction.
        inputs: E, the size of x.
        mlp: M, the size of the hidden layer.
        layers: The number of layers of the BiLSTM.
        dropout: The dropout rate, applied to x, h and m.
        dtype: The dtype of the initial parameters.
    """

    labels: int
    hidden: int
    inputs: int
    mlp: int = 32
    layers: int = 1
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @property
    def bilstm(self) -> BiLSTM:
        """The BiLSTM over the inputs."""
        return BiLSTM(self.hidden, self.inputs, self.layers, self.dtype)

    @one_program
    def init(self, key: jax.Array) -> dict[str, Any]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key, 3)
        return {
            "bilstm": self.bilstm.init(keys[0]),
            "w": glorot(keys[1], 2 * self.hidden, self.mlp, self.dtype),
            "b": jnp.zeros(self.mlp, self.dtype),
            "v": glorot(keys[2], self.mlp, self.labels, self.dtype),
            "c": jnp.zeros(self.labels, self.dtype),
        }

    def run(
        self,
        params: dict[str, Any],
        sched: cavs.Schedule,
        back: cavs.Schedule,
        inputs: Array,
        *,
        key: Key | None = None,
    ) -> jax.Array:
        """Computes the logits of every vertex.

        Args:
            params: The parameters, as returned by `init`.
            sched: A schedule of the chains.
            back: A schedule of `chains.reversed()`.
            inputs: x of each vertex, float[V, E], as for `cavs.run`.
            key: A key of `jax.random` for dropout, or None for no dropout.

        Returns:
            The logits, (V, C), in the order of the rows of `cavs.run`.
        """
        keys = split_key(key, 3)
        h = self.bilstm.run(params["bilstm"], sched, back, dropout(inputs, self.dropout, keys[0]))
        m = jnp.tanh(dropout(h, self.dropout, keys[1]) @ params["w"] + params["b"][None])
        return dropout(m, self.dropout, keys[2]) @ params["v"] + params["c"][None]
