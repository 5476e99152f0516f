"""Products of wide levels: `wgmma` on tiles of 64 rows a warpgroup, weights streamed through a ring in shared memory.

A level of thousands of vertices is an ordinary large product: weights that stay on the chip would make each CTA read all rows
for its few columns. Here a CTA has many columns, 64 rows for each of its warpgroups, and reads weights from L2 for each tile,
32 numbers of K at a time, laid out by `_layout.pack.pack_ring`. One thread asks for them (`cp.async.bulk`), `STAGES` chunks
ahead; two mbarriers a stage say when they are here and when all warpgroups have multiplied them. Rows are gathered straight
from global memory into the operand's registers, a chunk or two before they are needed.
"""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, nvvm, scf
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.config import STAGES
from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, as_index, await_phase, int32, ptx, scalar

_AHEAD = 32  # words of rows that a thread has on their way, and a chunk of all sources at least
_LATE = 2  # a stage is filled again so many chunks after it was multiplied: by then all warpgroups are done with it


def begin_ring(ring: Any, config: Any) -> None:
    """Sets up the barriers of all stages: full (bytes), and empty (warpgroups)."""

    @plgpu.inline_mgpu(arg_types=(REF,))
    def go(ctx: Any, ring: Any) -> None:
        base = address(ring, 3)
        with mu.when(arith.cmpi(arith.CmpIPredicate.eq, mu.thread_idx(), int32(0))):
            for stage in range(STAGES):
                ptx(f"mbarrier.init.shared.b64 [$0+{16 * stage}], 1;", [], base)
                ptx(f"mbarrier.init.shared.b64 [$0+{16 * stage + 8}], {config.warpgroups};", [], base)
            ptx("fence.mbarrier_init.release.cluster;", [])
        gpu.barrier()

    go(ring)


def wide_product(
    tile: Tile,
    specs: Sequence[Any],
    refs: Sequence[Any],
    indices: Sequence[Any],
    bases: Sequence[Any],
    weights: Any,
    part: Any,
    ring: Any,
    cta: Any,
) -> None:
    """All products of a phase for the rows of the tiles of all warpgroups, into `part` (warpgroups, rows, columns).

    All warpgroups of the CTA call it together. `refs`, `indices` (None: the tile's own rows) and `bases` belong to the sources
    of `specs`; `weights` is (CTAs, words). `part` lies over the ring of weights.
    """
    present = [index for index in indices if index is not None]
    which = [n for n, index in enumerate(indices) if index is not None]

    @plgpu.inline_mgpu(arg_types=([REF] * len(refs), [REF] * len(present), [SCALAR] * len(bases), *[REF] * 3, *[SCALAR] * 3))
    def go(
        ctx: Any, refs: Any, present: Any, bases: Any, weights: Any, part: Any, ring: Any, row: Any, last: Any, cta: Any
    ) -> None:
        found = dict(zip(which, present, strict=True))
        sources = [(ref, found.get(n), base) for n, (ref, base) in enumerate(zip(refs, bases, strict=True))]
        _Wide(specs, sources, weights, part, ring, row, last, cta).emit()

    go(list(refs), present, list(bases), weights, part, ring, tile.row, tile.last, cta)


