"""Products of wide levels: `wgmma` on tiles of 64 rows per warpgroup, with weights streamed through a ring in shared memory.

A level of thousands of vertices is an ordinary large product. Keeping weights resident would be a loss there: each thread block
would have to read all rows for its few columns. Instead a thread block owns many columns, computes 64 rows for each of its
warpgroups, and reads the weights from L2 for each tile, 32 elements of K at a time, as `_layout.pack.pack_ring` packs them.
One thread issues these copies (`cp.async.bulk`) `STAGES` chunks ahead; see `_mosaic.ring`. Rows are gathered straight from
global memory into the registers of the operand, one or two chunks ahead.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import gpu, llvm, nvvm, scf
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.config import STAGES
from cavs.kernels._layout.specs import ProductSpec, Tile, WeightSpec
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, inline_mgpu, ptx, thread_index
from cavs.kernels._mosaic.ring import Ring
from cavs.kernels._mosaic.types import F32, I32, Context, GlobalAddress, MemRef, Register, Scalar
from cavs.kernels._mosaic.value import Value, as_index, bitcast, constant, int32, int64, minimum, scalar, select, zero_extended
from cavs.kernels._program.arrays import Ref

_AHEAD = 32  # the words of rows that a thread has in flight; at least one chunk of all sources
_LATE = 2  # a stage is refilled this many chunks after it was multiplied, when all warpgroups have finished with it

Source: TypeAlias = tuple[MemRef, MemRef | None, Scalar]  # a tensor, the indices of its rows, and what is added to these
RowPair: TypeAlias = list[GlobalAddress]  # where a thread reads its two rows of a source
Sums: TypeAlias = dict[tuple[int, int], list[F32]]  # a thread's accumulators by weight and operand


def wide_product(
    tile: Tile,
    specs: Sequence[ProductSpec],
    refs: Sequence[Ref],
    indices: Sequence[Ref | None],
    bases: Sequence[jax.Array],
    weights: Ref,
    part: Ref,
    ring: Ref,
    cta: jax.Array,
) -> None:
    """Computes all products of a phase for the rows of the tiles of all warpgroups, which call it together.

    Args:
        tile: The warpgroup's tile.
        specs: The products.
        refs: For each source of each spec, a float32 tensor in global memory, of shape (rows, width).
        indices: For each source int32 of shape (rows,) in global memory: the source's row for row r of the tile is `index[r]`.
            `None` if it is r.
        bases: For each source an int32 scalar that is added to its rows.
        weights: The packed weights in global memory, of shape (thread blocks, words).
        part: The sums in shared memory, float32 of shape (warpgroups, rows, columns). They share memory with the stages.
        ring: The barriers; see `begin_ring`.
        cta: An int32 scalar: the number of this thread block in its group.
    """
    present = [index for index in indices if index is not None]
    which = [n for n, index in enumerate(indices) if index is not None]

    @inline_mgpu(arg_types=([REF] * len(refs), [REF] * len(present), [SCALAR] * len(bases), *[REF] * 3, *[SCALAR] * 3))
    def emit(ctx: Context, refs: list[MemRef], present: list[MemRef], bases: list[Scalar], *arguments: Any) -> None:
        found = dict(zip(which, present, strict=True))
        sources = [(ref, found.get(n), base) for n, (ref, base) in enumerate(zip(refs, bases, strict=True))]
        _Wide(specs, sources, *arguments).emit()

    emit(list(refs), present, list(bases), weights, part, ring, tile.row, tile.last, cta)


class _Wide:
    """Emits the products of a phase; see `wide_product` for the arguments. In PTX's terms, a lane is 4 * `group` + `quad`."""

    def __init__(
        self,
        specs: Sequence[ProductSpec],
        sources: Sequence[Source],
        weights: MemRef,
        part: MemRef,
        ring: MemRef,
        row: Scalar,
        last: Scalar,
        cta: Scalar,
    ):
        self.specs, self.part, barriers = specs, part, address(ring, 3)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.thread = thread_index()
        lane = self.thread & 31
        self.group, self.quad = lane >> 2, lane & 3
        self.row = (self.thread >> 5 & 3) * 16 + self.group  # of the tile; the thread's other row is 8 later
        self.leader, self.first = self.thread == 0, self.thread & 127 == 0
        stages = address(part, 3)
        offset = int64(scalar(cta)) * (4 * ir.MemRefType(weights.type).shape[1])
        self.ring = Ring(specs, barriers, stages, address(weights, 1) + offset)
        self.pointers: list[RowPair] = []  # for each source
        columns = [source.column for spec in specs for source in spec.sources]
        for (ref, index, base), column in zip(sources, columns, strict=True):
            width, two = ir.MemRefType(ref.type).shape[1], []
            for below in (0, 8):
                r = minimum(scalar(row) + self.row + below, scalar(last))
                if index is not None:
                    r = ptx("ld.global.b32 $0, [$1];", self.i32, address(index, 1) + int64(r) * 4)
                at = int64(r + scalar(base)) * (4 * width) + 4 * column + int64(self.quad * 16)
                two.append(address(ref, 1) + at)
            self.pointers.append(two)

    def emit(self) -> None:
        """Emits the products."""
        ptx("fence.proxy.async.shared::cta;", [])  # until now, threads wrote and read this memory as `part`
        gpu.barrier()
        with mu.when(self.leader):
            for q in range(STAGES):
                self.ring.fill(int32(q), q)
        sums, source = [], 0
        for n, spec in enumerate(self.specs):
            sums.append(self._stream(n, spec, self.pointers[source : source + len(spec.sources)]))
            source += len(spec.sources)
        gpu.barrier()  # all stages have been multiplied, so sums may overwrite them
        for spec, found in zip(self.specs, sums, strict=True):
            self._store(spec, found)
        mu.warpgroup_barrier()

    def _read(self, spec: ProductSpec, pointers: list[RowPair], chunk: I32) -> list[F32]:
        """Reads a chunk of all sources: for each source 16 elements, ordered by row, half of the chunk, and element."""
        each, elements = spec.chunks // spec.joined, []
        for n in range(0, len(pointers), spec.joined):
            two, rest = pointers[n], chunk
            for m in range(1, spec.joined):
                later = chunk >= m * each
                two = [select(later, b, a) for a, b in zip(two, pointers[n + m], strict=True)]
                rest = select(later, chunk - m * each, rest)
            rest = minimum(rest, each - 1)  # chunks past the last are read but not used
            for start in two:
                at = start + int64(rest * 128)
                for half in range(2):
                    text = f"ld.relaxed.gpu.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{64 * half}];"
                    elements += ptx(text, [self.f32] * 4, at)
        return elements

    def _stream(self, n: int, spec: ProductSpec, pointers: list[RowPair]) -> Sums:
        """The sums of the n-th spec, chunk after chunk."""
        widths = [w.width for w in spec.weights]
        keys = [(w, o) for w, weight in enumerate(spec.weights) for o in weight.operands]
        zeros = [constant(self.f32, 0)] * sum(widths[w] // 2 for w, _ in keys)
        words = 16 * (len(pointers) // spec.joined)
        depth = max(1, _AHEAD // words)
        ahead = [x for c in range(depth) for x in self._read(spec, pointers, int32(c))]
        loop = scf.ForOp(as_index(0), as_index(spec.chunks), as_index(STAGES), [*zeros, *ahead])
        with ir.InsertionPoint(loop.body):
            carried = [Value(x) for x in loop.inner_iter_args]
            rest = iter(carried[: len(zeros)])
            sums: Sums = {(w, o): [next(rest) for _ in range(widths[w] // 2)] for w, o in keys}
            queue = [carried[len(zeros) + words * c :][:words] for c in range(depth)]
            begin = int32(loop.induction_variable)
            for stage in range(STAGES):
                chunk = begin + stage
                q = chunk + self.ring.starts[n]
                rows = [self._operand(o, queue[0]) for o in spec.operands]
                queue.pop(0)
                self.ring.wait_full(q, stage)
                nvvm.wgmma_fence_aligned()
                for step in range(4):
                    for w, o in keys:
                        at = self._at(stage, spec.weights[w], step)
                        sums[w, o] = self._multiply(sums[w, o], rows[o][step], at, widths[w])
                nvvm.wgmma_commit_group_sync_aligned()
                queue.append(self._read(spec, pointers, chunk + depth))
                nvvm.wgmma_wait_group_sync_aligned(1)
                self.ring.release((stage - 1) % STAGES, self.first & (chunk > 0))
                old = q - _LATE
                again = old + STAGES
                more = (old >= 0) & (again < self.ring.total)
                with mu.when(self.leader & more):
                    free = (stage - _LATE) % STAGES
                    self.ring.wait_empty(old, free)
                    self.ring.fill(again, free)
            scf.yield_([x for key in keys for x in sums[key]] + [x for words_ in queue for x in words_])
        nvvm.wgmma_wait_group_sync_aligned(0)
        self.ring.release(STAGES - 1, self.first)
        rest = map(Value, loop.results)
        return {(w, o): [next(rest) for _ in range(widths[w] // 2)] for w, o in keys}

    def _operand(self, sources: Sequence[int], read: list[F32]) -> list[list[Register]]:
        """The four registers of an operand, a sum of sources, for each of a chunk's four steps; see `RING_ORDER`."""
        first, *others = (read[16 * s : 16 * s + 16] for s in sources)
        for more in others:
            first = [a + b for a, b in zip(first, more, strict=True)]
        # `wgmma` truncates; this corrects the bias on average, as in `_mosaic.operands.to_tf32`.
        factor = constant(self.f32, 1 + math.log(2) * 2**-11)
        near = [bitcast(self.i32, x * factor) for x in first]
        upper, lower = near[:8], near[8:]
        return [[upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]] for s in range(4)]

    def _at(self, stage: int, weight: WeightSpec, step: int) -> int:
        """The offset in bytes of a weight's first column among the stages, for one step of a chunk."""
        return stage * self.ring.size + 128 * weight.offset + 32 * step

    def _multiply(self, total: list[F32], left: list[Register], at: int, width: int) -> list[F32]:
        """Adds the product of 64 rows and `width` columns for 8 elements of K; the columns are `at` bytes into the stages."""
        # The matrix descriptor: an address, 128 bytes per column with a 128-byte swizzle, and 1024 bytes per 8 columns.
        place = ((self.ring.stages + at) & 0x3FFFF) >> 4
        descriptor = zero_extended(ir.IntegerType.get_signless(64), place) | (1 << 62 | 64 << 32 | 1 << 16)
        count = len(total)
        out = ",".join(f"${i}" for i in range(count))
        names = [f"${2 * count + i}" for i in range(5)]
        text = (
            f"wgmma.mma_async.sync.aligned.m64n{width}k8.f32.tf32.tf32 {{{out}}}, "
            f"{{{','.join(names[:4])}}}, {names[4]}, 1, 1, 1;"
        )
        codes = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
        kind = llvm.StructType.get_literal([self.f32] * count)
        results: Any = llvm.inline_asm(kind, [*total, *left, descriptor], text, ",".join(codes), has_side_effects=True)
        return [Value(llvm.extractvalue(self.f32, results, [i])) for i in range(count)]

    def _store(self, spec: ProductSpec, sums: Sums) -> None:
        """Writes the warpgroup's sums to its rows of `part`."""
        _, rows, width = ir.MemRefType(self.part.type).shape
        row = (self.thread >> 7) * rows + self.row
        place = self.ring.stages + (row * (4 * width) + self.quad * 8)
        for (w, o), totals in sums.items():
            weight = spec.weights[w]
            column = weight.columns[weight.operands.index(o)]
            for i in range(len(totals) // 4):
                for half in range(2):
                    first = 4 * (column + 8 * i + 8 * half * width)
                    two = totals[4 * i + 2 * half : 4 * i + 2 * half + 2]
                    ptx(f"st.shared.v2.f32 [$0+{first}], {{$1, $2}};", [], place, *two)
