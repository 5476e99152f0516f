"""Levels of few rows: groups of thread blocks take graphs of their own, each warpgroup runs tiles of its group's rows.

If there are fewer graphs than groups, the groups can share the rows of every level instead (`LaunchConfig.spread`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._body.device import Weights
from cavs.kernels._body.evaluate import Values, Where
from cavs.kernels._body.kernel import tile
from cavs.kernels._body.launch import Launch
from cavs.kernels._layout.config import PARTS
from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.arrays import NUM_LEVELS
from cavs.kernels._program.jaxprs import ROW
from cavs.kernels._program.names import PART_STARTS
from cavs.kernels._program.operations import Phase


class Narrow:
    """Runs levels with weights that stay on the chip, or that stream from L2 for each tile; a `_body.kernel.Strategy`."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.ring = [] if launch.buffers.ring is None else [launch.buffers.ring]
        self.weights: Weights = launch.buffers.resident

    def begin(self) -> None:
        """Sets up the barriers of the thread blocks that divide K, and reads weights that stay in registers."""
        launch = self.launch
        launch.device.begin_exchange(self.ring, launch.config)
        if launch.config.registers:
            self.weights = launch.device.hold_weights(launch.layout.specs(), self.weights)

    def end(self) -> None:
        """Waits until no other thread block sends sums to this one."""
        self.launch.device.end_exchange(self.ring)

    def level_range(self) -> tuple[jax.Array | None, jax.Array]:
        """All levels, or those after the wide ones."""
        launch = self.launch
        return launch.scalars[-1] if launch.shared else None, launch.scalar(NUM_LEVELS)

    def rows_of(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows of the group's parts, or its share of all rows."""
        config, group, starts = self.launch.config, self.launch.group, self.launch.buffers.integers[PART_STARTS]
        if config.spread:
            begin, end = starts[level * PARTS], starts[(level + 1) * PARTS]
            count = end - begin
            # Rounded up, so that the first group has a row of every level.
            low, high = (lax.div(count * (group + n) + config.groups - 1, jnp.int32(config.groups)) for n in range(2))
            return begin + low, begin + high
        share = PARTS // config.groups
        at = level * PARTS + group * share
        return starts[at], starts[at + share]

    def takes_part(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Whether the group has rows; if groups share rows, always, because all of them synchronise."""
        return jnp.bool_(True) if self.launch.config.spread else high > low

    def has_barrier(self, n: int) -> bool:
        """Whether the phase reads what other thread blocks wrote since the last barrier, and does not poll for it.

        In a group that has graphs of its own only products do. If groups share rows, a level reads what any of them wrote.
        """
        config, phase = self.launch.config, self.launch.program.phases[n]
        return config.spread and n == 0 or phase.barrier and not config.dataflow

    def barrier(self, times: jax.Array) -> None:
        """Synchronises the group, or all thread blocks."""
        launch, config = self.launch, self.launch.config
        slot, blocks = (jnp.int32(1), launch.blocks * config.groups) if config.spread else (launch.group + 1, launch.blocks)
        launch.device.group_barrier(launch.buffers.counters, slot, times * blocks, config.spins)

    def first_tiles(self, low: jax.Array, high: jax.Array) -> list[Where | None]:
        """Loads the row numbers of the first tile of each phase over rows; phases over edges load theirs when they begin."""
        first = tile(self.launch, jnp.int32(0), low, jnp.maximum(high - 1, 0))
        return [self.where(n, first) for n, phase in enumerate(self.launch.program.phases) if phase.domain == ROW]

    def prefetch(self, low: jax.Array, high: jax.Array) -> None:
        """Prefetches the inputs that the launch does not write into L2: a read of DRAM takes longer than a level.

        Each warpgroup prefetches the tile of another, because if there is only one tile, the others are idle.
        """
        launch = self.launch
        other = lax.rem(launch.wg + 1, jnp.int32(launch.config.warpgroups))
        first = tile(launch, jnp.int32(0), low, jnp.maximum(high - 1, 0), other)
        phases = [(n, phase) for n, phase in enumerate(launch.program.phases) if phase.domain == ROW]

        def ask() -> None:
            for n, phase in phases:
                Values(launch, phase, first, launch.layout.phases[n].sums).prefetch()

        lax.cond(low + other * launch.config.rows < high, ask, lambda: None)

    def where(self, n: int, tile: Tile) -> Where:
        """Loads the row numbers of a tile of a phase."""
        launch = self.launch
        sources = launch.layout.phases[n].sources
        values = Values(launch, launch.program.phases[n], tile, launch.layout.phases[n].sums)
        numbers = {name: launch.device.number(tile, launch.buffers.integers[name]) for name in values.indices()}
        if not sources:
            return None, numbers
        indices = [launch.index(source.index) for source in sources]
        bases = [launch.scalar(source.base) for source in sources]
        return launch.device.product_rows(tile, indices, bases), numbers

    def run_phase(self, n: int, phase: Phase, begin: jax.Array, last: jax.Array, first: Where | None) -> None:
        """Deals the tiles to the warpgroups in turn. The row numbers of a tile are loaded while the previous tile runs."""
        launch, config = self.launch, self.launch.config

        def one(t: jax.Array, where: Where) -> Where:
            ahead = self.where(n, tile(launch, t + 1, begin, last))
            self.run_tile(n, phase, tile(launch, t, begin, last), where)
            return ahead

        tiles = lax.div(last - begin + config.rows, jnp.int32(config.rows))
        turns = lax.div(tiles - launch.wg + config.warpgroups - 1, jnp.int32(config.warpgroups))
        lax.fori_loop(jnp.int32(0), turns, one, first)

    def run_tile(self, n: int, phase: Phase, tile: Tile, where: Where) -> None:
        """Runs a phase for one tile: early loads, products, equations, stores."""
        launch, layout = self.launch, self.launch.layout.phases[n]
        rows, numbers = where
        values = Values(launch, phase, tile, layout.sums, numbers)
        values.issue()
        if layout.specs:
            refs = [launch.buffers.tensors[source.tensor] for source in layout.sources]
            weights = launch.buffers.weights if self.weights is None else self.weights
            assert launch.buffers.sums is not None
            launch.device.product(
                tile, layout.specs, refs, rows, weights, launch.buffers.sums, launch.block, launch.buffers.counters, *self.ring
            )
        values.finish()
