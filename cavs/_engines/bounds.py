"""Bounds of |x| that hold whatever F is given: interval arithmetic over its equations, which begins at tanh and sigmoid."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs._function.children import reduce_max_p, spread_p
from cavs._function.jaxprs import is_var

_ONE = {"tanh", "logistic", "sin", "cos", "erf", "sign"}
_THE_SAME = {
    "neg", "abs", "copy", "copy_p", "reshape", "squeeze", "slice", "transpose", "rev", "broadcast_in_dim", "concatenate",
    "stack", "split", "max", "min", "stop_gradient", "reduce_max", "reduce_min", "select_n", spread_p.name, reduce_max_p.name,
}  # fmt: skip


def bounds(eqns: Sequence[Any], known: dict[Any, float]) -> dict[Any, float]:
    """The bound of each variable that has one; `known` are those of the inputs."""
    found = {v: b for v, b in known.items() if b < math.inf}
    for e in eqns:
        of = [bound(x, found) for x in e.invars]
        b = math.inf
        if e.primitive.name in _ONE:
            b = 1.0
        elif e.primitive.name in _THE_SAME:
            b = max(of[1:] if e.primitive.name == "select_n" else of)
        elif e.primitive.name in ("add", "sub", "add_any"):
            b = sum(of)
        elif e.primitive.name == "mul" and max(of) < math.inf:
            b = of[0] * of[1]
        elif e.primitive.name == "square" or (e.primitive.name == "integer_pow" and e.params["y"] == 2):
            b = of[0] ** 2
        if b < math.inf:  # NaN is no bound
            found |= dict.fromkeys(e.outvars, b)
    return found


def bound(x: Any, found: dict[Any, float]) -> float:
    """Of a variable or literal, from what `bounds` has found; infinite where there is none."""
    if is_var(x):
        return found.get(x, math.inf)
    return float(np.max(np.abs(x.val), initial=0)) if np.issubdtype(x.aval.dtype, np.number) else math.inf


def state_bounds(plan: Any) -> list[float]:
    """Of each leaf of the state, at vertices of any kind."""
    roles = [*plan.leaf.values(), *(part.role for part in plan.inner.values())]
    found = [bounds(role.program.eqns, {}) for role in roles]
    return [
        max(bound(x, b) for b, x in zip(found, states, strict=True))
        for states in zip(*(role.states for role in roles), strict=True)
    ]
