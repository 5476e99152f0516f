"""The LSTM with forget gates."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


def lstm_state(z: jax.Array, c: jax.Array) -> dict[str, jax.Array]:
    """c and h (H,), from the gates' sums z (4H,), columns i, f, o, g, and the c before."""
    i, f, o, g = jnp.split(z, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {"c": c, "h": jax.nn.sigmoid(o) * jnp.tanh(c)}


@dataclasses.dataclass(frozen=True)
class LSTM:
    """LSTM over chains: Hochreiter and Schmidhuber, 1997, with the forget gate of Gers, Schmidhuber and Cummins, 2000.

        i, f, o = sigmoid(x W + h' U + b), the first three quarters
        g       = tanh(x W + h' U + b), the last quarter
        c       = f c' + i g
        h       = o tanh(c)

    c', h' are the state of the previous position, the one child; zero at the first position. No peepholes.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** `w` (E, 4H), `u` (H, 4H), `b` (4H,), columns i, f, o, g; the forget gate's bias starts at 1
    (Jozefowicz, Zaremba and Sutskever, 2015).
    **Pushes** h.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key)
        return {
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=4),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=4),
            "b": jnp.zeros(4 * self.hidden, self.dtype).at[self.hidden : 2 * self.hidden].set(1),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        before = v.gather(0)
        state = lstm_state(before["h"] @ params["u"] + (v.pull() @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state["h"])

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=1)
