"""How a launch of engine `persistent` is laid out on the chip (VPPS III-A): measured layouts, else a cost model's choice."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from cavs._schedule import Shape
from cavs.kernels import _tuned, persistent
from cavs.kernels._specs import Level, Unfit

SMS = 132


@contextlib.contextmanager
def using(choose: Callable[[Level, bool, persistent.Config], persistent.Config]) -> Iterator[None]:
    """Within it `choose(level, forward, config)` decides on layouts; for `bench tune` and tests."""
    _CHOOSERS.append(choose)
    try:
        yield
    finally:
        _CHOOSERS.pop()


_CHOOSERS: list[Any] = []


def candidates(level: Level, precision: str) -> list[persistent.Config]:
    """Every layout on the chip that fits, weights resident where any can be."""
    unit, found = level.unit, []
    for hb in (64, 32, 16, 8):
        ctas = unit // hb
        if unit % hb or ctas > SMS:
            continue
        groups = min(persistent.PARTS, 1 << (SMS // ctas).bit_length() - 1)
        for resident in (True, False):
            for rows in (32, 16, 8):
                if rows * hb % 128:
                    continue
                config = persistent.Config(hb, groups, ctas == 16, rows, 2, precision, resident)
                if persistent.layout_of(level, config).shared_memory(config) <= persistent.SHARED_MEMORY:
                    found.append(config)
    return [c for c in found if c.resident] or found


def cost(level: Level, config: persistent.Config, rows: float) -> float:
    """Microseconds that a level of `rows` vertices takes, roughly; fitted to runs on an H200.

    A level has a fixed part, mostly the group's meeting; its rows come from L2 at about 100 kB a microsecond and CTA; each
    tile reads all weights from shared memory, at 128 bytes a clock, and computes `rows * hb / 128` numbers a thread; the
    warpgroups of a CTA overlap.
    """
    layout = persistent.layout_of(level, config)
    mine = rows / config.groups
    width = sum(spec.chunk * spec.chunks * len(spec.sources) for specs in layout.specs for spec, _ in specs)
    read = layout.words * 4 / 128 / 1755 * (1 if config.resident else 4)
    tile = 0.35 + read + 0.24 * config.rows * config.hb / 128
    return 1.6 + mine * width * 4 / 1e5 + tile * max(1.0, mine / config.rows / config.warpgroups)


def mean_rows(shape: Shape | None) -> float:
    """Vertices a level of a schedule's shape, as far as the shape tells; about a batch of 64 sentences without."""
    return sum(shape.inner) / max(shape.levels, 1) if shape else 32.0


def tuning_key(level: Level, forward: bool, precision: str, shape: Shape | None) -> str:
    """Under which a layout is recorded in `kernels/tuned`."""
    weights = {(p.weight, p.axis): p for phase in level.phases for p in phase.products}
    sizes = [(p.weight.aval.shape[p.axis], p.blocks * level.unit) for p in weights.values()]
    return _tuned.key(sizes, forward, precision, mean_rows(shape))


def configure(program: Any, precision: str, interpret: bool, shape: Shape | None = None) -> persistent.Config:
    """The layout on the chip: one measured on this device, or of those that fit the one that should be fastest."""
    level = program.level
    if interpret:
        return persistent.Config(level.unit, 1, False, 8, 1, "fp32", True, interpret=True)
    fitting = candidates(level, precision)
    if not fitting:
        raise Unfit("no layout of the recurrent part fits the chip")
    # Most levels are narrow, most vertices in few wide ones: half of a mean level, and four of them.
    mean = mean_rows(shape)
    best = min(fitting, key=lambda c: 3 * cost(level, c, mean / 2) + cost(level, c, 4 * mean))
    known = _tuned.records(jax.devices()[0].device_kind).get(tuning_key(level, program.forward, precision, shape))
    if known:
        fields = {k: v for k, v in known.items() if k != "us"}
        best = dataclasses.replace(best, **fields)
    for choose in _CHOOSERS:
        best = choose(level, program.forward, best)
    return best
