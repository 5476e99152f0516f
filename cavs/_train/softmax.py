"""Softmax cross-entropy of a linear layer, `softmax(h @ w + b)`, without ever holding all of its logits.

The rows of a batch times a vocabulary of 50,000 words are gigabytes. Rows are taken in chunks, and the derivative is
computed together with the value, chunk by chunk, while the chunk's logits exist: with p = softmax(h w + b),

    d loss / d logits = weight (p - onehot(label)) =: g,   d h = g wᵀ,   d w = Σ_chunks hᵀ g,   d b = Σ g

so each logit is computed once and none is kept (`jax.checkpoint` would compute them twice).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Logits that exist at one time. On a CPU the chunk should stay near the last-level cache.
CHUNK_BYTES = 16 << 20


@jax.custom_vjp
def softmax_loss(h: Any, w: Any, b: Any, labels: Any, weight: Any) -> tuple[Any, Any, Any]:
    """The weighted loss of N rows.

    **Arguments:** `h` (N, H), `w` (H, C), `b` (C,), `labels` (N,) int32, `weight` (N,), 0 where a row does not count.

    **Returns:** the scalar Σ weight · nll, whose derivatives by `h`, `w` and `b` are defined; and, without derivative,
    `nll` (N,) and whether the label is the likeliest class, (N,) bool.
    """
    return _forward(h, w, b, labels, weight, derivative=False)[0]


def _fwd(h: Any, w: Any, b: Any, labels: Any, weight: Any) -> Any:
    return _forward(h, w, b, labels, weight, derivative=True)


def _bwd(derivatives: Any, cotangents: Any) -> Any:
    ct = cotangents[0]
    return *(ct * d for d in derivatives), None, None


softmax_loss.defvjp(_fwd, _bwd)


def _forward(h: Any, w: Any, b: Any, labels: Any, weight: Any, derivative: bool) -> tuple[Any, Any]:
    rows, classes = h.shape[0], w.shape[1]
    size = min(rows, max(8, CHUNK_BYTES // (4 * classes) // 8 * 8))
    chunks = -(-rows // size)

    def one(sums: Any, chunk: Any) -> tuple[Any, Any]:
        h, labels, weight = chunk
        logits = h @ w + b
        top = logits.max(-1)
        exp = jnp.exp(logits - top[:, None])
        total = exp.sum(-1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        nll = jnp.log(total) + top - picked
        sums = [sums[0] + jnp.vdot(weight, nll), *sums[1:]]
        if not derivative:
            return sums, (nll, picked >= top)
        hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]
        g = weight[:, None] * (exp / total[:, None] - hit)
        return [sums[0], sums[1] + h.T @ g, sums[2] + g.sum(0)], (nll, picked >= top, g @ w.T)

    def split(x: Any) -> Any:
        x = jnp.pad(x, ((0, chunks * size - rows), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(chunks, size, *x.shape[1:])

    sums = [jnp.zeros((), h.dtype), *((jnp.zeros_like(w), jnp.zeros_like(b)) if derivative else ())]
    if chunks == 1:
        sums, outs = one(sums, (h, labels, weight))
    else:
        sums, outs = lax.scan(one, sums, (split(h), split(labels), split(weight)))
        outs = [x.reshape(chunks * size, *x.shape[2:])[:rows] for x in outs]
    return (sums[0], outs[0], outs[1]), (outs[2], sums[1], sums[2]) if derivative else None
