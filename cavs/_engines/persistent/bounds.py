"""Bounds of |x| for the values of F that hold for any parameters and inputs; they tell where products can use float16.

Interval arithmetic over the equations of F: bounds begin at functions such as tanh and sigmoid.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cavs._function.children import reduce_max_p, spread_p
from cavs._function.plan import FunctionPlan
from cavs._function.products import BIAS, LARGEST
from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs._stages.entrance import slots_together_of

_AT_MOST_ONE = {"tanh", "logistic", "sin", "cos", "erf", "sign"}
_UNCHANGED = {
    "neg", "abs", "copy", "copy_p", "reshape", "squeeze", "slice", "transpose", "rev", "broadcast_in_dim", "concatenate",
    "stack", "split", "max", "min", "stop_gradient", "reduce_max", "reduce_min", "select_n", spread_p.name, reduce_max_p.name,
}  # fmt: skip


def bounds(eqns: Sequence[Eqn], known: Mapping[Var, float]) -> dict[Var, float]:
    """Returns the bound of each variable that has one. `known`: the bounds of the inputs; other inputs have none."""
    found = {v: b for v, b in known.items() if b < math.inf}
    for e in eqns:
        of = [bound(x, found) for x in e.invars]
        b = math.inf
        if e.primitive.name in _AT_MOST_ONE:
            b = 1.0
        elif e.primitive.name in _UNCHANGED:
            b = max(of[1:] if e.primitive.name == "select_n" else of)
        elif e.primitive.name in ("add", "sub", "add_any"):
            b = sum(of)
        elif e.primitive.name == "mul" and max(of) < math.inf:
            b = of[0] * of[1]
        elif e.primitive.name == "square" or (e.primitive.name == "integer_pow" and e.params["y"] == 2):
            b = of[0] ** 2
        if b < math.inf:  # False for NaN, too
            found |= dict.fromkeys(e.outvars, b)
    return found


def bound(x: Atom, found: Mapping[Var, float]) -> float:
    """Returns the bound of a variable or literal, given those that `bounds` found; infinity if it has none."""
    if is_var(x):
        return found.get(x, math.inf)
    return float(np.max(np.abs(x.val), initial=0)) if np.issubdtype(x.aval.dtype, np.number) else math.inf


def state_bounds(plan: FunctionPlan, leaves: bool = True) -> list[float]:
    """Returns a bound for each leaf of the state, which holds at vertices of every kind; infinity if it has none.

    `leaves`: whether it must hold at vertices without children.
    """
    roles = [*(plan.leaf.values() if leaves else ()), *(part.role for part in plan.inner.values())]
    found = [bounds(role.program.eqns, {}) for role in roles]
    return [
        max(bound(x, b) for b, x in zip(found, states, strict=True))
        for states in zip(*(role.states for role in roles), strict=True)
    ]


def powers_of_operands(part: Split, largest: Sequence[float]) -> dict[Var, int]:
    """Returns for operands of lazy gradients with a bound the even power of two that brings the bound to [2^13, 2^15]."""
    known = {v: largest[i] for v, (_, i) in zip(part.forward.slots, part.recurrent.slots, strict=True)}
    known |= {v: largest[i] for v, i in zip(part.forward.child, part.recurrent.child, strict=True)}
    found = bounds(part.joint.program.eqns, known)
    operands = {x for use in part.reverse.uses for x in use.operands.values() if is_var(x)}
    limited = {x: found[x] for x in operands if 0 < found.get(x, 0.0) < 2.0**LARGEST}
    return {x: min(LARGEST + 1 - math.frexp(b)[1], BIAS - 1) & ~1 for x, b in limited.items()}


def gathered_operands(part: Split) -> dict[Var, int]:
    """Returns the operands of lazy gradients that consist of rows of one state, and which leaf of the state it is."""
    found = dict(zip(part.forward.slots, (i for _, i in part.recurrent.slots), strict=True))
    found |= dict(zip(part.forward.child, part.recurrent.child, strict=True))
    operands = [x for use in part.reverse.uses for x in use.operands.values() if is_var(x)]
    found |= {x: i for x, (i, _) in slots_together_of(part, operands).items()}
    return {x: found[x] for x in operands if x in found}
