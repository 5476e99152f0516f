"""The device operations of `kernels/_mosaic` in plain Pallas, for Pallas' interpreter: one thread block, any machine, no GPU.

The functions have the parameters of those of `_mosaic.mosaic`, which documents them. Products read packed weights, so
tests cover the packing, too. An access outside a buffer, which may end a program on a GPU, becomes visible: a read gives NaN
(of integers the least), and a write fills the whole buffer with it.
"""

import functools
import operator
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from cavs.kernels import persistent
from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.pack import RING_ORDER, PackedWeight
from cavs.kernels._layout.specs import ProductSpec, Tile, WeightSpec
from cavs.kernels._program.arrays import Ref
from cavs.kernels.precision import stored_as
from tests import packing

_Read: TypeAlias = tuple[Ref, jax.Array]  # a tensor, and for each row of a tile which of its rows a product reads


def sync() -> None:
    """Does nothing: the interpreter runs one thread after another."""


def begin_exchange(ring: Sequence[Ref], config: LaunchConfig) -> None:
    """Checks that no other thread block has to send sums."""
    assert config.split == 1 and not ring


def end_exchange(ring: Sequence[Ref]) -> None:
    """Does nothing; see `begin_exchange`."""


def begin_ring(ring: Ref, config: LaunchConfig) -> None:
    """Does nothing: `wide_product` reads the weights where they are."""


def group_barrier(counters: Ref, slot: jax.Array, target: jax.Array, spins: int) -> None:
    """Does nothing: there is one thread block."""
    del counters, slot, target, spins


def mark_unwritten(outputs: Sequence[jax.ShapeDtypeStruct], after: jax.Array) -> list[jax.Array]:
    """Returns arrays that nothing has written."""
    del after
    return [persistent.unwritten(out.shape, out.dtype) for out in outputs]


def pack_weights(
    parts: Sequence[PackedWeight],
    weights: Sequence[jax.Array],
    inverses: Sequence[jax.Array | None],
    unit: int,
    config: LaunchConfig,
) -> jax.Array:
    """Packs the weights, divided by their inverses."""
    scaled = [w if one is None else w / one for w, one in zip(weights, inverses, strict=True)]
    return packing.pack_weights(parts, scaled, unit, config.hb, config.precision)


def copy_weights(packed: Ref, cta: jax.Array, target: Ref, config: LaunchConfig) -> None:
    """Copies the thread block's packed weights."""
    del config
    target[...] = packed[cta]


def _numbers(tile: Tile) -> jax.Array:
    return jnp.minimum(tile.row + jnp.arange(tile.shape[0]), tile.last)


def _columns(tile: Tile, column: jax.Array, wide: bool = True) -> jax.Array:
    return column + jnp.arange(tile.shape[1]) if wide else jnp.full(tile.shape[1], column)


def number(tile: Tile, index: Ref) -> jax.Array:
    """Loads `index[r]` for each row r of a tile."""
    return jnp.broadcast_to(_at(index, _numbers(tile))[:, None], tile.shape)


def _at(ref: Ref, *index: jax.Array) -> jax.Array:
    """Returns elements of a buffer; NaN, or the least integer, for positions outside it."""
    index = tuple(jnp.where(i < 0, n, i) for i, n in zip(index, ref.shape, strict=False))  # a negative one is outside, too
    return ref[...].at[index].get(mode="fill")


def load(
    tile: Tile, dtype: np.dtype, ref: Ref, index: jax.Array | None, base: jax.Array, column: jax.Array, wide: bool = True
) -> jax.Array:
    """Loads a tile's rows of a tensor, by `index` if given; negative indices give zeros."""
    n = _numbers(tile) if index is None else index[:, 0]
    got = _at(ref, (jnp.maximum(n, 0) + base)[:, None], _columns(tile, column, wide)[None])
    return jnp.where(n[:, None] < 0, 0, got).astype(dtype)


def prefetch(tile: Tile, ref: Ref, base: jax.Array, column: jax.Array) -> None:
    """Does nothing: there is no cache."""


