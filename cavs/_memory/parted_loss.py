"""The loss of one part of a batch, cut at the sums that `cavs.data.total` and `cavs.data.mean` take over the whole batch.

Before the cut are values of a part. After it, the loss of the whole batch follows from the sums. The derivative of the loss by
each sum is the weight of that sum: the gradient of the loss is that of the weighted terms of all parts, added up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float, needed, reads, run_equations, value_of
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Jaxpr, PyTreeDef, Var, bodies_in, is_var, opened
from cavs._jaxpr.mesh_types import zeros
from cavs._jaxpr.names import WHOLE_BATCH
from cavs._jaxpr.source_lines import line_of

Arrays = list[jax.Array]

_CALLS = ("jit", "pjit", "closed_call", "core_call")
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
    """A loss as equations, cut at its totals.

    Attributes:
        params: the variables of the parameters, flat.
        batch: those of one part of the batch.
        eqns: the equations, in an order in which they can run.
        of_whole: the values that follow from totals: those after the cut.
        outs: the loss, and the other results, flat.
        consts: the constants of the equations.
        tree: the structure of the results.
        terms: for each total, what one part adds to it.
        totals: the variables of the totals.
        parts: the number of parts.
    """

    params: list[Var]
    batch: list[Var]
    eqns: list[Eqn]
    of_whole: set[Var]
    outs: list[Atom]
    consts: Env
    tree: PyTreeDef
    terms: list[Atom]
    totals: list[Var]
    parts: int

    @property
    def is_whole(self) -> list[bool]:
        """For each result, whether it follows from totals; the others are summed over the parts."""
        return [is_var(x) and x in self.of_whole for x in self.outs]

    def before(self, params: PyTree, batch: PyTree, which: Sequence[int] | None = None) -> tuple[Arrays, Arrays]:
        """Returns what is summed over the parts: the results that do not follow from totals, and the terms of totals.

        Args:
            params: the parameters.
            batch: one part of the batch.
            which: the totals whose terms alone are computed. `None`: everything.
        """
        terms = [x for i, x in enumerate(self.terms) if which is None or i in which]
        outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if not is_whole and which is None]
        effects = [e for e in self.eqns if e.effects and not self._follows(e)]
        if which is not None and not any(e.effects for e in needed(self.eqns, terms, set())[0]):
            effects = []
        found = self._run(self._given(params) | _named(self.batch, batch), [*outs, *terms], effects)
        return found[: len(outs)], found[len(outs) :]

    def after(self, params: PyTree, sums: Arrays, totals: Arrays) -> Any:
        """Returns the results for the whole batch, from the sums over all parts."""
        outs = [x for x, is_whole in zip(self.outs, self.is_whole, strict=True) if is_whole]
        effects = [e for e in self.eqns if e.effects and self._follows(e)]
        found = iter(self._run(self._given(params) | _named(self.totals, totals), outs, effects))
        summed = iter(sums)
        return self.tree.unflatten([next(found) if is_whole else next(summed) for is_whole in self.is_whole])

    def weights(self, params: PyTree, sums_of: Callable[[Sequence[int]], Arrays]) -> dict[int, jax.Array]:
        """Returns the derivatives of the loss by the totals that are floats; none if it does not follow from totals.

        Args:
            params: the parameters.
            sums_of: computes the totals with these numbers. Called once, if the derivatives depend on totals.
        """
        if not self.is_whole[0]:
            return {}
        floats = [i for i, v in enumerate(self.totals) if is_float(v)]

        def derivatives(totals: Arrays) -> Arrays:
            def loss(some: Arrays) -> jax.Array:
                env = _named(self.totals, totals) | dict(zip([self.totals[i] for i in floats], some, strict=True))
                return self._run(self._given(params) | env, self.outs[:1])[0]

            return jax.grad(loss)([totals[i] for i in floats])

        shapes = [v.aval for v in self.totals]
        traced: Any = jax.make_jaxpr(derivatives)(shapes)
        jaxpr, _ = opened(traced)
        eqns: list[Eqn] = []
        outs = inlined(jaxpr, {}, eqns, _CALLS)
        read = reads(needed(eqns, outs, set())[0], outs)
        which = [i for i, v in enumerate(jaxpr.invars) if v in read]
        known = dict(zip(which, sums_of(which) if which else [], strict=True))
        found = derivatives([known.get(i, zeros(x)) for i, x in enumerate(shapes)])
        return dict(zip(floats, found, strict=True))

    def weighed(self, sums: Arrays, terms: Arrays, weights: dict[int, jax.Array]) -> jax.Array:
        """Returns the function of one part whose gradients add up to that of the loss."""
        if not self.is_whole[0]:
            return sums[0]
        return sum((weights[i] * terms[i] for i in weights), jnp.zeros((), self.outs[0].aval.dtype))

    def reads_params(self) -> bool:
        """Returns whether the loss depends on parameters other than through totals."""
        read = reads(needed(self.eqns, self.outs[:1], {*self.totals})[0], self.outs[:1])
        return self.is_whole[0] and not read.isdisjoint(self.params)

    def _follows(self, eqn: Eqn) -> bool:
        """Returns whether an equation reads totals, or what follows from them."""
        return any(is_var(x) and x in self.of_whole for x in eqn.invars)

    def _given(self, params: PyTree) -> Env:
        return self.consts | _named(self.params, params)

    def _run(self, env: Env, outs: Sequence[Atom], effects: Sequence[Eqn] = ()) -> Arrays:
        """Computes values, and runs equations with effects."""
        have, also = {*env}, set(map(id, effects))
        also.update(map(id, needed(self.eqns, [*outs, *(x for e in effects for x in e.invars)], have)[0]))
        for eqn in (e for e in self.eqns if id(e) in also):
            if _is_total(eqn):  # of what is the same in all parts, such as a number of elements
                env[eqn.outvars[0]] = value_of(eqn.invars[0], env) * self.parts
            else:
                run_equations([eqn], env)
        return [value_of(x, env) for x in outs]


def parted(function: str, loss: Callable[..., Any], params: PyTree, batch: PyTree, parts: int) -> PartedLoss:
    """Traces the loss of one part of a batch.

    Args:
        function: named by errors.
        loss: from the parameters and a part to a pytree of results, whose first leaf is the loss.
        params: the parameters.
        batch: the shapes and dtypes of a part.
        parts: the number of parts.

    Raises:
        TypeError: the loss uses totals where parts cannot be added up.
    """
    closed: Any
    closed, shapes = jax.make_jaxpr(loss, return_shape=True)(params, batch)
    jaxpr, consts = opened(closed)
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, _CALLS, lambda eqn: any(map(_totals_in, bodies_in(eqn))))
    count = len(jax.tree.leaves(params))
    of_part, of_whole = set(jaxpr.invars[count:]), set[Var]()
    totals: dict[Var, Atom] = {}
    for eqn in eqns:
        if inside := [total for body in bodies_in(eqn) for total in _totals_in(body)]:
            raise TypeError(MSG_INSIDE.format(function=function, name=eqn.primitive.name, where=line_of(inside[0])))
        read = {x for x in eqn.invars if is_var(x)}
        if read & of_whole and (_is_total(eqn) or eqn.effects and read & of_part):
            raise TypeError(MSG_MIXED.format(function=function))
        made = {*eqn.outvars, *(read if eqn.effects else ())}  # it may write to references
        of_whole |= made if read & of_whole or _is_total(eqn) and read & of_part else set()
        if not _is_total(eqn):
            of_part |= made if read & of_part else set()
        elif read & of_part:
            totals[eqn.outvars[0]] = eqn.invars[0]
    if any(x in of_part and x in of_whole for x in outs if is_var(x)):
        raise TypeError(MSG_MIXED.format(function=function))
    return PartedLoss(
        jaxpr.invars[:count], jaxpr.invars[count:], eqns, of_whole, outs, dict(zip(jaxpr.constvars, consts, strict=True)),
        jax.tree.structure(shapes), list(totals.values()), list(totals), parts,
    )  # fmt: skip


def _named(names: Sequence[Var], values: PyTree) -> Env:
    return dict(zip(names, jax.tree.leaves(values), strict=True))


def _is_total(eqn: Eqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == WHOLE_BATCH


def _totals_in(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of a jaxpr that are totals, also inside of its calls and loops."""
    inside = [total for eqn in jaxpr.eqns for body in bodies_in(eqn) for total in _totals_in(body)]
    return [*filter(_is_total, jaxpr.eqns), *inside]
