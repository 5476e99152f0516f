"""The layout on the chip of a launch of engine `persistent` (VPPS, section III-A).

It is a layout that was measured on this device, if there is one, and otherwise the choice of a cost model.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from cavs._schedule.schedule import Shape
from cavs.kernels import PARTS, PRECISIONS, LaunchConfig, LevelProgram, Target, Unfit, layout_of, tuned


class Direction(Protocol):
    """One direction of the recurrent part, for which a layout is chosen; see `_engines.persistent.lower.Recurrence`."""

    @property
    def program(self) -> LevelProgram: ...
    @property
    def forward(self) -> bool: ...
    @property
    def precision(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Overrides of the layouts that engine `persistent` chooses, for tests and `bench tune`; part of the engine's value."""

    # `narrow(level, forward, config)` returns the layout to use instead of `config`.
    narrow: Callable[[LevelProgram, bool, LaunchConfig], LaunchConfig] | None = None
    # `wide(level, config)` returns the layout of a launch for wide levels, or `None`, and the least number of vertices of a
    # wide level. If only `narrow` is given, one launch runs all levels.
    wide: Callable[[LevelProgram, LaunchConfig], tuple[LaunchConfig | None, int]] | None = None


MEASURED = Layouts()  # no overrides


class LaunchOptions(NamedTuple):
    target: Target  # the GPU
    interpret: str | None = None  # see `LaunchConfig`
    layouts: Layouts = MEASURED  # overrides of the layouts on the chip


# (tight, rows of a tile, warpgroups, reads in flight) of `LaunchConfig`. Each was among the fastest in a measurement on H200.
_WAYS = [(False, 32, 2, 12), (False, 16, 2, 12), (False, 16, 2, 24), (False, 16, 3, 12), (False, 8, 2, 24)]
_WAYS += [(False, 32, 2, 24), (False, 32, 3, 16), (False, 32, 4, 12), (False, 16, 3, 24), (False, 16, 4, 12)]
_WAYS += [(True, 16, 2, 12), (True, 16, 2, 24), (True, 16, 3, 12), (True, 8, 2, 24), (True, 8, 3, 16)]
_WAYS += [(True, 32, 1, 24), (True, 32, 2, 12), (True, 32, 3, 12), (True, 16, 4, 8), (True, 8, 4, 8)]
_WAYS += [(True, 16, 4, 12), (True, 8, 3, 12), (True, 8, 2, 8), (True, 8, 3, 8)]


