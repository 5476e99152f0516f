"""Finds out why the loss of one part of a batch is no sum over graphs, so that the losses of all parts cannot be added up.

Only what follows the last sum over rows is looked at. Before it, graphs may depend on each other, as in batch statistics.
"""

import math
from typing import Any

import numpy as np

from cavs._jaxpr.equations import depends
from cavs._jaxpr.inline import PLAIN, inlined
from cavs._jaxpr.jaxprs import Atom, Eqn, Jaxpr, Var, is_var

_SUMS = ("add", "add_any", "sub")
_SCALES = ("mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "copy")
_PICKS = ("slice", "dynamic_slice", "gather", "split")
# Functions f with f(a + b) != f(a) + f(b).
_CURVED = frozenset(
    "max min abs sign exp exp2 log log1p expm1 sqrt rsqrt cbrt pow integer_pow square tanh logistic erf sin cos clamp floor "
    "ceil round reduce_max reduce_min reduce_prod argmax argmin".split()
)
MSG_TERM = (
    "{function}: loss: got a sum over graphs together with a term of the parameters alone{where}, which every part would add; "
    "expected such a term beside a total. Write cavs.data.total(losses) + penalty(params) for losses.sum() + penalty(params)."
)
MSG_MEAN = (
    "{function}: loss: got a mean over one part{where}, which would be added up over the parts; expected a sum over graphs, or "
    "cavs.data.mean and cavs.data.total. Write cavs.data.mean(losses) for losses.mean(), and cavs.data.total(a) / "
    "cavs.data.total(b) for a.sum() / b.sum(). If a factor is a weight that only happens to be 1 / n, write weight * "
    "cavs.data.total(losses) for weight * losses.sum(). To add up a value y of each part on purpose, write cavs.data.total(y)."
)
MSG_CURVED = (
    "{function}: loss: got {name} of values of one part{where}, which would be added up over the parts; expected a sum over "
    "graphs. Write f(cavs.data.total(x)) for f(x.sum()), or cavs.data.total(f(x.sum())) to add up that of each part."
)


def no_sum(jaxpr: Jaxpr, count: int) -> tuple[str, Eqn] | None:
    """Returns why the loss of one part is no sum over graphs, a message, and the equation; `None` if nothing was found.

    Such an equation adds a term of the parameters alone, divides by what the part determines, as a mean does, or is curved. The
    first `count` inputs are parameters, the others a part of the batch.
    """
    eqns, (loss, *_) = inlined(jaxpr, (*PLAIN, "custom_jvp_call"))
    todo: list[tuple[Atom, list[tuple[float, Eqn]]]] = [(loss, [])]  # values, and the constant factors that follow
    of_params, of_part = (depends(eqns, {*inputs}) for inputs in (jaxpr.invars[:count], jaxpr.invars[count:]))
    maker = {v: e for e in eqns for v in e.outvars}
    unseen = dict(maker)  # each equation is looked at once
    while todo:
        x, factors = todo.pop()
        eqn = unseen.pop(x, None) if is_var(x) else None
        if eqn is None:
            continue
        name, read = eqn.primitive.name, [x for x in eqn.invars if is_var(x)]
        part_operands = [x for x in read if x in of_part]
        if name in _SUMS and any(x in of_params and x not in of_part for x in read):
            return MSG_TERM, eqn
        if name == "div" and len(part_operands) == 2:
            return MSG_MEAN, eqn
        of_many = (_of_many(x, maker, of_part) for x in part_operands)
        curved = name in _CURVED or name == "div" and part_operands != eqn.invars[:1]
        if curved and any(of_many) or name == "mul" and len(part_operands) == 2 and all(of_many):
            return MSG_CURVED, eqn
        if name == "reduce_sum":  # factors may be rounded to 16 bits
            counts = np.cumprod(eqn.invars[0].aval.shape)  # of rows, ..., and of all values
            if of_mean := [e for factor, e in factors if np.isclose(factor * counts[counts > 1], 1, 4e-3).any()]:
                return MSG_MEAN, of_mean[0]
        factors = [*factors, *((factor, eqn) for factor in _factors(eqn))]
        goes_on = name == "reduce_sum" and _adds_sums(eqn, maker, of_part)
        if goes_on or name in _SUMS or name == "select_n" or name in _SCALES and len(part_operands) == 1:
            todo += [(x, factors) for x in part_operands]
    return None


def _factors(eqn: Eqn) -> list[float]:
    """Returns by what literals an equation multiplies, if it may be part of a mean. A factor of 0.5 is of squared errors."""
    literals: list[Any] = [x.val for x in eqn.invars if not is_var(x) and not x.aval.shape]
    if eqn.primitive.name == "div":
        return [1 / float(x or math.inf) for x in literals]
    return [float(x) for x in literals if eqn.primitive.name == "mul" and x != 0.5]


def _adds_sums(eqn: Eqn, maker: dict[Any, Eqn], of_part: set[Var]) -> bool:
    """Returns whether an equation adds up scaled sums over rows, as in `losses.mean(0).sum()`. Stacked arrays are no rows."""
    x = eqn.invars[0]
    while (made := maker.get(x)) is not None and made.primitive.name in _SCALES:
        x = next((y for y in made.invars if is_var(y) and y in of_part), None)
    if made is None or made.primitive.name != "reduce_sum" or 0 not in made.params["axes"]:
        return False
    stack = maker.get(made.invars[0])
    return stack is None or stack.primitive.name not in ("stack", "concatenate")


def _picks_row(eqn: Eqn, x: Var) -> bool:
    """Returns whether a result of an equation is a single row or number of its operand."""
    return eqn.primitive.name == "unstack" or eqn.primitive.name in _PICKS and x.aval.shape[:1] in ((), (1,))


def _of_many(x: Var, maker: dict[Var, Eqn], of_part: set[Var]) -> bool:
    """Returns whether several rows of a part may be joined in this number. A part of one row may be a number itself."""
    todo, seen = [x], set[Var]()
    while todo:
        if (x := todo.pop()) in seen:
            continue
        seen.add(x)
        eqn = maker.get(x)
        if eqn is None and x.aval.size > 1:
            return True
        if eqn is not None and not _picks_row(eqn, x):
            todo += [y for y in eqn.invars if is_var(y) and y in of_part]
    return False
