"""Packs the weights of narrow levels in plain JAX: what the kernels' own packing (`_mosaic.weights`) is compared with."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._layout.pack import PackedWeight, rounded_to_tf32
from cavs.kernels.precision import PRECISIONS


def pack_weights(parts: Sequence[PackedWeight], weights: Sequence[jax.Array], unit: int, hb: int, precision: str) -> jax.Array:
    """Packs weights as `PackedWeight` says: float32 of shape (thread blocks, words). The arguments are those of `pack_ring`."""
    ctas = unit // hb
    chunk, dtype, rounded = PRECISIONS[precision].chunk, PRECISIONS[precision].dtype, PRECISIONS[precision].rounded
    out = []
    for part, weight in zip(parts, weights, strict=True):
        w = weight if part.axis == 0 else weight.T
        k, split = part.k, w.shape[0] // part.k
        w = w.reshape(split, k, -1, ctas // split, hb * split).transpose(3, 0, 2, 4, 1).reshape(ctas, part.width, k)
        w = rounded_to_tf32(w) if rounded else w
        whole = part.width // 16 * 16
        for columns, halves in ((w[:, :whole], 2), (w[:, whole:], 1)):
            if not columns.shape[1]:
                continue
            if dtype is not None:
                x = columns.astype(dtype).reshape(ctas, -1, halves, 8, k // chunk, 4, 2, 2, 2)
                x = lax.bitcast_convert_type(x.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8), jnp.float32)
            else:
                x = columns.reshape(ctas, -1, halves, 8, k // chunk, 4, 2, 2).transpose(0, 1, 4, 6, 3, 5, 7, 2)
            out.append((_tight(x.reshape(ctas, -1, 2 * k // chunk, 32, 4), part) if part.tight else x).reshape(ctas, -1))
    return jnp.concatenate(out, axis=1) if out else jnp.zeros((ctas, 4), jnp.float32)


def _tight(x: jax.Array, part: PackedWeight) -> jax.Array:
    """(blocks, tiles, steps of K, lanes, registers) to (blocks, warps, triples, 2, lanes, registers)."""
    ctas, tiles = x.shape[:2]
    bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(ctas, tiles, part.splits, -1, 32, 4)
    bits = bits.transpose(0, 2, 3, 1, 4, 5).reshape(ctas, part.splits, -1, 32, 4)
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[2] % 3), (0, 0), (0, 0)), mode="edge")
    one, two, three = jnp.moveaxis(bits.reshape(ctas, part.splits, -1, 3, 32, 4), 3, 0)
    both = jnp.stack([one | (three >> 19) - (two >> 13) & 0x1FFF, two | three >> 6 & 0x1F80], 3)
    return lax.bitcast_convert_type(both, jnp.float32)
