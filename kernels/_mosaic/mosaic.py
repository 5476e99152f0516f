"""The few device operations of the persistent kernels, in Pallas Mosaic GPU (Hopper); `_body.interpret` has their twins.

Pallas has no gather of rows by number and no tf32 product for a few rows, so these are inline Mosaic: per-thread loads
and stores by row number, and `mma.sync` products whose left operand is the weights (M = weight columns, N = 8 rows).
Everything elementwise between them is ordinary Pallas, on arrays of (rows, units) with one element a register.

A product's K is split over the four warps of a warpgroup. Each warp reads its part of the rows straight from global
memory into the operand's registers (K may be permuted at will, so that every read is 16 bytes), and leaves partial sums
in shared memory.
"""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, memref, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.exchange import begin_exchange as begin_exchange, end_exchange as end_exchange
from cavs.kernels._mosaic.mlir import (
    REF,
    SCALAR,
    address,
    as_index,
    constant,
    elements,
    int32,
    patience,
    place,
    ptx,
    scalar,
    tile_layout,
)
from cavs.kernels._mosaic.products import product as product
from cavs.kernels._mosaic.rows import product_rows as product_rows, read_product as read_product
from cavs.kernels._mosaic.weights import copy_weights as copy_weights
from cavs.kernels._mosaic.wide import begin_ring as begin_ring, wide_product as wide_product
from cavs.kernels._program.widths import FACTOR, half_of


def sync() -> None:
    """All threads of the CTA."""

    @plgpu.inline_mgpu()
    def go(ctx: Any) -> None:
        gpu.barrier()

    go()


def group_barrier(counters: Any, slot: Any, target: Any, clustered: bool, spins: int) -> None:
    """All CTAs of a group; what they wrote before is seen by all after.

    A group that is a cluster meets in hardware. Else each CTA adds one to the group's counter and waits until it reads
    `target`; after `spins` reads in vain it says so in `counters[0]` and goes on, so that no launch hangs. Once that is said,
    nobody waits long.
    """
    if clustered:

        @plgpu.inline_mgpu()
        def meet(ctx: Any) -> None:
            ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", [])

        return meet()

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR, SCALAR))
    def go(ctx: Any, counters: Any, slot: Any, target: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        i64 = ir.IntegerType.get_signless(64)
        gpu.barrier()
        base = address(counters, 1)
        place = arith.addi(base, arith.extsi(i64, arith.muli(scalar(slot), int32(128))))
        leader = arith.cmpi(arith.CmpIPredicate.eq, mu.thread_idx(), int32(0))
        with mu.when(leader):
            ptx("red.release.gpu.global.add.u32 [$0], $1;", [], place, int32(1))
            loop = scf.WhileOp([i32], [int32(0)])
            before = loop.before.blocks.append(i32)
            with ir.InsertionPoint.at_block_begin(before):
                seen = ptx("ld.acquire.gpu.global.u32 $0, [$1];", [i32], place)
                short = arith.cmpi(arith.CmpIPredicate.ult, seen, scalar(target))
                turn = before.arguments[0]
                scf.condition(arith.andi(short, patience(base, turn, spins)), [arith.addi(turn, int32(1))])
            after = loop.after.blocks.append(i32)
            with ir.InsertionPoint.at_block_begin(after):
                scf.yield_(after.arguments)
            lost = arith.cmpi(arith.CmpIPredicate.ugt, loop.results[0], int32(spins))
            with mu.when(lost):
                ptx("st.relaxed.gpu.global.u32 [$0], $1;", [], base, int32(1))
        gpu.barrier()

    go(counters, slot, target)


def number(tile: Tile, index: Any) -> Any:
    """`index[r]` for each row r of the tile, repeated over its units. Rows past the tile's last repeat it."""

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR, SCALAR), return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.int32, tile_layout(tile))
    )
    def go(ctx: Any, index: Any, row: Any, last: Any) -> Any:
        def value(i: Any, j: Any) -> Any:
            return memref.load(index, [as_index(arith.minsi(arith.addi(scalar(row), i), scalar(last)))])

        return elements(tile, jnp.int32, value)

    return go(index, tile.row, tile.last)


