"""Finds the launches of engine `persistent` in a traced step that run in pairs, each on half of the multiprocessors.

Launches run one after another, as they need all of a GPU. Two that follow each other and do not depend on each other can share it
if both have a layout for half of it (`_engines.persistent.beside`): the two directions of a BiLSTM, or the encoders of two inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cavs._engines.persistent.beside import Halvable
from cavs._jaxpr.jaxprs import CALLS, Eqn, Jaxpr, bodies_in, body_of, is_var
from cavs._jaxpr.ruled import ruled_p
from cavs.kernels import begin_p


class _Launch(NamedTuple):
    rules: Halvable | None  # `None` for what cannot be halved: an equation with launches inside, or a convolution
    known: int  # the launches that it depends on, a bit for each


def halves(jaxpr: Jaxpr) -> list[Halvable | None]:
    """Returns the rules of each launch with rules, in order, if it runs on half of the multiprocessors; otherwise `None`.

    Launches in loops, branches and the like are not included: their bodies are jaxprs of their own.
    """
    launches: list[_Launch] = []
    _follow(jaxpr, [0] * len(jaxpr.invars), launches)
    paired = [False] * len(launches)
    for n in range(len(launches) - 1):
        if not paired[n] and _is_pair(launches[n], launches[n + 1], n):
            paired[n] = paired[n + 1] = True
    return [launch.rules if pair else None for launch, pair in zip(launches, paired, strict=True) if launch.rules]


def _is_pair(one: _Launch, other: _Launch, n: int) -> bool:
    """Returns whether launch n and the next one do not depend on each other, and should be faster side by side."""
    a, b = one.rules, other.rules
    return bool(a and b and not other.known >> n & 1 and max(a.half_cost, b.half_cost) < a.cost + b.cost)


def _follow(jaxpr: Jaxpr, given: Sequence[int], launches: list[_Launch]) -> list[int]:
    """Appends the launches of a jaxpr. Returns for each result the launches that it depends on, as `given` for arguments."""
    env = dict.fromkeys(jaxpr.constvars, 0) | dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        operands = [env[x] if is_var(x) else 0 for x in eqn.invars]
        rules, known = halvable(eqn), 0
        if eqn.primitive.name in CALLS and rules is None:
            env.update(zip(eqn.outvars, _follow(body_of(eqn)[0], operands, launches), strict=True))
            continue
        for x in operands:
            known |= x
        if is_launch(eqn):
            launches.append(_Launch(rules, known))
            known |= 1 << len(launches) - 1
        env |= dict.fromkeys(eqn.outvars, known)
    return [env[x] if is_var(x) else 0 for x in jaxpr.outvars]


def halvable(eqn: Eqn) -> Halvable | None:
    """Returns the rules of a launch that can run on half of the multiprocessors; `None` for another equation."""
    rules = eqn.params["rules"] if eqn.primitive is ruled_p else None
    return rules if isinstance(rules, Halvable) else None


def is_launch(eqn: Eqn) -> bool:
    """Returns whether an equation is, or contains, a launch."""
    return eqn.primitive is begin_p or any(has_launches(body.eqns) for body in bodies_in(eqn))


def has_launches(eqns: Sequence[Eqn]) -> bool:
    """Returns whether one of the equations is, or contains, a launch."""
    return any(map(is_launch, eqns))