@functools.lru_cache(maxsize=256)
def candidates(program: LevelProgram, precision: str, target: Target) -> list[LaunchConfig]:
    """Returns every layout that fits the chip.

    Three tf32 weights lie in two words if they stream from L2, and if they would not fit otherwise.

    `precision`: the precision of products; see `LaunchConfig`.
    """
    unit, available, layouts = program.unit, target.multiprocessors, []
    for hb in (64, 32, 16, 8):
        ctas = unit // hb
        if unit % hb or ctas > available:
            continue
        groups = min(PARTS, 1 << (available // ctas).bit_length() - 1)
        can_be_tight = PRECISIONS[precision].tight and hb % 16 == 0
        for resident, (tight, rows, warpgroups, in_flight) in itertools.product((True, False), _WAYS):
            if rows * hb % 128 or (tight and not can_be_tight):
                continue
            ways = [
                LaunchConfig(hb, groups, rows, warpgroups, precision, resident, tight, in_flight, paired)
                for paired in (False, True)
            ]
            fitting = _fitting(program, ways, target)[:1]  # paired only if it must be
            if ctas % 2 == 0:
                with contextlib.suppress(Unfit):
                    fitting += _fitting(program, [dataclasses.replace(c, split=2) for c in ways], target)
            layouts += fitting
            if program.flows and resident:
                layouts += [dataclasses.replace(c, dataflow=True) for c in fitting]
    layouts += in_registers(program, layouts)
    loose = {(c.resident, c.hb) for c in layouts if not c.tight}
    loose -= {(False, c.hb) for c in layouts if c.tight and not c.resident}
    return [c for c in layouts if c.tight == ((c.resident, c.hb) not in loose)]


def _fitting(program: LevelProgram, layouts: Sequence[LaunchConfig], target: Target) -> list[LaunchConfig]:
    """Returns the layouts that fit in the shared memory of a multiprocessor."""
    return [c for c in layouts if layout_of(program, c).shared_memory(c) <= target.shared_memory]


def in_registers(program: LevelProgram, layouts: Sequence[LaunchConfig]) -> list[LaunchConfig]:
    """Returns these layouts with weights in registers, as far as they have room there.

    Only weights of 16 bits: on an H200 (2026-11-29), forward passes in float16 took 1 to 7 % less time than the fastest others,
    and backward passes in tf32 5 % more.
    """
    variants = []
    for c in layouts:
        if not c.resident or c.hb % 16 or c.split > 1 or c.paired or PRECISIONS[c.precision].dtype is None:
            continue
        layout = layout_of(program, c)
        weights = sum(part.words(c.precision) // (32 * part.splits) for part in layout.packed)
        available = min(255, 65536 // (128 * c.warpgroups))
        for in_flight in (8, 12):
            # Weights, sums, reads of 16 bytes, and 48 for the rest. By this rule, 52 layouts spilled at most 16 bytes.
            if weights and weights + layout.columns * c.rows // 32 + 4 * in_flight + 48 <= available:
                variants.append(dataclasses.replace(c, in_flight=in_flight, registers=True))
    return list(dict.fromkeys(variants))


def narrow_cost(program: LevelProgram, config: LaunchConfig, rows: float, graphs: int = PARTS) -> float:
    """Estimates the microseconds that a level of `rows` vertices of `graphs` graphs takes; fitted to measurements on an H200.

    A level has a fixed cost: mostly the group's barrier or, in a dataflow launch, the latency of an element from one thread
    block to another. A thread block reads rows from L2 at about 100 kB per microsecond, and about three times if it polls. Each
    tile reads all weights from shared memory at 128 bytes per clock, or from L2 at 80 kB per microsecond, and computes
    `rows * hb / 128` elements per thread. The warpgroups of a thread block overlap. If thread blocks divide K, each reads only
    its part of a row, and each tile waits for the sums of the others. A group without a graph does nothing, unless all share
    the rows of every level; then all thread blocks meet at a barrier.
    """
    layout = layout_of(program, config)
    group_rows = rows / (config.groups if config.spread else min(config.groups, graphs))
    width = sum(spec.chunk * spec.chunks * len(spec.sources) // spec.joined for spec in layout.specs())
    read = 0 if config.registers else layout.words * 4 / (128 * 1755 if config.resident else 8e4)
    tile = 0.35 + read + 0.24 * config.rows * config.hb / 128 + 1.6 * (config.split > 1)
    fixed, polling = (0.9, 3.0) if config.dataflow else (1.8 if config.spread else 1.6, 1.0)
    size = (PRECISIONS[config.precision].dtype or np.dtype(np.float32)).itemsize
    return fixed + polling * group_rows * width * size / 1e5 + tile * max(1.0, group_rows / config.rows / config.warpgroups)


def is_crowded(program: LevelProgram, config: LaunchConfig) -> bool:
    """Returns whether a thread's sums take more than three tenths of its registers; the compiler then spills.

    On an H100 (2026-11-27) the forward of BinaryTreeLSTM, hidden 1024 and batch 256, took 1,049 us with tiles of 32 rows and
    four warpgroups (1,124 bytes spilled), 413 with 16 rows (56 bytes), and 354 with three warpgroups. Of 60 layouts that were
    the fastest in measurements on an H200, one is crowded.
    """
    registers = min(255, 65536 // (128 * config.warpgroups))
    return layout_of(program, config).columns * config.rows / 32 > 0.3 * registers


def mean_cost(program: LevelProgram, config: LaunchConfig, shape: Shape | None, graphs: int = PARTS) -> float:
    """Estimates the mean cost of a level on schedules of a shape, for batches of `graphs` graphs.

    Most levels are narrow, with half the mean number of vertices; most vertices lie on a few wide levels.
    """
    mean = mean_rows(shape)
    narrow, broad = (narrow_cost(program, config, rows, graphs) for rows in (mean / 2, 4 * mean))
    level = (3 * narrow + broad) / 4
    if config.resident or not shape:
        return level
    # Weights are packed before the launch, at 2 TB/s. Costs of resident weights were fitted when the launch packed them itself.
    packed = 3 * layout_of(program, config).words * 4 * (program.unit // config.hb)
    return level + packed / 2e6 / max(shape.levels, 1)


# If no layout keeps weights on the chip, engine scan may be faster from this many vertices per level on, as `mean_rows` counts
# them. Measured with hidden 2048: 8.3 ms (scan) and 7.1 ms (persistent) with 157 (H100), 9.5 ms and 17.6 ms with 1,020 (H200,
# with layouts that spilled). Resident weights were still faster with 2,040.
WIDE = 500
# Weights that could stay stream, and groups share rows, only if a level then takes at most this part of the time, as estimated.
_GAIN = 0.85


def too_wide(recurrence: Direction, target: Target, shape: Shape) -> bool:
    """Returns whether engine scan should be faster than a launch on schedules of a shape."""
    return mean_rows(shape) > WIDE and not can_stay(recurrence, target)


def can_stay(recurrence: Direction, target: Target) -> bool:
    """Returns whether some layout keeps the weights in shared memory."""
    return any(c.resident for c in candidates(recurrence.program, recurrence.precision, target))


def mean_rows(shape: Shape | None) -> float:
    """Returns the mean number of vertices per (padded) level; without a shape, as in a batch of 64 sentences."""
    return sum(shape.inner) / max(shape.levels, 1) if shape else 32.0


def tuning_keys(program: LevelProgram, forward: bool, precision: str, shape: Shape | None) -> tuple[list[str], list[str]]:
    """Returns the keys under which a layout may be recorded in `kernels/tuned`, the nearest first.

    Returns:
        Keys for batches of exactly so few graphs, none if each group may have one; and keys for batches of any number.
    """
    weights = {(p.weight, p.axis): p for p in program.products()}
    sizes = [(program.size(p.size), p.blocks * program.unit) for p in weights.values()]
    keys = tuned.keys(sizes, forward, PRECISIONS[precision].tuned_as or precision, mean_rows(shape))
    return [f"{key}, graphs: {shape.graphs}" for key in keys] if shape and has_few_graphs(shape) else [], keys


def has_few_graphs(shape: Shape) -> bool:
    """Returns whether some group of thread blocks may have no graph of its own."""
    return shape.graphs < PARTS


def configure(recurrence: Direction, options: LaunchOptions, shape: Shape | None = None) -> LaunchConfig:
    """Returns the layout on the chip: one measured on this device, or the one that fits and has the lowest estimated cost.

    `shape`: the shape of the schedule, if known. Raises `Unfit` if no layout fits the chip.
    """
    program, layouts = recurrence.program, options.layouts
    if options.interpret:
        config = LaunchConfig(program.unit, 1, 8, 1, "fp32", True, interpret=options.interpret, dataflow=program.flows)
    else:
        config, _ = chosen(recurrence, options.target, shape)
    return layouts.narrow(program, recurrence.forward, config) if layouts.narrow else config


def half_layout(recurrence: Direction, options: LaunchOptions, shape: Shape) -> LaunchConfig | None:
    """Returns the layout of a launch on half of the multiprocessors, beside another launch; `None` if none fits.

    All thread blocks of both launches are then on the chip at once, wherever those of the first one are. Clusters are left out:
    a cluster needs multiprocessors of one part of the chip, and the first launch may leave too few in each part. So are weights
    in registers, which were not compared beside another launch. The cost model chooses, as records are of launches that have
    the chip to themselves.
    """
    program, half = recurrence.program, half_of(options.target)
    if options.interpret:
        config = configure(recurrence, options, shape)
    else:
        fitting = [c for c in candidates(program, recurrence.precision, half) if c.split == 1 and not c.registers]
        if not fitting:
            return None
        config = estimated(program, fitting, shape)
        config = _spread_if_faster(program, config, fitting, shape) if has_few_graphs(shape) else config
        config = options.layouts.narrow(program, recurrence.forward, config) if options.layouts.narrow else config
    fits = num_thread_blocks(program, config) <= half.multiprocessors and config.split == 1
    return config if fits else None


@functools.lru_cache(maxsize=64)
def half_of(target: Target) -> Target:
    """Returns a device of half of the multiprocessors; the same one for each target, as caches know it by identity."""
    return dataclasses.replace(target, multiprocessors=target.multiprocessors // 2)


def num_thread_blocks(program: LevelProgram, config: LaunchConfig) -> int:
    return program.unit // config.hb * config.groups


def launch_cost(program: LevelProgram, config: LaunchConfig, shape: Shape) -> float:
    """Estimates the microseconds that a launch takes on schedules of a shape."""
    return shape.levels * mean_cost(program, config, shape, min(PARTS, shape.graphs))


def chosen(recurrence: Direction, target: Target, shape: Shape | None) -> tuple[LaunchConfig, str | None]:
    """Returns the layout of a launch, and the key of its record, `None` if the cost model chooses it; see `configure`."""
    program = recurrence.program
    fitting = candidates(program, recurrence.precision, target)
    if not fitting:
        raise Unfit("no layout of the recurrent part fits the chip")
    exact_keys, general_keys = tuning_keys(program, recurrence.forward, recurrence.precision, shape)
    if record := _recorded(recurrence, target, exact_keys):
        return record
    best, key = _recorded(recurrence, target, general_keys) or (estimated(program, fitting, shape), None)
    if shape and has_few_graphs(shape) and (layout := _spread_if_faster(program, best, fitting, shape)) is not best:
        return layout, None
    return best, key


def estimated(program: LevelProgram, fitting: list[LaunchConfig], shape: Shape | None) -> LaunchConfig:
    """Returns the layout of the lowest estimated cost."""
    roomy = [c for c in fitting if not is_crowded(program, c)]
    return min(roomy or fitting, key=lambda c: mean_cost(program, c, shape) / (1 if c.resident else _GAIN))


def _spread_if_faster(program: LevelProgram, best: LaunchConfig, fitting: list[LaunchConfig], shape: Shape) -> LaunchConfig:
    """Returns a layout whose groups share rows if it should be faster than `best`, for a batch of few graphs."""
    if not (spread_layouts := spread(fitting)):
        return best
    alternative = estimated(program, spread_layouts, shape)
    faster = mean_cost(program, alternative, shape) < _GAIN * mean_cost(program, best, shape, shape.graphs)
    return alternative if faster else best


def spread(layouts: list[LaunchConfig]) -> list[LaunchConfig]:
    """Returns these layouts, changed so that groups share the rows of every level, for batches of fewer graphs than groups.

    Those with weights in registers are left out: they were not compared on a card.
    """
    changed = [dataclasses.replace(c, spread=True, dataflow=False) for c in layouts if c.groups > 1 and not c.registers]
    return list(dict.fromkeys(changed))


def key_of(recurrence: Direction, shape: Shape | None) -> str:
    """Returns the key under which the layout of a direction is recorded on schedules of a shape."""
    exact_keys, general_keys = tuning_keys(recurrence.program, recurrence.forward, recurrence.precision, shape)
    return (exact_keys or general_keys)[0]


def is_settled(recurrence: Direction, target: Target, shape: Shape) -> bool:
    """Returns whether the layout is on record for this GPU under its own key, so that records of others do not change it."""
    key = key_of(recurrence, shape)
    return bool(_recorded(recurrence, target, [key])) and tuned.origin(target.device_kind, key) != tuned.OTHERS


def source(recurrence: Direction, target: Target, shape: Shape | None = None) -> str:
    """Returns the words that say where the layout that `configure` returns comes from."""
    _, key = chosen(recurrence, target, shape)
    if key is None:
        return "by a cost model"
    timed = "us" in tuned.nearest(target.device_kind)[key]  # else the time to tune was up
    return f"{'by' if timed else 'without'} measurement, {tuned.origin(target.device_kind, key)}"


def _recorded(recurrence: Direction, target: Target, keys: list[str]) -> tuple[LaunchConfig, str] | None:
    """Returns the layout under the first of some keys that has one, and the key, if it fits: the kernels may have changed."""
    program, precision = recurrence.program, recurrence.precision
    records = tuned.nearest(target.device_kind)
    key = next((key for key in keys if key in records), None)
    if key is None:
        return None
    fields = {k: v for k, v in records[key].items() if k != "us"}
    if fields.keys() - LaunchConfig.__dataclass_fields__.keys():
        return None
    config, fitting = LaunchConfig(precision=precision, **fields), candidates(program, precision, target)
    return (config, key) if config in (spread(fitting) if config.spread else fitting) else None
