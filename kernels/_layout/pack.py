"""Weights in the order in which `mma.sync` reads them, so that a lane takes its four registers with one read; or `wgmma`."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.widths import HALVES

# Where each of a chunk's 32 numbers of K lies for a `wgmma` of a wide level: step s multiplies numbers 8 s ... of this, and
# lane t of the other operand holds the t-th of them and the one 4 after it, so it reads 4 numbers of K at once.
RING_ORDER = np.array([16 * (s // 2) + 4 * (p % 4) + 2 * (s % 2) + p // 4 for s in range(4) for p in range(8)])


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """One weight as packed: its variable, the axis that is contracted, K, a CTA's columns, and where its words begin.

    `splits`: warps of a warpgroup among which K is divided; `tight`: three tf32 numbers lie in two words.
    """

    variable: Any
    axis: int
    k: int
    width: int
    offset: int
    splits: int
    tight: bool

    def fragments(self) -> int:
        """Of 16 columns and 8 numbers of K, that a warp multiplies; where `tight`, a multiple of three has room."""
        return self.width // 16 * (self.k // 8 // self.splits)

    def words(self, precision: str) -> int:
        """Of a CTA, 32 bits each."""
        if self.tight:
            return self.splits * -(-self.fragments() // 3) * 256
        return self.width * self.k // (2 if precision in HALVES else 1)


def pack_weights(parts: Sequence[Packed], weights: Sequence[Any], unit: int, hb: int, precision: str) -> Any:
    """(CTAs, words) 32-bit words: for each CTA its columns of every weight.

    A weight's columns for CTA j are units j*hb ... of each of its blocks of `unit` columns, in tiles of 16 (and half a
    tile of 8). Words of a tile go by step of K, lane, and register; lane 4g + t of step s of chunk c holds rows g and g + 8
    of the tile at k = c * chunk + t * chunk / 4 + s * chunk / 8 and beyond: a permutation of K that lets each lane of the
    other operand read 16 bytes at once.

    A tf32 number has 19 bits, and a product does not look at the other 13. Where a part is `tight`, the 12 words of three
    fragments in the order in which a warp multiplies them become 8, a and b, with the third number's bits in those 13:
    it is (a << 19) + (b << 6), of which a product reads what it should.
    """
    ctas = unit // hb
    chunk = 32 if precision in HALVES else 16
    out = []
    for part, weight in zip(parts, weights, strict=True):
        w = weight if part.axis == 0 else weight.T
        k, n = w.shape
        w = w.reshape(k, n // unit, ctas, hb).transpose(2, 1, 3, 0).reshape(ctas, part.width, k)
        w = _rounded(w) if precision == "tf32" else w
        whole = part.width // 16 * 16
        for columns, halves in ((w[:, :whole], 2), (w[:, whole:], 1)):
            if not columns.shape[1]:
                continue
            if precision in HALVES:
                x = columns.astype(HALVES[precision]).reshape(ctas, -1, halves, 8, k // chunk, 4, 2, 2, 2)
                x = lax.bitcast_convert_type(x.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8), jnp.float32)
            else:
                x = columns.reshape(ctas, -1, halves, 8, k // chunk, 4, 2, 2).transpose(0, 1, 4, 6, 3, 5, 7, 2)
            out.append((_tight(x.reshape(ctas, -1, 2 * k // chunk, 32, 4), part) if part.tight else x).reshape(ctas, -1))
    return jnp.concatenate(out, axis=1) if out else jnp.zeros((ctas, 4), jnp.float32)


def pack_ring(parts: Sequence[Packed], weights: Sequence[Any], unit: int, hb: int, precision: str) -> Any:
    """(CTAs, words): for each CTA its columns of the weights of every wide product (`_mosaic.wide`), by 32 numbers of K.

    `parts` of one product follow each other and share an `offset`. In a chunk the columns of all its weights lie one after
    another, each 128 bytes, in `RING_ORDER`; of these the eight pieces of 16 bytes are where a matrix descriptor with a
    128-byte swizzle wants them: piece n of column c at n ^ (c % 8).
    """
    out = []
    for _, group in itertools.groupby(zip(parts, weights, strict=True), lambda pair: pair[0].offset):
        columns = []
        for part, weight in group:
            w = weight if part.axis == 0 else weight.T
            w = _rounded(w) if precision == "tf32" else w
            shape = (unit // hb, w.shape[0] // 32, part.width, 8, 4)
            cta, chunk, column, piece, at = (lax.broadcasted_iota(jnp.int32, shape, n) for n in range(5))
            k = 32 * chunk + jnp.asarray(RING_ORDER)[4 * (piece ^ column % 8) + at]
            columns.append(w.at[k, column // hb * unit + cta * hb + column % hb].get(mode="promise_in_bounds"))
        out.append(jnp.concatenate(columns, 2).reshape(unit // hb, -1))
    return jnp.concatenate(out, axis=1)


def _rounded(w: Any) -> Any:
    """To the nearest tf32 number; the product would cut the last bits off."""
    bits = lax.bitcast_convert_type(w, jnp.uint32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & jnp.uint32(0xFFFFE000)
    return jnp.where(jnp.isnan(w), w, lax.bitcast_convert_type(bits, jnp.float32))  # not carried into the sign


def _tight(x: Any, part: Packed) -> Any:
    """(CTAs, tiles, steps of K, lanes, registers) to (CTAs, warps, triples, 2, lanes, registers)."""
    ctas, tiles = x.shape[:2]
    bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(ctas, tiles, part.splits, -1, 32, 4)
    bits = bits.transpose(0, 2, 3, 1, 4, 5).reshape(ctas, part.splits, -1, 32, 4)
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, -bits.shape[2] % 3), (0, 0), (0, 0)))
    one, two, three = jnp.moveaxis(bits.reshape(ctas, part.splits, -1, 3, 32, 4), 3, 0)
    both = jnp.stack([one | (three >> 19) - (two >> 13) & 0x1FFF, two | three >> 6 & 0x1F80], 3)
    return lax.bitcast_convert_type(both, jnp.float32)
