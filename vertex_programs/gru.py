"""The gated recurrent unit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


def gru_state(params: dict[str, jax.Array], x: jax.Array, before: jax.Array) -> jax.Array:
    """Computes the next state of a GRU.

    Args:
        params: The parameters of `GRU`.
        x: The input, (E,).
        before: The previous state, (H,).

    Returns:
        The next state, (H,).
    """
    x_r, x_z, x_n = jnp.split(x @ params["w"] + params["b"], 3)
    h_r, h_z, h_n = jnp.split(before @ params["u"], 3)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + params["d"]))
    return (1 - z) * n + z * before


@dataclasses.dataclass(frozen=True)
class GRU:
    """GRU over chains: Cho et al., 2014 (arXiv 1406.1078), equations 5-8.

    The reset gate is applied after the product with U, as in cuDNN and `torch.nn.GRU`. (The paper has (r h') U_n.) The
    three products with h' are then one.

        r, z = sigmoid(x W + h' U + b), the first two thirds
        n    = tanh(x W_n + b_n + r (h' U_n + d)), the last third
        h    = (1 - z) n + z h'

    h' is the state of the only child, the previous position. It is zero at the first position. Vertices push h.

    `init` returns a dict of parameters:

    - `w` (E, 3H), `u` (H, 3H), `b` (3H,), with columns r, z, n
    - `d` (H,), the bias inside the reset

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
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=3),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=3),
            "b": jnp.zeros(3 * self.hidden, self.dtype),
            "d": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        h = gru_state(params, v.pull(), v.gather(0))
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=1)
