"""The recursive neural network of Socher et al., with vertices of two kinds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class RvNN:
    """Recursive neural network over binary trees: Socher, Lin, Ng and Manning, 2011 (ICML), section 4.

    Leaves have weights of their own, so words and phrases may lie in different spaces (Irsoy and Cardie, 2014, "untying
    leaves and internals"). VPPS (Khorasani et al., 2018), section IV, trains this model.

        leaf:  h = tanh(x W + b_leaf)
        inner: h = tanh([h_1, h_2] U + b)

    Vertices push h. Leaves and inner vertices are two kinds of vertices with one vertex function each: call
    `graphs = RvNN.add_kinds(graphs)` before `cavs.schedule`.

    `init` returns a dict of parameters: `w` (E, H), `b_leaf` (H,), `u` (2H, H), `b` (H,).

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    dtype: DTypeLike = jnp.float32

    @staticmethod
    def add_kinds(graphs: cavs.Graphs) -> cavs.Graphs:
        """Returns the same graphs with the kinds "leaf" and "inner"."""
        return dataclasses.replace(graphs, kind=(graphs.height > 0).astype(np.int32), kind_names=("leaf", "inner"))

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key)
        return {
            "w": glorot(keys[0], self.inputs, self.hidden, self.dtype),
            "b_leaf": jnp.zeros(self.hidden, self.dtype),
            "u": glorot(keys[1], 2 * self.hidden, self.hidden, self.dtype),
            "b": jnp.zeros(self.hidden, self.dtype),
        }

    def leaf(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one leaf."""
        h = jnp.tanh(v.pull() @ params["w"] + params["b_leaf"])
        v.scatter(h)
        v.push(h)

    def inner(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one inner vertex."""
        h = jnp.tanh(jnp.concatenate([v.gather(0), v.gather(1)]) @ params["u"] + params["b"])
        v.scatter(h)
        v.push(h)

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex of a graph without kinds."""
        (self.leaf if v.is_leaf() else self.inner)(params, v)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`, with one function per kind. Equal programs return the same object and share compiled code."""
        return cavs.VertexFunction({"leaf": self.leaf, "inner": self.inner}, state=(self.hidden,), arity=2)
