"""The ring in shared memory through which the weights of wide products stream (`_mosaic.wide`).

It has `STAGES` stages, each for a chunk of 32 elements of K, and two mbarriers for each stage: "full" completes when the chunk
has arrived, "empty" when all warpgroups have multiplied it.
"""

import itertools
import math
from collections.abc import Sequence

from jax._src.lib.mlir.dialects import gpu
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._layout.config import STAGES, LaunchConfig
from cavs.kernels._layout.specs import ProductSpec
from cavs.kernels._mosaic.mlir import REF, address, inline_mgpu, ptx, thread_index, wait_phase
from cavs.kernels._mosaic.types import I32, Context, GlobalAddress, MemRef, Predicate, SharedAddress
from cavs.kernels._mosaic.value import int32, int64, select
from cavs.kernels._program.arrays import Ref

_FULL, _EMPTY = 0, 8  # the offsets of a stage's barriers among its 16 bytes


def begin_ring(ring: Ref, config: LaunchConfig) -> None:
    """Initialises the barriers of all stages.

    Args:
        ring: A buffer of `RING_WORDS` in shared memory.
        config: The layout on the chip.
    """

    @inline_mgpu(arg_types=(REF,))
    def emit(ctx: Context, ring: MemRef) -> None:
        base = address(ring, 3)
        with mu.when(thread_index() == 0):
            for stage in range(STAGES):
                ptx(f"mbarrier.init.shared.b64 [$0+{16 * stage + _FULL}], 1;", [], base)
                ptx(f"mbarrier.init.shared.b64 [$0+{16 * stage + _EMPTY}], {config.warpgroups};", [], base)
            ptx("fence.mbarrier_init.release.cluster;", [])
        gpu.barrier()

    emit(ring)


class Ring:
    """Emits the copies to the stages, and the synchronisation of the threads that use them.

    Args:
        specs: The phase's products. Their chunks are numbered one spec after another.
        barriers: The address of the barriers.
        stages: The address of the stages.
        weights: The address of the thread block's packed weights.

    Attributes:
        stages: The address of the stages.
        size: The bytes of a stage.
        starts: For each spec, the number of its first chunk.
        total: The number of chunks.
    """

    def __init__(self, specs: Sequence[ProductSpec], barriers: SharedAddress, stages: SharedAddress, weights: GlobalAddress):
        self.stages, self._specs, self._barriers, self._weights = stages, specs, barriers, weights
        self._columns = [sum(w.width for w in spec.weights) for spec in specs]
        self.size = 128 * max(self._columns)
        ends = list(itertools.accumulate(spec.chunks for spec in specs))
        self.starts, self.total = [0, *ends[:-1]], ends[-1]

    def fill(self, q: I32, stage: int) -> None:
        """Issues the copy of chunk `q` to a stage."""
        sizes = [128 * columns for columns in self._columns]
        size, begin = int32(sizes[0]), q * sizes[0] + 4 * self._specs[0].ring
        for spec, start, bytes_ in list(zip(self._specs, self.starts, sizes, strict=True))[1:]:
            later = q >= start
            there = (q - start) * bytes_ + 4 * spec.ring
            size, begin = select(later, bytes_, size), select(later, there, begin)
        ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{16 * stage + _FULL}], $1;", [], self._barriers, size)
        ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[$0+{stage * self.size}], [$1], $2, [$3+{16 * stage + _FULL}];",
            [],
            self.stages,
            self._weights + int64(begin),
            size,
            self._barriers,
        )

    def _parity(self, q: I32) -> I32:
        """The parity of a stage's barriers while it holds chunk `q`; each phase fills a stage an even number of times."""
        return q >> int(math.log2(STAGES)) & 1

    def wait_full(self, q: I32, stage: int) -> None:
        """Waits until chunk `q` has arrived in a stage."""
        wait_phase(self._barriers, 16 * stage + _FULL, self._parity(q))

    def wait_empty(self, q: I32, stage: int) -> None:
        """Waits until all warpgroups have multiplied chunk `q`, which a stage holds."""
        wait_phase(self._barriers, 16 * stage + _EMPTY, self._parity(q))

    def release(self, stage: int, when: Predicate) -> None:
        """If `when`, says for a warpgroup that it has multiplied the chunk in a stage."""
        with mu.when(when):
            ptx(f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0+{16 * stage + _EMPTY}];", [], self._barriers)
