"""The simple recurrent network of Elman."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


@dataclasses.dataclass(frozen=True)
class ElmanRNN:
    """Simple recurrent network over chains: Elman, "Finding structure in time", 1990.

        h = tanh(x W + h' U + b)

    h' is the state of the previous position, the one child; zero at the first position.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** `w` (E, H), `u` (H, H), `b` (H,).
    **Pushes** h.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key)
        return {
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype),
            "u": glorot(keys[1], self.hidden, self.hidden, self.dtype),
            "b": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        h = jnp.tanh(v.gather(0) @ params["u"] + (v.pull() @ params["w"] + params["b"]))
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=1)
