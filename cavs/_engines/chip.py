"""How a launch of engine `persistent` is laid out on the chip (VPPS III-A): measured layouts, else a cost model's choice."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Protocol

import jax

from cavs._schedule.schedule import Shape
from cavs.kernels import PARTS, SHARED_MEMORY, Config, LevelProgram, Unfit, layout_of, tuned


class Direction(Protocol):
    """What a layout is chosen for; see `_engines.lower.Recurrence`."""

    @property
    def program(self) -> LevelProgram: ...
    @property
    def forward(self) -> bool: ...


H200_MULTIPROCESSORS = 132  # as many as an H100 SXM has; an H100 PCIe has 114


def multiprocessors() -> int:
    """Of this GPU: all CTAs of a launch must be resident. Without a GPU those of an H200, for `explain`."""
    return jax.devices()[0].core_count if jax.default_backend() == "gpu" else H200_MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Overrides of the layouts that engine `persistent` chooses, for tests and `bench tune`; part of the engine's value.

    Attributes:
        narrow: `narrow(level, forward, config)` returns the layout to use instead of `config`.
        wide: `wide(level, config)` returns the layout of a launch for wide levels, or `None`, and from how many vertices on a
            level is wide. Without it, and with `narrow`, one launch runs all levels.
    """

    narrow: Callable[[LevelProgram, bool, Config], Config] | None = None
    wide: Callable[[LevelProgram, Config], tuple[Config | None, int]] | None = None


MEASURED = Layouts()  # no overrides: measured layouts, or the cost model's


# Whether weights are tight, rows of a tile, warpgroups, reads in flight: what was among the fastest somewhere on an H200.
_WAYS = [(False, 32, 2, 12), (False, 16, 2, 12), (False, 16, 2, 24), (False, 16, 3, 12), (False, 8, 2, 24)]
_WAYS += [(False, 32, 2, 24), (False, 32, 3, 16), (False, 32, 4, 12), (False, 16, 3, 24), (False, 16, 4, 12)]
_WAYS += [(True, 16, 2, 12), (True, 16, 2, 24), (True, 16, 3, 12), (True, 8, 2, 24), (True, 8, 3, 16)]
_WAYS += [(True, 32, 1, 24), (True, 32, 2, 12), (True, 32, 3, 12), (True, 16, 4, 8), (True, 8, 4, 8)]