def load(tile: Tile, dtype: Any, ref: Any, index: Any, base: Any, column: Any, wide: bool = True) -> Any:
    """`ref[base + n, column + j]` for each row r of the tile, where n is r, or with an `index`, from [`number`][], what
    that has for r; a negative one gives zero.

    Rows past the tile's last repeat it. Unless `wide`, j is left out.
    """
    width, kind = ref.shape[1], mgpu.utils.dtype_to_ir_type

    @plgpu.inline_mgpu(
        arg_types=(REF, [tile_layout(tile)] * (index is not None), SCALAR, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, tile_layout(tile)),
    )
    def go(ctx: Any, ref: Any, index: Any, base: Any, row: Any, last: Any, column: Any) -> Any:
        numbers = iter(index[0].registers.flat if index else [])

        def value(i: Any, j: Any) -> Any:
            c = arith.addi(scalar(column), j) if wide else scalar(column)
            if not index:
                r = arith.minsi(arith.addi(scalar(row), i), scalar(last))
                return memref.load(ref, [as_index(arith.addi(r, scalar(base))), as_index(c)])
            n = vector.extract(next(numbers), dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
            # Not a choice between two values: that would wait for the one that is read.
            text = "{.reg .pred p; setp.ge.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1];}"
            return ptx(text, [kind(dtype)], place(ref, width, 4, arith.addi(n, scalar(base)), c), n)

        return elements(tile, dtype, value)

    return go(ref, [] if index is None else [index], base, tile.row, tile.last, column)


def prefetch(tile: Tile, ref: Any, base: Any, column: Any) -> None:
    """Brings to L2 what [`load`][] without an index reads of float32 or int32."""
    width = ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR, SCALAR, SCALAR, SCALAR))
    def go(ctx: Any, ref: Any, base: Any, row: Any, last: Any, column: Any) -> None:
        def value(i: Any, j: Any) -> Any:
            r = arith.addi(scalar(row), i)
            c = arith.addi(scalar(column), j) if width > 1 else int32(0)
            # A thread for every 32 bytes: the instruction takes one address after the other.
            skipped = arith.andi(j, int32(7 if width > 1 else -1))
            text = "{.reg .pred p; setp.le.s32 p, $1, $2; setp.eq.and.s32 p, $3, 0, p; @p prefetch.global.L2 [$0];}"
            ptx(text, [], place(ref, width, 4, arith.addi(r, scalar(base)), c), r, scalar(last), skipped)
            return r

        elements(tile, jnp.int32, value)

    go(ref, base, tile.row, tile.last, column)


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
    """Per row r the sum (or maximum) of `ref[n, column + j]` over e in `first[r] ... + count[r]`, n = `index[e]` or e.

    Unless `wide`, j is left out; `offset` is added to n.
    """

    @plgpu.inline_mgpu(
        arg_types=(REF, [REF] * (index is not None), REF, REF, *[SCALAR] * 4, [SCALAR] * (offset is not None)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, tile_layout(tile)),
    )
    def go(
        ctx: Any, ref: Any, index: Any, first: Any, count: Any, base: Any, row: Any, last: Any, column: Any, offset: Any
    ) -> Any:
        def value(i: Any, j: Any) -> Any:
            r = arith.addi(arith.minsi(arith.addi(scalar(row), i), scalar(last)), scalar(base))
            begin = memref.load(first, [as_index(r)])
            end = arith.addi(begin, memref.load(count, [as_index(r)]))
            c = as_index(arith.addi(scalar(column), j) if wide else scalar(column))
            kind = mgpu.utils.dtype_to_ir_type(dtype)
            start = arith.constant(kind, ir.FloatAttr.get(kind, -np.inf if largest else 0.0))
            loop = scf.ForOp(as_index(begin), as_index(end), as_index(int32(1)), [start])
            with ir.InsertionPoint(loop.body):
                e = loop.induction_variable
                n = memref.load(index[0], [e]) if index else arith.index_cast(ir.IntegerType.get_signless(32), e)
                place = arith.maxsi(n, int32(0))
                place = arith.addi(place, scalar(offset[0])) if offset else place
                got = memref.load(ref, [as_index(place), c])
                if index:
                    got = arith.select(arith.cmpi(arith.CmpIPredicate.slt, n, int32(0)), start, got)
                total = loop.inner_iter_args[0]
                scf.yield_([arith.maximumf(total, got) if largest else arith.addf(total, got)])
            return loop.results[0]

        return elements(tile, dtype, value)

    more = [] if offset is None else [offset]
    return go(ref, [] if index is None else [index], first, count, base, tile.row, tile.last, column, more)


