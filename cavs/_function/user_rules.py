"""Keeps derivative rules of the user (`jax.custom_vjp`) per vertex: a rule gets the cotangent of one vertex, or of one child.

What is the same for all vertices is computed once, and so is what F writes twice. The cotangent of such a value is a sum. That
is right for linear rules, and for all derivatives of JAX. A rule that clips its cotangent, for instance, is not linear: its
call must depend on the vertex, so that `jax.vmap` batches the rule, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from cavs._function.domains import ROW, STATIC, Domains, domain_of, domains
from cavs._function.rewrite import retrace
from cavs._function.unroll import traced_vjp
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import Program, bind, depends, is_float, run_equations, values
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Eqn, Jaxpr, Var, all_equations, body_of, is_var, opened, scan_parts
from cavs._jaxpr.linear import CALLED, is_linear

_WITH_RULE = ("custom_vjp_call", "custom_jvp_call")


def has_rule(eqn: Eqn) -> bool:
    """Returns whether an equation is, or contains, a call of a function with a derivative rule of its own."""
    return any(e.primitive.name in _WITH_RULE for e in all_equations([eqn]))


def may_sum_first(eqn: Eqn) -> bool:
    """Returns whether an equation may get the sum of several cotangents at once: its derivative is linear, for certain."""
    if not has_rule(eqn):
        return True
    try:
        program = traced_vjp(eqn, [i for i, x in enumerate(eqn.invars) if is_float(x)])
    except Exception:  # there is no derivative: of a loop of a dynamic length, or whatever a rule raises to say so
        return True
    return is_linear(program.eqns, program.invars[len(eqn.invars) :], program.outs)


def to_vary(eqn: Eqn, varies: Sequence[bool]) -> list[int]:
    """Returns the operands that must differ by vertex so that no rule in an equation acts on the cotangents of several.

    Returns:
        The places of the operands: one, the smallest, if that is enough.

    `varies`: for each operand, whether it differs already.
    """
    if not has_rule(eqn) or not _acts_on_sums(eqn, varies):
        return []
    candidates = [i for i, x in enumerate(eqn.invars) if is_var(x) and is_float(x) and not varies[i]]
    for place in sorted(candidates, key=lambda i: bytes_of_var(eqn.invars[i])):
        if not _acts_on_sums(eqn, [x or i == place for i, x in enumerate(varies)]):
            return [place]
    return candidates


def with_rules_per_vertex(program: Program, known: Domains, some_row: Var) -> Program:
    """Returns the program with the operands of `to_vary` as ROW values. `some_row`: an integer ROW input."""
    if not any(map(has_rule, program.eqns)):
        return program
    domain, varied = dict(known), {}
    for eqn in program.eqns:
        domain |= domains([eqn], domain)
        if places := to_vary(eqn, [domain_of(x, domain) != STATIC for x in eqn.invars]):
            varied[id(eqn)] = places
            domain |= dict.fromkeys(eqn.outvars, max(ROW, domain_of(eqn.outvars[0], domain)))
    if not varied:
        return program

    def body(env: dict[Var, jax.Array]) -> list[jax.Array]:
        def results(eqn: Eqn, args: list[Any]) -> Sequence[jax.Array]:
            for i in varied.get(id(eqn), ()):
                args[i] = varying(args[i], env[some_row])
            return bind(eqn, args)

        run_equations(program.eqns, env, results)
        return values(program.outs, env)

    return retrace(program, body)


def with_rules_per_child(
    jaxpr: Jaxpr, consts: Sequence[Any], per_child: Sequence[bool], child: Sequence[Any], vary: Callable[[jax.Array], jax.Array]
) -> list[Any]:
    """Evaluates a function of a child of a vertex with the operands of `to_vary` different for each child.

    Args:
        jaxpr: of the function.
        consts: what it closes over.
        per_child: which of these differ by child.
        child: its arguments.
        vary: returns a value as one of each child.
    """
    eqns, outs = inlined(jaxpr)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *child], strict=True))
    differ = {*(v for v, x in zip(jaxpr.constvars, per_child, strict=True) if x), *jaxpr.invars}

    def results(eqn: Eqn, args: list[Any]) -> Sequence[jax.Array]:
        places = to_vary(eqn, [is_var(x) and x in differ for x in eqn.invars])
        for i in places:
            args[i] = vary(args[i])
        differ.update({*eqn.outvars} if places else depends([eqn], differ))
        return bind(eqn, args)

    run_equations(eqns, env, results)
    return values(outs, env)


def varying(x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns `x`, which depends on an integer without changing with it. Zeros keep their sign."""
    return x - (number * 0).astype(x.dtype)


def _acts_on_sums(eqn: Eqn, varies: Sequence[bool]) -> bool:
    """Returns whether a rule in an equation may act on a sum over vertices; `varies` tells which operands differ by vertex."""
    return _followed(eqn, varies)[1]


def _followed(eqn: Eqn, varies: Sequence[bool]) -> tuple[list[bool], bool]:
    """Returns which results differ by vertex, and whether a rule acts on a sum."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if not has_rule(eqn):
        return [any(varies)] * count, False
    if name in CALLED:
        body, _ = body_of(eqn)
        outs, acts = _through(body, varies)
        if name not in _WITH_RULE:
            return outs, acts
        results_vary = all(x for x, v in zip(outs, eqn.outvars, strict=True) if is_float(v))
        return outs, not (results_vary and (name == "custom_vjp_call" or not acts)) and not may_sum_first(eqn)
    if name == "scan":
        consts, carry, xs = scan_parts(eqn.params, varies)
        return _through_loop(opened(eqn.params["jaxpr"])[0], consts, carry, xs)
    if name == "while":  # it has a derivative inside of a call with rules, such as `cavs.run`
        first, last = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return _through_loop(opened(eqn.params["body_jaxpr"])[0], list(varies[first:last]), list(varies[last:]), [])
    if name == "cond":  # branches run for all vertices, also if these choose
        cases = [_through(opened(branch)[0], varies[1:]) for branch in eqn.params["branches"]]
        return [varies[0] or any(of) for of in zip(*(outs for outs, _ in cases), strict=True)], any(acts for _, acts in cases)
    operands_vary = all(x for x, v in zip(varies, eqn.invars, strict=True) if is_float(v))
    return [any(varies)] * count, not operands_vary and not may_sum_first(eqn)


def _through(body: Jaxpr, varies: Sequence[bool]) -> tuple[list[bool], bool]:
    """Like `_followed`, of a jaxpr."""
    differ, any_acts = {v for v, x in zip(body.invars, varies, strict=True) if x}, False
    for eqn in body.eqns:
        outs, acts = _followed(eqn, [is_var(x) and x in differ for x in eqn.invars])
        differ.update(v for v, x in zip(eqn.outvars, outs, strict=True) if x)
        any_acts = any_acts or acts
    return [is_var(x) and x in differ for x in body.outvars], any_acts


def _through_loop(body: Jaxpr, consts: list[bool], carry: list[bool], xs: list[bool]) -> tuple[list[bool], bool]:
    while True:
        outs, acts = _through(body, [*consts, *carry, *xs])
        after = [x or y for x, y in zip(carry, outs, strict=False)]
        if after == carry:
            return [*carry, *outs[len(carry) :]], acts
        carry = after
