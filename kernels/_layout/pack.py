"""Packs weights in the order in which the tensor cores read them: `mma.sync` on narrow levels, `wgmma` on wide ones."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.jaxprs import Var
from cavs.kernels.precision import PRECISIONS

# The order of a chunk's 32 elements of K for a `wgmma` of a wide level. Step s multiplies elements 8 s to 8 s + 7 of it.
# Lane t of the other operand holds the t-th of them and the one 4 after it, so a lane reads 4 elements of K at once.
RING_ORDER = np.array([16 * (s // 2) + 4 * (p % 4) + 2 * (s % 2) + p // 4 for s in range(4) for p in range(8)])


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of narrow levels, packed so that a lane reads its four registers of an `mma.sync` at once.

    Thread block j has the columns of units j*hb to (j+1)*hb of each block of `unit` columns, in tiles of 16; the last tile may
    have 8. Thread blocks that divide K have the columns of all of them, for their part of K. The words of a tile are ordered by
    step of K, lane, and register. Lane 4g + t of step s of chunk c holds rows g and g + 8 of the tile, from
    k = c * chunk + t * chunk / 4 + s * chunk / 8 on. This permutes K so that each lane of the other operand reads 16 bytes at
    once.

    A tf32 element has 19 bits, and products ignore the other 13. If a part is `tight`, the 12 words of three fragments, in the
    order in which a warp multiplies them, become 8 words: a and b, with the bits of the third element in the ignored bits.
    That element is (a << 19) + (b << 6), of which products again ignore the last 13 bits.

    Attributes:
        variable: The weight.
        axis: Its axis that is contracted.
        k: The length of that axis, in one thread block.
        width: The number of columns of a thread block.
        offset: The word at which it begins.
        splits: The warps of a warpgroup that divide K.
        tight: Whether three tf32 elements are packed into two words.
    """

    variable: Var
    axis: int
    k: int
    width: int
    offset: int
    splits: int
    tight: bool

    def fragments(self) -> int:
        """Returns how many fragments, 16 columns by 8 elements of K, each warp multiplies."""
        return self.width // 16 * (self.k // 8 // self.splits)

    def words(self, precision: str) -> int:
        """Returns the number of 32-bit words of a thread block; a `tight` weight has room for a multiple of three fragments."""
        if self.tight:
            return self.splits * -(-self.fragments() // 3) * 256
        return self.width * self.k // (1 if PRECISIONS[precision].dtype is None else 2)


def pack_ring(parts: Sequence[PackedWeight], weights: Sequence[jax.Array], unit: int, hb: int, precision: str) -> jax.Array:
    """Packs the weights of wide products (`_mosaic.wide`), by chunks of 32 elements of K.

    The parts of one product follow each other and share an `offset`. In a chunk, the columns of all its weights follow each
    other, 128 bytes each, in `RING_ORDER`. The eight pieces of 16 bytes of a column lie where a matrix descriptor with a
    128-byte swizzle expects them: piece n of column c at n ^ (c % 8).

    Args:
        parts: Where each weight goes.
        weights: The matrices.
        unit: The width of a unit vector in memory.
        hb: The units of a thread block.
        precision: See `LaunchConfig`.

    Returns:
        float32 of shape (thread blocks, words).
    """
    out = []
    for _, group in itertools.groupby(zip(parts, weights, strict=True), lambda pair: pair[0].offset):
        columns = []
        for part, weight in group:
            w = weight if part.axis == 0 else weight.T
            w = rounded_to_tf32(w) if PRECISIONS[precision].rounded else w
            shape = (unit // hb, w.shape[0] // 32, part.width, 8, 4)
            cta, chunk, column, piece, at = (lax.broadcasted_iota(jnp.int32, shape, n) for n in range(5))
            k = 32 * chunk + jnp.asarray(RING_ORDER)[4 * (piece ^ column % 8) + at]
            columns.append(w.at[k, column // hb * unit + cta * hb + column % hb].get(mode="promise_in_bounds"))
        out.append(jnp.concatenate(columns, 2).reshape(unit // hb, -1))
    return jnp.concatenate(out, axis=1)


def rounded_to_tf32(w: jax.Array) -> jax.Array:
    """Rounds to the nearest tf32 value; products would truncate."""
    bits = lax.bitcast_convert_type(w, jnp.uint32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & jnp.uint32(0xFFFFE000)
    return jnp.where(jnp.isnan(w), w, lax.bitcast_convert_type(bits, jnp.float32))  # not carried into the sign
