"""The LSTM with forget gates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


def lstm_state(z: jax.Array, c: jax.Array) -> dict[str, jax.Array]:
    """Computes the next state of an LSTM.

    Args:
        z: The gates before their activation, (4H,), in the order i, f, o, g.
        c: The previous cell state, (H,).

    Returns:
        The next `c` and `h`, each (H,).
    """
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

    c' and h' are the state of the only child, the previous position. They are zero at the first position. There are no
    peepholes. Vertices push h.

    `init` returns a dict of parameters: `w` (E, 4H), `u` (H, 4H), `b` (4H,), with columns i, f, o, g. The bias of the forget
    gate is initialised to 1 (Jozefowicz, Zaremba and Sutskever, 2015).

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    dtype: DTypeLike = jnp.float32

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key)
        return {
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=4),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=4),
            "b": jnp.zeros(4 * self.hidden, self.dtype).at[self.hidden : 2 * self.hidden].set(1),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        before = v.gather(0)
        state = lstm_state(before["h"] @ params["u"] + (v.pull() @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state["h"])

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=1)
