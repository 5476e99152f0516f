"""The transformations of filters, inputs and outputs: task kinds FILTER, INPUT and OUTPUT (MegaKernels, section 3).

A thread transforms one tile for one channel or two. Neighbouring threads have neighbouring channels, so that a warp reads and
writes whole lines.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import math as mlir_math

from cavs.kernels._mosaic.mlir import REF, SCALAR, address, for_each, inline_mgpu, ptx, thread_index
from cavs.kernels._mosaic.types import F32, I32, Context, GlobalAddress, MemRef, Predicate, Scalar
from cavs.kernels._mosaic.value import Value, bitcast, constant, int64, scalar, select, zero_extended
from cavs.kernels._program.arrays import Ref
from cavs.kernels._tasks.winograd import FILTER_ROWS, ConvolutionSizes, matrices

Grid: TypeAlias = list[list[F32]]  # values by row and column


def vector(channels: int, m: int) -> int:
    """How many neighbouring channels a thread transforms at a time."""
    return 1 if channels % 2 or m > 2 else 2


def transform_filter(sizes: ConvolutionSizes, parts: int, w: Ref, u: Ref, number: jax.Array) -> None:
    """Runs FILTER task `number`: U = G g G^T for `FILTER_ROWS` input channels and one block of output channels.

    Args:
        sizes: The sizes of the convolution.
        parts: In how many bfloat16 terms each element is split.
        w: float32 of shape (3, 3, C, K).
        u: bfloat16 of shape (positions * parts * padded C, padded K).
        number: int32: the number of the block, times padded C / `FILTER_ROWS`, plus that of the rows.
    """
    rows, pairs = sizes.padded_inputs // FILTER_ROWS, sizes.columns // 2
    _, g, _ = matrices(sizes.m)

    @inline_mgpu(arg_types=(REF, REF, SCALAR))
    def emit(ctx: Context, w: MemRef, u: MemRef, number: Scalar) -> None:
        block, part = scalar(number) // rows, scalar(number) % rows
        reads, writes = address(w, 1), address(u, 1)

        def item(i: I32) -> None:
            c, k = part * FILTER_ROWS + i // pairs, block * sizes.columns + i % pairs * 2
            step, filters = 4 * sizes.inputs * sizes.outputs, []
            for second in range(2):
                there = (c < sizes.inputs) & (k + second < sizes.outputs)
                at = reads + int64(c * sizes.outputs + k + second) * 4
                filters.append([[_load(at, (3 * y + x) * step, there, 1)[0] for x in range(3)] for y in range(3)])
            at = writes + (int64(c) * sizes.padded_outputs + int64(k)) * 2
            _store_terms(g, filters, parts, at, sizes.padded_inputs * sizes.padded_outputs * 2)

        for_each(thread_index() & 127, FILTER_ROWS * pairs, 128, item)

    emit(w, u, number)


def transform_input(
    sizes: ConvolutionSizes, tiles: int, x: Ref, v: Ref, group: jax.Array, number: jax.Array, slot: jax.Array
) -> None:
    """Runs INPUT task `number` of a group: V = B^T d B for `tiles` tiles and all channels.

    Args:
        sizes: The sizes of the convolution.
        tiles: The tiles of a task.
        x: float32 of shape (N, H, W, C).
        v: float32 of shape (slots * positions * rows, padded C).
        group: int32: the group of tiles.
        number: int32: the number of the task in the group.
        slot: int32: where the group is in `v`.
    """
    wide = vector(sizes.inputs, sizes.m)
    across, size = sizes.padded_inputs // wide, sizes.m + 2
    _, _, b = matrices(sizes.m)

    @inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR, SCALAR))
    def emit(ctx: Context, x: MemRef, v: MemRef, group: Scalar, number: Scalar, slot: Scalar) -> None:
        reads, writes = address(x, 1), address(v, 1)

        def item(i: I32) -> None:
            row, c = scalar(number) * tiles + i // across, i % across * wide
            n, top, left, present = _tile(sizes, scalar(group) * sizes.rows + row)
            y, x = top - sizes.padding[0][0], left - sizes.padding[1][0]
            present = present & (c < sizes.inputs)
            start = ((int64(n) * sizes.height + int64(y)) * sizes.width + int64(x)) * sizes.inputs + int64(c)
            inside_x = [_within(x + j, sizes.width) & present for j in range(size)]
            loaded: list[list[list[F32]]] = []
            for h in range(size):
                inside = _within(y + h, sizes.height)
                at = reads + (start + h * sizes.width * sizes.inputs) * 4
                loaded.append([_load(at, 4 * j * sizes.inputs, inside & inside_x[j], wide) for j in range(size)])
            done = [_both(b, [[e[n] for e in row_] for row_ in loaded]) for n in range(wide)]
            at = int64(scalar(slot) * (sizes.positions * sizes.rows) + row) * sizes.padded_inputs + int64(c)
            for p in range(sizes.positions):
                h, j = divmod(p, size)
                below = 4 * p * sizes.rows * sizes.padded_inputs
                _store(writes + at * 4, below, None, [values[h][j] for values in done])

        for_each(thread_index() & 127, tiles * across, 128, item)

    emit(x, v, group, number, slot)


def transform_output(
    sizes: ConvolutionSizes,
    tiles: int,
    products: Ref,
    y: Ref,
    counters: Ref,
    group: jax.Array,
    number: jax.Array,
    slot: jax.Array,
) -> None:
    """Runs OUTPUT task `number` of a group: Y = A^T M A for `tiles` tiles and all channels; see `transform_input`.

    Once a task has waited in vain (`_tasks.counters`), outputs are NaN.
    """
    wide = vector(sizes.outputs, sizes.m)
    across, size = -(-sizes.outputs // wide), sizes.m + 2
    a, _, _ = matrices(sizes.m)

    @inline_mgpu(arg_types=(REF, REF, REF, SCALAR, SCALAR, SCALAR))
    def emit(ctx: Context, products: MemRef, y: MemRef, counters: MemRef, group: Scalar, number: Scalar, slot: Scalar) -> None:
        reads, writes = address(products, 1), address(y, 1)
        i32 = ir.IntegerType.get_signless(32)
        lost = ptx("ld.relaxed.gpu.global.u32 $0, [$1];", i32, address(counters, 1)) != 0

        def item(i: I32) -> None:
            row, k = scalar(number) * tiles + i // across, i % across * wide
            n, top, left, present = _tile(sizes, scalar(group) * sizes.rows + row)
            at = int64(scalar(slot) * (sizes.positions * sizes.rows) + row) * sizes.padded_outputs + int64(k)
            step = 4 * sizes.rows * sizes.padded_outputs
            loaded = [[_load(reads + at * 4, (h * size + j) * step, present, wide) for j in range(size)] for h in range(size)]
            done = [_both(a, [[e[n] for e in row_] for row_ in loaded]) for n in range(wide)]
            start = ((int64(n) * sizes.out_height + int64(top)) * sizes.out_width + int64(left)) * sizes.outputs + int64(k)
            for h in range(sizes.m):
                for j in range(sizes.m):
                    inside = present & (top + h < sizes.out_height) & (left + j < sizes.out_width)
                    below = 4 * (h * sizes.out_width + j) * sizes.outputs
                    _store(writes + start * 4, below, inside, [select(lost, math.nan, values[h][j]) for values in done])

        for_each(thread_index() & 127, tiles * across, 128, item)

    emit(products, y, counters, group, number, slot)


def transform_gradient(
    sizes: ConvolutionSizes, tiles: int, parts: int, dy: Ref, d: Ref, group: jax.Array, number: jax.Array, slot: jax.Array
) -> None:
    """Runs an INPUT task of the gradient with respect to the filters: D = A dY A^T, split in bfloat16 terms.

    Args:
        sizes: The sizes of the convolution.
        tiles: The tiles of a task.
        parts: In how many bfloat16 terms each element is split.
        dy: float32 of shape (N, H', W', K).
        d: bfloat16 of shape (slots * positions * parts * rows, padded K).
        group: int32: the group of tiles.
        number: int32: the number of the task in the group.
        slot: int32: where the group is in `d`.
    """
    pairs = sizes.padded_outputs // 2
    a = matrices(sizes.m)[0].T

    @inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR, SCALAR))
    def emit(ctx: Context, dy: MemRef, d: MemRef, group: Scalar, number: Scalar, slot: Scalar) -> None:
        reads, writes = address(dy, 1), address(d, 1)

        def item(i: I32) -> None:
            row, k = scalar(number) * tiles + i // pairs, i % pairs * 2
            n, top, left, present = _tile(sizes, scalar(group) * sizes.rows + row)
            start = ((int64(n) * sizes.out_height + int64(top)) * sizes.out_width + int64(left)) * sizes.outputs + int64(k)
            down = [present & _within(top + h, sizes.out_height) for h in range(sizes.m)]
            across = [_within(left + j, sizes.out_width) for j in range(sizes.m)]

            def load(h: int, j: int) -> list[F32]:
                below, inside = 4 * (h * sizes.out_width + j) * sizes.outputs, down[h] & across[j]
                if sizes.outputs % 2 == 0:
                    return _load(reads + start * 4, below, inside & (k < sizes.outputs), 2)
                there = [inside & (k + n < sizes.outputs) for n in range(2)]
                return [_load(reads + (start + n) * 4, below, there[n], 1)[0] for n in range(2)]

            loaded = [[load(h, j) for j in range(sizes.m)] for h in range(sizes.m)]
            first = int64(scalar(slot) * (sizes.positions * parts * sizes.rows) + row)
            at = writes + (first * sizes.padded_outputs + int64(k)) * 2
            both = [[[pair[n] for pair in row_] for row_ in loaded] for n in range(2)]
            _store_terms(a, both, parts, at, sizes.rows * sizes.padded_outputs * 2)

        for_each(thread_index() & 127, tiles * pairs, 128, item)

    emit(dy, d, group, number, slot)


def _tile(sizes: ConvolutionSizes, tile: I32) -> tuple[I32, I32, I32, Predicate]:
    """The image of a tile, its first output row and column, and whether there is such a tile."""
    each = sizes.tiles_down * sizes.tiles_across
    image, rest = tile // each, tile % each
    return image, rest // sizes.tiles_across * sizes.m, rest % sizes.tiles_across * sizes.m, tile < sizes.tiles


def _within(at: I32, length: int) -> Predicate:
    return (at >= 0) & (at < length)


def _load(at: GlobalAddress, below: int, present: Predicate, wide: int) -> list[F32]:
    """Loads neighbouring elements, `below` bytes after an address; zeros if they are not `present`."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    zeros = "".join(f"mov.f32 ${n}, 0f00000000;" for n in range(wide))
    out = "$0" if wide == 1 else f"{{{', '.join(f'${n}' for n in range(wide))}}}"
    kind = "f32" if wide == 1 else f"v{wide}.f32"
    text = f"{{.reg .pred p; setp.ne.s32 p, ${wide + 1}, 0; {zeros} @p ld.global.{kind} {out}, [${wide}+{below}];}}"
    values = ptx(text, [f32] * wide, at, zero_extended(i32, present))
    return list(values)


