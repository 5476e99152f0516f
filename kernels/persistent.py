"""All levels of a pass in one launch, weights on chip (VPPS section III; MegaKernels): a kernel from a `Level` program.

The grid is `groups` groups of CTAs; a group is one virtual processor of VPPS. Its CTA j owns units j*hb ... of every
vector and keeps the weights' columns for them in shared memory for the whole launch. Groups take graphs of their own, so
they never wait for each other; within a group the CTAs meet where a product reads what others stored (see `_phases`).
"""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._evaluate import Values
from cavs.kernels._layout import PARTS, Config, Layout
from cavs.kernels._pack import pack_weights
from cavs.kernels._specs import EDGE, ROW, Level, Phase, Rows, SourceSpec, Tile, num_blocks
from cavs.kernels._turns import begin_p, end_p


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of a launch, by the names that the `Level` uses.

    `tensors`: (rows, width), read; `constants`: the same for all rows, flat float32 vectors; `integers`: int32 vectors,
    among them `scalars` (NUM_LEVELS ... and the bases that sources name), `starts` (levels * PARTS + 1: first row of each
    part at each level), `first` and `count` (a row's edges), `edge_owner`; `updated`: tensors that are read and written;
    `made`: what the launch writes.
    """

    tensors: dict[str, Any]
    constants: dict[str, Any]
    integers: dict[str, Any]
    updated: dict[str, Any]
    made: dict[str, "Made"]


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor that a launch writes: (rows, width) of `dtype`, for rows or edges (`domain`) from `base` on.

    Unless `sparse`, rows after the last vertex are filled with zeros; those before `base` never are.
    """

    rows: int
    width: int
    dtype: Any
    domain: int
    base: int | None = None
    sparse: bool = False


# The scalars that every launch has; the bases that sources name follow.
NUM_LEVELS, NUM_ROWS, NUM_EDGES = 0, 1, 2


def launch(
    level: Level, config: Config, layout: Layout, weights: dict[Any, Any], arrays: Arrays, reverse: bool
) -> tuple[dict[str, Any], Any]:
    """Runs all levels. Returns the tensors written, by name, and (1,) int32, not 0 where a wait was given up."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not every JAX that cavs runs on has all of it

    ctas = level.unit // config.hb
    rows_padded, edges_padded = (arrays.integers[k].shape[0] for k in ("first", "edge_owner"))
    # One vector of integers: parts of the schedule's own would not be aligned as XLA wants a kernel's operands.
    integers, places = _joined(arrays.integers, jnp.int32)
    constants, constant_places = _joined(arrays.constants, jnp.float32)
    made = dict(arrays.made)
    for name, (domain, width, dtype) in level.scratch.items():
        made[name] = Made(rows_padded if domain == ROW else edges_padded, width, dtype, domain)
    given = [weights[p.variable] for p in layout.packed]
    if config.resident:
        held_weights = {f"weight{n}": w for n, w in enumerate(given)}
    else:
        held_weights = {"packed": pack_weights(layout.packed, given, level.unit, config.hb, config.precision)}
    names = [*arrays.tensors, *held_weights, "constants", "integers"]
    mutable = [*arrays.updated, "counters"]
    out_type = [jax.ShapeDtypeStruct((m.rows, m.width), m.dtype) for m in made.values()]

    def body(*refs: Any) -> None:
        count = len(names) + len(mutable)
        table = dict(zip([*names, *mutable], refs[:count], strict=True))
        table |= dict(zip(made, refs[count : count + len(made)], strict=True))
        table |= {k: table["integers"].at[pl.ds(begin, size)] for k, (begin, size) in places.items()}
        table |= {k: table["constants"].at[:, pl.ds(begin, size)] for k, (begin, size) in constant_places.items()}
        scratch = list(refs[count + len(made) :])
        _Kernel(level, config, layout, table, made, scratch, reverse).run()

    body.__name__ = "cavs_backward" if reverse else "cavs_forward"
    scratch = []
    if layout.columns:
        scratch.append(plgpu.SMEM((config.warpgroups * layout.slots, config.rows, layout.columns + 4), jnp.float32))
        if config.resident:
            scratch.append(plgpu.SMEM((layout.words,), jnp.float32))
    shape: dict[str, Any]
    if config.clustered:
        shape = {"grid": (config.groups,), "grid_names": ("group",), "cluster": (ctas,), "cluster_names": ("cta",)}
    else:
        shape = {"grid": (config.groups, ctas), "grid_names": ("group", "cta")}
    if config.warpgroups > 1:
        shape |= {"num_threads": config.warpgroups, "thread_name": "wg"}
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=getattr(plgpu, "InterpretGPUParams")() if config.interpret else None,  # noqa: B009  (of jax 0.11)
        **shape,
    )
    held = {name: jax.new_ref(x) for name, x in arrays.updated.items()}
    counters = jax.new_ref(begin_p.bind(jnp.zeros(32 * (config.groups + 1), jnp.int32)))
    operands = [*arrays.tensors.values(), *held_weights.values(), constants[None], integers]
    out = kernel(*operands, *held.values(), counters)
    results = dict(zip(made, out, strict=True)) | {name: jax.freeze(ref) for name, ref in held.items()}
    inner = level.scratch.keys() | level.halves.keys()
    return {name: x for name, x in results.items() if name not in inner}, end_p.bind(jax.freeze(counters)[:1])


def _joined(vectors: dict[str, Any], dtype: Any) -> tuple[Any, dict[str, tuple[int, int]]]:
    """All vectors as one, and (begin, size) of each."""
    parts = [jnp.asarray(x, dtype).reshape(-1) for x in vectors.values()]
    ends = np.cumsum([x.shape[0] for x in parts])
    whole = jnp.concatenate([*parts, jnp.zeros(4, dtype)])
    return whole, {k: (int(e) - x.shape[0], x.shape[0]) for k, x, e in zip(vectors, parts, ends, strict=True)}


class _Kernel:
    """The body of one launch, traced in Pallas."""

    def __init__(
        self,
        level: Level,
        config: Config,
        layout: Layout,
        table: dict[str, Any],
        made: dict[str, Made],
        scratch: list[Any],
        reverse: bool,
    ):
        self.level, self.config, self.layout, self.table = level, config, layout, table
        self.made, self.reverse = made, reverse
        self.device: Any = importlib.import_module("cavs.kernels." + ("_interpret" if config.interpret else "_mosaic"))
        self.part = scratch[0] if scratch else None
        self.weights = scratch[1] if len(scratch) > 1 else table.get("packed")
        self.ctas = level.unit // config.hb
        self.group, self.cta = lax.axis_index("group"), lax.axis_index("cta")
        self.wg = lax.axis_index("wg") if config.warpgroups > 1 else jnp.int32(0)

    def scalar(self, which: int | None) -> Any:
        return jnp.int32(0) if which is None else self.table["scalars"][which]

    def run(self) -> None:
        config, table = self.config, self.table
        if self.layout.columns and config.resident:
            refs = [table[f"weight{n}"] for n in range(len(self.layout.packed))]
            unit = self.level.unit
            self.device.copy_weights(self.layout.packed, refs, self.cta, self.weights, unit, config.hb, config)
        self.clear_padding()
        self.device.sync()
        levels = self.scalar(NUM_LEVELS)
        share = PARTS // config.groups
        meetings = sum(p.meet for p in self.level.phases)

        def bounds(i: Any) -> tuple[Any, Any]:
            i = jnp.clip(levels - 1 - i if self.reverse else i, 0, levels - 1)
            at = i * PARTS + self.group * share
            return table["starts"][at], table["starts"][at + share]

        def one(i: Any, carry: Any) -> Any:
            met, low, high = carry
            ahead = bounds(i + 1)  # read before it is needed: a read takes as long as the maths of a level

            lax.cond(high > low, lambda: self.run_level(low, high, met), lambda: None)
            return met + jnp.where(high > low, jnp.int32(meetings), jnp.int32(0)), *ahead

        lax.fori_loop(jnp.int32(0), levels, one, (jnp.int32(0), *bounds(jnp.int32(0))))

    def clear_padding(self) -> None:
        """Zeros in the rows of outputs that belong to no vertex: large products read them after the launch."""
        step = self.config.rows * self.config.warpgroups * self.config.groups
        for name, made in self.made.items():
            if name in self.level.scratch or made.sparse:
                continue
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

    def column(self, block: int) -> Any:
        """The first of the CTA's columns in a block of units."""
        return block * self.level.unit + self.cta * self.config.hb

    def run_level(self, low: Any, high: Any, met: Any) -> None:
        for n, phase in enumerate(self.level.phases):
            begin, end = low, high
            if phase.domain == EDGE:
                begin = self.table["first"][low]
                end = self.table["first"][high - 1] + self.table["count"][high - 1]
            self.device.sync()
            meet = None
            if phase.meet:
                meet = met = met + 1
            tiles = lax.div(end - begin + self.config.rows - 1, jnp.int32(self.config.rows))
            self.run_phase(n, phase, begin, end - 1, tiles, meet)

    def run_phase(self, n: int, phase: Phase, begin: Any, last: Any, tiles: Any, meet: Any) -> None:
        """Each warpgroup runs every so many-th tile. What a tile reads of its own CTA's units is on its way while the
        tile before it runs, or while the group meets."""

        def tile_of(t: Any) -> Tile:
            row = jnp.minimum(begin + (self.wg + t * self.config.warpgroups) * self.config.rows, last)
            return Tile((self.config.rows, self.config.hb), row, last)

        def ahead(t: Any) -> Any:
            tile = tile_of(t)
            numbers = [self.places(sources, tile.row, last) for _, sources in self.layout.specs[n]]
            return Values(self, phase, tile, self.layout.results[n]).fetch(), numbers

        first = ahead(jnp.int32(0))
        if meet is not None:
            self.device.group_barrier(
                self.table["counters"], self.group + 1, meet * self.ctas, self.config.clustered, self.config.spins
            )

        def one(t: Any, fetched: Any) -> Any:
            following = ahead(t + 1)
            self.run_tile(n, phase, tile_of(t), *fetched)
            return following

        mine = lax.div(tiles - self.wg + self.config.warpgroups - 1, jnp.int32(self.config.warpgroups))
        lax.fori_loop(jnp.int32(0), mine, one, first)

    def run_tile(self, n: int, phase: Phase, tile: Tile, fetched: list[Any], places: list[Any]) -> None:
        values = Values(self, phase, tile, self.layout.results[n], fetched)
        for (spec, sources), numbers in zip(self.layout.specs[n], places, strict=True):
            refs = [self.table[s.tensor] for s in sources]
            found = zip(refs, spec.sources, strict=True)
            read = tuple(SourceSpec(r.shape[1], s.column, np.dtype(r.dtype).itemsize) for r, s in found)
            spec = dataclasses.replace(spec, sources=read)
            self.device.product(spec, refs, numbers, self.weights, self.part, tile.row, tile.last, self.cta)
        level = self.level
        valid = None if level.valid == level.unit else level.valid - self.cta * self.config.hb
        for v, targets in phase.stores.items():
            arrays = values[v]
            for place in targets:
                for b in range(max(1, num_blocks(v.aval, self.level.valid))):
                    x, base = arrays.flat[b], self.scalar(place.base)
                    if v.aval.dtype == np.bool_:
                        x = jnp.where(x, jnp.int32(1), jnp.int32(0))
                    self.device.store(tile, self.table[place.tensor], x, base, self.column(b), valid)

    def places(self, sources: list[Rows], row: Any, last: Any) -> Any:
        """The rows of every source that each thread reads in a product."""
        indices = [self.table[s.index] if s.index else None for s in sources]
        return self.device.product_rows(indices, [self.scalar(s.base) for s in sources], row, last, self.config.rows)


def supported() -> str | None:
    """Why the kernels cannot run here; `None` where they can."""
    if tuple(int(x) for x in jax.__version__.split(".")[:2]) < (0, 11):
        return f"they need jax 0.11 or newer, and this is {jax.__version__}"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"they need an NVIDIA GPU of compute capability 9.0 (Hopper), and JAX runs on {device.platform!r} here"
    capability = str(getattr(device, "compute_capability", ""))
    if capability != "9.0":
        return f"they need an NVIDIA GPU of compute capability 9.0 (Hopper), and this one has {capability}"
    return None
