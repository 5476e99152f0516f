"""Products by `mma.sync`: weights in shared memory (`_mosaic.weights`), rows straight from global memory; see `mosaic`."""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, scf
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.exchange import Exchange
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, as_index, false, int32, ptx, scalar
from cavs.kernels._mosaic.reads import POLLED, Reader, Step
from cavs.kernels._program.widths import FACTOR, HALVES


def product(
    tile: Tile,
    specs: Sequence[Any],
    refs: Sequence[Any],
    numbers: Any,
    weights: Any,
    part: Any,
    cta: Any,
    counters: Any,
    ring: Any = None,
) -> None:
    """All products of a phase for the rows of a tile, into `part`.

    `specs` are `_program.specs.ProductSpec`; `refs` belong to their sources, `numbers` are from `product_rows`; `weights` is
    one flat array of packed weights, in shared memory, or in global memory where they stream; `counters[0]` is set where a
    wait is given up; `ring` holds the barriers of `_mosaic.exchange`, where CTAs divide K.
    """
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=([REF] * len(refs), layout, REF, REF, SCALAR, SCALAR, SCALAR, REF, [REF] * (ring is not None)))
    def go(
        ctx: Any, refs: Any, numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any, counters: Any, ring: Any
    ) -> None:
        _Product(specs, refs, numbers, weights, part, row, last, cta, counters, ring).emit()

    go(list(refs), numbers, weights, part, tile.row, tile.last, cta, counters, [] if ring is None else [ring])


