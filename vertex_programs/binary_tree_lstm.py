"""The binary child-sum Tree-LSTM of Cavs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot


@dataclasses.dataclass(frozen=True)
class BinaryTreeLSTM:
    """Tree-LSTM over two children: Cavs (Xu et al., 2018), figure 4 with N = 2; Tai, Socher and Manning, 2015, equations 2-8.

    With h = h_1 + h_2 and a zero state where a child is missing,

        i, o, u = sigmoid, sigmoid, tanh (x W_iou + h U_iou + b_iou)
        f_k     = sigmoid(x W_f + h_k U_f + b_f)        k = 1, 2
        c       = i u + f_1 c_1 + f_2 c_2
        h       = o tanh(c)

    Constituency trees have words at their leaves alone. So with `leaf_inputs_only` inner vertices do not read x at all
    (there is no W_f, and no product of x with W_iou but at leaves); the rows of `inputs` at inner vertices do not matter.

    **Fields:** `hidden`, H; `inputs`, E, the width of x; `leaf_inputs_only`; `dtype` of the initial parameters.
    **Parameters:** `w_iou` (E, 3H), `u_iou` (H, 3H), `b_iou` (3H,), `u_f` (H, H), `b_f` (H,), which starts at 1, and,
    unless `leaf_inputs_only`, `w_f` (E, H).
    **Pushes** h.
    """

    hidden: int
    inputs: int
    leaf_inputs_only: bool = True
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        keys = jax.random.split(key, 4)
        params = {
            "w_iou": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=3),
            "u_iou": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=3),
            "b_iou": jnp.zeros(3 * self.hidden, self.dtype),
            "u_f": glorot(keys[2], self.hidden, self.hidden, self.dtype),
            "b_f": jnp.ones(self.hidden, self.dtype),
        }
        if not self.leaf_inputs_only:
            params["w_f"] = glorot(keys[3], self.inputs, self.hidden, self.dtype)
        return params

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        left, right = v.gather(0), v.gather(1)
        iou, forget = params["b_iou"], params["b_f"]
        if v.is_leaf() or not self.leaf_inputs_only:
            iou = v.pull() @ params["w_iou"] + iou
        if not self.leaf_inputs_only:
            forget = v.pull() @ params["w_f"] + forget
        i, o, u = jnp.split((left["h"] + right["h"]) @ params["u_iou"] + iou, 3)
        f_left = jax.nn.sigmoid(left["h"] @ params["u_f"] + forget)
        f_right = jax.nn.sigmoid(right["h"] @ params["u_f"] + forget)
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + f_left * left["c"] + f_right * right["c"]
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=2)
