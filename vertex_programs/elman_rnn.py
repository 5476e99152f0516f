"""The simple recurrent network of Elman."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class ElmanRNN:
    """Simple recurrent network over chains: Elman, "Finding structure in time", 1990.

        h = tanh(x W + h' U + b)

    h' is the state of the only child, the previous position. It is zero at the first position. Vertices push h.

    `init` returns a dict of parameters: `w` (E, H), `u` (H, H), `b` (H,).

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
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype),
            "b": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        h = jnp.tanh(v.gather(0) @ params["u"] + (v.pull() @ params["w"] + params["b"]))
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=1)
