"""The widest levels as ordinary tiled products, in a launch of their own: before the others forward, after them backward.

With weights that stay on the chip, every thread block reads all rows of its group for its few columns, which costs most for a
level of thousands of rows. Here the `groups` share a level's rows tile by tile, each thread block has many columns, weights
stream (`_mosaic.wide`), and all thread blocks synchronise before a product reads what others stored.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cavs.kernels._body.evaluate import Values, Where
from cavs.kernels._body.launch import Launch
from cavs.kernels._layout.config import PARTS
from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.names import PART_STARTS
from cavs.kernels._program.operations import Phase

ELEMENTS = 16  # of an array that a thread holds while it evaluates a phase: registers do not hold a whole tile


class Wide:
    """Runs the widest levels; a `_body.kernel.Strategy`."""

    def __init__(self, launch: Launch):
        self.launch = launch

    def begin(self) -> None:
        """Sets up the barriers of the ring of weights."""
        assert self.launch.buffers.ring is not None
        self.launch.device.begin_ring(self.launch.buffers.ring, self.launch.config)

    def end(self) -> None:
        """Does nothing: no thread block accesses the shared memory of another."""

    def level_range(self) -> tuple[jax.Array | None, jax.Array]:
        """The levels from the leaves' parents on that are wide."""
        return None, self.launch.scalars[-1]

    def rows_of(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All rows of a level."""
        starts = self.launch.buffers.integers[PART_STARTS]
        return starts[level * PARTS], starts[(level + 1) * PARTS]

    def takes_part(self, low: jax.Array, high: jax.Array) -> jax.Array:
        """Whether the level has rows."""
        return high > low

    def has_barrier(self, n: int) -> bool:
        """Always true: another thread block may have run the tile's rows, and those that they read, in the previous phase."""
        return True

    def barrier(self, times: jax.Array) -> None:
        """Synchronises all thread blocks."""
        launch, config = self.launch, self.launch.config
        target = times * (launch.blocks * config.groups)
        launch.device.group_barrier(launch.buffers.counters, jnp.int32(1), target, config.spins)

    def first_tiles(self, low: jax.Array, high: jax.Array) -> list[Where | None]:
        """Loads nothing ahead: a tile takes far longer than loading its row numbers."""
        return [None] * len(self.launch.program.phases)

    def prefetch(self, low: jax.Array, high: jax.Array) -> None:
        """Does nothing; see `first_tiles`."""

    def where(self, n: int, tile: Tile) -> None:
        """Loads nothing; see `first_tiles`."""

    def run_phase(self, n: int, phase: Phase, begin: jax.Array, last: jax.Array, first: Where | None) -> None:
        """Deals the tiles to the thread blocks in turn. The warpgroups of one share a tile, and evaluate it in pieces."""
        launch, config = self.launch, self.launch.config
        rows = config.rows * config.warpgroups
        height = min(config.rows, ELEMENTS * 128 // config.hb)

        def one(t: jax.Array, _: jax.Array) -> jax.Array:
            row = begin + (launch.group + t * config.groups) * rows + launch.wg * config.rows
            self.products(n, Tile((config.rows, config.hb), jnp.minimum(row, last), last))
            lax.fori_loop(jnp.int32(0), jnp.int32(config.rows // height), lambda p, _: piece(row, p), jnp.int32(0))
            return _

        def piece(row: jax.Array, p: jax.Array) -> jax.Array:
            # Past the last row nothing is stored: what another warpgroup stores may replace what this one reads.
            small = Tile((height, config.hb), row + p * height, last)
            assert launch.buffers.sums is not None
            sums = launch.buffers.sums.at[:, pl.ds(p * height, height)]
            values = Values(launch, phase, small, launch.layout.phases[n].sums, part=sums)
            values.issue()
            values.finish()
            return jnp.int32(0)

        tiles = lax.div(last - begin + rows, jnp.int32(rows))
        turns = lax.div(tiles - launch.group + config.groups - 1, jnp.int32(config.groups))
        lax.fori_loop(jnp.int32(0), turns, one, jnp.int32(0))

    def products(self, n: int, tile: Tile) -> None:
        """Computes all products of a phase for a tile, into the partial sums."""
        launch, layout = self.launch, self.launch.layout.phases[n]
        if not layout.specs:
            return
        buffers = launch.buffers
        assert buffers.weights is not None and buffers.sums is not None and buffers.ring is not None
        launch.device.wide_product(
            tile,
            layout.specs,
            [buffers.tensors[source.tensor] for source in layout.sources],
            [launch.index(source.index) for source in layout.sources],
            [launch.scalar(source.base) for source in layout.sources],
            buffers.weights,
            buffers.sums,
            buffers.ring,
            launch.block,
        )
