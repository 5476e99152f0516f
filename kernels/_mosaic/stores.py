"""Stores to tensors in global memory: a tile's elements, each thread its own; and marks of elements that are not stored yet."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import (
    REF,
    SCALAR,
    address,
    element_address,
    for_each,
    inline_mgpu,
    ptx,
    store_words,
    thread_index,
    tile_layout,
)
from cavs.kernels._mosaic.types import I32, Context, Fragments, GlobalAddress, MemRef, Scalar, Subscript
from cavs.kernels._mosaic.value import Value, constant, int32, int64, scalar, select
from cavs.kernels._program.arrays import Ref
from cavs.kernels._program.widths import UNWRITTEN
from cavs.kernels.precision import stored_as

_BLOCKS, _THREADS = 64, 512  # of `mark_unwritten`


def store(
    tile: Tile,
    ref: Ref,
    value: jax.Array,
    base: jax.Array,
    column: jax.Array,
    valid: jax.Array | None = None,
    awaited: bool = False,
) -> None:
    """Stores `value[r, j]` to `ref[base + r, column + j]` for each unit j and each row r of a tile up to its last.

    Args:
        tile: The tile.
        ref: A tensor in global memory, of shape (rows, width): of the dtype of `value`; or bfloat16 or float16, whose elements
            are multiplied by the `factor` of their precision, if `value` is float32.
        value: An array of the tile's shape, float32 or int32.
        base: An int32 scalar.
        column: An int32 scalar.
        valid: An int32 scalar: zeros are stored for units j from `valid` on. `None` if all units are valid.
        awaited: Whether other thread blocks poll the elements: they are written to L2 at once.
    """
    if not isinstance(value, (int, float)):
        value = plgpu.layout_cast(value, tile_layout(tile))
    dtype, width = np.dtype(ref.dtype), ref.shape[1]
    precision = stored_as(dtype)
    instruction = f"{'st.relaxed.gpu' if awaited else 'st'}.global.b32"

    @inline_mgpu(arg_types=(REF, tile_layout(tile), SCALAR, SCALAR, SCALAR, SCALAR, [SCALAR] * (valid is not None)))
    def emit(
        ctx: Context,
        ref: MemRef,
        value: Fragments,
        base: Scalar,
        row: Scalar,
        last: Scalar,
        column: Scalar,
        valid: list[Scalar],
    ) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def put(element: ir.Value, at: tuple[Subscript, ...]) -> None:
            x, r, j = Value(element), scalar(row) + int32(at[0]), int32(at[1])
            if valid:  # what equations compute in the padding is arbitrary
                zero = constant(x.type, 0)
                x = select(j < scalar(valid[0]), x, zero)
            end = scalar(last)
            if precision:  # even threads store their own element and the next thread's, odd threads nothing
                x = x * precision.factor if precision.factor != 1 else x
                following = ptx("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", x.type, x)
                x = ptx(f"cvt.rn.{precision.kind}x2.f32 $0, $1, $2;", i32, following, x)
                end = select(j & 1 != 0, -1, end)
            # A predicated store, because the compiler would sink the computation of `x` into a branch, element by element.
            text = f"{{.reg .pred p; setp.le.s32 p, $2, $3; @p {instruction} [$0], $1;}}"
            target = element_address(ref, width, dtype.itemsize, r + scalar(base), scalar(column) + j)
            ptx(text, [], target, x, r, end)

        value.foreach(put)

    emit(ref, value, base, tile.row, tile.last, column, [] if valid is None else [valid])


def mark_unwritten(outputs: Sequence[jax.ShapeDtypeStruct], after: jax.Array) -> list[jax.Array]:
    """Returns arrays of `UNWRITTEN`, which one kernel fills once `after` is computed.

    XLA would fill each with a kernel on all multiprocessors, and what comes between two launches would wait for these.
    """

    def body(_: Ref, *refs: Ref) -> None:
        @inline_mgpu(arg_types=([REF] * len(refs), SCALAR))
        def emit(ctx: Context, refs: list[MemRef], block: Scalar) -> None:
            thread = scalar(block) * _THREADS + thread_index()
            for ref, out in zip(refs, outputs, strict=True):
                begin, word = address(ref, 1), int32(int(UNWRITTEN))
                pieces, rest = divmod(out.size * out.dtype.itemsize, 16)
                assert not rest, out  # rows are multiples of 16 elements (`widths.padded_unit`)

                def write(n: I32, begin: GlobalAddress = begin, word: I32 = word) -> None:
                    store_words(begin + int64(n) * 16, [word] * 4)

                for_each(thread, pieces, _BLOCKS * _THREADS, write)

        emit(list(refs), lax.axis_index("block"))

    body.__name__ = "cavs_unwritten"
    return plgpu.kernel(
        body,
        out_type=list(outputs),
        grid=(_BLOCKS,),
        grid_names=("block",),
        num_threads=_THREADS // 128,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(after)
