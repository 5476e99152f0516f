"""Twins of `_mosaic.mosaic`'s device operations in plain Pallas, for interpret mode: one CTA, any machine, no GPU.

They read the packed weights as the device does, so that the packing is tested too. An access outside a buffer, which ends a
program on a GPU or worse, shows: such a read gives NaN (the least of integers), and such a write fills the buffer with it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from cavs.kernels._layout.pack import RING_ORDER, pack_weights
from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.widths import FACTOR, half_of


def sync() -> None:
    """One thread runs after another."""


def begin_exchange(ring: Sequence[Any], config: Any) -> None:
    """One CTA has nobody to exchange sums with."""
    assert config.split == 1 and not ring


def end_exchange(ring: Sequence[Any]) -> None:
    """Nothing here."""


def begin_ring(ring: Any, config: Any) -> None:
    """Nothing here."""


def group_barrier(counters: Any, slot: Any, target: Any, clustered: bool, spins: int) -> None:
    """One CTA is alone."""
    del counters, slot, target, clustered, spins


def copy_weights(parts: Sequence[Any], refs: Sequence[Any], cta: Any, target: Any, unit: int, hb: int, config: Any) -> None:
    """See `_mosaic.mosaic`."""
    target[...] = pack_weights(parts, [ref[...] for ref in refs], unit, hb, config.precision)[cta]


def _numbers(tile: Tile) -> Any:
    return jnp.minimum(tile.row + jnp.arange(tile.shape[0]), tile.last)


def _columns(tile: Tile, column: Any) -> Any:
    return column + jnp.arange(tile.shape[1])


def number(tile: Tile, index: Any) -> Any:
    """See `_mosaic.mosaic`."""
    return jnp.broadcast_to(_at(index, _numbers(tile))[:, None], tile.shape)


def _at(ref: Any, *index: Any) -> Any:
    """Numbers of a buffer by their places."""
    index = tuple(jnp.where(i < 0, n, i) for i, n in zip(index, ref.shape, strict=False))  # a negative one is outside, too
    return ref[...].at[index].get(mode="fill")


def load(tile: Tile, dtype: Any, ref: Any, index: Any, base: Any, column: Any, wide: bool = True) -> Any:
    """See `_mosaic.mosaic`."""
    n = _numbers(tile) if index is None else index[:, 0]
    columns = _columns(tile, column) if wide else jnp.full(tile.shape[1], column)
    got = _at(ref, (jnp.maximum(n, 0) + base)[:, None], columns[None])
    return jnp.where(n[:, None] < 0, 0, got).astype(dtype)


def prefetch(tile: Tile, ref: Any, base: Any, column: Any) -> None:
    """Nothing here."""


def segments(
    tile: Tile,
    dtype: Any,
    ref: Any,
    index: Any,
    first: Any,
    count: Any,
    base: Any,
    column: Any,
    largest: bool,
    wide: bool = True,
    offset: Any = None,
) -> Any:
    """See `_mosaic.mosaic`."""
    columns = _columns(tile, column) if wide else jnp.full(tile.shape[1], column)
    begin, size = _at(first, _numbers(tile) + base), _at(count, _numbers(tile) + base)
    start = jnp.full(tile.shape, -jnp.inf if largest else 0.0, dtype)

    def one(k: Any, total: Any) -> Any:
        e = begin + jnp.minimum(k, jnp.maximum(size - 1, 0))
        n = e if index is None else _at(index, e)
        got = _at(ref, (jnp.maximum(n, 0) + (0 if offset is None else offset))[:, None], columns[None])
        got = jnp.where(((n < 0) | (k >= size))[:, None], start, got)
        return jnp.maximum(total, got) if largest else total + got

    return lax.fori_loop(0, jnp.max(size), one, start)


def whole_rows(tile: Tile, dtype: Any, ref: Any, base: Any, unit: int, valid: int, operation: str) -> Any:
    """See `_mosaic.mosaic`."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[operation]
    rows = _at(ref, _numbers(tile) + base).reshape(tile.shape[0], -1, unit)[:, :, :valid]
    return jnp.broadcast_to(reduce(rows, axis=(1, 2))[:, None], tile.shape).astype(dtype)


def store(tile: Tile, ref: Any, value: Any, base: Any, column: Any, valid: Any = None, awaited: bool = False) -> None:
    """See `_mosaic.mosaic`."""
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


def _factor(ref: Any) -> Any:
    """By which the numbers of a tensor are multiplied."""
    return FACTOR.get(half_of(ref.dtype) or "", 1)


def read_product(tile: Tile, part: Any, slots: int, column: int) -> Any:
    """See `_mosaic.mosaic`."""
    total = jnp.zeros(tile.shape, jnp.float32)
    for w in range(slots):
        total = total + part[w, pl.ds(0, tile.shape[0]), pl.ds(column, tile.shape[1])]
    return total


def product_rows(tile: Tile, indices: Sequence[Any], bases: Sequence[Any]) -> Any:
    """The rows of a tile that each source is read at."""
    at = _numbers(tile)
    return [(at if index is None else _at(index, at)) + base for index, base in zip(indices, bases, strict=True)]


def product(
    tile: Tile, specs: Sequence[Any], refs: Sequence[Any], numbers: Any, weights: Any, part: Any, cta: Any, counters: Any
) -> None:
    """See `_mosaic.mosaic`. Weights in bf16 are for the device alone."""
    del tile, counters
    left = zip(refs, numbers, strict=True)
    for spec in specs:
        _product(spec, [next(left) for _ in spec.sources], weights, part, cta)


def _product(spec: Any, read: list[tuple[Any, Any]], weights: Any, part: Any, cta: Any) -> None:
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


def _multiply(spec: Any, weight: Any, sources: list[Any], w: Any, part: Any) -> None:
    """A weight's columns (columns, K) times all its operands, into `part`."""
    for o, column in zip(weight.operands, weight.columns, strict=True):
        x = sum(sources[s] for s in spec.operands[o])
        z = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        for n in range(spec.slots):
            part[n, :, pl.ds(column, w.shape[0])] = z if n == 0 else jnp.zeros_like(z)


def _sources(spec: Any, read: list[tuple[Any, Any]]) -> list[Any]:
    """What the sources of a product hold at the rows of a tile."""
    k = spec.chunk * spec.chunks
    parts = [
        _at(ref, mine[:, None], source.column + jnp.arange(k // spec.joined)[None]).astype(jnp.float32) / _factor(ref)
        for (ref, mine), source in zip(read, spec.sources, strict=True)
    ]
    return [jnp.concatenate(parts[i : i + spec.joined], 1) for i in range(0, len(parts), spec.joined)]


def _loosened(spec: Any, weight: Any, words: Any) -> Any:
    """The words of a tight weight, a number in each."""
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
    specs: Sequence[Any],
    refs: Sequence[Any],
    indices: Sequence[Any],
    bases: Sequence[Any],
    weights: Any,
    part: Any,
    ring: Any,
    cta: Any,
) -> None:
    """See `_mosaic.wide`."""
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
