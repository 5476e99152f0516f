"""The time-delay LSTM of VPPS."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs.td_rnn import pyramids


@dataclasses.dataclass(frozen=True)
class TDLSTM:
    """Time-delay LSTM: VPPS (Khorasani et al., 2018), section IV. It is `TDRNN` with LSTM units.

    It runs over `TDLSTM.graphs(lengths)`. Each of the two neighbours has its own weights and forget gate.

        leaf:  h = x, c = 0
        inner: i, o, f_left, f_right = sigmoid(h_left U_left + h_right U_right + b), the first four fifths
               g = tanh(h_left U_left + h_right U_right + b), the last fifth
               c = i g + f_left c_left + f_right c_right
               h = o tanh(c)

    Vertices push h. `init` returns a dict of parameters: `u` (2H, 5H), with U_left above U_right, and `b` (5H,). The biases of
    the forget gates are initialised to 1.

    Attributes:
        hidden: H, the size of the state and of x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    dtype: DTypeLike = jnp.float32

    graphs = staticmethod(pyramids)

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        return {
            "u": glorot(key, 2 * self.hidden, self.hidden, self.dtype, gates=5),
            "b": jnp.zeros(5 * self.hidden, self.dtype).at[2 * self.hidden : 4 * self.hidden].set(1),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
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

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=2)
