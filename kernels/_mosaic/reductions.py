"""Reductions of tensors in global memory: over the edges of each row, and over the elements of each row."""

import jax
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import REF, SCALAR, elements, inline_mgpu, tile_type
from cavs.kernels._mosaic.types import I32, Context, Element, Fragments, MemRef, Scalar
from cavs.kernels._mosaic.value import Value, as_index, constant, int32, load_element, maximum, minimum, scalar, select
from cavs.kernels._program.arrays import Ref


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
    """Reduces `ref[n + offset, column + j]` over the edges e of each row r of a tile, for each unit j.

    The edges of row r are `count[base + r]` values of e from `first[base + r]` on; n is `index[e]`, or e without an index.

    Args:
        tile: The tile.
        dtype: float32.
        ref: A tensor of `dtype` in global memory, of shape (rows, width).
        index: int32 of shape (edges,) in global memory, or `None`. Negative numbers are skipped.
        first: int32 of shape (rows,) in global memory.
        count: int32 of shape (rows,) in global memory.
        base: An int32 scalar.
        column: An int32 scalar.
        largest: Whether to take the maximum instead of the sum.
        wide: Whether rows have several units; otherwise every unit reduces column `column`.
        offset: An int32 scalar, or `None` for 0.

    Returns:
        An array of `dtype` and the tile's shape: zero, or -inf for a maximum, if a row has no edges. Rows past the tile's last
        repeat the last row.
    """

    @inline_mgpu(
        arg_types=(REF, [REF] * (index is not None), REF, REF, *[SCALAR] * 4, [SCALAR] * (offset is not None)),
        return_type=tile_type(tile, dtype),
    )
    def emit(
        ctx: Context,
        ref: MemRef,
        index: list[MemRef],
        first: MemRef,
        count: MemRef,
        base: Scalar,
        row: Scalar,
        last: Scalar,
        column: Scalar,
        offset: list[Scalar],
    ) -> Fragments:
        def value(i: I32, j: I32) -> Element:
            r = minimum(scalar(row) + i, scalar(last)) + scalar(base)
            begin = load_element(first, r)
            end = begin + load_element(count, r)
            c = as_index(scalar(column) + j if wide else scalar(column))
            start = constant(mu.dtype_to_ir_type(dtype), -np.inf if largest else 0)
            loop = scf.ForOp(as_index(begin), as_index(end), as_index(1), [start])
            with ir.InsertionPoint(loop.body):
                e = loop.induction_variable
                n = load_element(index[0], e) if index else int32(e)
                at = maximum(n, 0)
                at = at + scalar(offset[0]) if offset else at
                got = load_element(ref, at, c)
                if index:
                    got = select(n < 0, start, got)
                total = Value(loop.inner_iter_args[0])
                scf.yield_([arith.maximumf(total, got) if largest else total + got])
            return Value(loop.results[0])

        return elements(tile, dtype, value)

    more = [] if offset is None else [offset]
    return emit(ref, [] if index is None else [index], first, count, base, tile.row, tile.last, column, more)


def whole_rows(tile: Tile, dtype: np.dtype, ref: Ref, base: jax.Array, unit: int, valid: int, operation: str) -> jax.Array:
    """Reduces all elements of row `base + r` of a tensor, for each row r of a tile.

    Args:
        tile: The tile.
        dtype: float32.
        ref: A tensor of `dtype` in global memory, of shape (rows, width).
        base: An int32 scalar.
        unit: The width of a unit vector in memory.
        valid: The number of elements of a unit vector; the zeros after them are skipped.
        operation: "sum", "max" or "min".

    Returns:
        An array of `dtype` and the tile's shape: each row repeats its result. Rows past the tile's last repeat the last row's.
    """
    blocks = [(0, ref.shape[1])] if valid == unit else [(at, at + valid) for at in range(0, ref.shape[1], unit)]
    combine = {"sum": arith.addf, "max": arith.maximumf, "min": arith.minimumf}[operation]
    neutral = {"sum": 0.0, "max": -np.inf, "min": np.inf}[operation]

    @inline_mgpu(
        arg_types=(REF, SCALAR, SCALAR, SCALAR),
        return_type=tile_type(tile, dtype),
    )
    def emit(ctx: Context, ref: MemRef, base: Scalar, row: Scalar, last: Scalar) -> Fragments:
        def value(i: I32, j: I32) -> Element:
            r = as_index(minimum(scalar(row) + i, scalar(last)) + scalar(base))
            total = constant(mu.dtype_to_ir_type(dtype), neutral)
            for begin, end in blocks:
                loop = scf.ForOp(as_index(begin), as_index(end), as_index(1), [total])
                with ir.InsertionPoint(loop.body):
                    scf.yield_([combine(loop.inner_iter_args[0], load_element(ref, r, loop.induction_variable))])
                total = Value(loop.results[0])
            return total

        return elements(tile, dtype, value)

    return emit(ref, base, tile.row, tile.last)
