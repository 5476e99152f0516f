"""Loads of a tile's elements from tensors in global memory, each thread for its own elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import REF, SCALAR, element_address, elements, inline_mgpu, ptx, tile_layout, tile_type
from cavs.kernels._mosaic.types import I32, Context, Element, Fragments, MemRef, Scalar
from cavs.kernels._mosaic.value import element, int32, load_element, minimum, scalar
from cavs.kernels._program.arrays import Ref


def number(tile: Tile, index: Ref) -> jax.Array:
    """Loads `index[r]` for each row r of a tile.

    Args:
        tile: The tile.
        index: int32 of shape (rows,) in global memory.

    Returns:
        int32 of the tile's shape: each row repeats its number. Rows past the tile's last repeat the last row's.
    """

    @inline_mgpu(arg_types=(REF, SCALAR, SCALAR), return_type=tile_type(tile, jnp.int32))
    def emit(ctx: Context, index: MemRef, row: Scalar, last: Scalar) -> Fragments:
        def value(i: I32, j: I32) -> Element:
            return load_element(index, minimum(scalar(row) + i, scalar(last)))

        return elements(tile, np.dtype(np.int32), value)

    return emit(index, tile.row, tile.last)


def load(
    tile: Tile, dtype: np.dtype, ref: Ref, index: jax.Array | None, base: jax.Array, column: jax.Array, wide: bool = True
) -> jax.Array:
    """Loads `ref[base + n, column + j]` for each row r and unit j of a tile, where n is `index[r]`, or r without an index.

    Args:
        tile: The tile.
        dtype: A dtype of 32 bits.
        ref: A tensor of `dtype` in global memory, of shape (rows, width).
        index: The result of `number`, or `None`. Negative numbers give zeros.
        base: An int32 scalar.
        column: An int32 scalar.
        wide: Whether rows have several units; otherwise every unit is `ref[base + n, column]`.

    Returns:
        An array of `dtype` and the tile's shape. Rows past the tile's last repeat the last row.
    """
    width = ref.shape[1]

    @inline_mgpu(
        arg_types=(REF, [tile_layout(tile)] * (index is not None), SCALAR, SCALAR, SCALAR, SCALAR),
        return_type=tile_type(tile, dtype),
    )
    def emit(
        ctx: Context, ref: MemRef, index: list[Fragments], base: Scalar, row: Scalar, last: Scalar, column: Scalar
    ) -> Fragments:
        numbers = iter(index[0].registers.flat if index else [])

        def value(i: I32, j: I32) -> Element:
            c = scalar(column) + j if wide else scalar(column)
            if not index:
                return load_element(ref, minimum(scalar(row) + i, scalar(last)) + scalar(base), c)
            n = element(next(numbers))
            # A predicated load, because a select between two values would wait for the load even if it is not needed.
            text = "{.reg .pred p; setp.ge.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1];}"
            return ptx(text, mu.dtype_to_ir_type(dtype), element_address(ref, width, 4, n + scalar(base), c), n)

        return elements(tile, dtype, value)

    return emit(ref, [] if index is None else [index], base, tile.row, tile.last, column)


def prefetch(tile: Tile, ref: Ref, base: jax.Array, column: jax.Array) -> None:
    """Prefetches into L2 what `load` without an index reads.

    Args:
        tile: The tile.
        ref: A float32 or int32 tensor in global memory, of shape (rows, width).
        base: An int32 scalar.
        column: An int32 scalar.
    """
    width = ref.shape[1]

    @inline_mgpu(arg_types=(REF, SCALAR, SCALAR, SCALAR, SCALAR))
    def emit(ctx: Context, ref: MemRef, base: Scalar, row: Scalar, last: Scalar, column: Scalar) -> None:
        def value(i: I32, j: I32) -> Element:
            r = scalar(row) + i
            c = scalar(column) + j if width > 1 else int32(0)
            # One thread prefetches 32 bytes, because a warp's addresses are processed one after another.
            skipped = j & (7 if width > 1 else -1)
            text = "{.reg .pred p; setp.le.s32 p, $1, $2; setp.eq.and.s32 p, $3, 0, p; @p prefetch.global.L2 [$0];}"
            ptx(text, [], element_address(ref, width, 4, r + scalar(base), c), r, scalar(last), skipped)
            return r

        elements(tile, np.dtype(np.int32), value)

    emit(ref, base, tile.row, tile.last, column)
