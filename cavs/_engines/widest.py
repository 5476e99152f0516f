"""Which levels of a batch run as large tiled products, and how these lie on the chip (`kernels/_body/wide`)."""

import contextlib

import jax
import jax.numpy as jnp

from cavs._engines import chip
from cavs._schedule.schedule import Shape
from cavs.kernels import (
    PARTS,
    SHARED_MEMORY,
    Across,
    Config,
    ConstantRead,
    Equation,
    LevelProgram,
    Load,
    ProductSpec,
    Unfit,
    Var,
    aval,
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
    recurrence: chip.Direction, precision: str, interpret: bool, shape: Shape, layouts: chip.Layouts = chip.MEASURED
) -> tuple[list[Config], int]:
    """The layouts of the launches of one direction, in order, and from how many vertices on the wide launch runs a level."""
    narrow = chip.configure(recurrence, precision, interpret, shape, layouts)
    if layouts.wide:
        wide, rows = layouts.wide(recurrence.program, narrow)
    else:
        wide, rows = (None, 0) if layouts.narrow else widest(recurrence.program, narrow, shape)
    if wide is None:
        return [narrow], 0
    return ([wide, narrow] if recurrence.forward else [narrow, wide]), rows


def widest(program: LevelProgram, narrow: Config, shape: Shape) -> tuple[Config | None, int]:
    """The layout of a launch for levels that it runs faster than `narrow` does, and how many vertices these have at least.

    None where batches of this shape will hardly have such a level: it is at most half of a complete binary tree's vertices with
    children, and mostly less than a quarter; no level of chains is wider than others.
    """
    found = possible(program, narrow.precision) if shape.fan_in > 1 and not narrow.interpret else []
    if not found:
        return None, 0
    total, flops = sum(shape.inner), _flops(program)
    sizes = [max(1, int(total / 2 ** (n / 2))) for n in range(2, 11)]

    def time(config: Config) -> float:
        return sum(min(cost(program, config, rows), rows * flops / _RESIDENT) for rows in sizes)

    wide = min(found, key=time)
    rows = [n for n in sizes if n <= total / 4 and cost(program, wide, n) < _GAIN * n * flops / _RESIDENT]
    return (wide, min(rows)) if rows else (None, 0)


def possible(program: LevelProgram, precision: str) -> list[Config]:
    """Every layout of a launch for wide levels: products in tf32 alone, of sums that are long enough."""
    return [c for hb in (256, 128, 64, 32) for c in fitting(program, hb)] if precision == "tf32" else []


def fitting(program: LevelProgram, hb: int) -> list[Config]:
    """A layout with `hb` units a CTA, if there is one."""
    groups = chip.multiprocessors() * hb // program.unit
    if program.unit % hb or not groups or not any(phase.products for phase in program.phases):
        return []
    config = Config(hb, groups, False, 64, 2, "tf32", False, wide=True)
    with contextlib.suppress(Unfit):
        layout = layout_of(program, config)
        held = layout.columns // 2 + max(32, 16 * max(map(_sources, layout.specs())))  # registers: sums, and rows on their way
        fits = layout.shared_memory(config) <= SHARED_MEMORY and max(part.width for part in layout.packed) <= 256
        if fits and layout.columns <= 256 and held <= 170:
            return [config]
    return []


def _sources(spec: ProductSpec) -> int:
    """Rows that a vertex's products read, those side by side as one."""
    return len(spec.sources) // spec.joined


def _flops(program: LevelProgram) -> int:
    """FLOPs of one vertex's matrix products."""
    return sum(2 * program.size(p.size) * p.blocks * program.unit * len(p.operands) for p in program.products())


def _moved(program: LevelProgram) -> int:
    """Blocks of units that one vertex's equations read and store, beside what its products read.

    A value that a phase computes, stores for a later phase and reads itself counts as read: `_BLOCK` was fitted so.
    """
    in_memory = _values_in_memory(program)
    count = 0
    for phase in program.phases:
        read = {x for op in phase.of(Equation) for x in op.eqn.invars if is_var(x)}
        read |= {op.operand for op in phase.operations if isinstance(op, Across)}
        moved = [*(x for x in read if x in in_memory), *(store.value for store in phase.stores)]
        count += sum(num_blocks(aval(x), program.valid) for x in moved)
    return count


def _values_in_memory(program: LevelProgram) -> set[Var]:
    """The values that some phase reads from rows in memory."""
    loads = [load for phase in program.phases for load in phase.of(Load)]
    found = {load.value for load in loads if not isinstance(load.source, ConstantRead)}
    found |= {op.operand for phase in program.phases for op in phase.operations if isinstance(op, Across)}
    stores = [store for phase in program.phases for store in phase.stores]
    for product in program.products():
        x, tensors = product.eqn.invars[0], product.tensors()
        found |= {store.value for store in stores if store.value is x and store.place.tensor in tensors}
    return found


def cost(program: LevelProgram, config: Config, rows: float) -> float:
    """Microseconds that a wide level of `rows` vertices takes, roughly: each tile reads its rows and all weights from L2."""
    read = 0
    for spec in layout_of(program, config).specs():
        columns = sum(weight.width for weight in spec.weights)
        read += 128 * spec.chunks * (columns + config.rows * config.warpgroups * _sources(spec))
    tiles = -(-rows // (config.rows * config.warpgroups))
    turns = -(-tiles // config.groups)
    busy = tiles / (turns * config.groups)  # where fewer CTAs read, each gets more
    return _FIXED + turns * (read / (_RATE * (1.3 - 0.3 * busy)) + _BLOCK * _moved(program))


def wide_levels(part_start: jax.Array, rows: int) -> jax.Array:
    """How many levels, from the leaves' parents on, have at least so many vertices; one at least, so that a launch has some."""
    widths = jnp.diff(jnp.asarray(part_start)[::PARTS])
    return jnp.maximum(jnp.argmin(jnp.append(widths >= rows, False)), 1).astype(jnp.int32)
