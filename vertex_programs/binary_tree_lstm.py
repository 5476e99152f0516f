"""The binary child-sum Tree-LSTM of Cavs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class BinaryTreeLSTM:
    """Binary Tree-LSTM: Tai, Socher and Manning, 2015, equations 2-8; Cavs, figure 4 with N = 2.

    With h = h_1 + h_2, and zeros for the state of a missing child,

        i, o, u = sigmoid, sigmoid, tanh (x W_iou + h U_iou + b_iou)
        f_k     = sigmoid(x W_f + h_k U_f + b_f)        k = 1, 2
        c       = i u + f_1 c_1 + f_2 c_2
        h       = o tanh(c)

    Vertices push h. Constituency trees have words at their leaves only. With `leaf_inputs_only`, inner vertices do not
    read x: there is no W_f, only leaves multiply x by W_iou, and the rows of `inputs` at inner vertices are ignored.

    `init` returns a dict of parameters:

    - `w_iou` (E, 3H), `u_iou` (H, 3H), `b_iou` (3H,)
    - `u_f` (H, H), `b_f` (H,), initialised to 1
    - `w_f` (E, H), unless `leaf_inputs_only`

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        leaf_inputs_only: Whether only leaves read x.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    leaf_inputs_only: bool = True
    dtype: DTypeLike = jnp.float32

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
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

    def read(self, params: dict[str, jax.Array], v: cavs.Vertex) -> jax.Array:
        """Returns x, (E,)."""
        return v.pull()

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        left, right = v.gather(0), v.gather(1)
        iou, forget = params["b_iou"], params["b_f"]
        if v.is_leaf() or not self.leaf_inputs_only:
            iou = self.read(params, v) @ params["w_iou"] + iou
        if not self.leaf_inputs_only:
            forget = self.read(params, v) @ params["w_f"] + forget
        i, o, u = jnp.split((left["h"] + right["h"]) @ params["u_iou"] + iou, 3)
        f_left = jax.nn.sigmoid(left["h"] @ params["u_f"] + forget)
        f_right = jax.nn.sigmoid(right["h"] @ params["u_f"] + forget)
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + f_left * left["c"] + f_right * right["c"]
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=2)
