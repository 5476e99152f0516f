"""Softmax cross-entropy of a linear layer, `softmax(h @ w + b)`, without storing all of its logits.

The logits of a batch over a vocabulary of 50,000 words take gigabytes. The rows are therefore processed in chunks, and the
derivative of a chunk is computed together with its value, while its logits exist. With p = softmax(h w + b),

    d loss / d logits = weight (p - onehot(label)) =: g,   d h = g wᵀ,   d w = Σ_chunks hᵀ g,   d b = Σ g

so each logit is computed once and none is stored (`jax.checkpoint` would compute them twice).
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from cavs._function.arrays import as_array
from cavs._function.children import wide
from cavs._jaxpr.mesh_types import unsharded, vary
from cavs._jaxpr.settings import promoting
from cavs._run.manual_axes import checked_axes

# Bytes of the logits that exist at one time. On a CPU a chunk should be about as large as the last-level cache.
CHUNK_BYTES = 16 << 20

Outputs: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # the loss, nll (N,), and whether each row is right (N,)
Derivatives: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # with respect to h, w, b and weight


@promoting
def softmax_loss(
    h: ArrayLike, w: ArrayLike, b: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the cross-entropy of `softmax(h @ w + b)` without storing the logits of all rows.

    ```python
    loss, nll, right = cavs.data.softmax_loss(h, params["w"], params["b"], sched.label)       # no loss where the label is -1
    mean = cavs.data.total(loss) / cavs.data.total(sched.label >= 0)
    ```

    The rows are processed in chunks of 16 MiB of logits, and the derivative of a chunk is computed while its logits exist, so a
    vocabulary may be large. For `jax.grad` of one order; vertices without a label do not count.

    Args:
        h: (N, H) features.
        w: (H, C) weights.
        b: (C,) biases.
        labels: int[N], the classes; -1 for a row without a label.
        weight: (N,) weights of the rows. `None`: 1 for each row with a label.

    Returns:
        The scalar sum of weight * nll over the rows, which is differentiable with respect to `h`, `w`, `b` and `weight`; and,
        without derivatives, `nll` float[N], the negative log-likelihoods, and whether the label is the most likely class,
        bool[N], also if others are as likely. Rows without a label are meaningless in `nll`, and `False` in the latter.

    Raises:
        ValueError: if shapes do not fit together, or `labels` are no integers.
    """
    named = {"h": h, "w": w, "b": b, "labels": labels}
    h, w, b, labels = (unsharded(as_array(x, f"softmax_loss: {name}")) for name, x in named.items())
    weight = jnp.ones(labels.shape, h.dtype) if weight is None else unsharded(as_array(weight, "softmax_loss: weight"))
    _check(h, w, b, labels, weight)
    has = labels >= 0
    weight = jnp.where(has, weight.astype(jnp.result_type(h, w, b)), 0)
    h, w, b, labels, weight = (vary(x, checked_axes()) for x in (h, w, b, labels, weight))
    loss, nll, right = _loss(h, w, b, labels, weight)
    return loss, nll, right & has


def _check(h: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array, weight: jax.Array) -> None:
    """Raises `ValueError` if shapes do not fit together, which would broadcast, or the labels are no integers."""
    rows, width, classes = len(h) if h.ndim else 0, w.shape[0] if w.ndim else 0, w.shape[-1:]
    expected = {"h": (rows, width), "w": (width, *classes), "b": classes, "labels": (rows,), "weight": (rows,)}
    if classes == (0,):
        raise ValueError(f"softmax_loss: w: got shape {w.shape}, without classes; expected (H, C) with at least one.")
    for (name, shape), x in zip(expected.items(), (h, w, b, labels, weight), strict=True):
        suits = name != "labels" or jnp.issubdtype(x.dtype, jnp.integer)
        if x.shape != shape or not suits:
            raise ValueError(
                f"softmax_loss: {name}: got {x.dtype}{list(x.shape)}; expected {list(shape)}{'' if suits else ' integers'}, as "
                "features h of shape (N, H) go with w (H, C), b (C,), labels (N,) and weight (N,). Write x.reshape(...), or "
                "labels.astype(int)."
            )


@jax.custom_vjp
def _loss(h: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array, weight: jax.Array) -> Outputs:
    return _forward(h, w, b, labels, weight, derivative=False)[0]


@promoting
def _bwd(derivatives: Derivatives, cotangents: Outputs) -> tuple[jax.Array | None, ...]:
    ct = cotangents[0]
    h, w, b, weight = ((ct * d).astype(d.dtype) for d in derivatives)
    return h, w, b, None, weight


@promoting
def _forward(
    h: jax.Array, w: jax.Array, b: jax.Array, labels: jax.Array, weight: jax.Array, derivative: bool
) -> tuple[Outputs, Derivatives | None]:
    rows, classes = h.shape[0], w.shape[1]
    chunks = max(1, -(-rows // max(8, CHUNK_BYTES // (4 * classes) // 8 * 8)))
    size = rows if chunks == 1 else -(-rows // chunks // 8) * 8  # equal chunks: with full ones, the last may be mostly padding

    def one(sums: list[jax.Array], chunk: tuple[jax.Array, ...]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        h, labels, weight = chunk
        logits = h @ w + b[None]
        top = logits.max(-1)
        exp = jnp.exp(logits - top[:, None])
        total = exp.sum(-1, dtype=sums[0].dtype)  # float16 ends at 65,504, which is fewer than some vocabularies have words
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        nll = (jnp.log(total) + top - picked).astype(logits.dtype)
        counted = jnp.where(weight == 0, 0, weight * nll)  # rows without a label may have infinite logits
        sums = [sums[0] + counted.sum(dtype=sums[0].dtype), *sums[1:]]
        if not derivative:
            return sums, (nll, picked >= top)
        hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]
        g = weight[:, None] * ((exp / total[:, None]).astype(logits.dtype) - hit)
        g = jnp.where(weight[:, None] == 0, 0, g)
        return [sums[0], sums[1] + h.T @ g, sums[2] + g.sum(0)], (nll, picked >= top, g @ w.T)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, chunks * size - rows), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(chunks, size, *x.shape[1:])

    kind = jnp.result_type(h, w, b)
    shapes = ((), w.shape, b.shape) if derivative else ((),)
    sums = [vary(wide(jnp.zeros(shape, kind)), checked_axes()) for shape in shapes]
    if chunks == 1:
        sums, outs = one(sums, (h, labels, weight))
    else:
        sums, outs = lax.scan(one, sums, (split(h), split(labels), split(weight)))
        outs = [x.reshape(chunks * size, *x.shape[2:])[:rows] for x in outs]
    outputs = (sums[0].astype(kind), outs[0], outs[1])
    if not derivative:
        return outputs, None
    return outputs, (outs[2].astype(h.dtype), sums[1].astype(w.dtype), sums[2].astype(b.dtype), outs[0].astype(weight.dtype))


_loss.defvjp(functools.partial(_forward, derivative=True), _bwd)
