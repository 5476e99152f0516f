"""The body of one launch: a loop over levels, phases and tiles, traced in Pallas; the same for every program.

A `Strategy` says how the thread blocks divide the rows of a level: `_body.narrow` or `_body.wide`.
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._body.evaluate import Where
from cavs.kernels._body.launch import Launch
from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.arrays import NUM_EDGES, NUM_ROWS, Output
from cavs.kernels._program.jaxprs import EDGE, ROW
from cavs.kernels._program.names import EDGE_COUNT, FIRST_EDGE, Tensor
from cavs.kernels._program.operations import Phase


class Strategy(Protocol):
    """How the thread blocks of a launch divide the rows of a level."""

    launch: Launch

    # Sets up the launch's barriers in shared memory, and reads weights that stay in registers.
    def begin(self) -> None: ...

    # Runs after the last level.
    def end(self) -> None: ...

    # The first level that the launch runs, `None` for the first of all, and the one after its last.
    def level_range(self) -> tuple[jax.Array | None, jax.Array]: ...

    # The first row of a level for this thread block's group, and the one after its last.
    def rows_of(self, level: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    # Whether this thread block runs, or synchronises with those that run, a level of which it has these rows.
    def takes_part(self, low: jax.Array, high: jax.Array) -> jax.Array: ...

    # Whether thread blocks synchronise before phase n.
    def has_barrier(self, n: int) -> bool: ...

    # Synchronises the thread blocks that work on the same rows, for the `times`-th time.
    def barrier(self, times: jax.Array) -> None: ...

    # Loads the row numbers of the first tile of each phase over rows, for the level after this one.
    def first_tiles(self, low: jax.Array, high: jax.Array) -> "list[Where | None]": ...

    # Prefetches the inputs of the level after this one into L2.
    def prefetch(self, low: jax.Array, high: jax.Array) -> None: ...

    # Loads the row numbers of a tile of phase n.
    def where(self, n: int, tile: Tile) -> "Where | None": ...

    # Runs phase n for the rows (or edges) `begin` to `last`; `first` are the row numbers of the first tile.
    def run_phase(self, n: int, phase: Phase, begin: jax.Array, last: jax.Array, first: "Where | None") -> None: ...


def run(strategy: Strategy) -> None:
    """Runs all levels of a launch."""
    launch = strategy.launch
    config, buffers = launch.config, launch.buffers
    if launch.layout.columns and config.resident:
        assert buffers.weights is not None and buffers.resident is not None
        launch.device.copy_weights(buffers.weights, launch.block, buffers.resident, config)
    _clear_padding(launch)
    launch.device.sync()
    strategy.begin()
    begin, end = strategy.level_range()
    count = end if begin is None else end - begin
    barriers = sum(map(strategy.has_barrier, range(len(launch.program.phases))))

    def bounds(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        i = end - 1 - i if launch.reverse else i if begin is None else begin + i
        return strategy.rows_of(jnp.clip(i, 0, end - 1))

    # Row numbers are loaded one level ahead, because loading them takes as long as the arithmetic of a level.
    def one(i: jax.Array, carry: tuple) -> tuple:
        met, first, low, high, *following = carry
        after = bounds(i + 2)
        ahead = strategy.first_tiles(*following)
        strategy.prefetch(*following)
        runs = strategy.takes_part(low, high)
        lax.cond(runs, lambda: _run_level(strategy, low, high, met, first), lambda: None)
        return met + jnp.where(runs, jnp.int32(barriers), jnp.int32(0)), ahead, *following, *after

    first, second = (bounds(jnp.int32(n)) for n in range(2))
    lax.fori_loop(jnp.int32(0), count, one, (jnp.int32(0), strategy.first_tiles(*first), *first, *second))
    strategy.end()


def _run_level(strategy: Strategy, low: jax.Array, high: jax.Array, met: jax.Array, first_tiles: "list[Where | None]") -> None:
    """Runs the phases of one level; `met` is the number of barriers that the launch has passed."""
    launch, ahead = strategy.launch, iter(first_tiles)
    for n, phase in enumerate(launch.program.phases):
        begin, end = low, high
        if phase.domain == EDGE:
            first, count = (launch.buffers.integers[name] for name in (FIRST_EDGE, EDGE_COUNT))
            begin = first[jnp.minimum(low, high - 1)]  # there may be no rows, and then no row `low`
            end = first[high - 1] + count[high - 1]
        launch.device.sync()
        if strategy.has_barrier(n):
            met = met + 1
            strategy.barrier(met)
        tiles = next(ahead) if phase.domain == ROW else None
        run = functools.partial(_run_phase, strategy, n, begin, end - 1, tiles)
        if launch.config.spread:
            lax.cond(high > low, run, lambda: None)
        else:
            run()


def _run_phase(strategy: Strategy, n: int, begin: jax.Array, last: jax.Array, first: "Where | None") -> None:
    """Runs phase n for rows, whose numbers were loaded for the first tile, or for edges."""
    phase = strategy.launch.program.phases[n]
    if phase.domain == EDGE:
        first = strategy.where(n, tile(strategy.launch, jnp.int32(0), begin, last))
    strategy.run_phase(n, phase, begin, last, first)


def tile(launch: Launch, t: jax.Array, begin: jax.Array, last: jax.Array, wg: jax.Array | None = None) -> Tile:
    """A warpgroup's t-th tile of the rows `begin` to `last`; this warpgroup's, or that of `wg`."""
    config, number = launch.config, launch.wg if wg is None else wg
    row = jnp.minimum(begin + (number + t * config.warpgroups) * config.rows, last)
    return Tile((config.rows, config.hb), row, last)


def _clear_padding(launch: Launch) -> None:
    """Writes zeros to the rows of outputs that belong to no vertex, because the large products after the launch read them."""
    config = launch.config
    step = config.rows * config.warpgroups * config.groups
    for name, output in launch.whole_outputs().items():
        count = launch.scalar(NUM_ROWS if output.domain == ROW else NUM_EDGES) + launch.scalar(output.base)

        def clear(
            i: jax.Array, _: jax.Array, name: Tensor = name, output: Output = output, count: jax.Array = count
        ) -> jax.Array:
            row = count + i * step + (launch.group * config.warpgroups + launch.wg) * config.rows
            here = Tile((config.rows, config.hb), row, jnp.int32(output.rows - 1))
            zeros = jnp.zeros(here.shape, output.dtype)
            for b in range(output.width // launch.program.unit):
                launch.device.store(here, launch.buffers.tensors[name], zeros, jnp.int32(0), launch.column(b))
            return _

        turns = lax.div(output.rows - count + step - 1, jnp.int32(step))
        lax.fori_loop(jnp.int32(0), turns, clear, jnp.int32(0))
