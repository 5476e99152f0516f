"""Sums of products across the CTAs of a cluster, through each other's shared memory (DSMEM; `Config.split`).

Where K of each product is divided among the CTAs of a cluster, each of them reads only its part of every row, computes with
it for the units of all of them, and sends each of the others one sum for each number that it owns. Warpgroups of the same
number run the same tiles, so each has two barriers in shared memory (mbarriers): one completes when the others' sums are
here, one when the others have read what they got for the tile before.
"""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.config import EXCHANGE_WORDS
from cavs.kernels._mosaic.mlir import REF, address, await_phase, int32, ptx

_THERE, _FREE, _TURN = 0, 8, 16  # where a warpgroup's two barriers of 64 bits and the parity of its tile are, in bytes


def begin_exchange(ring: Sequence[Any], config: Any) -> None:
    """Sets up the barriers of all warpgroups, in the one ref of a `ring`, before any CTA of the cluster uses them."""
    if not ring:
        return

    @plgpu.inline_mgpu(arg_types=(REF,))
    def go(ctx: Any, ring: Any) -> None:
        base = address(ring, 3)
        with mu.when(arith.cmpi(arith.CmpIPredicate.eq, mu.thread_idx(), int32(0))):
            for wg in range(config.warpgroups):
                at, others = wg * EXCHANGE_WORDS * 4, config.split - 1
                ptx(f"mbarrier.init.shared.b64 [$0+{at + _THERE}], {4 * others};", [], base)  # for each of their warps
                ptx(f"mbarrier.init.shared.b64 [$0+{at + _FREE}], {others};", [], base)
                ptx(f"st.shared.b32 [$0+{at + _TURN}], 0;", [], base)
            ptx("fence.mbarrier_init.release.cluster;", [])
        gpu.barrier()
        _meet()

    go(*ring)


def end_exchange(ring: Sequence[Any]) -> None:
    """Nobody sends to a CTA that has ended."""
    if not ring:
        return

    @plgpu.inline_mgpu()
    def go(ctx: Any) -> None:
        _meet()

    go()


def _meet() -> None:
    ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", [])


class Exchange:
    """Of one warpgroup, for one tile: `free` before its products, `swap` once its warps have left their sums."""

    def __init__(self, ring: Any, part: Any, peer: Any, spec: Any):
        self.i32, self.f32, self.spec, self.part = ir.IntegerType.get_signless(32), ir.F32Type.get(), spec, part
        self.thread = mu.thread_idx()
        self.lane, self.mine = arith.andi(self.thread, int32(31)), arith.andi(self.thread, int32(127))
        self.wg = arith.shrui(self.thread, int32(7))
        self.ring = arith.addi(address(ring, 3), arith.muli(self.wg, int32(EXCHANGE_WORDS * 4)))
        # The others of the cluster, by how far they are from this one.
        self.ranks = [arith.remui(arith.addi(peer, int32(n)), int32(spec.split)) for n in range(1, spec.split)]
        self.others = [self._at(self.ring, rank) for rank in self.ranks]

    def _at(self, place: Any, rank: Any) -> Any:
        """The same place in the shared memory of another CTA."""
        return ptx("mapa.shared::cluster.u32 $0, $1, $2;", [self.i32], place, rank)

    def free(self) -> None:
        """The warpgroup has read what was sent for the tile before: the others may send more."""
        self.turn = ptx(f"ld.shared.b32 $0, [$1+{_TURN}];", [self.i32], self.ring)
        with mu.when(arith.cmpi(arith.CmpIPredicate.eq, self.mine, int32(0))):
            self._arrive(_FREE)

    def _arrive(self, which: int) -> None:
        for other in self.others:
            ptx(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0+{which}];", [], other)

    def _wait(self, which: int) -> None:
        """Not bounded: the other CTAs run the same tiles, and all waits of theirs for rows are."""
        await_phase(self.ring, which, self.turn, ".acquire.cluster")

    def swap(self, count: Any) -> None:
        """Sends the others what this warpgroup has left for their units, summed, for `count` rows; and waits for theirs."""
        self._wait(_FREE)
        spec, (_, rows, width) = self.spec, ir.MemRefType(self.part.type).shape
        own = (width - 4) // spec.split
        base = address(self.part, 3)
        first = arith.muli(self.wg, int32(spec.all_slots))
        parts = [self._at(base, rank) for rank in self.ranks]
        for begin in range(0, rows * own, 128):
            i = arith.addi(self.mine, int32(begin))
            row, column = arith.divui(i, int32(own)), arith.remui(i, int32(own))
            block, inside = arith.divui(column, int32(spec.hb)), arith.remui(column, int32(spec.hb))
            for n, (rank, part) in enumerate(zip(self.ranks, parts, strict=True)):
                column = arith.addi(arith.muli(block, int32(spec.hb * spec.split)), arith.muli(rank, int32(spec.hb)))
                at = arith.addi(arith.muli(row, int32(width)), arith.addi(column, inside))
                at = arith.muli(arith.addi(arith.muli(first, int32(rows * width)), at), int32(4))
                mine, total = arith.addi(base, at), None
                for slot in range(spec.slots):
                    got = ptx(f"ld.shared.f32 $0, [$1+{slot * rows * width * 4}];", [self.f32], mine)
                    total = got if total is None else arith.addf(total, got)
                to = arith.addi(part, arith.addi(at, int32((spec.slots + n) * rows * width * 4)))
                text = "{.reg .pred p; setp.lt.s32 p, $2, $3; @p st.shared::cluster.f32 [$0], $1;}"
                ptx(text, [], to, total, row, count)
        ptx("bar.warp.sync 0xffffffff;", [])
        with mu.when(arith.cmpi(arith.CmpIPredicate.eq, self.lane, int32(0))):
            self._arrive(_THERE)
        with mu.when(arith.cmpi(arith.CmpIPredicate.eq, self.mine, int32(0))):
            ptx(f"st.shared.b32 [$0+{_TURN}], $1;", [], self.ring, arith.xori(self.turn, int32(1)))
        self._wait(_THERE)
