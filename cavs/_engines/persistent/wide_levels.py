"""Which levels of a batch run as large tiled products, and the layout of their launch (`kernels._body.wide`)."""

import contextlib

import jax
import jax.numpy as jnp

from cavs._engines.persistent import chip
from cavs._schedule.schedule import Shape
from cavs.kernels import (
    PARTS,
    PRECISIONS,
    Across,
    ConstantRead,
    Equation,
    LaunchConfig,
    LevelProgram,
    Load,
    ProductSpec,
    Target,
    Unfit,
    Var,
    aval,
    is_var,
    layout_of,
    num_blocks,
)

# Measured on an H200, 2026-11-22: FLOPs per microsecond of wide levels with resident weights (70e6 to 115e6); bytes per
# microsecond that each thread block gets from L2 if all of them read; the fixed cost of a wide level in microseconds; and the
# cost of a tile for each block of units that it reads or stores besides its products, in microseconds.
_RESIDENT, _RATE, _FIXED, _BLOCK = 1e8, 27 * 1.755e3, 4.0, 1.0
_GAIN = 0.8  # a wide launch must take at most this part of the time that the other launch would take


def launch_configs(recurrence: chip.Direction, options: chip.LaunchOptions, shape: Shape) -> tuple[list[LaunchConfig], int]:
    """Returns the layouts of the launches of one direction, and the least number of vertices of a level of the wide launch.

    There are one or two layouts, in the order in which the launches run; and 0 vertices without a wide launch. Raises `Unfit`
    if no layout fits the chip. `shape`: the shape of the schedule.
    """
    narrow = chip.configure(recurrence, options, shape)
    if options.layouts.wide:
        wide, rows = options.layouts.wide(recurrence.program, narrow)
    else:
        wide, rows = (None, 0) if options.layouts.narrow else wide_launch(recurrence.program, narrow, options.target, shape)
    if wide is None:
        return [narrow], 0
    return ([wide, narrow] if recurrence.forward else [narrow, wide]), rows


def wide_launch(program: LevelProgram, narrow: LaunchConfig, target: Target, shape: Shape) -> tuple[LaunchConfig | None, int]:
    """Returns the layout of a launch for wide levels, and the least number of vertices of a level that it runs faster.

    Returns `None` and 0 if batches of this shape will hardly have such a level. The widest level has at most half of a complete
    binary tree's vertices with children, and mostly less than a quarter. All levels of chains are equally wide.
    """
    layouts = possible(program, narrow.precision, target) if shape.fan_in > 1 and not narrow.interpret else []
    if not layouts:
        return None, 0
    total, flops = sum(shape.inner), _flops(program)
    sizes = [max(1, int(total / 2 ** (n / 2))) for n in range(2, 11)]

    def time(config: LaunchConfig) -> float:
        return sum(min(wide_cost(program, config, rows), rows * flops / _RESIDENT) for rows in sizes)

    wide = min(layouts, key=time)
    rows = [n for n in sizes if n <= total / 4 and wide_cost(program, wide, n) < _GAIN * n * flops / _RESIDENT]
    return (wide, min(rows)) if rows else (None, 0)


def possible(program: LevelProgram, precision: str, target: Target) -> list[LaunchConfig]:
    """Returns every layout that a launch for wide levels can have. It needs products in tf32 that sum over enough elements."""
    return [c for hb in (256, 128, 64, 32) for c in fitting(program, hb, target)] if PRECISIONS[precision].wide else []


def fitting(program: LevelProgram, hb: int, target: Target) -> list[LaunchConfig]:
    """Returns the layout with `hb` units per thread block, in a list that is empty if it does not fit the chip."""
    groups = target.multiprocessors * hb // program.unit
    if program.unit % hb or not groups or not any(phase.products for phase in program.phases):
        return []
    config = LaunchConfig(hb, groups, 64, 2, "tf32", False, wide=True)
    with contextlib.suppress(Unfit):
        layout = layout_of(program, config)
        held = layout.columns // 2 + max(32, 16 * max(map(_sources, layout.specs())))  # registers: sums, and rows in flight
        fits = layout.shared_memory(config) <= target.shared_memory and max(part.width for part in layout.packed) <= 256
        if fits and layout.columns <= 256 and held <= 170:
            return [config]
    return []


def _sources(spec: ProductSpec) -> int:
    """Counts the rows that the products of one vertex read; rows that lie side by side count as one."""
    return len(spec.sources) // spec.joined


def _flops(program: LevelProgram) -> int:
    """Returns the FLOPs of one vertex's matrix products."""
    return sum(2 * program.size(p.size) * p.blocks * program.unit * len(p.operands) for p in program.products())


def _moved(program: LevelProgram) -> int:
    """Counts the blocks of units that one vertex's equations read and store, besides what its products read.

    A value that a phase computes, stores for a later phase and reads itself counts as read, because `_BLOCK` was fitted so.
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
    """Returns the values that some phase reads from rows in memory."""
    loads = [load for phase in program.phases for load in phase.of(Load)]
    in_memory = {load.value for load in loads if not isinstance(load.source, ConstantRead)}
    in_memory |= {op.operand for phase in program.phases for op in phase.operations if isinstance(op, Across)}
    stores = [store for phase in program.phases for store in phase.stores]
    for product in program.products():
        x, tensors = product.eqn.invars[0], product.tensors()
        in_memory |= {store.value for store in stores if store.value is x and store.place.tensor in tensors}
    return in_memory


def wide_cost(program: LevelProgram, config: LaunchConfig, rows: float) -> float:
    """Estimates the microseconds that a wide level of `rows` vertices takes: each tile reads its rows and all weights."""
    read = 0  # bytes from L2
    for spec in layout_of(program, config).specs():
        columns = sum(weight.width for weight in spec.weights)
        read += 128 * spec.chunks * (columns + config.rows * config.warpgroups * _sources(spec))
    tiles = -(-rows // (config.rows * config.warpgroups))
    turns = -(-tiles // config.groups)
    busy = tiles / (turns * config.groups)  # if fewer thread blocks read, each of them gets more
    return _FIXED + turns * (read / (_RATE * (1.3 - 0.3 * busy)) + _BLOCK * _moved(program))


def count_wide_levels(part_start: jax.Array, rows: int) -> jax.Array:
    """Returns the number of levels, from the leaves' parents on, that have at least `rows` vertices, as an int32 scalar.

    It is at least one, because a launch must run a level. `part_start`: int32 of shape (levels * PARTS + 1,): for each level
    and part of the schedule, its first row.
    """
    widths = jnp.diff(jnp.asarray(part_start)[::PARTS])
    return jnp.maximum(jnp.argmin(jnp.append(widths >= rows, False)), 1).astype(jnp.int32)