class _Product(Reader):
    """Emits the products of a phase; see the module's text."""

    def __init__(
        self,
        specs: Any,
        refs: Any,
        numbers: Any,
        weights: Any,
        part: Any,
        row: Any,
        last: Any,
        cta: Any,
        counters: Any,
        ring: Sequence[Any],
    ):
        peer = arith.remui(scalar(cta), int32(specs[0].split))
        self.exchange = Exchange(*ring, part, peer, specs[0]) if ring else None
        super().__init__(specs, refs, numbers, row, last, peer, counters)
        self.spec, self.part = specs[0], part
        if self.spec.resident:
            self.weights = address(weights, 3)
        else:
            own = arith.muli(arith.extsi(self.i64, scalar(cta)), arith.constant(self.i64, self.spec.words * 4))
            self.weights = arith.addi(address(weights, 1), own)

    def emit(self) -> None:
        count = arith.addi(arith.subi(self.last, self.row), int32(1))
        groups = self.spec.rows // 8
        mu.warpgroup_barrier()  # the partial sums of the last tile have been read
        if self.exchange:
            self.exchange.free()
        self._choose([n for n in (1, 2, 4, 8) if n < groups] + [groups], count)
        mu.warpgroup_barrier()
        if self.exchange:
            self.exchange.swap(count)

    def _choose(self, sizes: list[int], count: Any) -> None:
        """The smallest number of 8-row groups that holds the rows."""
        if len(sizes) == 1:
            self._rows(sizes[0])
            return
        few = arith.cmpi(arith.CmpIPredicate.sle, count, int32(8 * sizes[0]))
        branch = scf.IfOp(few, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            self._rows(sizes[0])
            scf.yield_([])
        with ir.InsertionPoint(branch.else_block):
            self._choose(sizes[1:], count)
            scf.yield_([])

    def _rows(self, groups: int) -> None:
        self.begin(groups)
        for splits in dict.fromkeys(spec.splits for spec in self.specs):
            together = [n for n, spec in enumerate(self.specs) if spec.splits == splits]
            active = arith.cmpi(arith.CmpIPredicate.slt, self.warp, int32(splits))
            with contextlib.nullcontext() if splits == 4 else mu.when(active):
                self._stream(together, groups)

    def _stream(self, which: list[int], groups: int) -> None:
        """Products of some specs, chunk after chunk, for which the rows of several chunks are on their way."""
        specs, spec = {n: self.specs[n] for n in which}, self.specs[which[0]]
        self.triples: dict[tuple[int, int], list[list[Any]]] = {}  # read in this branch
        places = {n: self.places(n, groups) for n in which}
        steps = [Step(places[n], c, n) for n in which for c in range(specs[n].chunks // spec.splits)]
        # Enough reads in flight to cover the way to L2.
        ends = np.cumsum([step.reads for step in steps])
        depth = max(1, int((ends <= (min(POLLED, spec.in_flight) if self.awaits else spec.in_flight)).sum()))
        keys = [
            (s, w, m, o, n)
            for s in which
            for w, weight in enumerate(specs[s].weights)
            for m in range(weight.tiles)
            for o in weight.operands
            for n in range(groups)
        ]

        def once() -> tuple[list[Any], Any]:
            """The sums, and whether a number came too late for them."""
            queue, sent = self.first(steps[:depth]), depth
            totals = dict.fromkeys(keys, [arith.constant(self.f32, 0.0)] * 4)
            late = false()
            for i, step in enumerate(steps):
                done = ends[i] - step.reads
                while sent < len(steps) and (not queue or ends[sent] - done <= spec.in_flight):
                    queue.append(self.read(steps[sent]))
                    sent += 1
                values = queue.pop(0)
                if i >= depth:
                    late = arith.ori(late, self.unwritten(step.places, values))
                self._multiply_chunk(step, values, totals, groups)
            return [x for key in keys for x in totals[key]], late

        if self.awaits and depth < len(steps):
            found = self.until_there([self.f32] * 4 * len(keys), once)
        else:
            found, _ = once()
        totals = {key: found[4 * i : 4 * i + 4] for i, key in enumerate(keys)}
        if spec.slots == spec.splits:
            self._leave(totals, spec, False)
            return
        second = arith.cmpi(arith.CmpIPredicate.uge, self.warp, int32(spec.slots))
        with mu.when(second):
            self._leave(totals, spec, False)
        mu.warpgroup_barrier()
        with mu.when(arith.cmpi(arith.CmpIPredicate.ult, self.warp, int32(spec.slots))):
            self._leave(totals, spec, True)

    def _multiply_chunk(self, step: Step, values: list[list[Any]], totals: dict[Any, list[Any]], groups: int) -> None:
        spec = self.specs[step.spec]
        for half in range(2):
            rights = {
                (o, n): self._right([values[s * groups + n] for s in operand], half)
                for o, operand in enumerate(spec.operands)
                for n in range(groups)
            }
            for w, weight in enumerate(spec.weights):
                for m in range(weight.tiles):
                    left = self._left(spec, weight, m, step.chunk, half)
                    for o in weight.operands:
                        for n in range(groups):
                            key = (step.spec, w, m, o, n)
                            totals[key] = self._multiply(totals[key], left, rights[o, n])

    def _leave(self, totals: dict[Any, list[Any]], spec: Any, add: bool) -> None:
        """The warp's sums into its slot of `part`; or added to what is there."""
        slot = self.warp if spec.slots == spec.splits else arith.andi(self.warp, int32(spec.slots - 1))
        place = arith.addi(arith.muli(arith.shrui(self.thread, int32(7)), int32(spec.all_slots)), slot)
        for (s, w, m, o, n), four in totals.items():
            weight = self.specs[s].weights[w]
            column = weight.columns[weight.operands.index(o)] + 16 * m
            mine = four[:2] if weight.half and m == weight.tiles - 1 else four
            for q, x in enumerate(self._times(mine, 1 / FACTOR.get(spec.precision, 1))):
                r = arith.addi(arith.muli(self.quad, int32(2)), int32(8 * n + q % 2))
                col = arith.addi(self.group, int32(column + 8 * (q // 2)))
                at = [as_index(place), as_index(r), as_index(col)]
                memref.store(arith.addf(memref.load(self.part, at), x) if add else x, self.part, at)

    def _right(self, sources: list[list[Any]], step: int) -> list[Any]:
        """The two registers of the rows' operand for one step of K; sources are summed."""
        mine = [x[step * len(x) // 2 : (step + 1) * len(x) // 2] for x in sources]
        if len(mine) < 3 and all(x[0].type == self.i32 for x in mine):  # the sum of two is rounded but once, as below
            add = f"add.rn.{self.spec.precision}x2 $0, $1, $2;"
            return [two[0] if len(two) == 1 else ptx(add, [self.i32], *two) for two in zip(*mine, strict=True)]
        values, *others = (self._wide(x) for x in mine)
        for more in others:
            values = [arith.addf(a, b) for a, b in zip(values, more, strict=True)]
        if (kind := self.spec.precision) in HALVES:
            values = self._times(values, FACTOR[kind])
            return [ptx(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", [self.i32], values[q + 1], values[q]) for q in (0, 2)]
        return self._tf32(values)

    def _wide(self, numbers: list[Any]) -> list[Any]:
        """In float32; two in a word are bf16."""
        if numbers[0].type == self.f32:
            return numbers
        assert self.spec.precision == "bf16", "no sums of more than two rows in float16: `cavs._engines.lower._measured`"
        both = ((arith.shli(x, int32(16)), arith.andi(x, int32(-0x10000))) for x in numbers)
        return [arith.bitcast(self.f32, x) for two in both for x in two]

    def _times(self, values: Sequence[Any], factor: float) -> list[Any]:
        return [arith.mulf(x, arith.constant(self.f32, factor)) for x in values] if factor != 1 else list(values)

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

    def _left(self, spec: Any, weight: Any, m: int, c: int, step: int) -> list[Any]:
        """The four registers of a tile of 16 weight columns for one step of K; half a tile has columns 0 to 7 alone."""
        per_warp = spec.chunks // spec.splits
        if spec.tight:
            triple, which = divmod((2 * c + step) * weight.tiles + m, 3)
            if (weight.offset, triple) not in self.triples:
                self.triples[weight.offset, triple] = self._triple(weight, triple, per_warp)
            return self.triples[weight.offset, triple][which]
        steps, half = 2 * spec.chunks, weight.half and m == weight.tiles - 1
        words = 64 if half else 128
        at = (weight.offset + m * steps * 128 + (2 * c + step) * words) * 4
        mine = arith.addi(arith.muli(self.warp, int32(2 * per_warp * words * 4)), arith.muli(self.lane, int32(words // 8)))
        text = "ld.shared" if spec.resident else "ld.global.nc"
        place = arith.addi(self.weights, mine if spec.resident else arith.extsi(self.i64, mine))
        if half:
            two = ptx(f"{text}.v2.b32 {{$0, $1}}, [$2+{at}];", [self.i32] * 2, place)
            four = [two[0], int32(0), two[1], int32(0)]
        else:
            four = ptx(f"{text}.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];", [self.i32] * 4, place)
        if spec.precision == "fp32":
            return self._tf32([arith.bitcast(self.f32, x) for x in four])
        return list(four)

    def _triple(self, weight: Any, triple: int, per_warp: int) -> list[list[Any]]:
        """Three fragments that lie in the words of two; see `_layout.pack`."""
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
        three = [arith.addi(arith.shli(a, int32(19)), arith.shli(b, int32(6))) for a, b in zip(one, two, strict=True)]
        return [list(one), list(two), three]

    def _multiply(self, total: list[Any], left: list[Any], right: list[Any]) -> list[Any]:
        half = self.spec.precision in HALVES
        shape, kind = ("m16n8k16", self.spec.precision) if half else ("m16n8k8", "tf32")
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
