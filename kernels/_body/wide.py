"""The widest levels as ordinary tiled products, in a launch of their own: before the others forward, after them backward.

Where weights stay on the chip every CTA reads all rows of its group for its few columns, which a level of thousands of rows
pays for most. Here the `groups` share a level's rows tile by tile, each CTA has many columns, weights stream (`_mosaic.wide`),
and all CTAs meet before a product reads what others stored.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cavs.kernels._body.evaluate import Values
from cavs.kernels._body.kernel import Kernel
from cavs.kernels._layout.layout import PARTS
from cavs.kernels._program.specs import Phase, Tile

NUMBERS = 16  # of an array that a thread holds while it evaluates a phase: registers allow no whole tile


class WideKernel(Kernel):
    """The body of a launch for the widest levels."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.ring = self.weights

    def begin(self) -> None:
        self.device.begin_ring(self.ring, self.config)

    def end(self) -> None:
        pass

    def levels(self) -> tuple[Any, Any]:
        return None, self.scalars[-1]

    def rows_at(self, i: Any) -> tuple[Any, Any]:
        return self.table["starts"][i * PARTS], self.table["starts"][(i + 1) * PARTS]

    def meets(self, phase: Phase) -> bool:
        """Always: a tile's rows, and those that they read, may have been another CTA's in the phase before."""
        return True

    def meet(self, times: Any) -> None:
        config = self.config
        target = times * (self.ctas * config.groups)
        self.device.group_barrier(self.table["counters"], jnp.int32(1), target, config.clustered, config.spins)

    def first_numbers(self, low: Any, high: Any) -> list[Any]:
        """A tile takes far longer than to read where its rows are."""
        return [None] * len(self.level.phases)

    def numbers(self, n: int, tile: Tile) -> Any:
        return None

    def prefetch(self, low: Any, high: Any) -> None:
        pass

    def run_phase(self, n: int, phase: Phase, begin: Any, last: Any, first: Any) -> None:
        """Every so many-th tile of the CTA's warpgroups together; each evaluates its rows piece by piece."""
        config = self.config
        rows = config.rows * config.warpgroups
        height = min(config.rows, NUMBERS * 128 // config.hb)

        def one(t: Any, _: Any) -> Any:
            row = begin + (self.group + t * config.groups) * rows + self.wg * config.rows
            tile = Tile((config.rows, config.hb), jnp.minimum(row, last), last)
            self.products(n, tile)
            lax.fori_loop(jnp.int32(0), jnp.int32(config.rows // height), lambda p, _: piece(tile, p), jnp.int32(0))
            return _

        def piece(tile: Tile, p: Any) -> Any:
            small = Tile((height, config.hb), tile.row + p * height, last)
            values = Values(self, phase, small, self.layout.results[n], part=self.part.at[:, pl.ds(p * height, height)])
            values.fetch()
            self.finish(phase, small, values)
            return jnp.int32(0)

        tiles = lax.div(last - begin + rows, jnp.int32(rows))
        mine = lax.div(tiles - self.group + config.groups - 1, jnp.int32(config.groups))
        lax.fori_loop(jnp.int32(0), mine, one, jnp.int32(0))

    def products(self, n: int, tile: Tile) -> None:
        """All products of a phase for a tile, into `part`."""
        if not self.layout.specs[n]:
            return
        sources = [s for _, of_spec in self.layout.specs[n] for s in of_spec]
        self.device.wide_product(
            tile,
            [spec for spec, _ in self.layout.specs[n]],
            [self.table[s.tensor] for s in sources],
            [self.table[s.index] if s.index else None for s in sources],
            [self.scalar(s.base) for s in sources],
            self.table["packed"],
            self.part,
            self.ring,
            self.cta,
        )
