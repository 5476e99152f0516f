"""Products by `mma.sync`: weights in shared memory (`_mosaic_weights`), rows straight from global memory; see `_mosaic`."""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, scf, vector
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._mlir import REF, SCALAR, address, as_index, int32, ptx, scalar


def product(spec: Any, refs: Sequence[Any], numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any) -> None:
    """All products of a phase for the rows `row` ... `last` (at most `spec.rows`), into `part`.

    `spec` is a `_specs.ProductSpec`; `refs` belong to its sources, `numbers` are from `product_rows`; `weights` is one
    flat array of packed weights, in shared memory, or in global memory where they stream.
    """
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=([REF] * len(refs), layout, REF, REF, SCALAR, SCALAR, SCALAR))
    def go(ctx: Any, refs: Any, numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any) -> None:
        _Product(spec, refs, numbers, weights, part, row, last, cta).emit()

    go(list(refs), numbers, weights, part, row, last, cta)


class _Product:
    """Emits one product; see the module's text. In the names of PTX: lane = 4 * group + thread-in-group."""

    def __init__(self, spec: Any, refs: Any, numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any):
        self.spec, self.refs, self.numbers, self.part = spec, refs, numbers, part
        self.row, self.last = scalar(row), scalar(last)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        thread = mu.thread_idx()
        self.lane = arith.andi(thread, int32(31))
        self.warp = arith.andi(arith.shrui(thread, int32(5)), int32(3))
        slot = self.warp if spec.slots == spec.splits else arith.andi(self.warp, int32(spec.slots - 1))
        self.place = arith.addi(arith.muli(arith.shrui(thread, int32(7)), int32(spec.slots)), slot)  # in `part`
        self.group, self.quad = arith.shrui(self.lane, int32(2)), arith.andi(self.lane, int32(3))
        self.resident = spec.resident
        if self.resident:
            self.weights = address(weights, 3)
        else:
            own = arith.muli(arith.extsi(self.i64, scalar(cta)), arith.constant(self.i64, spec.words * 4))
            self.weights = arith.addi(address(weights, 1), own)

    def emit(self) -> None:
        count = arith.addi(arith.subi(self.last, self.row), int32(1))
        groups = self.spec.rows // 8
        sizes = [n for n in (1, 2, 4, 8) if n < groups] + [groups]
        active = arith.cmpi(arith.CmpIPredicate.slt, self.warp, int32(self.spec.splits))
        self.active = contextlib.nullcontext if self.spec.splits == 4 else lambda: mu.when(active)
        mu.warpgroup_barrier()  # the partial sums of the last tile have been read
        self._choose(sizes, count)
        mu.warpgroup_barrier()

    def _choose(self, sizes: list[int], count: Any) -> None:
        """The smallest number of 8-row groups that holds the rows."""
        if len(sizes) == 1:
            with self.active():
                self._rows(sizes[0])
            return
        few = arith.cmpi(arith.CmpIPredicate.sle, count, int32(8 * sizes[0]))
        branch = scf.IfOp(few, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            with self.active():
                self._rows(sizes[0])
            scf.yield_([])
        with ir.InsertionPoint(branch.else_block):
            self._choose(sizes[1:], count)
            scf.yield_([])

    def _rows(self, groups: int) -> None:
        spec = self.spec
        self.triples: dict[tuple[int, int], list[list[Any]]] = {}  # read in this branch
        per_warp = spec.chunks // spec.splits
        places = []
        for s in range(0, len(spec.sources), spec.joined):
            for n in range(groups):
                size = spec.sources[s].size
                place = self._place(s, n, per_warp)
                places.append((place, spec.chunk * size // 4, self.i32 if size == 2 else self.f32))

        def fetch(c: int) -> list[list[Any]]:
            return [
                [
                    x
                    for at in range(0, quarter, 16)
                    for x in ptx(f"ld.global.cg.v4.b32 {{$0, $1, $2, $3}}, [$4+{4 * c * quarter + at}];", [kind] * 4, place)
                ]
                for place, quarter, kind in places
            ]

        zero = arith.constant(self.f32, 0.0)
        totals = {
            (w, m, o, n): [zero] * 4
            for w, weight in enumerate(spec.weights)
            for m in range(weight.tiles)
            for o in weight.operands
            for n in range(groups)
        }
        # Enough reads in flight to cover the way to L2.
        depth = min(per_warp, max(1, spec.in_flight // sum(quarter // 16 for _, quarter, _ in places)))
        queue = [fetch(c) for c in range(depth)]
        for c in range(per_warp):
            values = queue.pop(0)
            for step in range(2):
                rights = {
                    (o, n): self._right([values[s * groups + n] for s in operand], step)
                    for o, operand in enumerate(spec.operands)
                    for n in range(groups)
                }
                for w, weight in enumerate(spec.weights):
                    for m in range(weight.tiles):
                        left = self._left(weight, m, c, per_warp, step)
                        for o in weight.operands:
                            for n in range(groups):
                                key = (w, m, o, n)
                                totals[key] = self._multiply(totals[key], left, rights[o, n])
            if c + depth < per_warp:
                queue.append(fetch(c + depth))
        if spec.slots == spec.splits:
            self._leave(totals, False)
            return
        second = arith.cmpi(arith.CmpIPredicate.uge, self.warp, int32(spec.slots))
        with mu.when(second):
            self._leave(totals, False)
        mu.warpgroup_barrier()
        with mu.when(arith.cmpi(arith.CmpIPredicate.ult, self.warp, int32(spec.slots))):
            self._leave(totals, True)

    def _leave(self, totals: dict[Any, list[Any]], add: bool) -> None:
        """The warp's sums into its slot of `part`; or added to what is there."""
        for (w, m, o, n), four in totals.items():
            weight = self.spec.weights[w]
            column = weight.columns[weight.operands.index(o)] + 16 * m
            for q, x in enumerate(four[:2] if weight.half and m == weight.tiles - 1 else four):
                r = arith.addi(arith.muli(self.quad, int32(2)), int32(8 * n + q % 2))
                col = arith.addi(self.group, int32(column + 8 * (q // 2)))
                at = [as_index(self.place), as_index(r), as_index(col)]
                memref.store(arith.addf(memref.load(self.part, at), x) if add else x, self.part, at)

    def _place(self, s: int, n: int, per_warp: int) -> Any:
        """Where this thread's numbers of source s begin, for the n-th 8 rows; of joined sources a warp reads one."""
        spec, found = self.spec, []
        warps = spec.splits // spec.joined
        which = arith.divui(self.warp, int32(warps))
        warp = arith.subi(self.warp, arith.muli(which, int32(warps)))
        for i in range(s, s + spec.joined):
            source = spec.sources[i]
            quarter = spec.chunk * source.size // 4  # of a chunk: a thread's bytes
            offset = arith.addi(arith.muli(warp, int32(4 * per_warp * quarter)), arith.muli(self.quad, int32(quarter)))
            number = self.numbers.registers.flat[i * (spec.rows // 8) + n]
            r = vector.extract(number, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
            start = arith.muli(arith.extsi(self.i64, r), arith.constant(self.i64, source.width * source.size))
            start = arith.addi(start, arith.extsi(self.i64, arith.addi(offset, int32(source.column * source.size))))
            found.append(arith.addi(address(self.refs[i], 1), start))
        place = found[0]
        for i, other in enumerate(found[1:], 1):
            place = arith.select(arith.cmpi(arith.CmpIPredicate.uge, which, int32(i)), other, place)
        return place

    def _right(self, sources: list[list[Any]], step: int) -> list[Any]:
        """The two registers of the rows' operand for one step of K; sources are summed."""
        mine = [x[step * len(x) // 2 : (step + 1) * len(x) // 2] for x in sources]
        if len(mine) == 1 and mine[0][0].type == self.i32:
            return mine[0]
        values, *others = (self._wide(x) for x in mine)
        for more in others:
            values = [arith.addf(a, b) for a, b in zip(values, more, strict=True)]
        if self.spec.precision == "bf16":
            return [ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", [self.i32], values[q + 1], values[q]) for q in (0, 2)]
        return self._tf32(values)

    def _wide(self, numbers: list[Any]) -> list[Any]:
        """In float32; two in a word are bf16."""
        if numbers[0].type == self.f32:
            return numbers
        both = ((arith.shli(x, int32(16)), arith.andi(x, int32(-0x10000))) for x in numbers)
        return [arith.bitcast(self.f32, x) for two in both for x in two]

    def _tf32(self, values: list[Any]) -> list[Any]:
        """For tf32; at fp32 also what that leaves (3xtf32: three products of two tf32 parts).

        The product cuts off the last 13 bits. One multiplication before makes up for that on average; rounding to nearest takes
        two instructions at half the rate, and loses NaNs (`cvt.rna` carries their bits into the sign).
        """
        factor = arith.constant(self.f32, 1 + math.log(2) * 2**-11)  # mantissas are 1 / ln 2 on average

        def near(x: Any) -> Any:
            return arith.bitcast(self.i32, arith.mulf(x, factor))

        found = [near(x) for x in values]
        if self.spec.precision == "tf32":
            return found
        high = [arith.andi(x, int32(-0x2000)) for x in found]
        return high + [near(arith.subf(x, arith.bitcast(self.f32, h))) for x, h in zip(values, high, strict=True)]

    def _left(self, weight: Any, m: int, c: int, per_warp: int, step: int) -> list[Any]:
        """The four registers of a tile of 16 weight columns for one step of K; half a tile has columns 0 to 7 alone."""
        if self.spec.tight:
            triple, which = divmod((2 * c + step) * weight.tiles + m, 3)
            if (weight.offset, triple) not in self.triples:
                self.triples[weight.offset, triple] = self._triple(weight, triple, per_warp)
            return self.triples[weight.offset, triple][which]
        steps, half = 2 * self.spec.chunks, weight.half and m == weight.tiles - 1
        words = 64 if half else 128
        at = (weight.offset + m * steps * 128 + (2 * c + step) * words) * 4
        mine = arith.addi(arith.muli(self.warp, int32(2 * per_warp * words * 4)), arith.muli(self.lane, int32(words // 8)))
        text = "ld.shared" if self.resident else "ld.global.nc"
        place = arith.addi(self.weights, mine if self.resident else arith.extsi(self.i64, mine))
        if half:
            two = ptx(f"{text}.v2.b32 {{$0, $1}}, [$2+{at}];", [self.i32] * 2, place)
            four = [two[0], int32(0), two[1], int32(0)]
        else:
            four = ptx(f"{text}.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];", [self.i32] * 4, place)
        if self.spec.precision == "fp32":
            return self._tf32([arith.bitcast(self.f32, x) for x in four])
        return list(four)

    def _triple(self, weight: Any, triple: int, per_warp: int) -> list[list[Any]]:
        """Three fragments that lie in the words of two; see `_pack`."""
        mine = arith.muli(self.warp, int32(-(-2 * per_warp * weight.tiles // 3) * 1024))
        place = arith.addi(self.weights, arith.addi(mine, arith.muli(self.lane, int32(16))))
        one, two = (
            ptx(
                f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{weight.offset * 4 + triple * 1024 + n * 512}];",
                [self.i32] * 4,
                place,
            )
            for n in range(2)
        )
        three = [
            arith.ori(arith.shli(a, int32(19)), arith.shli(arith.andi(b, int32(0x1FFF)), int32(6)))
            for a, b in zip(one, two, strict=True)
        ]
        return [[arith.andi(x, int32(-0x2000)) for x in one], [arith.andi(x, int32(-0x2000)) for x in two], three]

    def _multiply(self, total: list[Any], left: list[Any], right: list[Any]) -> list[Any]:
        shape, kind = ("m16n8k16", "bf16") if self.spec.precision == "bf16" else ("m16n8k8", "tf32")
        text = (
            f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        if self.spec.precision == "fp32":
            high, low = left[:4], left[4:]
            for a, b in ((low, right[:2]), (high, right[2:]), (high, right[:2])):
                total = ptx(text, [self.f32] * 4, *a, *b, *total)
            return total
        return ptx(text, [self.f32] * 4, *left, *right, *total)