def segments(
    tile: Tile,
    dtype: np.dtype,
    ref: Ref,
    index: Ref | None,
    first: Ref,
    count: Ref,
    base: jax.Array,
    column: jax.Array,
    largest: bool,
    wide: bool = True,
    offset: jax.Array | None = None,
) -> jax.Array:
    """Sums, or takes the maximum of, `count[r]` rows of a tensor for each row r of a tile."""
    columns = _columns(tile, column, wide)
    begin, size = _at(first, _numbers(tile) + base), _at(count, _numbers(tile) + base)
    start = jnp.full(tile.shape, -jnp.inf if largest else 0.0, dtype)

    def one(k: jax.Array, total: jax.Array) -> jax.Array:
        e = begin + jnp.minimum(k, jnp.maximum(size - 1, 0))
        n = e if index is None else _at(index, e)
        got = _at(ref, (jnp.maximum(n, 0) + (0 if offset is None else offset))[:, None], columns[None])
        got = jnp.where(((n < 0) | (k >= size))[:, None], start, got)
        return jnp.maximum(total, got) if largest else total + got

    return lax.fori_loop(0, jnp.max(size), one, start)


def whole_rows(tile: Tile, dtype: np.dtype, ref: Ref, base: jax.Array, unit: int, valid: int, operation: str) -> jax.Array:
    """Reduces all elements of each of a tile's rows of a tensor."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[operation]
    rows = _at(ref, _numbers(tile) + base).reshape(tile.shape[0], -1, unit)[:, :, :valid]
    return jnp.broadcast_to(reduce(rows, axis=(1, 2))[:, None], tile.shape).astype(dtype)


def store(
    tile: Tile,
    ref: Ref,
    value: jax.Array,
    base: jax.Array,
    column: jax.Array,
    valid: jax.Array | None = None,
    awaited: bool = False,
) -> None:
    """Stores a tile's rows to a tensor, zeros from column `valid` of the tile on."""
    del awaited
    if valid is not None:
        value = jnp.where(jnp.arange(tile.shape[1]) < valid, value, 0)
    n = tile.row + jnp.arange(tile.shape[0])
    at = jnp.where(n <= tile.last, n + base, ref.shape[0])
    value = (value * _factor(ref)).astype(ref.dtype)
    stored = ref[...].at[at[:, None], _columns(tile, column)[None]].set(value, mode="drop")
    outside = ((n <= tile.last) & ((n + base < 0) | (n + base >= ref.shape[0]))).any() | (column + tile.shape[1] > ref.shape[1])
    ref[...] = jnp.where(outside, jnp.asarray(_POISON[jnp.issubdtype(ref.dtype, jnp.floating)], ref.dtype), stored)


_POISON = {True: np.nan, False: np.iinfo(np.int32).min}


def _factor(ref: Ref) -> float:
    """What the elements of a tensor are multiplied by in memory."""
    precision = stored_as(ref.dtype)
    return precision.factor if precision else 1


def read_product(tile: Tile, part: Ref, slots: int, column: jax.Array) -> jax.Array:
    """Adds the partial sums of a product for a tile."""
    total = jnp.zeros(tile.shape, jnp.float32)
    for w in range(slots):
        total = total + part[w, pl.ds(0, tile.shape[0]), pl.ds(column, tile.shape[1])]
    return total


