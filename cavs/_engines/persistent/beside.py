"""Launches that can run beside another one, each on half of the multiprocessors.

The thread blocks of a launch wait for each other, so all of them must be on the chip. A launch therefore has the chip to itself,
unless two launches have so few thread blocks that those of both are there at once. `cavs.concurrent_jit` and `cavs.data.step`
find such pairs in a traced step, such as the two directions of a BiLSTM, and run both with the layouts that are given here.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from cavs._engines.persistent.chip import LaunchOptions, half_layout, launch_cost
from cavs._engines.persistent.lower import Recurrence
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Var
from cavs._jaxpr.ruled import Flat, Rules, as_call, pushed
from cavs._schedule.schedule import Shape
from cavs.kernels import LaunchConfig, persistent


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Halvable(Rules):
    """The rules of a launch that can also run on half of the multiprocessors."""

    half: Flat  # the launch on half of them: the same function, with another layout
    cost: float  # the estimated microseconds of the launch
    half_cost: float  # those of `half`


def run_launches(
    recurrence: Recurrence,
    how: LaunchOptions,
    shape: Shape,
    configs: list[LaunchConfig],
    weights: dict[Var, jax.Array],
    arrays: persistent.Arrays,
) -> persistent.LaunchResults:
    """Runs all levels of a direction, as `kernels.persistent.launches`, in a call with rules `Halvable` if there is a layout.

    Two launches of one direction are not halved: the launch for wide levels needs the whole chip to be worth it.
    """
    program, reverse = recurrence.program, not recurrence.forward
    half = half_layout(recurrence, how, shape) if len(configs) == 1 else None
    if half is None:
        return persistent.launches(program, configs, weights, arrays, reverse)
    names, bare = list(weights), arrays.without_values()  # JAX's caches must not keep arrays

    def run(configs: list[LaunchConfig], values: list[jax.Array], given: list[list[jax.Array]]) -> persistent.LaunchResults:
        mine = dict(zip(names, values, strict=True))
        return persistent.launches(program, configs, mine, bare.with_values(given), reverse)

    costs = [launch_cost(program, config, shape) for config in (configs[0], half)]

    def rules(flat: Callable[[Callable[..., PyTree]], Flat]) -> Halvable:
        whole = flat(functools.partial(run, configs))
        return Halvable(
            whole,
            lambda primals, tangents: pushed(whole, primals, tangents),
            lambda over, dims, operands: over(whole, tuple(dims))(*operands),
            half=flat(functools.partial(run, [half])),
            cost=costs[0],
            half_cost=costs[1],
        )

    return as_call(rules)(list(weights.values()), arrays.values())
