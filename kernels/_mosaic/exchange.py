"""Sums of products across the thread blocks of a cluster, through distributed shared memory (`LaunchConfig.split`).

The thread blocks of a cluster divide K of each product. Each of them reads only its part of every row, computes partial sums
for the units of all of them, and sends each other thread block the partial sums of the units that it owns. Warpgroups of equal
number run the same tiles, so each warpgroup has two mbarriers in shared memory: one completes when the sums of the others have
arrived, the other when the others have read what was sent to them for the previous tile.
"""

import functools
import operator
from collections.abc import Sequence

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import gpu
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.config import EXCHANGE_WORDS, LaunchConfig
from cavs.kernels._layout.specs import ProductSpec
from cavs.kernels._mosaic.barriers import cluster_barrier
from cavs.kernels._mosaic.mlir import REF, address, inline_mgpu, ptx, thread_index, wait_phase
from cavs.kernels._mosaic.types import I32, Context, MemRef, SharedAddress
from cavs.kernels._program.arrays import Ref

# Byte offsets among the words of a warpgroup: its two mbarriers of 64 bits, and the parity of its current tile.
_ARRIVED, _FREE, _PARITY = 0, 8, 16


def begin_exchange(ring: Sequence[Ref], config: LaunchConfig) -> None:
    """Initialises the barriers of all warpgroups, before any thread block of the cluster uses them.

    Args:
        ring: One buffer in shared memory, of `EXCHANGE_WORDS` for each warpgroup; or none if thread blocks do not divide K.
        config: The layout on the chip.
    """
    if not ring:
        return

    @inline_mgpu(arg_types=(REF,))
    def emit(ctx: Context, ring: MemRef) -> None:
        base = address(ring, 3)
        with mu.when(thread_index() == 0):
            for wg in range(config.warpgroups):
                at, others = wg * EXCHANGE_WORDS * 4, config.split - 1
                ptx(f"mbarrier.init.shared.b64 [$0+{at + _ARRIVED}], {4 * others};", [], base)  # each of their warps arrives
                ptx(f"mbarrier.init.shared.b64 [$0+{at + _FREE}], {others};", [], base)
                ptx(f"st.shared.b32 [$0+{at + _PARITY}], 0;", [], base)
            ptx("fence.mbarrier_init.release.cluster;", [])
        gpu.barrier()
        cluster_barrier()

    emit(*ring)


def end_exchange(ring: Sequence[Ref]) -> None:
    """Waits for all thread blocks of the cluster, so that none sends sums to one that has exited; see `begin_exchange`."""
    if not ring:
        return

    @inline_mgpu()
    def emit(ctx: Context) -> None:
        cluster_barrier()

    emit()


class Exchange:
    """Emits the exchange of sums of one tile by one warpgroup: `release` before its products, `swap` after them.

    Args:
        ring: The barriers; see `begin_exchange`.
        part: Partial sums in shared memory, float32 of shape (slots of all warpgroups, rows, columns).
        peer: The number of this thread block in its cluster.
        spec: A spec of the phase's products.
    """

    def __init__(self, ring: MemRef, part: MemRef, peer: I32, spec: ProductSpec):
        self.i32, self.f32, self.spec, self.part = ir.IntegerType.get_signless(32), ir.F32Type.get(), spec, part
        thread = thread_index()
        self.lane, self.thread, self.wg = thread & 31, thread & 127, thread >> 7
        self.ring = address(ring, 3) + self.wg * (EXCHANGE_WORDS * 4)
        # The other thread blocks of the cluster, by their distance from this one.
        self.ranks = [(peer + n) % spec.split for n in range(1, spec.split)]
        self.others = [self._mapped(self.ring, rank) for rank in self.ranks]

    def _mapped(self, place: SharedAddress, rank: I32) -> SharedAddress:
        """The same address in the shared memory of another thread block."""
        return ptx("mapa.shared::cluster.u32 $0, $1, $2;", self.i32, place, rank)

    def release(self) -> None:
        """Tells the other thread blocks that this warpgroup has read their sums of the previous tile."""
        self.parity = ptx(f"ld.shared.b32 $0, [$1+{_PARITY}];", self.i32, self.ring)
        with mu.when(self.thread == 0):
            self._arrive(_FREE)

    def _arrive(self, barrier: int) -> None:
        """Arrives at a barrier of every other thread block."""
        for other in self.others:
            ptx(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0+{barrier}];", [], other)

    def _wait(self, barrier: int) -> None:
        """Waits without a limit: the other thread blocks run the same tiles, and their polls of rows are limited."""
        wait_phase(self.ring, barrier, self.parity, ".acquire.cluster")

    def swap(self, count: I32) -> None:
        """Sends the others the warpgroup's partial sums of their units, for `count` rows, and waits for theirs."""
        self._wait(_FREE)
        spec, (_, rows, width) = self.spec, ir.MemRefType(self.part.type).shape
        columns = (width - 4) // spec.split
        base = address(self.part, 3)
        first = self.wg * spec.all_slots
        parts = [self._mapped(base, rank) for rank in self.ranks]
        for begin in range(0, rows * columns, 128):
            i = self.thread + begin
            row, column = i // columns, i % columns
            block, inside = column // spec.hb, column % spec.hb
            for n, (rank, part) in enumerate(zip(self.ranks, parts, strict=True)):
                column = block * (spec.hb * spec.split) + rank * spec.hb
                at = row * width + (column + inside)
                at = (first * (rows * width) + at) * 4
                source, texts = base + at, [f"ld.shared.f32 $0, [$1+{slot * rows * width * 4}];" for slot in range(spec.slots)]
                total = functools.reduce(operator.add, (ptx(text, self.f32, source) for text in texts))
                to = part + (at + (spec.slots + n) * rows * width * 4)
                text = "{.reg .pred p; setp.lt.s32 p, $2, $3; @p st.shared::cluster.f32 [$0], $1;}"
                ptx(text, [], to, total, row, count)
        ptx("bar.warp.sync 0xffffffff;", [])
        with mu.when(self.lane == 0):
            self._arrive(_ARRIVED)
        with mu.when(self.thread == 0):
            ptx(f"st.shared.b32 [$0+{_PARITY}], $1;", [], self.ring, self.parity ^ 1)
        self._wait(_ARRIVED)
