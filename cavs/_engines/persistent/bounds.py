"""Bounds of |x| for the values of F that hold for any parameters and inputs; they tell where products can use float16.

Interval arithmetic over the equations of F: bounds begin at functions such as tanh and sigmoid. A mixture z a + (1 - z) b is no
larger than a or b if z is a sigmoid; so the states of a GRU are bounded, by induction over its levels.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from cavs._function.children import reduce_max_p, spread_p
from cavs._function.joint import RoleProgram
from cavs._function.plan import FunctionPlan
from cavs._function.products import BIAS, LARGEST
from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs._stages.entrance import slots_together_of

_AT_MOST_ONE = {"tanh", "logistic", "sin", "cos", "erf", "sign"}
_MOVED = {
    "copy", "copy_p", "reshape", "squeeze", "slice", "transpose", "rev", "broadcast_in_dim", "concatenate", "stack", "split",
}  # fmt: skip
_UNCHANGED = {
    *_MOVED, "neg", "abs", "max", "min", "stop_gradient", "reduce_max", "reduce_min", "select_n",
    spread_p.name, reduce_max_p.name,
}  # fmt: skip


def bounds(eqns: Sequence[Eqn], known: Mapping[Var, float]) -> dict[Var, float]:
    """Returns the bound of each variable that has one. `known`: the bounds of the inputs; other inputs have none."""
    limits = {v: b for v, b in known.items() if b < math.inf}
    makers, fractions = {v: e for e in eqns for v in e.outvars}, set[Var]()
    for e in eqns:
        of_operands = [bound(x, limits) for x in e.invars]
        b = math.inf
        if _is_fraction(e, fractions):
            fractions.update(e.outvars)
            b = 1.0
        elif e.primitive.name in _AT_MOST_ONE:
            b = 1.0
        elif e.primitive.name in _UNCHANGED:
            b = max(of_operands[1:] if e.primitive.name == "select_n" else of_operands)
        elif e.primitive.name in ("add", "sub", "add_any"):
            b = min(sum(of_operands), _of_mixture(e, makers, fractions, limits))
        elif e.primitive.name == "mul" and max(of_operands) < math.inf:
            b = of_operands[0] * of_operands[1]
        elif e.primitive.name == "square" or (e.primitive.name == "integer_pow" and e.params["y"] == 2):
            b = of_operands[0] ** 2
        if b < math.inf:  # False for NaN, too
            limits |= dict.fromkeys(e.outvars, b)
    return limits


def _is_fraction(e: Eqn, fractions: set[Var]) -> bool:
    """Returns whether the results of an equation lie between 0 and 1, given the variables that do."""
    known = [is_var(x) and x in fractions for x in e.invars]
    if e.primitive.name == "sub":
        return _is_one(e.invars[0]) and known[1]
    return e.primitive.name == "logistic" or (e.primitive.name in _MOVED and all(known))


def _is_one(x: Atom) -> bool:
    return not is_var(x) and bool(np.all(np.equal(x.val, 1)))


def _of_mixture(e: Eqn, makers: Mapping[Var, Eqn], fractions: set[Var], limits: Mapping[Var, float]) -> float:
    """Returns the bound of z a + (1 - z) b for a fraction z; infinity if the equation is no such sum."""
    terms = [makers[x].invars for x in e.invars if is_var(x) and x in makers and makers[x].primitive.name == "mul"]
    if e.primitive.name == "sub" or len(terms) != 2:
        return math.inf
    for (z, a), (rest, b) in itertools.product(*((term, term[::-1]) for term in terms)):
        if is_var(z) and is_var(rest) and {z, rest} <= fractions and (_is_rest(rest, z, makers) or _is_rest(z, rest, makers)):
            return max(bound(a, limits), bound(b, limits))
    return math.inf


def _is_rest(x: Var, z: Var, makers: Mapping[Var, Eqn]) -> bool:
    """Returns whether x is 1 - z."""
    return x in makers and makers[x].primitive.name == "sub" and _is_one(makers[x].invars[0]) and makers[x].invars[1] is z


def bound(x: Atom, limits: Mapping[Var, float]) -> float:
    """Returns the bound of a variable or literal, given those that `bounds` found; infinity if it has none."""
    if is_var(x):
        return limits.get(x, math.inf)
    return float(np.max(np.abs(x.val), initial=0)) if np.issubdtype(x.aval.dtype, np.number) else math.inf


def state_bounds(plan: FunctionPlan, leaves: bool = True) -> list[float]:
    """Returns a bound for each leaf of the state, which holds at vertices of every kind; infinity if it has none.

    `leaves`: whether it must hold at vertices without children.
    """
    of_leaves = _scattered(list(plan.leaf.values()), {})
    inner = [part.role for part in plan.inner.values()]
    plain = _scattered(inner, {})
    # By induction over the levels: if children have these bounds, so have their parents. The rounding of a mixture may add
    # 2^-22 of it on each level, for which the range of float16 leaves room.
    bounded = [b if b < math.inf else max(of_leaf, 1.0) for b, of_leaf in zip(plain, of_leaves, strict=True)]
    everywhere = [max(both) for both in zip(bounded, of_leaves, strict=True)]
    assumed = None
    while assumed != everywhere:  # those of children that the bounds found of their parents do not exceed
        assumed, found = everywhere, _scattered(inner, dict(enumerate(everywhere)))
        everywhere = [a if b <= a else math.inf for a, b in zip(assumed, found, strict=True)]
    return everywhere if leaves else [min(both) for both in zip(plain, everywhere, strict=True)]


def _scattered(roles: Sequence[RoleProgram], of_children: Mapping[int, float]) -> list[float]:
    """Returns a bound for each leaf of the state that these roles scatter. `of_children`: the bounds of what they gather."""
    out = []
    for role in roles:
        known = {v: of_children.get(i, math.inf) for states in (*role.slots, role.child) for i, v in enumerate(states)}
        limits = bounds(role.program.eqns, known)
        out.append([bound(x, limits) for x in role.states])
    return [max(states) for states in zip(*out, strict=True)]


def gathered_states(part: Split) -> dict[Var, int]:
    """Maps each variable that gathers a state of children to the leaf of the state."""
    slots = zip(part.forward.slots, (i for _, i in part.recurrent.slots), strict=True)
    return dict(slots) | dict(zip(part.forward.child, part.recurrent.child, strict=True))


def powers_of_operands(part: Split, largest: Sequence[float]) -> dict[Var, int]:
    """Returns for operands of lazy gradients with a bound the even power of two that brings the bound to [2^13, 2^15]."""
    limits = bounds(part.joint.program.eqns, {v: largest[i] for v, i in gathered_states(part).items()})
    limited = {x: limits[x] for x in part.reverse.operands if 0 < limits.get(x, 0.0) < 2.0**LARGEST}
    return {x: min(LARGEST + 1 - math.frexp(b)[1], BIAS - 1) & ~1 for x, b in limited.items()}


def gathered_operands(part: Split) -> dict[Var, int]:
    """Returns the operands of lazy gradients that consist of rows of one state, and which leaf of the state it is."""
    operands = part.reverse.operands
    state_of = gathered_states(part) | {x: i for x, (i, _) in slots_together_of(part, operands).items()}
    return {x: state_of[x] for x in operands if x in state_of}
