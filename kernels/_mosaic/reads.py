"""Reads of rows for products, straight from L2 into registers, and polling of rows that other thread blocks are writing.

In a dataflow launch (`LaunchConfig.dataflow`) no barrier says that a row is complete. Instead its elements hold `UNWRITTEN`
before they are written, and a thread that reads an unwritten element reads again.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax._src.lib.mlir import ir
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.specs import ProductSpec
from cavs.kernels._mosaic.mlir import address, false, if_else, keep_polling, ptx, repeat, thread_index
from cavs.kernels._mosaic.types import I32, Fragments, GlobalAddress, MemRef, Predicate, Register, Scalar
from cavs.kernels._mosaic.value import bitcast, compare, constant, element, int32, int64, scalar, select, zero_extended
from cavs.kernels._program.widths import UNWRITTEN

# The most 16-byte reads that a thread repeats while it polls. With more, threads that poll slow down those that write.
POLLED = 8


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A thread's pointer into the rows of a source, for 8 rows of a tile.

    Attributes:
        start: The address of the first element that the thread reads.
        quarter: The bytes of each chunk of K that the thread reads; four threads read a chunk.
        kind: The type of the registers: f32, or i32 for two elements of 16 bits.
        partial: Whether some of the 8 rows may be past the tile's last.
        awaited: Whether other thread blocks may still have to write the rows.
    """

    start: GlobalAddress
    quarter: int
    kind: ir.Type
    partial: bool
    awaited: bool

    def read(self, chunk: int) -> list[Register]:
        """Emits the reads of one chunk. They bypass L1, because other thread blocks' elements arrive in L2."""
        first = 4 * chunk * self.quarter
        texts = [f"ld.relaxed.gpu.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{first + at}];" for at in range(0, self.quarter, 16)]
        return [x for text in texts for x in ptx(text, [self.kind] * 4, self.start)]


