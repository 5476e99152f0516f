"""Which levels of a batch run as large tiled products, and how these lie on the chip (`kernels/_body/wide`)."""

import contextlib

import jax
import jax.numpy as jnp

from cavs._engines import chip
from cavs._schedule.schedule import Shape
from cavs.kernels import (
    PARTS,
    SHARED_MEMORY,
    Config,
    Layout,
    Level,
    ProductSpec,
    Rows,
    Sum,
    Unfit,
    is_var,
    layout_of,
    num_blocks,
)

# Measured on an H200, 2026-11-22: FLOPs a microsecond of wide levels where weights stay on chip (70e6 to 115e6); bytes a
# microsecond that each CTA gets from L2 where all read at once; microseconds of a wide level beside its tiles, and of a tile
# for each block of units that it reads or stores beside its products.
_RESIDENT, _RATE, _FIXED, _BLOCK = 1e8, 27 * 1.755e3, 4.0, 1.0
_GAIN = 0.8  # of the time that it takes else, at most


def launches(
    program: chip.Program, precision: str, interpret: bool, shape: Shape, layouts: chip.Layouts = chip.MEASURED
) -> tuple[list[Config], int]:
    """The layouts of the launches of one direction, in order, and from how many vertices on the wide launch runs a level."""
    narrow = chip.configure(program, precision, interpret, shape, layouts)
    if layouts.wide:
        wide, rows = layouts.wide(program.level, narrow)
    else:
        wide, rows = (None, 0) if layouts.narrow else widest(program.level, narrow, shape)
    if wide is None:
        return [narrow], 0
    return ([wide, narrow] if program.forward else [narrow, wide]), rows


def widest(program: LevelProgram, narrow: Config, shape: Shape) -> tuple[Config | None, int]:
    """The layout of a launch for levels that it runs faster than `narrow` does, and how many vertices these have at least.

    None where batches of this shape will hardly have such a level: it is at most half of a complete binary tree's vertices with
    children, and mostly less than a quarter; no level of chains is wider than others.
    """
    found = possible(level, narrow.precision) if shape.fan_in > 1 and not narrow.interpret else []
    if not found:
        return None, 0
    total, flops = sum(shape.inner), _flops(level)
    sizes = [max(1, int(total / 2 ** (n / 2))) for n in range(2, 11)]

    def time(config: Config) -> float:
        return sum(min(cost(level, config, rows), rows * flops / _RESIDENT) for rows in sizes)

    wide = min(found, key=time)
    rows = [n for n in sizes if n <= total / 4 and cost(level, wide, n) < _GAIN * n * flops / _RESIDENT]
    return (wide, min(rows)) if rows else (None, 0)


def possible(program: LevelProgram, precision: str) -> list[Config]:
    """Every layout of a launch for wide levels: products in tf32 alone, of sums that are long enough."""
    return [c for hb in (256, 128, 64, 32) for c in fitting(level, hb)] if precision == "tf32" else []


def fitting(program: LevelProgram, hb: int) -> list[Config]:
    """A layout with `hb` units a CTA, if there is one."""
    groups = chip.multiprocessors() * hb // level.unit
    if level.unit % hb or not groups or not any(phase.products for phase in level.phases):
        return []
    config = Config(hb, groups, False, 64, 2, "tf32", False, wide=True)
    with contextlib.suppress(Unfit):
        layout = layout_of(program, config)
        held = layout.columns // 2 + max(32, 16 * max(map(_sources, _specs(layout))))  # registers: sums, and rows on their way
        fits = layout.shared_memory(config) <= SHARED_MEMORY and max(part.width for part in layout.packed) <= 256
        if fits and layout.columns <= 256 and held <= 170:
            return [config]
    return []


def _specs(layout: Layout) -> list[ProductSpec]:
    return [spec for phase in layout.specs for spec, _ in phase]


def _sources(spec: ProductSpec) -> int:
    """Rows that a vertex's products read, those side by side as one."""
    return len(spec.sources) // spec.joined


def _flops(program: LevelProgram) -> int:
    """Of a vertex's products."""
    products = [p for phase in level.phases for p in phase.products]
    return sum(2 * level.size(p.weight.aval.shape[p.axis]) * p.blocks * level.unit * len(p.operands) for p in products)


def _moved(program: LevelProgram) -> int:
    """Blocks of units that a vertex's equations read and store, beside what its products read."""
    count = 0
    for phase in level.phases:
        made = {p.eqn.outvars[0] for p in phase.products}
        read = {x for v, e in phase.eqns.items() if v not in made for x in e.invars if is_var(x)}
        rows = [x for x in read if isinstance(phase.inputs.get(x) or level.sources.get(x), Rows | Sum)]
        stored = [v for v, places in phase.stores.items() for _ in places]
        count += sum(num_blocks(x.aval, level.valid) for x in (*rows, *stored))
    return count


def cost(program: LevelProgram, config: Config, rows: float) -> float:
    """Microseconds that a wide level of `rows` vertices takes, roughly: each tile reads its rows and all weights from L2."""
    read = 0
    for spec in _specs(layout_of(program, config)):
        columns = sum(weight.width for weight in spec.weights)
        read += 128 * spec.chunks * (columns + config.rows * config.warpgroups * _sources(spec))
    tiles = -(-rows // (config.rows * config.warpgroups))
    turns = -(-tiles // config.groups)
    busy = tiles / (turns * config.groups)  # where fewer CTAs read, each gets more
    return _FIXED + turns * (read / (_RATE * (1.3 - 0.3 * busy)) + _BLOCK * _moved(level))


def wide_levels(part_start: jax.Array, rows: int) -> jax.Array:
    """How many levels, from the leaves' parents on, have at least so many vertices; one at least, so that a launch has some."""
    widths = jnp.diff(jnp.asarray(part_start)[::PARTS])
    return jnp.maximum(jnp.argmin(jnp.append(widths >= rows, False)), 1).astype(jnp.int32)
