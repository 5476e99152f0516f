"""The N-ary Tree-LSTM of Tai et al."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program


@dataclasses.dataclass(frozen=True)
class NaryTreeLSTM:
    """N-ary Tree-LSTM: Tai, Socher and Manning, 2015, section 3.2, equations 9-14.

    A vertex has at most N children, in order. Each child has its own weights, and so has each pair of a forget gate and a
    child. With zeros for the state of a missing child,

        i, o, u = sigmoid, sigmoid, tanh (x W_iou + sum_l h_l U_iou,l + b_iou)
        f_k     = sigmoid(x W_f + sum_l h_l U_f,kl + b_f)        k = 1 .. N
        c       = i u + sum_k f_k c_k
        h       = o tanh(c)

    Vertices push h. The products with h_1 .. h_N are one product, [h_1, ..., h_N] U. The columns of U are i, o, u, f_1, ...,
    f_N.

    `init` returns a dict of parameters:

    - `w_iou` (E, 3H), `w_f` (E, H)
    - `u` (N H, (3 + N) H)
    - `b_iou` (3H,), `b_f` (H,), initialised to 1

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        arity: N, the maximum number of children.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    arity: int = 2
    dtype: DTypeLike = jnp.float32

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
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
        """Computes one vertex."""
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

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction(self, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=self.arity)
