"""The body of one launch: levels, phases, tiles; traced in Pallas, and the same for every model."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._body.evaluate import Values
from cavs.kernels._layout.layout import PARTS, Config, Layout
from cavs.kernels._program.specs import EDGE, ROW, Level, Made, Phase, Tile, num_blocks

# The scalars that every launch has; the bases that sources name follow.
NUM_LEVELS, NUM_ROWS, NUM_EDGES = 0, 1, 2


class Kernel:
    """The body of one launch, traced in Pallas; of some levels alone where they are `shared` with another (`_body.wide`)."""

    def __init__(
        self,
        level: Level,
        config: Config,
        layout: Layout,
        table: dict[str, Any],
        made: dict[str, Made],
        scratch: list[Any],
        reverse: bool,
        shared: bool,
    ):
        self.level, self.config, self.layout, self.table = level, config, layout, table
        self.made, self.reverse, self.shared = made, reverse, shared
        self.device: Any = importlib.import_module(
            "cavs.kernels." + ("_body.interpret" if config.interpret else "_mosaic.mosaic")
        )
        self.part: Any = scratch[0] if scratch else None
        self.weights = scratch[1] if len(scratch) > 1 else table.get("packed")
        self.ring = scratch[2:]
        self.ctas = level.unit // config.hb
        self.awaited = level.exchanged() if config.dataflow else set()
        # Read once: what is read after a store is read again.
        self.scalars = [table["scalars"][n] for n in range(table["scalars"].shape[0])]
        cluster = config.cluster(level.unit)
        self.group, peer = lax.axis_index("group"), lax.axis_index("peer") if cluster > 1 else jnp.int32(0)
        self.cta = lax.axis_index("cluster") * cluster + peer if cluster < self.ctas else peer
        self.wg = lax.axis_index("wg") if config.warpgroups > 1 else jnp.int32(0)

    def scalar(self, which: int | None) -> Any:
        return jnp.int32(0) if which is None else self.scalars[which]

    def run(self) -> None:
        config, table = self.config, self.table
        if self.layout.columns and config.resident:
            refs = [table[f"weight{n}"] for n in range(len(self.layout.packed))]
            unit = self.level.unit
            self.device.copy_weights(self.layout.packed, refs, self.cta, self.weights, unit, config.hb, config)
        self.clear_padding()
        self.begin()
        self.device.sync()
        begin, end = self.levels()
        count = end if begin is None else end - begin
        meetings = sum(self.meets(phase) for phase in self.level.phases)

        def bounds(i: Any) -> tuple[Any, Any]:
            i = end - 1 - i if self.reverse else i if begin is None else begin + i
            return self.rows_at(jnp.clip(i, 0, end - 1))

        # What says where to read is read a level before: on its own it takes as long as the maths of a level.
        def one(i: Any, carry: Any) -> Any:
            met, numbers, low, high, *following = carry
            after = bounds(i + 2)
            ahead = self.first_numbers(*following)
            self.prefetch(*following)
            lax.cond(high > low, lambda: self.run_level(low, high, met, numbers), lambda: None)
            return met + jnp.where(high > low, jnp.int32(meetings), jnp.int32(0)), ahead, *following, *after

        first, second = (bounds(jnp.int32(n)) for n in range(2))
        lax.fori_loop(jnp.int32(0), count, one, (jnp.int32(0), self.first_numbers(*first), *first, *second))
        self.end()

    def begin(self) -> None:
        self.device.begin_exchange(self.ring, self.config)

    def end(self) -> None:
        self.device.end_exchange(self.ring)

    def levels(self) -> tuple[Any, Any]:
        """The first level of this launch, None for that of all, and the one after its last."""
        return self.scalars[-1] if self.shared else None, self.scalar(NUM_LEVELS)

    def rows_at(self, i: Any) -> tuple[Any, Any]:
        """The rows of a level that this group runs."""
        share = PARTS // self.config.groups
        at = i * PARTS + self.group * share
        return self.table["starts"][at], self.table["starts"][at + share]

    def clear_padding(self) -> None:
        """Zeros in the rows of outputs that belong to no vertex: large products read them after the launch."""
        step = self.config.rows * self.config.warpgroups * self.config.groups
        for name, made in self.outputs().items():
            count = self.scalar(NUM_ROWS if made.domain == ROW else NUM_EDGES) + self.scalar(made.base)

            def clear(i: Any, _: Any, name: str = name, made: Made = made, count: Any = count) -> Any:
                row = count + i * step + (self.group * self.config.warpgroups + self.wg) * self.config.rows
                tile = Tile((self.config.rows, self.config.hb), row, jnp.int32(made.rows - 1))
                zeros = jnp.zeros(tile.shape, made.dtype)
                for b in range(made.width // self.level.unit):
                    self.device.store(tile, self.table[name], zeros, jnp.int32(0), self.column(b))
                return _

            turns = lax.div(made.rows - count + step - 1, jnp.int32(step))
            lax.fori_loop(jnp.int32(0), turns, clear, jnp.int32(0))

    def outputs(self) -> dict[str, Made]:
        """What is read after the launch from its first to its last row."""
        found = {n: m for n, m in self.made.items() if n not in self.level.scratch and not m.sparse}
        for place in dict.fromkeys(p for phase in self.level.phases for places in phase.stores.values() for p in places):
            if place.tensor not in self.level.halves and place.tensor not in self.made:
                ref = self.table[place.tensor]
                found[place.tensor] = Made(ref.shape[0], ref.shape[1], ref.dtype, ROW, place.base)
        return found

    def column(self, block: int) -> Any:
        """The first of the CTA's columns in a block of units."""
        return block * self.level.unit + self.cta * self.config.hb

    def first_numbers(self, low: Any, high: Any) -> list[Any]:
        """`numbers` of the first tile of each phase over a level's rows; phases over edges read theirs when they begin."""
        tile = self.tile(jnp.int32(0), low, jnp.maximum(high - 1, 0))
        return [self.numbers(n, tile) for n, phase in enumerate(self.level.phases) if phase.domain == ROW]

    def prefetch(self, low: Any, high: Any) -> None:
        """Brings near what a level reads that was there before: from memory it takes longer than a level. Each warpgroup asks
        for what another reads, for where there is but one tile they have nothing else to do."""
        other = lax.rem(self.wg + 1, jnp.int32(self.config.warpgroups))
        tile = self.tile(jnp.int32(0), low, jnp.maximum(high - 1, 0), other)
        phases = [(n, phase) for n, phase in enumerate(self.level.phases) if phase.domain == ROW]

        def ask() -> None:
            for n, phase in phases:
                Values(self, phase, tile, self.layout.results[n]).prefetch()

        lax.cond(low + other * self.config.rows < high, ask, lambda: None)

    def run_level(self, low: Any, high: Any, met: Any, numbers: list[Any]) -> None:
        ahead = iter(numbers)
        for n, phase in enumerate(self.level.phases):
            begin, end = low, high
            if phase.domain == EDGE:
                begin = self.table["first"][low]
                end = self.table["first"][high - 1] + self.table["count"][high - 1]
            self.device.sync()
            if self.meets(phase):
                met = met + 1
                self.meet(met)
            first = next(ahead) if phase.domain == ROW else self.numbers(n, self.tile(jnp.int32(0), begin, end - 1))
            self.run_phase(n, phase, begin, end - 1, first)

    def meets(self, phase: Phase) -> bool:
        """Whether the group meets before a phase."""
        return phase.meet and not self.config.dataflow

    def meet(self, times: Any) -> None:
        """The group meets for the so many-th time."""
        config, slot = self.config, self.group + 1
        self.device.group_barrier(self.table["counters"], slot, times * self.ctas, config.clustered, config.spins)

    def run_phase(self, n: int, phase: Phase, begin: Any, last: Any, first: Any) -> None:
        """Each warpgroup runs every so many-th tile; where a tile reads is read while the one before runs."""

        def one(t: Any, numbers: Any) -> Any:
            ahead = self.numbers(n, self.tile(t + 1, begin, last))
            self.run_tile(n, phase, self.tile(t, begin, last), *numbers)
            return ahead

        tiles = lax.div(last - begin + self.config.rows, jnp.int32(self.config.rows))
        mine = lax.div(tiles - self.wg + self.config.warpgroups - 1, jnp.int32(self.config.warpgroups))
        lax.fori_loop(jnp.int32(0), mine, one, first)

    def tile(self, t: Any, begin: Any, last: Any, wg: Any = None) -> Tile:
        """A warpgroup's t-th tile of the rows `begin` ... `last`; this one's unless `wg` says another."""
        wg = self.wg if wg is None else wg
        row = jnp.minimum(begin + (wg + t * self.config.warpgroups) * self.config.rows, last)
        return Tile((self.config.rows, self.config.hb), row, last)

    def numbers(self, n: int, tile: Tile) -> tuple[Any, dict[str, Any]]:
        """Where a tile of a phase reads: the rows of its products' sources, and those that each index array names."""
        sources = [s for _, of_spec in self.layout.specs[n] for s in of_spec]
        values = Values(self, self.level.phases[n], tile, self.layout.results[n])
        found = {name: self.device.number(tile, self.table[name]) for name in values.indices()}
        if not sources:
            return None, found
        indices = [self.table[s.index] if s.index else None for s in sources]
        bases = [self.scalar(s.base) for s in sources]
        return self.device.product_rows(tile, indices, bases), found

    def run_tile(self, n: int, phase: Phase, tile: Tile, rows: Any, found: dict[str, Any]) -> None:
        values = Values(self, phase, tile, self.layout.results[n], found)
        values.fetch()
        if self.layout.specs[n]:
            specs = [spec for spec, _ in self.layout.specs[n]]
            refs = [self.table[s.tensor] for _, sources in self.layout.specs[n] for s in sources]
            self.device.product(tile, specs, refs, rows, self.weights, self.part, self.cta, self.table["counters"], *self.ring)
        self.finish(phase, tile, values)

    def finish(self, phase: Phase, tile: Tile, values: Values) -> None:
        """The equations after the products, and what is stored."""
        level = self.level
        valid = None if level.valid == level.unit else level.valid - self.cta * self.config.hb
        stores = [(v, place) for v, places in phase.stores.items() for place in places]
        for v, place in sorted(stores, key=lambda store: store[1].tensor not in self.awaited):  # these somebody waits for
            for b in range(max(1, num_blocks(v.aval, self.level.valid))):
                x, base = values[v].flat[b], self.scalar(place.base)
                if np.shape(x) != tile.shape:  # a constant
                    x = jnp.full(tile.shape, x, v.aval.dtype)
                if v.aval.dtype == np.bool_:
                    x = jnp.where(x, jnp.int32(1), jnp.int32(0))
                self.device.store(tile, self.table[place.tensor], x, base, self.column(b), valid, place.tensor in self.awaited)