def whole_rows(tile: Tile, dtype: Any, ref: Any, base: Any, unit: int, valid: int, operation: str) -> Any:
    """Per row the sum, max or min over all columns of `ref`, the first `valid` of each `unit`; repeated over the tile's
    units."""
    blocks = [(0, ref.shape[1])] if valid == unit else [(at, at + valid) for at in range(0, ref.shape[1], unit)]
    combine = {"sum": arith.addf, "max": arith.maximumf, "min": arith.minimumf}[operation]
    neutral = {"sum": 0.0, "max": -np.inf, "min": np.inf}[operation]

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, tile_layout(tile)),
    )
    def go(ctx: Any, ref: Any, base: Any, row: Any, last: Any) -> Any:
        def value(i: Any, j: Any) -> Any:
            r = as_index(arith.addi(arith.minsi(arith.addi(scalar(row), i), scalar(last)), scalar(base)))
            total = constant(dtype, neutral)
            for begin, end in blocks:
                loop = scf.ForOp(as_index(int32(begin)), as_index(int32(end)), as_index(int32(1)), [total])
                with ir.InsertionPoint(loop.body):
                    got = memref.load(ref, [r, loop.induction_variable])
                    scf.yield_([combine(loop.inner_iter_args[0], got)])
                total = loop.results[0]
            return total

        return elements(tile, dtype, value)

    return go(ref, base, tile.row, tile.last)


def store(tile: Tile, ref: Any, value: Any, base: Any, column: Any, valid: Any = None, awaited: bool = False) -> None:
    """`ref[base + r, column + j] = value` for the tile's rows up to its last; 0 from the column j = `valid` on.

    float32 values may be stored in 16 bits. What is `awaited` goes to L2 at once, where other CTAs look for it.
    """
    if not isinstance(value, (int, float)):
        value = plgpu.layout_cast(value, tile_layout(tile))
    dtype, width = np.dtype(ref.dtype), ref.shape[1]
    kind = half_of(dtype)
    how = f"{'st.relaxed.gpu' if awaited else 'st'}.global.b32"

    @plgpu.inline_mgpu(arg_types=(REF, tile_layout(tile), SCALAR, SCALAR, SCALAR, SCALAR, [SCALAR] * (valid is not None)))
    def go(ctx: Any, ref: Any, value: Any, base: Any, row: Any, last: Any, column: Any, valid: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def put(x: Any, at: Any) -> None:
            r, j = arith.addi(scalar(row), arith.index_cast(i32, at[0])), arith.index_cast(i32, at[1])
            if valid:  # what is computed of padding may be anything
                zero = arith.constant(x.type, 0.0 if x.type == ir.F32Type.get() else 0)
                x = arith.select(arith.cmpi(arith.CmpIPredicate.slt, j, scalar(valid[0])), x, zero)
            end = scalar(last)
            if kind:  # every second thread stores its own number and the next one's
                x = arith.mulf(x, arith.constant(x.type, FACTOR[kind])) if FACTOR[kind] != 1 else x
                following = ptx("shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", [x.type], x)
                x = ptx(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", [i32], following, x)
                odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(j, int32(1)), int32(0))
                end = arith.select(odd, int32(-1), end)
            # Not in a branch: there what is stored would be computed, one number after the other.
            text = f"{{.reg .pred p; setp.le.s32 p, $2, $3; @p {how} [$0], $1;}}"
            at = place(ref, width, dtype.itemsize, arith.addi(r, scalar(base)), arith.addi(scalar(column), j))
            ptx(text, [], at, x, r, end)

        value.foreach(put)

    go(ref, value, base, tile.row, tile.last, column, [] if valid is None else [valid])
