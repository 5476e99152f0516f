"""Tree-FC, the benchmark model of TensorFlow Fold and of Cavs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


@dataclasses.dataclass(frozen=True)
class TreeFC:
    """A fully connected layer over two children: Looks et al., 2017 (TensorFlow Fold); Cavs, section 5.

        leaf:  h = x
        inner: h = tanh([h_1, h_2] U + b)

    A leaf's input is its state, so x has `hidden` entries; inner vertices do not read x.

    **Fields:** `hidden`, H; `dtype` of the initial parameters.
    **Parameters:** `u` (2H, H), `b` (H,).
    **Pushes** h.
    """

    hidden: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        return {"u": glorot(key, 2 * self.hidden, self.hidden, self.dtype), "b": jnp.zeros(self.hidden, self.dtype)}

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        if v.is_leaf():
            h = v.pull()
        else:
            h = jnp.tanh(jnp.concatenate([v.gather(0), v.gather(1)]) @ params["u"] + params["b"])
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=2)
