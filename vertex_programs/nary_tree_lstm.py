"""The N-ary Tree-LSTM of Tai et al."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


@dataclasses.dataclass(frozen=True)
class NaryTreeLSTM:
    """N-ary Tree-LSTM: Tai, Socher and Manning, 2015, section 3.2, equations 9-14.

    Children are ordered, at most N of them, and each has weights of its own; so has each pair of a forget gate and a
    child. With a zero state where a child is missing,

        i, o, u = sigmoid, sigmoid, tanh (x W_iou + sum_l h_l U_iou,l + b_iou)
        f_k     = sigmoid(x W_f + sum_l h_l U_f,kl + b_f)        k = 1 .. N
        c       = i u + sum_k f_k c_k
        h       = o tanh(c)

    All of the products with h_1 .. h_N are one: [h_1, ..., h_N] U, whose columns are i, o, u, f_1, ..., f_N.

    **Fields:** `hidden`, H; `inputs`, E; `arity`, N; `dtype` of the initial parameters.
    **Parameters:** `w_iou` (E, 3H), `w_f` (E, H), `u` (N H, (3 + N) H), `b_iou` (3H,), `b_f` (H,), which starts at 1.
    **Pushes** h.
    """

    hidden: int
    inputs: int
    arity: int = 2
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key, 3)
        rows = self.arity * self.hidden
        return {
            "w_iou": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=3),
            "w_f": glorot(keys[1], self.inputs, self.hidden, self.dtype),
            "u": glorot(keys[2], rows, self.hidden, self.dtype, gates=3 + self.arity),
            "b_iou": jnp.zeros(3 * self.hidden, self.dtype),
            "b_f": jnp.ones(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        x = v.pull()
        kids = [v.gather(k) for k in range(self.arity)]
        z = jnp.concatenate([kid["h"] for kid in kids]) @ params["u"]
        i, o, u = jnp.split(z[: 3 * self.hidden] + (x @ params["w_iou"] + params["b_iou"]), 3)
        forget = x @ params["w_f"] + params["b_f"]
        c = jax.nn.sigmoid(i) * jnp.tanh(u)
        for kid, f in zip(kids, jnp.split(z[3 * self.hidden :], self.arity), strict=True):
            c += jax.nn.sigmoid(f + forget) * kid["c"]
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=self.arity)