def candidates(program: LevelProgram, precision: str) -> list[Config]:
    """Every layout on the chip that fits, weights resident where any can be."""
    unit, found, available = program.unit, [], multiprocessors()
    for hb in (64, 32, 16, 8):
        ctas = unit // hb
        if unit % hb or ctas > available:
            continue
        groups = min(PARTS, 1 << (available // ctas).bit_length() - 1)
        for resident, clustered, (tight, rows, warpgroups, in_flight) in itertools.product((True, False), (True, False), _WAYS):
            if rows * hb % 128 or (clustered and ctas != 16) or (tight and (not resident or precision != "tf32" or hb % 16)):
                continue
            # Not every part of the chip has 16 multiprocessors for a cluster of 16: two CTAs must fit into one.
            room = SHARED_MEMORY // (2 if clustered else 1)
            ways = [
                Config(hb, groups, clustered, rows, warpgroups, precision, resident, tight, in_flight, paired)
                for paired in (False, True)
            ]
            fitting = [c for c in ways if layout_of(program, c).shared_memory(c) <= room][:1]  # with room, nothing is paired
            if resident and not clustered and ctas % 2 == 0:
                with contextlib.suppress(Unfit):
                    divided = [dataclasses.replace(c, split=2) for c in ways]
                    fitting += [c for c in divided if layout_of(program, c).shared_memory(c) <= room]
            found += fitting
            if program.flows and resident and not clustered:
                found += [dataclasses.replace(c, dataflow=True) for c in fitting]
    found = [c for c in found if c.resident] or found
    loose = {c.hb for c in found if not c.tight}
    return [c for c in found if not c.tight or c.hb not in loose]  # where there is room, there is nothing to decode


def cost(program: LevelProgram, config: Config, rows: float) -> float:
    """Microseconds that a level of `rows` vertices takes, roughly; fitted to runs on an H200.

    A level has a fixed part, mostly the group's meeting, or the way of a number from CTA to CTA; its rows come from L2 at about
    100 kB a microsecond and CTA, and about three times where CTAs look for numbers until they are there; each tile reads all
    weights from shared memory, at 128 bytes a clock, and computes `rows * hb / 128` numbers a thread; the warpgroups of a CTA
    overlap. Where CTAs divide K, each reads its part of a row, and each tile waits for the others' sums.
    """
    layout = layout_of(program, config)
    mine = rows / config.groups
    width = sum(spec.chunk * spec.chunks * len(spec.sources) // spec.joined for spec in layout.specs())
    read = layout.words * 4 / 128 / 1755 * (1 if config.resident else 4)
    tile = 0.35 + read + 0.24 * config.rows * config.hb / 128 + 1.6 * (config.split > 1)
    fixed, again = (0.9, 3.0) if config.dataflow else (1.6, 1.0)
    return fixed + again * mine * width * 4 / 1e5 + tile * max(1.0, mine / config.rows / config.warpgroups)


def mean_cost(program: LevelProgram, config: Config, shape: Shape | None) -> float:
    """`cost` on schedules of a shape: most levels are narrow, half of a mean one, and most vertices in few wide ones."""
    mean = mean_rows(shape)
    return (3 * cost(program, config, mean / 2) + cost(program, config, 4 * mean)) / 4


# Vertices a level, as `mean_rows` tells, from which loops over large products (engine scan) beat weights that stream from L2
# for every tile. On an H200, hidden 2048, 8 levels (padded to 32): 4.9 ms against 4.5 with 290 a level so counted, 9.5 against
# 17.6 with 1,020. Resident weights won with 2,040 still.
WIDE = 500


def too_wide(config: Config, shape: Shape) -> bool:
    """Whether engine scan should be faster on schedules of a shape."""
    return not config.resident and mean_rows(shape) > WIDE


def mean_rows(shape: Shape | None) -> float:
    """Vertices a level of a schedule's shape, whose levels are padded; about a batch of 64 sentences without a shape."""
    return sum(shape.inner) / max(shape.levels, 1) if shape else 32.0


def tuning_key(program: LevelProgram, forward: bool, precision: str, shape: Shape | None) -> str:
    """Under which a layout is recorded in `kernels/tuned`."""
    weights = {(p.weight, p.axis): p for p in program.products()}
    sizes = [(program.size(p.size), p.blocks * program.unit) for p in weights.values()]
    return tuned.key(sizes, forward, "bf16" if precision == "f16" else precision, mean_rows(shape))  # as fast


def configure(
    recurrence: Direction, precision: str, interpret: bool, shape: Shape | None = None, layouts: Layouts = MEASURED
) -> Config:
    """The layout on the chip: one measured on this device, or the one of lowest estimated cost among those that fit."""
    program = recurrence.program
    if interpret:
        config = Config(program.unit, 1, False, 8, 1, "fp32", True, interpret=True, dataflow=program.flows)
        return layouts.narrow(program, recurrence.forward, config) if layouts.narrow else config
    fitting = candidates(program, precision)
    if not fitting:
        raise Unfit("no layout of the recurrent part fits the chip")
    best = min(fitting, key=lambda c: mean_cost(program, c, shape))
    known = tuned.records(jax.devices()[0].device_kind).get(tuning_key(program, recurrence.forward, precision, shape))
    if known:
        measured = Config(precision=precision, **{k: v for k, v in known.items() if k != "us"})
        best = measured if measured in fitting else best  # the kernels may have changed since
    return layouts.narrow(program, recurrence.forward, best) if layouts.narrow else best