class ChunkRead(NamedTuple):
    """One chunk of one spec, and the pointers by which it is read."""

    pointers: list[Pointer]
    chunk: int
    spec: int

    @property
    def reads(self) -> int:
        """The number of 16-byte reads that a thread issues."""
        return sum(p.quarter // 16 for p in self.pointers)


class Reader:
    """Emits one thread's reads for the products of a phase. In PTX's terms its lane is 4 * `group` + `quad`.

    Args:
        specs: The products.
        refs: For each source of each spec, a tensor in global memory.
        numbers: The rows that the thread reads; see `_mosaic.rows.product_rows`.
        row: The tile's first row.
        last: The tile's last row.
        peer: The number of this thread block in its cluster.
        counters: int32 in global memory; the first is set if a thread gives up polling.
    """

    def __init__(
        self,
        specs: Sequence[ProductSpec],
        refs: Sequence[MemRef],
        numbers: Fragments,
        row: Scalar,
        last: Scalar,
        peer: I32,
        counters: MemRef,
    ):
        self.specs, self.counters, self.peer = specs, counters, peer
        self.awaits = any(source.awaited for spec in specs for source in spec.sources)
        self.row, self.last = scalar(row), scalar(last)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.thread = thread_index()
        self.lane, self.warp = self.thread & 31, self.thread >> 5 & 3
        self.group, self.quad = self.lane >> 2, self.lane & 3
        ends, count = np.cumsum([len(spec.sources) for spec in specs]).tolist(), specs[0].rows // 8
        # For each spec its tensors, and for each of its sources and each 8 rows of the tile the row that this thread reads.
        self.sources = [
            (refs[end - len(spec.sources) : end], numbers.registers.flat[(end - len(spec.sources)) * count : end * count])
            for spec, end in zip(specs, ends, strict=True)
        ]

    def begin(self, groups: int) -> None:
        """Prepares reads of the tile's first `groups` groups of 8 rows. The last group may extend past the tile's last row."""
        self.valid = self.row + self.group + 8 * (groups - 1) <= self.last

    def pointers(self, which: int, groups: int) -> list[Pointer]:
        """This thread's pointers into the sources of a spec, for each 8 rows; of joined sources, a warp reads one."""
        spec, (refs, numbers) = self.specs[which], self.sources[which]
        warps, per_warp = spec.splits * spec.split // spec.joined, spec.chunks // spec.splits
        rank = self.peer * spec.splits + self.warp
        part = rank // warps
        warp = rank - part * warps
        out = []
        for s, n in itertools.product(range(0, len(spec.sources), spec.joined), range(groups)):
            starts = []
            size = 4 if ir.MemRefType(refs[s].type).element_type == self.f32 else 2  # bytes
            quarter = spec.chunk * size // 4
            for i, source in enumerate(spec.sources[s : s + spec.joined], s):
                offset = warp * (4 * per_warp * quarter) + self.quad * quarter
                r = element(numbers[i * (spec.rows // 8) + n])
                start = int64(r) * (ir.MemRefType(refs[i].type).shape[1] * size) + int64(offset + source.column * size)
                starts.append(address(refs[i], 1) + start)
            start = starts[0]
            for i, other in enumerate(starts[1:], 1):
                start = select(compare("uge", part, i), other, start)
            awaited = any(x.awaited for x in spec.sources[s : s + spec.joined])
            out.append(Pointer(start, quarter, self.i32 if size == 2 else self.f32, n == groups - 1, awaited))
        return out

    def first(self, steps: list[ChunkRead]) -> list[list[list[Register]]]:
        """Reads the first steps, and polls until their elements are written; returns for each step what `read` does."""
        if not self.awaits:
            return [self.read(step) for step in steps]

        def read() -> tuple[list[Register], Predicate]:
            attempt = [self.read(step) for step in steps]
            late = false()
            for step, values in zip(steps, attempt, strict=True):
                late = late | self.any_unwritten(step.pointers, values)
            return [x for values in attempt for numbers in values for x in numbers], late

        kinds = [p.kind for step in steps for p in step.pointers for _ in range(p.quarter // 4)]
        left = iter(self.poll(kinds, read))
        return [[[next(left) for _ in range(p.quarter // 4)] for p in step.pointers] for step in steps]

    def read(self, step: ChunkRead) -> list[list[Register]]:
        """Reads a step; returns the registers of each pointer. Rows past the tile's last are zeros: no row is read twice."""
        partial = [p for p in step.pointers if p.partial]
        kinds = [p.kind for p in partial for _ in range(p.quarter // 4)]
        numbers = lambda: [x for p in partial for x in p.read(step.chunk)]  # noqa: E731
        left = iter(if_else(self.valid, kinds, numbers, lambda: [constant(kind, 0) for kind in kinds]))
        return [[next(left) for _ in range(p.quarter // 4)] if p.partial else p.read(step.chunk) for p in step.pointers]

    def any_unwritten(self, pointers: list[Pointer], values: list[list[Register]]) -> Predicate:
        """Whether one of the elements that this thread has read by these pointers is not written yet."""
        missing, least = false(), None
        for x in (x for p, numbers in zip(pointers, values, strict=True) if p.awaited for x in numbers):
            if x.type == self.f32:
                missing = missing | (bitcast(self.i32, x) == int(UNWRITTEN))
                continue
            differ = x ^ int(UNWRITTEN)  # two elements of 16 bits
            least = differ if least is None else ptx("min.u16x2 $0, $1, $2;", self.i32, least, differ)
        for half in () if least is None else (least & 0xFFFF, least >> 16):
            missing = missing | (half == 0)
        return missing

    def poll(self, kinds: Sequence[ir.Type], attempt: Callable[[], tuple[list[Register], Predicate]]) -> list[Register]:
        """Repeats an attempt until it succeeds for all threads of the warp, or has been repeated too often.

        Args:
            kinds: The types of the attempt's values.
            attempt: Emits the attempt; returns its values, and whether it failed for this thread.

        Returns:
            The values of the last attempt.
        """
        failed = address(self.counters, 1)

        def turn(number: I32) -> tuple[Predicate, list[Register]]:
            values, late = attempt()
            text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p;}"
            late = ptx(text, self.i32, zero_extended(self.i32, late)) != 0
            again = keep_polling(failed, number, self.specs[0].spins)
            with mu.when(late & (again ^ 1)):
                ptx("st.relaxed.gpu.global.u32 [$0], $1;", [], failed, int32(1))
            return late & again, [number + 1, *values]

        return repeat([int32(0)], kinds, turn)[1:]
