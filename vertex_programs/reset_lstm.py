"""An LSTM whose state may be reset within a sequence."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.lstm import LSTM


@dataclasses.dataclass(frozen=True)
class ResetLSTM:
    """LSTM with resets: Mnih et al., 2016 (A3C), section 5; Kapturowski et al., 2019 (R2D2), section 2: recurrent agents
    whose sequences run over the ends of episodes.

    As `LSTM`, but where a vertex's `reset` holds, c' and h' are zeros: nothing of what came before is seen, and no
    gradient flows back. Where resets are known when the batch is made, cutting the chains there is the same and
    shorter: `cavs.from_lengths` of the pieces.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** those of `LSTM`. **Pulls** `{"x": (E,), "reset": ()}`, a bool (or a number, not 0 for a reset).
    **Pushes** h.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        return LSTM(self.hidden, self.inputs, self.dtype).init(key)

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        keep = v.pull("reset") == 0
        before = jax.tree.map(lambda s: jnp.where(keep, s, 0), v.gather(0))
        z = before["h"] @ params["u"] + (v.pull("x") @ params["w"] + params["b"])
        i, f, o, g = jnp.split(z, 4)
        c = jax.nn.sigmoid(f) * before["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=1)
