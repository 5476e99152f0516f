"""The operands of `mma.sync`: weights as they are packed, and rows as they are read; and the instruction.

The left operand is 16 columns of a weight and the right operand 8 rows of a tile, for 8 elements of K (16 in bf16 and f16). A
product at precision "fp32" is three products in tf32 (3xtf32).
"""

import math
from collections.abc import Sequence

from jax._src.lib.mlir import ir

from cavs.kernels._layout.specs import ProductSpec, WeightSpec
from cavs.kernels._mosaic.mlir import ptx
from cavs.kernels._mosaic.types import F32, I32, Address, Register
from cavs.kernels._mosaic.value import bitcast, constant, int32, int64
from cavs.kernels.precision import PRECISIONS


class WeightReader:
    """Reads fragments of a thread block's packed weights.

    Args:
        start: The address of the weights: in shared memory if they are resident, otherwise in global memory.
        warp: The number of the warp among those that divide K.
        lane: The thread's number in its warp.
    """

    def __init__(self, start: Address, warp: I32, lane: I32):
        self.start, self.warp, self.lane = start, warp, lane
        self._triples: dict[tuple[int, int], list[list[Register]]] = {}

    def read(self, spec: ProductSpec, weight: WeightSpec, tile: int, chunk: int, step: int) -> list[Register]:
        """Returns the registers of a tile of 16 columns for one step of K: four, or eight at precision "fp32".

        Half a tile has only columns 0 to 7; the registers of the others are zero.
        """
        per_warp = spec.chunks // spec.splits
        if spec.tight:
            triple, which = divmod((2 * chunk + step) * weight.tiles + tile, 3)
            if (weight.offset, triple) not in self._triples:
                self._triples[weight.offset, triple] = self._triple(spec, weight, triple, per_warp)
            return self._triples[weight.offset, triple][which]
        steps, half = 2 * spec.chunks, weight.half and tile == weight.tiles - 1
        words = 64 if half else 128
        at = (weight.offset + tile * steps * 128 + (2 * chunk + step) * words) * 4
        start = self.warp * (2 * per_warp * words * 4) + self.lane * (words // 8)
        four = self._load(spec, start, at, words // 32)
        if half:
            four = [four[0], int32(0), four[1], int32(0)]
        if PRECISIONS[spec.precision].terms > 1:
            return to_tf32([bitcast(ir.F32Type.get(), x) for x in four], spec.precision)
        return four

    def _triple(self, spec: ProductSpec, weight: WeightSpec, triple: int, per_warp: int) -> list[list[Register]]:
        """Unpacks three fragments from the words of two; see `_layout.pack`."""
        start = self.warp * (-(-2 * per_warp * weight.tiles // 3) * 1024) + self.lane * 16
        one, two = (self._load(spec, start, weight.offset * 4 + triple * 1024 + n * 512, 4) for n in range(2))
        return [one, two, [(a << 19) + (b << 6) for a, b in zip(one, two, strict=True)]]

    def _load(self, spec: ProductSpec, start: I32, at: int, count: int) -> list[Register]:
        """Loads words of the thread's own, from byte `start` + `at` on."""
        text, place = ("ld.shared", self.start + start) if spec.resident else ("ld.global.nc", self.start + int64(start))
        words = ", ".join(f"${n}" for n in range(count))
        return list(ptx(f"{text}.v{count}.b32 {{{words}}}, [${count}+{at}];", [ir.IntegerType.get_signless(32)] * count, place))


def right_operand(sources: list[list[Register]], step: int, precision: str) -> list[Register]:
    """Returns the registers of the rows' operand for one step of K: two, or four at precision "fp32".

    Args:
        sources: For each of the sources, whose sum is the operand, the registers that the thread has read of a chunk.
        step: The half of the chunk, 0 or 1.
        precision: See `LaunchConfig`.
    """
    i32, how = ir.IntegerType.get_signless(32), PRECISIONS[precision]
    halves = [x[step * len(x) // 2 : (step + 1) * len(x) // 2] for x in sources]
    if len(halves) < 3 and all(x[0].type == i32 for x in halves):  # as below, a sum of two elements is rounded once
        add = f"add.rn.{how.kind}x2 $0, $1, $2;"
        return [two[0] if len(two) == 1 else ptx(add, i32, *two) for two in zip(*halves, strict=True)]
    values, *others = (_to_float32(x, precision) for x in halves)
    for more in others:
        values = [a + b for a, b in zip(values, more, strict=True)]
    if how.dtype is not None:
        values = scaled(values, how.factor)
        return [ptx(f"cvt.rn.{how.kind}x2.f32 $0, $1, $2;", i32, values[q + 1], values[q]) for q in (0, 2)]
    return to_tf32(values, precision)


def _to_float32(registers: list[Register], precision: str) -> list[F32]:
    """Converts elements to float32; i32 registers hold two bf16 elements each."""
    f32 = ir.F32Type.get()
    if registers[0].type == f32:
        return registers
    assert PRECISIONS[precision].upper_half, "no sums of more than two rows: `_engines.persistent.lower._of_two_rows`"
    return [bitcast(f32, half) for x in registers for half in (x << 16, x & -0x10000)]


def scaled(values: Sequence[F32], factor: float) -> list[F32]:
    """Multiplies all values by a constant."""
    return [x * factor for x in values] if factor != 1 else list(values)


def to_tf32(values: Sequence[F32], precision: str) -> list[Register]:
    """Converts values to tf32; at precision "fp32" the tf32 values of the remainders follow.

    `mma.sync` truncates the last 13 bits. A multiplication before it corrects this bias on average. Rounding to nearest would
    take two instructions at half the rate, and would lose NaNs (`cvt.rna` carries their bits into the sign).
    """
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    factor = constant(f32, 1 + math.log(2) * 2**-11)  # mantissas are 1 / ln 2 on average

    def near(x: F32) -> Register:
        return bitcast(i32, x * factor)

    rounded = [near(x) for x in values]
    if PRECISIONS[precision].terms == 1:
        return rounded
    high = [x & -0x2000 for x in rounded]
    return high + [near(x - bitcast(f32, h)) for x, h in zip(values, high, strict=True)]


def multiply(total: list[F32], left: list[Register], right: list[Register], precision: str) -> list[F32]:
    """Returns a thread's four accumulators `total` plus the product of the operands of one step of K."""
    f32, how = ir.F32Type.get(), PRECISIONS[precision]
    text = (
        f"mma.sync.aligned.{how.shape}.row.col.f32.{how.kind}.{how.kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    if how.terms > 1:
        high, low = left[:4], left[4:]
        for a, b in ((low, right[:2]), (high, right[2:]), (high, right[:2])):
            total = ptx(text, [f32] * 4, *a, *b, *total)
        return total
    return ptx(text, [f32] * 4, *left, *right, *total)
