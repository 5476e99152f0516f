"""The loss of one part of a batch, cut at the sums that `cavs.data.total` and `cavs.data.mean` take over the whole batch.

Before the cut are values of a part. After it, the loss of the whole batch follows from the sums. The derivative of the loss by
each sum is the weight of that sum: the gradient of the loss is that of the weighted terms of all parts, added up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._jaxpr.equations import alive, bind, depends, is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.inline import PLAIN, inlined
from cavs._jaxpr.jaxprs import Atom, Eqn, Jaxpr, Var, all_equations, is_var, opened
from cavs._jaxpr.mesh_types import zeros
from cavs._jaxpr.names import WHOLE_BATCH
from cavs._jaxpr.settings import promoting
from cavs._jaxpr.source_lines import line_of

Arrays = list[jax.Array]

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_SUMS = ("add", "add_any", "sub")
_SCALES = ("mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "copy")
_PICKS = ("slice", "dynamic_slice", "gather", "split")
# Functions of which that of a sum is not the sum.
_CURVED = frozenset(
    "max min abs sign exp exp2 log log1p expm1 sqrt rsqrt cbrt pow integer_pow square tanh logistic erf sin cos clamp floor "
    "ceil round reduce_max reduce_min reduce_prod argmax argmin".split()
)
MSG_MIXED = (
    "{function}: loss: got values of one part of a batch together with cavs.data.total or cavs.data.mean, which are over the "
    "whole batch; expected a loss that follows from such totals and the parameters alone. Write cavs.data.total(x) for every "
    "jnp.sum(x) over graphs or vertices, and cavs.data.mean(x) for x.mean()."
)
MSG_TERM = (
    "{function}: loss: got a sum over graphs together with a term of the parameters alone{where}, which every part would add; "
    "expected such a term beside a total. Write cavs.data.total(losses) + penalty(params) for losses.sum() + penalty(params)."
)
MSG_MEAN = (
    "{function}: loss: got a mean over one part{where}, which would be added up over the parts; expected a sum over graphs, or "
    "cavs.data.mean and cavs.data.total. Write cavs.data.mean(losses) for losses.mean(), cavs.data.total(a) / "
    "cavs.data.total(b) for a.sum() / b.sum(), or cavs.data.total(y) to add up the y of all parts, such as losses.mean(), or "
    "a sum whose weight only happens to be 1 / n."
)
MSG_CURVED = (
    "{function}: loss: got {name} of values of one part{where}, which would be added up over the parts; expected a sum over "
    "graphs. Write f(cavs.data.total(x)) for f(x.sum()), or cavs.data.total(f(x.sum())) to add up that of each part."
)
MSG_INSIDE = (
    "{function}: loss: got cavs.data.total or cavs.data.mean inside {name}{where}; expected it outside of loops, conditions, "
    "jax.checkpoint and functions with derivatives of their own. Return the losses, and write cavs.data.total(losses) after it."
)


@dataclass(eq=False)
class PartedLoss:
    """A loss as equations, cut at its totals. All methods take and return flat arrays."""

    params: list[Var]  # the variables of the parameters
    batch: list[Var]  # the variables of one part of the batch
    before_cut: list[Eqn]  # the equations that do not depend on totals
    after_cut: list[Eqn]  # the others, and those without effects that follow from the parameters alone
    outs: list[Atom]  # the loss, and the other results
    is_whole: list[bool]  # for each result, whether it follows from totals; the others are summed over the parts
    totals: dict[Var, Atom]  # the variables of the totals, and for each what one part adds to it
    parts: int  # the number of parts

    def before(self, params: Arrays, batch: Arrays, which: Sequence[int] | None = None) -> tuple[Arrays, Arrays]:
        """Returns what is summed over the parts: the results that do not follow from totals, and the terms of totals.

        `which`: the totals whose terms alone are computed; `None` for everything.
        """
        terms, outs = list(self.totals.values()), list[Atom]()
        if which is None:
            outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if not is_whole]
        else:
            terms = [terms[i] for i in which]
        eqns = needed(self.before_cut, terms, set())[0]
        if which is None or any(e.effects for e in eqns):
            eqns = alive(self.before_cut, [*outs, *terms])
        results = self._run(eqns, [*self.params, *self.batch], [*params, *batch], [*outs, *terms])
        return results[: len(outs)], results[len(outs) :]

    def after(self, params: Arrays, sums: Arrays, totals: Arrays) -> Arrays:
        """Returns the results for the whole batch, from the sums over all parts."""
        outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if is_whole]
        eqns = alive(self.after_cut, outs, {*self.totals})
        from_totals = iter(self._run(eqns, [*self.params, *self.totals], [*params, *totals], outs))
        summed = iter(sums)
        return [next(from_totals) if is_whole else next(summed) for is_whole in self.is_whole]

    def weights(self, params: Arrays, sums_of: Callable[[Sequence[int]], Arrays]) -> dict[int, jax.Array]:
        """Returns the derivatives of the loss by the totals that are floats; none if it does not follow from totals.

        `sums_of`: computes the totals with these numbers. Called once, if the derivatives depend on totals.
        """
        if not self.is_whole[0]:
            return {}
        totals, shapes = list(self.totals), [v.aval for v in self.totals]
        floats = [i for i, v in enumerate(totals) if is_float(v)]

        def derivatives(total_values: Arrays) -> Arrays:
            def loss(float_values: Arrays) -> jax.Array:
                values = dict(enumerate(total_values)) | dict(zip(floats, float_values, strict=True))
                return self._run(self._of_loss, [*self.params, *totals], [*params, *values.values()], self.outs[:1])[0]

            return jax.grad(loss)([total_values[i] for i in floats])

        traced: Any = jax.make_jaxpr(derivatives)(shapes)
        eqns: list[Eqn] = []
        outs = inlined(opened(traced)[0], {}, eqns, _CALLS)
        read = reads(needed(eqns, outs, set())[0], outs)
        positions = [i for i, v in enumerate(opened(traced)[0].invars) if v in read]
        known = dict(zip(positions, sums_of(positions) if positions else [], strict=True))
        return dict(zip(floats, derivatives([known.get(i, zeros(x)) for i, x in enumerate(shapes)]), strict=True))

    @promoting
    def weighed(self, sums: Arrays, terms: Arrays, weights: dict[int, jax.Array]) -> jax.Array:
        """Returns the function of one part whose gradients add up to that of the loss."""
        if not self.is_whole[0]:
            return sums[0]
        return sum((weights[i] * terms[i] for i in weights), jnp.zeros((), self.outs[0].aval.dtype))

    def reads_params(self) -> bool:
        """Returns whether the loss depends on parameters other than through totals."""
        return self.is_whole[0] and not reads(self._of_loss, self.outs[:1]).isdisjoint(self.params)

    @property
    def _of_loss(self) -> list[Eqn]:
        """The equations from totals to the loss."""
        return needed(self.after_cut, self.outs[:1], {*self.totals})[0]

    def _run(self, eqns: Sequence[Eqn], names: Sequence[Var], values: Arrays, outs: Sequence[Atom]) -> Arrays:
        env = dict(zip(names, values, strict=True))
        # Other totals are of what is the same in all parts, such as a number of elements.
        run_equations(eqns, env, lambda e, operands: [operands[0] * self.parts] if _is_total(e) else bind(e, operands))
        return [value_of(x, env) for x in outs]


def parted(function: str, jaxpr: Jaxpr, count: int, parts: int) -> PartedLoss:
    """Cuts the loss of one part of a batch: a jaxpr without constants, whose first result is a scalar.

    The first `count` inputs are parameters, the others a part of the batch. Raises a `TypeError`, which names `function`, if
    the loss uses totals where parts cannot be added up.
    """
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, _CALLS, lambda eqn: bool(_totals_in(eqn)))
    of_part, of_whole = set(jaxpr.invars[count:]), set[Var]()
    totals: dict[Var, Atom] = {}
    before, after = list[Eqn](), list[Eqn]()
    for eqn in eqns:
        if nested := _totals_in(eqn):
            raise TypeError(MSG_INSIDE.format(function=function, name=eqn.primitive.name, where=line_of(nested[0])))
        read = {x for x in eqn.invars if is_var(x)}
        if read & of_whole and (_is_total(eqn) or eqn.effects and read & of_part):
            raise TypeError(MSG_MIXED.format(function=function))
        after += [eqn] if read & of_whole or not eqn.effects else []
        before += [] if read & of_whole else [eqn]
        written = {*eqn.outvars, *(read if eqn.effects else ())}  # it may write to references
        of_whole |= written if read & of_whole or _is_total(eqn) and read & of_part else set()
        if not _is_total(eqn):
            of_part |= written if read & of_part else set()
        elif read & of_part:
            totals[eqn.outvars[0]] = eqn.invars[0]
    if any(x in of_part and x in of_whole for x in outs if is_var(x)):
        raise TypeError(MSG_MIXED.format(function=function))
    is_whole = [is_var(x) and x in of_whole for x in outs]
    if not is_whole[0] and (reason := _no_sum(jaxpr, count)):
        message, eqn = reason
        if message is MSG_TERM or function == "sub_batched" and parts > 1:  # `plan` compares the numbers
            raise TypeError(message.format(function=function, name=eqn.primitive.name, where=line_of(eqn)))
    return PartedLoss(jaxpr.invars[:count], jaxpr.invars[count:], before, after, outs, is_whole, totals, parts)


def _no_sum(jaxpr: Jaxpr, count: int) -> tuple[str, Eqn] | None:
    """Returns why the loss of one part is no sum over graphs, a message, and the equation; `None` if nothing was found.

    Such an equation adds a term of the parameters alone, divides by what the part determines, as a mean does, or is curved.
    Before the last sum over rows everything is allowed: graphs may depend on each other there, as in batch statistics.
    """
    eqns: list[Eqn] = []
    loss = inlined(jaxpr, {}, eqns, (*PLAIN, "custom_jvp_call"))[0]
    todo: list[tuple[Atom, list[tuple[float, Eqn]]]] = [(loss, [])]  # values, and the constant factors that follow
    of_params, of_part = (depends(eqns, {*inputs}) for inputs in (jaxpr.invars[:count], jaxpr.invars[count:]))
    made_by, maker = ({v: e for e in eqns for v in e.outvars} for _ in range(2))
    while todo:
        x, factors = todo.pop()
        eqn = made_by.pop(x, None) if is_var(x) else None  # each equation once
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
    literals: list[Any] = [x.val for x in eqn.invars if not is_var(x)]
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


def _is_total(eqn: Eqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == WHOLE_BATCH


def _totals_in(eqn: Eqn) -> list[Eqn]:
    """Returns the totals in an equation that is a call, a loop or the like."""
    return [e for e in all_equations([eqn]) if _is_total(e) and e is not eqn]