def product_rows(tile: Tile, indices: Sequence[Ref | None], bases: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns which rows the sources of a tile's products are."""
    at = _numbers(tile)
    return [(at if index is None else _at(index, at)) + base for index, base in zip(indices, bases, strict=True)]


def product(
    tile: Tile,
    specs: Sequence[ProductSpec],
    refs: Sequence[Ref],
    numbers: list[jax.Array],
    weights: Ref,
    part: Ref,
    cta: jax.Array,
    counters: Ref,
) -> None:
    """Computes all products of a phase for a tile, into the partial sums. It cannot read weights of 16 bits."""
    del tile, counters
    left = zip(refs, numbers, strict=True)
    for spec in specs:
        _product(spec, [next(left) for _ in spec.sources], weights, part, cta)


def _product(spec: ProductSpec, read: list[_Read], weights: Ref, part: Ref, cta: jax.Array) -> None:
    k, sources = spec.chunk * spec.chunks, _sources(spec, read)
    words = weights[...] if spec.resident else weights[cta]
    for weight in spec.weights:
        flat, at, w = (_loosened(spec, weight, words), 0, []) if spec.tight else (words, weight.offset, [])
        for m in range(weight.tiles):
            halves = 1 if weight.half and m == weight.tiles - 1 else 2
            tile = lax.slice(flat, (at,), (at + halves * 8 * k,)).reshape(k // 16, 2, 8, 4, 2, halves)
            w.append(tile.transpose(5, 2, 0, 3, 1, 4).reshape(halves * 8, k))
            at += halves * 8 * k
        w = jnp.concatenate(w)
        _multiply(spec, weight, sources, w, part)


def _multiply(spec: ProductSpec, weight: WeightSpec, sources: list[jax.Array], w: jax.Array, part: Ref) -> None:
    """Multiplies all operands of a weight by it, (columns, K), into `part`."""
    for o, column in zip(weight.operands, weight.columns, strict=True):
        x = functools.reduce(operator.add, [sources[s] for s in spec.operands[o]])
        z = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        for n in range(spec.slots):
            part[n, :, pl.ds(column, w.shape[0])] = z if n == 0 else jnp.zeros_like(z)


def _sources(spec: ProductSpec, read: list[_Read]) -> list[jax.Array]:
    """Returns the rows of each source of a product."""
    k = spec.chunk * spec.chunks
    parts = [
        _at(ref, mine[:, None], source.column + jnp.arange(k // spec.joined)[None]).astype(jnp.float32) / _factor(ref)
        for (ref, mine), source in zip(read, spec.sources, strict=True)
    ]
    return [jnp.concatenate(parts[i : i + spec.joined], 1) for i in range(0, len(parts), spec.joined)]


def _loosened(spec: ProductSpec, weight: WeightSpec, words: jax.Array) -> jax.Array:
    """Returns the words of a tight weight with one element in each."""
    steps = 2 * spec.chunks // spec.splits
    triples = -(-steps * weight.tiles // 3)
    tight = lax.slice(words, (weight.offset,), (weight.offset + spec.splits * triples * 256,))
    a, b = jnp.moveaxis(lax.bitcast_convert_type(tight, jnp.uint32).reshape(spec.splits, triples, 2, 32, 4), 2, 0)
    three = jnp.stack([a, b, (a << 19) + (b << 6)], 2) & jnp.uint32(0xFFFFE000)
    fragments = three.reshape(spec.splits, -1, 32, 4)[:, : steps * weight.tiles]
    fragments = fragments.reshape(spec.splits * steps, weight.tiles, 32, 4).transpose(1, 0, 2, 3)
    return lax.bitcast_convert_type(fragments, jnp.float32).reshape(-1)


def wide_product(
    tile: Tile,
    specs: Sequence[ProductSpec],
    refs: Sequence[Ref],
    indices: Sequence[Ref | None],
    bases: Sequence[jax.Array],
    weights: Ref,
    part: Ref,
    ring: Ref,
    cta: jax.Array,
) -> None:
    """Computes all products of a phase for a tile of a wide level, into the partial sums."""
    del ring
    left = zip(refs, product_rows(tile, indices, bases), strict=True)
    for spec in specs:
        sources = _sources(spec, [next(left) for _ in spec.sources])
        widths = [weight.width for weight in spec.weights]
        size = 32 * spec.chunks * sum(widths)
        w = lax.slice(weights[cta], (spec.ring,), (spec.ring + size,)).reshape(spec.chunks, -1, 8, 8, 4)
        w = jnp.stack([jnp.stack([w[:, :, c, n ^ c] for n in range(8)], 2) for c in range(8)], 2)  # pieces in order
        w = w.reshape(spec.chunks, sum(widths), 32)
        w = jnp.stack([w[:, :, int(n)] for n in np.argsort(RING_ORDER)], 2)
        w = w.transpose(1, 0, 2).reshape(sum(widths), -1)
        for weight, width in zip(spec.weights, widths, strict=True):
            _multiply(spec, weight, sources, w[weight.offset : weight.offset + width], part)
