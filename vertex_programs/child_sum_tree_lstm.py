"""The child-sum Tree-LSTM of Tai et al."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class ChildSumTreeLSTM:
    """Child-sum Tree-LSTM: Tai, Socher and Manning, 2015, section 3.1, equations 2-8; Cavs, figure 4.

    A vertex may have any number of children, in any order (dependency trees, DAGs). Every vertex has an input x.

        h~      = sum over children k of h_k
        i, o, u = sigmoid, sigmoid, tanh (x W_iou + h~ U_iou + b_iou)
        f_k     = sigmoid(x W_f + h_k U_f + b_f)
        c       = i u + sum over children k of f_k c_k
        h       = o tanh(c)

    Vertices push h. `init` returns a dict of parameters:

    - `w_iou` (E, 3H), `u_iou` (H, 3H), `b_iou` (3H,)
    - `w_f` (E, H), `u_f` (H, H), `b_f` (H,), initialised to 1

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
        keys = jax.random.split(key, 4)
        return {
            "w_iou": glorot(keys[0], self.inputs, self.hidden, self.dtype, gates=3),
            "u_iou": glorot(keys[1], self.hidden, self.hidden, self.dtype, gates=3),
            "b_iou": jnp.zeros(3 * self.hidden, self.dtype),
            "w_f": glorot(keys[2], self.inputs, self.hidden, self.dtype),
            "u_f": glorot(keys[3], self.hidden, self.hidden, self.dtype),
            "b_f": jnp.ones(self.hidden, self.dtype),
        }

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        x = v.pull()
        h = v.gather_all(lambda child: child["h"])
        i, o, u = jnp.split(h @ params["u_iou"] + (x @ params["w_iou"] + params["b_iou"]), 3)
        forget = x @ params["w_f"] + params["b_f"]
        kept = v.gather_all(lambda child: jax.nn.sigmoid(child["h"] @ params["u_f"] + forget) * child["c"])
        c = jax.nn.sigmoid(i) * jnp.tanh(u) + kept
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)})