class _Wide:
    """Emits the products of a phase; see the module's text. In the names of PTX: lane = 4 * group + thread-in-group."""

    def __init__(self, specs: Any, sources: Any, weights: Any, part: Any, ring: Any, row: Any, last: Any, cta: Any):
        self.specs, self.part, self.ring = specs, part, address(ring, 3)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.thread = mu.thread_idx()
        lane = arith.andi(self.thread, int32(31))
        self.group, self.quad = arith.shrui(lane, int32(2)), arith.andi(lane, int32(3))
        warp = arith.andi(arith.shrui(self.thread, int32(5)), int32(3))
        self.row = arith.addi(arith.muli(warp, int32(16)), self.group)  # of the tile; and the one 8 below it
        self.leader = self._is(self.thread, 0)
        self.first = self._is(arith.andi(self.thread, int32(127)), 0)
        self.stages = address(part, 3)
        self.columns = [sum(w.width for w in spec.weights) for spec in specs]
        self.size = 128 * max(self.columns)  # bytes of a stage
        ends = list(itertools.accumulate(spec.chunks for spec in specs))
        self.starts, self.total = [0, *ends[:-1]], ends[-1]
        own = arith.muli(arith.extsi(self.i64, scalar(cta)), self._long(4 * ir.MemRefType(weights.type).shape[1]))
        self.weights = arith.addi(address(weights, 1), own)
        self.places: list[list[Any]] = []  # of each source, where the thread reads its two rows
        columns = [source.column for spec in specs for source in spec.sources]
        for (ref, index, base), column in zip(sources, columns, strict=True):
            width, two = ir.MemRefType(ref.type).shape[1], []
            for below in (0, 8):
                r = arith.minsi(arith.addi(arith.addi(scalar(row), self.row), int32(below)), scalar(last))
                if index is not None:
                    at = arith.addi(address(index, 1), arith.muli(arith.extsi(self.i64, r), self._long(4)))
                    r = ptx("ld.global.b32 $0, [$1];", [self.i32], at)
                r = arith.extsi(self.i64, arith.addi(r, scalar(base)))
                at = arith.addi(arith.muli(r, self._long(4 * width)), self._long(4 * column))
                at = arith.addi(at, arith.extsi(self.i64, arith.muli(self.quad, int32(16))))
                two.append(arith.addi(address(ref, 1), at))
            self.places.append(two)

    def _is(self, x: Any, n: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, x, int32(n))

    def _long(self, n: int) -> Any:
        return arith.constant(self.i64, n)

    def emit(self) -> None:
        ptx("fence.proxy.async.shared::cta;", [])  # what lay here before was written and read as `part`
        gpu.barrier()
        with mu.when(self.leader):
            for q in range(STAGES):
                self._fill(int32(q), q)
        sums, source = [], 0
        for n, spec in enumerate(self.specs):
            sums.append(self._stream(n, spec, self.places[source : source + len(spec.sources)]))
            source += len(spec.sources)
        gpu.barrier()  # all stages have been multiplied: sums may lie over them
        for spec, found in zip(self.specs, sums, strict=True):
            self._leave(spec, found)
        mu.warpgroup_barrier()

    def _fill(self, q: Any, stage: int) -> None:
        """Asks for chunk `q` of the phase's products."""
        sizes = [128 * columns for columns in self.columns]
        size, begin = int32(sizes[0]), arith.muli(q, int32(sizes[0]))
        begin = arith.addi(begin, int32(4 * self.specs[0].ring))
        for spec, start, bytes_ in list(zip(self.specs, self.starts, sizes, strict=True))[1:]:
            later = arith.cmpi(arith.CmpIPredicate.sge, q, int32(start))
            there = arith.addi(arith.muli(arith.subi(q, int32(start)), int32(bytes_)), int32(4 * spec.ring))
            size, begin = arith.select(later, int32(bytes_), size), arith.select(later, there, begin)
        ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{16 * stage}], $1;", [], self.ring, size)
        ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[$0+{stage * self.size}], [$1], $2, [$3+{16 * stage}];",
            [],
            self.stages,
            arith.addi(self.weights, arith.extsi(self.i64, begin)),
            size,
            self.ring,
        )

    def _parity(self, q: Any) -> Any:
        """Of the turn in which a stage holds chunk `q`; each phase takes an even number of turns."""
        return arith.andi(arith.shrui(q, int32(int(math.log2(STAGES)))), int32(1))

    def _done(self, stage: int, when: Any) -> None:
        with mu.when(when):
            ptx(f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0+{16 * stage + 8}];", [], self.ring)

    def _read(self, spec: Any, places: list[list[Any]], chunk: Any) -> list[Any]:
        """A chunk of all sources: for each 16 words, by row, half of the chunk, and number."""
        each, found = spec.chunks // spec.joined, []
        for n in range(0, len(places), spec.joined):
            two, rest = places[n], chunk
            for m in range(1, spec.joined):
                later = arith.cmpi(arith.CmpIPredicate.sge, chunk, int32(m * each))
                two = [arith.select(later, b, a) for a, b in zip(two, places[n + m], strict=True)]
                rest = arith.select(later, arith.subi(chunk, int32(m * each)), rest)
            rest = arith.minsi(rest, int32(each - 1))  # chunks past the last are asked for, and not used
            for place in two:
                at = arith.addi(place, arith.extsi(self.i64, arith.muli(rest, int32(128))))
                for half in range(2):
                    text = f"ld.relaxed.gpu.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{64 * half}];"
                    found += ptx(text, [self.f32] * 4, at)
        return found

    def _stream(self, n: int, spec: Any, places: list[list[Any]]) -> dict[tuple[int, int], list[Any]]:
        """The sums of one spec by weight and operand, chunk after chunk."""
        widths = [w.width for w in spec.weights]
        keys = [(w, o) for w, weight in enumerate(spec.weights) for o in weight.operands]
        zeros = [arith.constant(self.f32, 0.0)] * sum(widths[w] // 2 for w, _ in keys)
        words = 16 * (len(places) // spec.joined)
        depth = max(1, _AHEAD // words)
        ahead = [x for c in range(depth) for x in self._read(spec, places, int32(c))]
        loop = scf.ForOp(as_index(int32(0)), as_index(int32(spec.chunks)), as_index(int32(STAGES)), [*zeros, *ahead])
        with ir.InsertionPoint(loop.body):
            carried = list(loop.inner_iter_args)
            sums, rest = {}, iter(carried[: len(zeros)])
            for w, o in keys:
                sums[w, o] = [next(rest) for _ in range(widths[w] // 2)]
            queue = [carried[len(zeros) + words * c :][:words] for c in range(depth)]
            begin = arith.index_cast(self.i32, loop.induction_variable)
            for stage in range(STAGES):
                chunk = arith.addi(begin, int32(stage))
                q = arith.addi(chunk, int32(self.starts[n]))
                rows = [self._operand(o, queue[0]) for o in spec.operands]
                queue.pop(0)
                await_phase(self.ring, 16 * stage, self._parity(q))
                nvvm.wgmma_fence_aligned()
                for step in range(4):
                    for w, o in keys:
                        at = self._at(stage, spec.weights[w], step)
                        sums[w, o] = self._multiply(sums[w, o], rows[o][step], at, widths[w])
                nvvm.wgmma_commit_group_sync_aligned()
                queue.append(self._read(spec, places, arith.addi(chunk, int32(depth))))
                nvvm.wgmma_wait_group_sync_aligned(1)
                later = arith.cmpi(arith.CmpIPredicate.sgt, chunk, int32(0))
                self._done((stage - 1) % STAGES, arith.andi(self.first, later))
                old = arith.subi(q, int32(_LATE))
                again = arith.addi(old, int32(STAGES))
                more = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, old, int32(0)),
                    arith.cmpi(arith.CmpIPredicate.slt, again, int32(self.total)),
                )
                with mu.when(arith.andi(self.leader, more)):
                    free = (stage - _LATE) % STAGES
                    await_phase(self.ring, 16 * free + 8, self._parity(old))
                    self._fill(again, free)
            scf.yield_([x for key in keys for x in sums[key]] + [x for words_ in queue for x in words_])
        nvvm.wgmma_wait_group_sync_aligned(0)
        self._done(STAGES - 1, self.first)
        rest = iter(list(loop.results))
        return {(w, o): [next(rest) for _ in range(widths[w] // 2)] for w, o in keys}

    def _operand(self, sources: Sequence[int], read: list[Any]) -> list[list[Any]]:
        """The four registers of an operand (sources summed) for each of a chunk's four steps; see `_layout.pack.RING_ORDER`."""
        first, *others = (read[16 * s : 16 * s + 16] for s in sources)
        for more in others:
            first = [arith.addf(a, b) for a, b in zip(first, more, strict=True)]
        # As in `_mosaic.products._tf32`: the product cuts bits off, and this makes up for it on average.
        factor = arith.constant(self.f32, 1 + math.log(2) * 2**-11)
        near = [arith.bitcast(self.i32, arith.mulf(x, factor)) for x in first]
        upper, lower = near[:8], near[8:]
        return [[upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]] for s in range(4)]

    def _at(self, stage: int, weight: Any, step: int) -> int:
        """The byte of the stages at which a weight's first column begins, for one step of a chunk."""
        return stage * self.size + 128 * weight.offset + 32 * step

    def _multiply(self, total: list[Any], left: list[Any], at: int, width: int) -> list[Any]:
        """Adds 64 rows times `width` columns of 8 numbers of K, which lie at byte `at` of the stages."""
        # A matrix descriptor: the address, 128 bytes a column, swizzled; 1024 bytes from 8 columns to the next 8.
        place = arith.shrui(arith.andi(arith.addi(self.stages, int32(at)), int32(0x3FFFF)), int32(4))
        descriptor = arith.ori(arith.extui(self.i64, place), self._long((1 << 62) | (64 << 32) | (1 << 16)))
        count = len(total)
        out = ",".join(f"${i}" for i in range(count))
        names = [f"${2 * count + i}" for i in range(5)]
        text = (
            f"wgmma.mma_async.sync.aligned.m64n{width}k8.f32.tf32.tf32 {{{out}}}, "
            f"{{{','.join(names[:4])}}}, {names[4]}, 1, 1, 1;"
        )
        codes = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
        kind = llvm.StructType.get_literal([self.f32] * count)
        made = llvm.inline_asm(kind, [*total, *left, descriptor], text, ",".join(codes), has_side_effects=True)
        return [llvm.extractvalue(self.f32, made, [i]) for i in range(count)]

    def _leave(self, spec: Any, sums: dict[tuple[int, int], list[Any]]) -> None:
        """The warpgroup's sums into its rows of `part`."""
        _, rows, width = ir.MemRefType(self.part.type).shape
        row = arith.addi(arith.muli(arith.shrui(self.thread, int32(7)), int32(rows)), self.row)
        at = arith.addi(arith.muli(row, int32(4 * width)), arith.muli(self.quad, int32(8)))
        place = arith.addi(self.stages, at)
        for (w, o), found in sums.items():
            weight = spec.weights[w]
            column = weight.columns[weight.operands.index(o)]
            for i in range(len(found) // 4):
                for half in range(2):
                    first = 4 * (column + 8 * i + 8 * half * width)
                    two = found[4 * i + 2 * half : 4 * i + 2 * half + 2]
                    ptx(f"st.shared.v2.f32 [$0+{first}], {{$1, $2}};", [], place, *two)
