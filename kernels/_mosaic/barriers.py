"""Synchronisation of the threads of a thread block, of a cluster, and of a group of thread blocks."""

import jax
from jax._src.lib.mlir.dialects import gpu
from jax.experimental.mosaic.gpu import utils as mu

from cavs.kernels._mosaic.mlir import REF, SCALAR, address, inline_mgpu, poll, ptx, thread_index
from cavs.kernels._mosaic.types import Context, MemRef, Scalar
from cavs.kernels._mosaic.value import int32, int64, scalar
from cavs.kernels._program.arrays import Ref


def sync() -> None:
    """Synchronises the threads of the thread block."""

    @inline_mgpu()
    def emit(ctx: Context) -> None:
        gpu.barrier()

    emit()


def cluster_barrier() -> None:
    """Emits a barrier of all threads of the cluster; called inside `inline_mgpu`."""
    ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", [])


def group_barrier(counters: Ref, slot: jax.Array, target: jax.Array, spins: int) -> None:
    """Synchronises the thread blocks of a group: afterwards each of them sees what all of them wrote before.

    Each thread block adds one to the group's counter, and polls it until it reaches `target`. After `spins` unsuccessful polls
    a thread block sets `counters[0]` and goes on, so that no launch hangs. Once this flag is set, none polls for long.

    Args:
        counters: int32 in global memory: a flag, then one counter for each group, 128 bytes apart.
        slot: An int32 scalar: the group's counter, in units of 128 bytes.
        target: An int32 scalar: the value of the counter when all thread blocks have arrived.
        spins: The number of polls.
    """

    @inline_mgpu(arg_types=(REF, SCALAR, SCALAR))
    def emit(ctx: Context, counters: MemRef, slot: Scalar, target: Scalar) -> None:
        gpu.barrier()
        base = address(counters, 1)
        counter = base + int64(scalar(slot) * 128)
        with mu.when(thread_index() == 0):
            ptx("red.release.gpu.global.add.u32 [$0], $1;", [], counter, int32(1))
            poll(counter, scalar(target), base, spins)
        gpu.barrier()

    emit(counters, slot, target)
