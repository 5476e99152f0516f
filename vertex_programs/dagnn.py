"""The recurrent network over directed acyclic graphs of Thost and Chen."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot
from cavs.vertex_programs.gru import gru_state


@dataclasses.dataclass(frozen=True)
class DAGNN:
    """One layer of DAGNN: Thost and Chen, 2021 (arXiv 2101.07965), section 2.1, for ANY number of children: netlists,
    programs, neural architectures.

        m = sum over children k of a_k h_k,  a = softmax over children of h_k s      (equations 4, 5)
        h = GRU(x, m), as `GRU` with m for the state before                           (equation 7)

    m is a mean, so states stay bounded through thousands of levels. The paper's term of the vertex itself in the score
    is the same for all of its children, and a softmax does not see it; so a child scatters its score, once for all parents.

    Layers and directions are nets of nets: a `cavs.run` each, which pulls what the one below pushed, over `graphs` or
    `graphs.reversed()` (section 2.2); `cavs.readout` makes graph vectors.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** `s` (H,); `w` (E, 3H), `u` (H, 3H), `b` (3H,), columns r, z, n; `d` (H,), as of `GRU`.
    **Pushes** h.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key, 3)
        return {
            "s": glorot(keys[0], self.hidden, 1, self.dtype)[:, 0],
            "w": glorot(keys[1], self.inputs, self.hidden, self.dtype, gates=3),
            "u": glorot(keys[2], self.hidden, self.hidden, self.dtype, gates=3),
            "b": jnp.zeros(3 * self.hidden, self.dtype),
            "d": jnp.zeros(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        m = v.gather_all(lambda child: (child["score"], child["h"]), reduce="softmax")
        h = gru_state(params, v.pull(), m)
        v.scatter({"h": h, "score": h @ params["s"]})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"h": (self.hidden,), "score": ()})
