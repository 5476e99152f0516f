"""Launches as calls in a jaxpr, with what others may want to know of them.

The thread blocks of a launch wait for each other, so all of them must be on the chip. A launch therefore has the chip to
itself, unless two launches have so few thread blocks that those of both are there at once. `cavs.concurrent_jit` and
`cavs.data.step` find such pairs in a traced step (`_step.pairs`), and run both on half of the multiprocessors each, with the
layouts that are chosen here.

Marks say what each launch runs, for those who choose its layout by measuring (`_run.tune`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from cavs._engines.engine import Job
from cavs._engines.persistent.chip import LaunchOptions, half_layout, launch_cost
from cavs._engines.persistent.lower import Recurrence
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Eqn, Var
from cavs._jaxpr.ruled import Flat, Rules, as_call, call, ruled_p
from cavs._schedule.schedule import Shape
from cavs.kernels import LaunchConfig, persistent


class Half(NamedTuple):
    """A launch on half of the multiprocessors."""

    run: Flat  # the same function as the launch on all of them, with another layout
    cost: float  # the estimated microseconds
    whole_cost: float  # those of the launch on all multiprocessors


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LaunchRules(Rules):
    """The rules of a launch that may be able to run beside another one."""

    halve: Callable[[], Half | None]  # returns how it runs there, `None` if no layout fits


def run_launches(
    recurrence: Recurrence,
    options: LaunchOptions,
    shape: Shape,
    configs: list[LaunchConfig],
    weights: dict[Var, jax.Array],
    arrays: persistent.Arrays,
    ready: Callable[[Sequence[LaunchConfig], persistent.Arrays], persistent.Arrays],
) -> persistent.LaunchResults:
    """Runs all levels of a direction as `kernels.persistent.launches` does: one launch as a call with `LaunchRules`.

    If there are two, they run alone: the launch for wide levels is worth it because it has the whole chip.

    `ready`: returns what launches in some layouts need in place of `arrays`. It may not close over tracers.
    """
    program, reverse = recurrence.program, not recurrence.forward
    if len(configs) > 1:
        return persistent.launches(program, configs, weights, ready(configs, arrays), reverse)
    variables, bare = list(weights), arrays.without_values()  # rules may not refer to tracers

    def launch(config: LaunchConfig, values: list[jax.Array], array_values: list[list[jax.Array]]) -> persistent.LaunchResults:
        ready_arrays = ready([config], bare.with_values(array_values))
        return persistent.launches(program, [config], dict(zip(variables, values, strict=True)), ready_arrays, reverse)

    def rules(flat: Callable[[Callable[..., PyTree]], Flat]) -> LaunchRules:
        whole = flat(functools.partial(launch, configs[0]))

        @functools.cache
        def halve() -> Half | None:
            if (config := half_layout(recurrence, options, shape)) is None:
                return None
            costs = (launch_cost(program, c, shape) for c in (config, configs[0]))
            return Half(flat(functools.partial(launch, config)), *costs)

        return LaunchRules.plain(whole, halve=halve)

    return as_call(rules)(list(weights.values()), arrays.values())


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LaunchMark(Rules):
    """The rules of an identity that says which launch computed its operand."""

    job: Job  # what the launch is a part of
    recurrence: Recurrence  # the direction that it runs


def marked(flag: jax.Array, job: Job, recurrence: Recurrence) -> jax.Array:
    """Returns the flag of a launch, marked in the jaxpr."""
    return call(LaunchMark.plain(lambda x: [x], job=job, recurrence=recurrence), flag)[0]


def is_mark(eqn: Eqn) -> bool:
    """Returns whether an equation is the mark of a launch."""
    return eqn.primitive is ruled_p and isinstance(eqn.params["rules"], LaunchMark)
