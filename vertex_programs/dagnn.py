"""DAGNN, the recurrent network over directed acyclic graphs of Thost and Chen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs.gru import gru_state


@dataclasses.dataclass(frozen=True)
class DAGNN:
    """One layer of DAGNN: Thost and Chen, 2021 (arXiv 2101.07965), section 2.1.

    A vertex may have any number of children (netlists, programs, neural architectures).

        a = softmax over children k of h_k s
        m = sum over children k of a_k h_k                       (equations 4 and 5)
        h = GRU(x, m), as `GRU` with m as the previous state     (equation 7)

    Vertices push h. m is a mean, so states stay bounded through thousands of levels. The paper's score has another term,
    which depends on the vertex itself. It is the same for all children of the vertex and cancels in the softmax. A child
    therefore computes its score once, for all of its parents.

    To stack layers or directions (section 2.2), use one `cavs.run` for each: it pulls the pushes of the layer below, over
    `graphs` or `graphs.reversed()`. `cavs.readout` computes vectors of graphs.

    `init` returns a dict of parameters:

    - `s` (H,)
    - `w` (E, 3H), `u` (H, 3H), `b` (3H,), with columns r, z, n, and `d` (H,), as in `GRU`

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
        keys = jax.random.split(key, 3)
        return {
            "s": glorot(keys[0], self.hidden, 1, self.dtype)[:, 0],
            "w": glorot(keys[1], self.inputs, self.hidden, self.dtype, gates=3),
            "u": glorot(keys[2], self.hidden, self.hidden, self.dtype, gates=3),
            "b": jnp.zeros(3 * self.hidden, self.dtype),
            "d": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        m = v.gather_all(lambda child: (child["score"], child["h"]), reduce="softmax")
        h = gru_state(params, v.pull(), m)
        v.scatter({"h": h, "score": h @ params["s"]})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"h": (self.hidden,), "score": ()})
