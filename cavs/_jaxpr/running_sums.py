"""Adds results of a jaxpr to running sums, term by term.

The gradient of a weight is often a sum: of those at the leaves and above, for instance. XLA computes all terms and adds them in
one kernel, so all of them are in memory. Here each term is added as soon as it is there.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import alive, run_equations, value_of
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var, opened, without_constants
from cavs._jaxpr.ruled import replaceable

_LARGE = 1 << 16  # bytes of a result whose terms are added one by one


def run_and_add(closed: Any, args: Sequence[Any], totals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Runs a closed jaxpr. Returns the sums of its first results and `totals`, and its other results.

    It may be differentiated.
    """
    without, consts = without_constants(closed)
    jaxpr, _ = opened(without)
    eqns, outs = inlined(jaxpr, ("call_with_rules", "custom_vmap_call"))
    summed, others = outs[: len(totals)], outs[len(totals) :]
    terms = _terms(eqns, outs)[: len(totals)]
    order = alive(eqns, [x for addends in terms for x in addends] + others)

    def plain(args: Sequence[Any], totals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        run_equations(jaxpr.eqns, env)
        results = [value_of(x, env) for x in jaxpr.outvars]
        return [x + y for x, y in zip(totals, results, strict=False)], results[len(totals) :]

    def by_terms(args: Sequence[Any], totals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        env = dict(zip(jaxpr.invars, args, strict=True))
        sums = [x if addends else x + value_of(y, env) for x, y, addends in zip(totals, summed, terms, strict=True)]
        begun: set[int] = set()
        for eqn in order:
            run_equations([eqn], env)
            for i, x in ((i, x) for i, addends in enumerate(terms) for x in addends if any(x is v for v in eqn.outvars)):
                sums[i] = env[x] + (barrier(sums[i]) if i in begun else sums[i])  # XLA would fuse two sums
                begun.add(i)
        return sums, [value_of(x, env) for x in others]

    return replaceable(by_terms, plain)([*consts, *args], list(totals))


def _terms(eqns: Sequence[Eqn], outs: Sequence[Atom]) -> list[list[Var]]:
    """Returns for each of `outs` the variables whose sum it is; none if no equation computes it."""
    uses = Counter(x for eqn in eqns for x in eqn.invars if is_var(x)) + Counter(x for x in outs if is_var(x))
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}

    def terms(x: Atom) -> list[Var]:
        if not is_var(x) or x not in makers:
            return []
        eqn = makers[x]
        single = eqn.primitive.name not in ("add", "add_any") or uses[x] > 1 or bytes_of_var(x) < _LARGE
        by_operand = [] if single else [terms(y) for y in eqn.invars]
        return [y for ys in by_operand for y in ys] if by_operand and all(by_operand) else [x]

    return [terms(x) for x in outs]