def _store(at: GlobalAddress, below: int, present: Predicate | None, values: Sequence[F32]) -> None:
    """Stores neighbouring elements, `below` bytes after an address, if they are `present`."""
    wide = len(values)
    names = [f"${n + 1}" for n in range(wide)]
    kind, data = ("f32", names[0]) if wide == 1 else (f"v{wide}.f32", f"{{{', '.join(names)}}}")
    if present is None:
        ptx(f"st.global.{kind} [$0+{below}], {data};", [], at, *values)
        return
    i32 = ir.IntegerType.get_signless(32)
    text = f"{{.reg .pred p; setp.ne.s32 p, ${wide + 1}, 0; @p st.global.{kind} [$0+{below}], {data};}}"
    ptx(text, [], at, *values, zero_extended(i32, present))


def _store_terms(matrix: np.ndarray, pair: Sequence[Grid], parts: int, at: GlobalAddress, step: int) -> None:
    """Stores `matrix` @ values @ `matrix`.T of two neighbouring channels in bfloat16 terms, `step` bytes apart.

    It does one row after another, which needs fewer registers.
    """
    below = 0
    for y in range(len(matrix)):
        rows = [[_times(matrix[y : y + 1], column)[0] for column in zip(*values, strict=True)] for values in pair]
        for two in zip(*(_times(matrix, row) for row in rows), strict=True):
            for _ in range(parts):
                packed, two = _rounded(two)
                ptx(f"st.global.b32 [$0+{below}], $1;", [], at, packed)
                below += step


