"""Engine `scan`, backward: the rounds in reverse. A round has a loop over tasks for each kind and each size."""

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.scan.task import Cuts, Kind, StateCotangents, Totals, empty_cuts, run_task
from cavs._function.vertex import Optimizations
from cavs._jaxpr.jaxprs import Env
from cavs._schedule.schedule import Schedule
from cavs._stages.operands import Products
from cavs._stages.tensors import Zeros

# The tasks that are left, the cotangents of states, for each kind the cut cotangents, and the cotangents of static values.
Rounds: TypeAlias = tuple[jax.Array, StateCotangents, list[Env], Totals]

_RoundCarry: TypeAlias = tuple[jax.Array, tuple[StateCotangents, Cuts, Totals]]  # begins with the number of tasks that are left


class Loop(NamedTuple):
    """What every round of the backward reads."""

    sched: Schedule
    zeros: Zeros
    kinds: list[Kind]
    begins: jax.Array  # (rounds * kinds * classes + 1,) the first task of each loop, and the end of the last
    options: Optimizations
    rounds: Callable[..., Rounds]  # `rounds_back`, or another engine's
    products: Products | None = None  # computes lazy gradients; `None` for XLA
    eager: Collection[int] = ()  # see `scan_reverse.backward_levels`


def begins_of(sched: Schedule) -> jax.Array:
    """Returns `Loop.begins`."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(sched.round_end).reshape(-1)])


def rounds_back(loop: Loop, tasks: jax.Array, g: StateCotangents, totals: Totals) -> Rounds:
    """Runs all rounds.

    Returns:
        The number of tasks that are left, the cotangents of states, for each kind the cut cotangents, and the cotangents of
        static values.
    """
    last = jnp.asarray(loop.sched.num_rounds, jnp.int32)
    carry = tasks, (g, [empty_cuts(kind, loop.zeros) for kind in loop.kinds], totals)
    tasks, (g, cuts, totals) = lax.fori_loop(0, last, lambda r, c: _round_back(loop, last - 1 - r, c), carry)
    return tasks, g, [dict(zip(kind.stored, own, strict=True)) for kind, own in zip(loop.kinds, cuts, strict=True)], totals


def _round_back(loop: Loop, r: jax.Array, carry: _RoundCarry) -> _RoundCarry:
    """Runs round r: for each kind and each class of task sizes, a loop over its tasks."""
    classes = loop.sched.shape.classes
    for kind in reversed(loop.kinds):
        for c in reversed(range(len(classes) if loop.sched.shape.inner[kind.number] else 0)):
            begin = loop.begins[r * (len(loop.kinds) * len(classes)) + kind.number * len(classes) + c]

            def step(state: _RoundCarry, kind: Kind = kind, c: int = c) -> _RoundCarry:
                t = state[0] - 1
                return t, run_task(kind, loop.sched, *classes[c], t, state[1], loop.options)

            carry = lax.while_loop(lambda state, begin=begin: state[0] > begin, step, carry)
    return carry
