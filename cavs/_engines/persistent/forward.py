"""The forward of engine `persistent`, with products in scaled float16 where that saves time."""

from cavs._engines.persistent.chip import candidates, estimated, launch_cost
from cavs._engines.persistent.lower import Recurrence, recurrence_of, scaled_forward_of
from cavs._engines.persistent.wide_levels import wide_launch
from cavs._function.plan import FunctionPlan
from cavs._schedule.schedule import Shape
from cavs.kernels import Target

# The estimated microseconds of a launch in tf32 from which on scaled float16 is used. A launch then takes 0.7 of the time, but
# finding the largest number and copying the leaves take about 20 us. One H100, 2026-11-28, Tree-FC: with hidden 1024 and batch
# 64 (257 us estimated), the launch takes 159 -> 113 us and a step 436 -> 405; with 512 and 16 (96), 27 -> 21 and 97 -> 98.
_LEAST = 200.0


def forward_of(plan: FunctionPlan, name: str | None, shape: Shape, keep: bool, target: Target) -> Recurrence:
    """Returns the forward of the inner role of a kind on schedules of a shape; see `lower.recurrence_of`."""
    plain = recurrence_of(plan, name, True, shape.forest, keep, target)
    other = scaled_forward_of(plan, name, shape.forest, keep, target)
    return other if other is not None and is_long(plain, shape, target) else plain


def is_long(made: Recurrence, shape: Shape, target: Target) -> bool:
    """Returns whether a launch takes long, unless wide levels have a launch of their own, which multiplies in tf32.

    The cost model says so alone: records of layouts may change before a run is resumed.
    """
    fitting = candidates(made.program, made.precision, target)
    if not fitting:
        return True
    config = estimated(made.program, fitting, shape)
    wide, _ = wide_launch(made.program, config, target, shape)
    return wide is None and launch_cost(made.program, config, shape) > _LEAST
