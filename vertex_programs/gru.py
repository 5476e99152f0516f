"""The gated recurrent unit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


def gru_state(params: dict[str, jax.Array], x: jax.Array, before: jax.Array) -> jax.Array:
    """h (H,), from the inputs x (E,) and the h before; parameters as of `GRU`."""
    x_r, x_z, x_n = jnp.split(x @ params["w"] + params["b"], 3)
    h_r, h_z, h_n = jnp.split(before @ params["u"], 3)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + params["d"]))
    return (1 - z) * n + z * before


@dataclasses.dataclass(frozen=True)
class GRU:
    """GRU over chains: Cho et al., 2014 (arXiv 1406.1078), equations 5-8.

    The reset gate acts after the product with U, as in cuDNN and torch.nn.GRU (the paper has (r h') U_n): so the three
    products with h' are one.

        r, z = sigmoid(x W + h' U + b), the first two thirds
        n    = tanh(x W_n + b_n + r (h' U_n + d)), the last third
        h    = (1 - z) n + z h'

    h' is the state of the previous position, the one child; zero at the first position.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** `w` (E, 3H), `u` (H, 3H), `b` (3H,), columns r, z, n; `d` (H,), the bias within the reset.
    **Pushes** h.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key)
        return {
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=3),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=3),
            "b": jnp.zeros(3 * self.hidden, self.dtype),
            "d": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        h = gru_state(params, v.pull(), v.gather(0))
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=1)
