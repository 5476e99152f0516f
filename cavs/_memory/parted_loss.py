"""The loss of one part of a batch, cut at the sums that `cavs.data.total` and `cavs.data.mean` take over the whole batch.

Before the cut are values of a part. After it, the loss of the whole batch follows from the sums. The derivative of the loss by
each sum is the weight of that sum: the gradient of the loss is that of the weighted terms of all parts, added up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cavs._jaxpr.equations import alive, bind, is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.inline import JITTED, inlined
from cavs._jaxpr.jaxprs import Arrays, Atom, Eqn, Jaxpr, Var, all_equations, is_var, opened
from cavs._jaxpr.mesh_types import zeros
from cavs._jaxpr.names import WHOLE_BATCH
from cavs._jaxpr.settings import promoting
from cavs._jaxpr.source_lines import line_of
from cavs._memory.no_sum import MSG_TERM, no_sum

MSG_MIXED = (
    "{function}: loss: got values of one part of a batch together with cavs.data.total or cavs.data.mean, which are over the "
    "whole batch; expected a loss that follows from such totals and the parameters alone. Write cavs.data.total(x) for every "
    "jnp.sum(x) over graphs or vertices, and cavs.data.mean(x) for x.mean()."
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
        eqns = needed(self.before_cut, terms)[0]
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

        jaxpr, _ = opened(jax.make_jaxpr(derivatives)(shapes))
        eqns, outs = inlined(jaxpr, JITTED)
        read = reads(needed(eqns, outs)[0], outs)
        positions = [i for i, v in enumerate(jaxpr.invars) if v in read]
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
    eqns, outs = inlined(jaxpr, JITTED, where=lambda eqn: bool(_totals_in(eqn)))
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
    if not is_whole[0] and (reason := no_sum(jaxpr, count)):
        message, eqn = reason
        if message is MSG_TERM or function == "sub_batched" and parts > 1:  # `plan` compares the numbers
            raise TypeError(message.format(function=function, name=eqn.primitive.name, where=line_of(eqn)))
    return PartedLoss(jaxpr.invars[:count], jaxpr.invars[count:], before, after, outs, is_whole, totals, parts)


def _is_total(eqn: Eqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == WHOLE_BATCH


def _totals_in(eqn: Eqn) -> list[Eqn]:
    """Returns the totals in an equation that is a call, a loop or the like."""
    return [e for e in all_equations([eqn]) if _is_total(e) and e is not eqn]
