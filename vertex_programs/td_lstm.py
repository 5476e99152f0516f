"""The time-delay LSTM of VPPS."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot
from cavs.vertex_programs.td_rnn import pyramids


@dataclasses.dataclass(frozen=True)
class TDLSTM:
    """Time-delay LSTM: VPPS (Khorasani et al., 2018), section IV: `TDRNN` with LSTMs in place of the simple recurrence.

    Over `TDLSTM.graphs(lengths)`; each of the two neighbours has weights and a forget gate of its own:

        leaf:  h = x, c = 0
        inner: i, o, f_left, f_right = sigmoid(h_left U_left + h_right U_right + b), the first four fifths
               g = tanh(h_left U_left + h_right U_right + b), the last fifth
               c = i g + f_left c_left + f_right c_right
               h = o tanh(c)

    **Fields:** `hidden`, H, also the entries of x; `dtype` of the initial parameters.
    **Parameters:** `u` (2H, 5H), U_left above U_right; `b` (5H,); the forget gates' biases start at 1.
    **Pushes** h.
    """

    hidden: int
    dtype: Any = jnp.float32

    graphs = staticmethod(pyramids)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        return {
            "u": glorot(key, 2 * self.hidden, self.hidden, self.dtype, gates=5),
            "b": jnp.zeros(5 * self.hidden, self.dtype).at[2 * self.hidden : 4 * self.hidden].set(1),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        if v.is_leaf():
            h = v.pull()
            c = jnp.zeros_like(h)
        else:
            left, right = v.gather(0), v.gather(1)
            z = jnp.concatenate([left["h"], right["h"]]) @ params["u"] + params["b"]
            i, o, f_left, f_right, g = jnp.split(z, 5)
            c = jax.nn.sigmoid(i) * jnp.tanh(g)
            c += jax.nn.sigmoid(f_left) * left["c"] + jax.nn.sigmoid(f_right) * right["c"]
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=2)
