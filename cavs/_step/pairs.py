"""Finds the launches of engine `persistent` in a traced step that run in pairs, each on half of the multiprocessors.

Launches run one after another, because each needs a whole GPU. Two successive ones that do not depend on each other can share
it instead (`_engines.persistent.launch_calls`): the two directions of a BiLSTM, or the encoders of two inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cavs._engines.persistent.launch_calls import Half, LaunchRules
from cavs._jaxpr.jaxprs import CALLS, Eqn, Jaxpr, all_equations, body_of, is_var
from cavs._jaxpr.ruled import ruled_p
from cavs.kernels import begin_p


class _Launch(NamedTuple):
    rules: LaunchRules | None  # `None` for a convolution, and for an equation with launches inside, such as a loop
    known: int  # the launches on which it depends, a bit for each


def halves_of(jaxpr: Jaxpr) -> list[Half | None]:
    """Returns for each launch with `LaunchRules`, in order, how it runs beside another one; `None` if it runs alone.

    The bodies of loops, branches and the like are not included. They are jaxprs of their own.
    """
    launches: list[_Launch] = []
    _follow(jaxpr, [0] * len(jaxpr.invars), launches)
    halves: list[Half | None] = [None] * len(launches)
    for n in range(len(launches) - 1):
        if halves[n] is None:
            halves[n : n + 2] = _pair(launches, n) or (None, None)
    return [half for half, launch in zip(halves, launches, strict=True) if launch.rules]


def _pair(launches: Sequence[_Launch], n: int) -> tuple[Half, Half] | None:
    """Returns how launch n and the next one run side by side; `None` if they cannot, or if that should take longer."""
    (first, _), (second, known) = launches[n : n + 2]
    if not first or not second or known >> n & 1:
        return None
    a, b = first.halve(), second.halve()
    return (a, b) if a and b and max(a.cost, b.cost) < a.whole_cost + b.whole_cost else None


def _follow(jaxpr: Jaxpr, of_inputs: Sequence[int], launches: list[_Launch]) -> list[int]:
    """Appends the launches of a jaxpr. Returns on which launches its results depend, given those of its arguments."""
    env = dict.fromkeys(jaxpr.constvars, 0) | dict(zip(jaxpr.invars, of_inputs, strict=True))
    for eqn in jaxpr.eqns:
        operands = [env[x] if is_var(x) else 0 for x in eqn.invars]
        rules, known = rules_of(eqn), 0
        if eqn.primitive.name in CALLS and rules is None:
            env.update(zip(eqn.outvars, _follow(body_of(eqn)[0], operands, launches), strict=True))
            continue
        for x in operands:
            known |= x
        if has_launches([eqn]):
            launches.append(_Launch(rules, known))
            known |= 1 << len(launches) - 1
        env |= dict.fromkeys(eqn.outvars, known)
    return [env[x] if is_var(x) else 0 for x in jaxpr.outvars]


def rules_of(eqn: Eqn) -> LaunchRules | None:
    """Returns the rules of a launch that may be able to run beside another one; `None` for any other equation."""
    rules = eqn.params["rules"] if eqn.primitive is ruled_p else None
    return rules if isinstance(rules, LaunchRules) else None


def has_launches(eqns: Sequence[Eqn]) -> bool:
    """Returns whether one of the equations is, or contains, a launch."""
    return any(e.primitive is begin_p for e in all_equations(eqns))
