"""Tree-FC, the benchmark model of TensorFlow Fold and of Cavs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class TreeFC:
    """A fully connected layer over two children: Looks et al., 2017 (TensorFlow Fold); Cavs, section 5.

        leaf:  h = x
        inner: h = tanh([h_1, h_2] U + b)

    Vertices push h. The state of a leaf is its input, so x has H entries. Inner vertices do not read x.

    `init` returns a dict of parameters: `u` (2H, H), `b` (H,).

    Attributes:
        hidden: H, the size of the state and of x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    dtype: DTypeLike = jnp.float32

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        return {"u": glorot(key, 2 * self.hidden, self.hidden, self.dtype), "b": jnp.zeros(self.hidden, self.dtype)}

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        if v.is_leaf():
            h = v.pull()
        else:
            h = jnp.tanh(jnp.concatenate([v.gather(0), v.gather(1)]) @ params["u"] + params["b"])
        v.scatter(h)
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state=(self.hidden,), arity=2)
