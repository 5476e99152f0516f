"""The BiLSTM tagger: a label for every vertex of a chain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._dropout import dropout
from cavs.vertex_programs._initialisers import glorot
from cavs.vertex_programs.bilstm import BiLSTM


@dataclasses.dataclass(frozen=True)
class BiLSTMTagger:
    """BiLSTM tagger: Huang, Xu and Yu, 2015 (arXiv 1508.01991), section 2.2; with the hidden layer of VPPS's application
    BiLSTM (Khorasani et al., 2018, section IV), as in DyNet's benchmark of it.

        h      = BiLSTM(x)
        m      = tanh(h W + b)
        logits = m V + c

    **Fields:** `labels`, C; `hidden`, H of each direction; `inputs`, E; `mlp`, M; `layers` of the BiLSTM; `dropout` at
    the inputs, at h and at m; `dtype` of the initial parameters.
    **Parameters:** `bilstm`, `w` (2H, M), `b` (M,), `v` (M, C), `c` (C,).
    """

    labels: int
    hidden: int
    inputs: int
    mlp: int = 32
    layers: int = 1
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @property
    def bilstm(self) -> BiLSTM:
        """The BiLSTM over the inputs."""
        return BiLSTM(self.hidden, self.inputs, self.layers, self.dtype)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters."""
        keys = jax.random.split(key, 3)
        return {
            "bilstm": self.bilstm.init(keys[0]),
            "w": glorot(keys[1], 2 * self.hidden, self.mlp, self.dtype),
            "b": jnp.zeros(self.mlp, self.dtype),
            "v": glorot(keys[2], self.mlp, self.labels, self.dtype),
            "c": jnp.zeros(self.labels, self.dtype),
        }

    def run(self, params: Any, sched: cavs.Schedule, back: cavs.Schedule, inputs: Any, *, key: Any = None) -> jax.Array:
        """Logits of every vertex (V, C), rows as those of `cavs.run`; `back` is a schedule of `graphs.reversed()`.

        With `key`, dropout.
        """
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        h = self.bilstm.run(params["bilstm"], sched, back, dropout(inputs, self.dropout, keys[0]))
        m = jnp.tanh(dropout(h, self.dropout, keys[1]) @ params["w"] + params["b"])
        return dropout(m, self.dropout, keys[2]) @ params["v"] + params["c"]