def _both(matrix: np.ndarray, values: Grid) -> Grid:
    """`matrix` @ values @ `matrix`.T."""
    columns = [_times(matrix, [row[j] for row in values]) for j in range(len(values[0]))]
    return [_times(matrix, [column[i] for column in columns]) for i in range(len(matrix))]


def _times(matrix: np.ndarray, values: Sequence[F32]) -> list[F32]:
    """`matrix` @ values, without products by 0, 1 and -1."""
    f32 = ir.F32Type.get()
    products = []
    for row in matrix:
        total: F32 | None = None
        for factor, value in sorted(zip(row, values, strict=True), key=lambda pair: abs(pair[0]) != 1):
            if factor == 0:
                continue
            if total is None:
                total = value if factor == 1 else constant(f32, 0) - value if factor == -1 else value * float(factor)
            elif abs(factor) == 1:
                total = total + value if factor == 1 else total - value
            else:
                total = Value(mlir_math.fma(value, constant(f32, float(factor)), total))
        assert total is not None
        products.append(total)
    return products


def _rounded(pair: Sequence[F32]) -> tuple[Value, list[F32]]:
    """Two elements rounded to bfloat16, in one word, and what is left of them."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    packed = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", i32, *pair)
    near = [bitcast(f32, packed << 16), bitcast(f32, packed & -65536)]
    return packed, [a - b for a, b in zip(pair, near, strict=True)]
