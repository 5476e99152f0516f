"""What a launch's kernel works on: its program, its buffers, and the place of a thread block in the grid."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._body.device import device_of
from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.layout import Layout
from cavs.kernels._program.arrays import Output, Ref
from cavs.kernels._program.names import SCALARS, Index, Tensor
from cavs.kernels._program.operations import LevelProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of a launch.

    Attributes:
        tensors: Tensors of rows in global memory, and constants.
        integers: Vectors of int32 in global memory.
        counters: One counter for each group, 128 bytes apart, after a flag that is set if a thread block gives up waiting.
        weights: The packed weights, in global memory; `None` without products.
        sums: The products' partial sums, in shared memory; `None` without products.
        resident: The packed weights in shared memory; `None` if they stream.
        ring: The barriers in shared memory of `_mosaic.exchange` or `_mosaic.wide`; `None` if neither is used.
    """

    tensors: dict[Tensor, Ref]
    integers: dict[Index, Ref]
    counters: Ref
    weights: Ref | None
    sums: Ref | None
    resident: Ref | None
    ring: Ref | None


class Launch:
    """One launch, as a thread block's warpgroup sees it: the context of `_body.kernel.run`, traced in Pallas.

    `shared` says that another launch runs some of the levels (`_body.wide`).
    """

    def __init__(
        self,
        program: LevelProgram,
        config: LaunchConfig,
        layout: Layout,
        buffers: Buffers,
        outputs: dict[Tensor, Output],
        reverse: bool,
        shared: bool,
    ):
        self.program, self.config, self.layout, self.buffers = program, config, layout, buffers
        self.outputs, self.reverse, self.shared = outputs, reverse, shared
        self.device = device_of(config)
        self.blocks = program.unit // config.hb  # of a group
        self.awaited = program.exchanged() if config.dataflow else set()
        # Read once: values that are read after a store are read again.
        scalars = buffers.integers[SCALARS]
        self.scalars = [scalars[n] for n in range(scalars.shape[0])]
        self.group, peer = lax.axis_index("group"), lax.axis_index("peer") if config.split > 1 else jnp.int32(0)
        self.block = lax.axis_index("cluster") * config.split + peer if config.split < self.blocks else peer
        self.wg = lax.axis_index("wg") if config.warpgroups > 1 else jnp.int32(0)

    def scalar(self, which: int | None) -> jax.Array:
        """A scalar of the launch; 0 for `None`."""
        return jnp.int32(0) if which is None else self.scalars[which]

    def column(self, block: int) -> jax.Array:
        """The first of the thread block's columns in a block of units."""
        return block * self.program.unit + self.block * self.config.hb

    def index(self, name: Index | None) -> Ref | None:
        """A vector of integers by name."""
        return None if name is None else self.buffers.integers[name]

    def whole_outputs(self) -> dict[Tensor, Output]:
        """The tensors that are read after the launch from their first to their last row."""
        whole = {t: out for t, out in self.outputs.items() if t not in self.program.scratch and not out.sparse}
        stored = ((phase.domain, store.place) for phase in self.program.phases for store in phase.stores)
        for domain, place in dict.fromkeys(stored):
            if place.tensor not in self.program.halves and place.tensor not in self.outputs:
                ref = self.buffers.tensors[place.tensor]
                whole[place.tensor] = Output(ref.shape[0], ref.shape[1], ref.dtype, domain, place.base)
        return whole
