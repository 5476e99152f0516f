"""Reading rows for products straight from L2 into registers, and waiting for those that other CTAs are making.

In a dataflow launch (`Config.dataflow`) nobody says that a row is there: what is there says so, because before it is
`UNWRITTEN`. A thread that reads some of it before reads again.
"""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf, vector
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._mosaic.mlir import address, false, int32, patience, ptx, scalar, true
from cavs.kernels._program.widths import UNWRITTEN, UNWRITTEN_HALF

# Reads, of 16 bytes, that a thread repeats at most while it waits: with more, those who wait hinder those who write.
POLLED = 12


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a thread reads its numbers of a source, for 8 rows: `quarter` bytes of each chunk, of type `kind`.

    `partial`: some of the rows may be past the tile's last.
    """

    start: Any
    quarter: int
    kind: Any
    partial: bool
    awaited: bool

    def read(self, chunk: int) -> list[Any]:
        """Straight from L2, where other CTAs' numbers arrive."""
        first = 4 * chunk * self.quarter
        texts = [f"ld.relaxed.gpu.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{first + at}];" for at in range(0, self.quarter, 16)]
        return [x for text in texts for x in ptx(text, [self.kind] * 4, self.start)]


class Step(NamedTuple):
    """One chunk of one spec, read at these places."""

    places: list[_Place]
    chunk: int
    spec: int

    @property
    def reads(self) -> int:
        """Of 16 bytes, by a thread."""
        return sum(p.quarter // 16 for p in self.places)


class Reader:
    """Emits the reads of a phase's products by one thread. In the names of PTX: lane = 4 * group + thread-in-group."""

    def __init__(self, specs: Any, refs: Any, numbers: Any, row: Any, last: Any, peer: Any, counters: Any):
        self.specs, self.counters, self.peer = specs, counters, peer
        self.awaits = any(source.awaited for spec in specs for source in spec.sources)
        self.row, self.last = scalar(row), scalar(last)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.thread = mu.thread_idx()
        self.lane = arith.andi(self.thread, int32(31))
        self.warp = arith.andi(arith.shrui(self.thread, int32(5)), int32(3))
        self.group, self.quad = arith.shrui(self.lane, int32(2)), arith.andi(self.lane, int32(3))
        ends, count = np.cumsum([len(spec.sources) for spec in specs]), specs[0].rows // 8
        # Of each spec: its tensors, and for each of its sources and 8 rows the row that this thread reads.
        self.sources = [
            (refs[end - len(spec.sources) : end], numbers.registers.flat[(end - len(spec.sources)) * count : end * count])
            for spec, end in zip(specs, ends, strict=True)
        ]

    def begin(self, groups: int) -> None:
        """What follows is for so many groups of 8 rows, the last of which may be partly past the tile's last row."""
        last = arith.addi(arith.addi(self.row, self.group), int32(8 * (groups - 1)))
        self.valid = arith.cmpi(arith.CmpIPredicate.sle, last, self.last)

    def places(self, which: int, groups: int) -> list[_Place]:
        """Where this thread's numbers of each source of a spec begin, for each 8 rows; of joined sources a warp reads one."""
        spec, (refs, numbers) = self.specs[which], self.sources[which]
        warps, per_warp = spec.splits * spec.split // spec.joined, spec.chunks // spec.splits
        rank = arith.addi(arith.muli(self.peer, int32(spec.splits)), self.warp)
        part = arith.divui(rank, int32(warps))
        warp = arith.subi(rank, arith.muli(part, int32(warps)))
        out = []
        for s, n in itertools.product(range(0, len(spec.sources), spec.joined), range(groups)):
            found = []
            size = 4 if ir.MemRefType(refs[s].type).element_type == self.f32 else 2  # bytes
            quarter = spec.chunk * size // 4
            for i, source in enumerate(spec.sources[s : s + spec.joined], s):
                offset = arith.addi(arith.muli(warp, int32(4 * per_warp * quarter)), arith.muli(self.quad, int32(quarter)))
                number = numbers[i * (spec.rows // 8) + n]
                r = vector.extract(number, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
                width = ir.MemRefType(refs[i].type).shape[1]
                start = arith.muli(arith.extsi(self.i64, r), arith.constant(self.i64, width * size))
                start = arith.addi(start, arith.extsi(self.i64, arith.addi(offset, int32(source.column * size))))
                found.append(arith.addi(address(refs[i], 1), start))
            start = found[0]
            for i, other in enumerate(found[1:], 1):
                start = arith.select(arith.cmpi(arith.CmpIPredicate.uge, part, int32(i)), other, start)
            awaited = any(x.awaited for x in spec.sources[s : s + spec.joined])
            out.append(_Place(start, quarter, self.i32 if size == 2 else self.f32, n == groups - 1, awaited))
        return out

    def first(self, steps: list[Step]) -> list[list[list[Any]]]:
        """The numbers of the first steps, once they are there."""
        if not self.awaits:
            return [self.read(step) for step in steps]

        def read() -> tuple[list[Any], Any]:
            found = [self.read(step) for step in steps]
            late = false()
            for step, values in zip(steps, found, strict=True):
                late = arith.ori(late, self.unwritten(step.places, values))
            return [x for values in found for numbers in values for x in numbers], late

        left = iter(self.until_there([p.kind for step in steps for p in step.places for _ in range(p.quarter // 4)], read))
        return [[[next(left) for _ in range(p.quarter // 4)] for p in step.places] for step in steps]

    def read(self, step: Step) -> list[list[Any]]:
        """A thread's numbers for a step, of each place; zeros past the tile's last row, so that nothing is read twice."""
        partial = [p for p in step.places if p.partial]
        kinds = [p.kind for p in partial for _ in range(p.quarter // 4)]
        branch = scf.IfOp(self.valid, kinds, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([x for p in partial for x in p.read(step.chunk)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([arith.constant(kind, 0.0 if kind == self.f32 else 0) for kind in kinds])
        left = iter(branch.results)
        return [[next(left) for _ in range(p.quarter // 4)] if p.partial else p.read(step.chunk) for p in step.places]

    def unwritten(self, places: list[_Place], values: list[list[Any]]) -> Any:
        """Whether this thread has read a number that nobody has written."""
        found, least = false(), None
        for x in (x for p, numbers in zip(places, values, strict=True) if p.awaited for x in numbers):
            if x.type == self.f32:
                same = arith.cmpi(arith.CmpIPredicate.eq, arith.bitcast(self.i32, x), int32(int(UNWRITTEN)))
                found = arith.ori(found, same)
                continue
            differ = arith.xori(x, int32((int(UNWRITTEN_HALF) * 0x10001) - (1 << 32)))  # of two bf16 numbers in a word
            least = differ if least is None else ptx("min.u16x2 $0, $1, $2;", [self.i32], least, differ)
        for half in () if least is None else (arith.andi(least, int32(0xFFFF)), arith.shrui(least, int32(16))):
            found = arith.ori(found, arith.cmpi(arith.CmpIPredicate.eq, half, int32(0)))
        return found

    def until_there(self, kinds: list[Any], attempt: Callable[[], tuple[list[Any], Any]]) -> list[Any]:
        """What `attempt` gives, of these types, once it is late for no thread of the warp; or when patience is at its end."""
        lost = address(self.counters, 1)
        loop = scf.WhileOp([self.i32, *kinds], [int32(0)])
        before = loop.before.blocks.append(self.i32)
        with ir.InsertionPoint.at_block_begin(before):
            values, late = attempt()
            (turn,) = before.arguments
            text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p;}"
            late = arith.cmpi(arith.CmpIPredicate.ne, ptx(text, [self.i32], arith.extui(self.i32, late)), int32(0))
            patient = patience(lost, turn, self.specs[0].spins)
            vain = arith.extui(self.i32, arith.andi(late, arith.xori(patient, true())))
            with mu.when(arith.cmpi(arith.CmpIPredicate.ne, vain, int32(0))):
                ptx("st.relaxed.gpu.global.u32 [$0], $1;", [], lost, int32(1))
            scf.condition(arith.andi(late, patient), [arith.addi(turn, int32(1)), *values])
        after = loop.after.blocks.append(self.i32, *kinds)
        with ir.InsertionPoint.at_block_begin(after):
            scf.yield_([after.arguments[0]])
        return list(loop.results)[1:]
