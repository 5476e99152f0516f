"""Dependency counters in global memory (MegaKernels, section 6): a task waits until those that it needs are done.

Each counter counts finished tasks. Counter 0 is a flag: a wait in vain sets it after `SPINS` polls, so that no launch hangs.
"""

from collections.abc import Sequence

import jax
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._mosaic.mlir import REF, SCALAR, address, inline_mgpu, poll, ptx, thread_index
from cavs.kernels._mosaic.types import Context, MemRef, Scalar
from cavs.kernels._mosaic.value import int32, int64, scalar, select
from cavs.kernels._program.arrays import Ref

SPINS = 1 << 24  # polls before a task gives up, some seconds


def wait(counters: Ref, needs: Sequence[tuple[jax.Array, jax.Array]]) -> None:
    """Waits, in all threads of a warpgroup, until each counter has at least its target.

    Afterwards the warpgroup sees what the counted tasks wrote, also through copies by TMA.

    Args:
        counters: int32 in global memory.
        needs: Counters and targets, int32 scalars; at most four.
    """

    @inline_mgpu(arg_types=(REF, [SCALAR] * len(needs), [SCALAR] * len(needs)))
    def emit(ctx: Context, counters: MemRef, which: list[Scalar], targets: list[Scalar]) -> None:
        base, thread = address(counters, 1), thread_index() & 127
        warp = thread >> 5
        at, target = scalar(which[0]), scalar(targets[0])
        for n in range(1, len(needs)):
            at, target = (select(warp == n, scalar(x[n]), old) for x, old in ((which, at), (targets, target)))
        counter = base + int64(at * 4)
        with mu.when((thread & 31 == 0) & (warp < len(needs))):
            poll(counter, target, base, SPINS)
        mu.warpgroup_barrier()
        ptx("fence.proxy.async;", [])

    emit(counters, [n for n, _ in needs], [t for _, t in needs])


def finish(counters: Ref, which: jax.Array) -> None:
    """Adds one to a counter, after all that the threads of the warpgroup have written."""

    @inline_mgpu(arg_types=(REF, SCALAR))
    def emit(ctx: Context, counters: MemRef, which: Scalar) -> None:
        ptx("fence.proxy.async;", [])
        mu.warpgroup_barrier()
        with mu.when(thread_index() & 127 == 0):
            ptx("red.release.gpu.global.add.u32 [$0], $1;", [], address(counters, 1) + int64(scalar(which) * 4), int32(1))

    emit(counters, which)
