"""Rewrites of a vertex's equations into those that the persistent kernels compute."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from cavs._engines.persistent.maths import literal_of, written
from cavs._function.children import spread, spread_p
from cavs._function.domains import ROW, STATIC, Domain, Domains, domain_of, domains
from cavs._function.products import exponent_of, inverse_scale, root_of_product
from cavs._function.unroll import opened_calls, trace
from cavs._jaxpr.equations import renamed, shape_of
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs.kernels import REDUCTIONS, is_product


def rewritten(eqns: Sequence[Eqn], known: Domains) -> tuple[list[Eqn], Domains]:
    """Replaces the equations that the kernels cannot compute, or compute better in another way.

    Functions with custom derivatives are inlined, so the result must not be differentiated. A product without a matrix becomes
    elementwise: for example, a product of two vectors is a sum, which is exact in float32 and needs no tensor cores.

    Returns the new equations, and the domains of all variables.
    """
    eqns, domain = opened_calls(eqns, known)
    out: list[Eqn] = []
    literals: dict[Any, Any] = {}
    for e in eqns:
        e = renamed(e, literals)
        literals |= {v: x for v in e.outvars if (x := literal_of(e)) is not None}
        fn = _replacement(e, domain)
        new_eqns = [e] if fn is None else _traced(fn, e.invars, e.outvars)
        if fn is not None:
            domain = domains(new_eqns, domain) | {v: domain[v] for v in e.outvars}
        out += new_eqns
    return out, domain


def in_domain(x: Atom, want: Domain, domain: Domains, eqns: list[Eqn]) -> Var:
    """Returns a variable of domain `want` with the value of `x`, whose domain is the same or a smaller one.

    Unless that variable is `x` itself, appends the equations that compute it to `eqns`, and adds it to `domain`.
    """
    have = domain_of(x, domain)
    if is_var(x) and have == want:
        return x
    assert have < want, "a value of a vertex's edges is not one value of the vertex"
    return _added(spread if have == ROW else jnp.copy, [x], x.aval, want, domain, eqns)


def zeros_in_domain(aval: ShapedArray, want: Domain, domain: Domains, eqns: list[Eqn]) -> Var:
    """Returns a variable of domain `want` that is zero, of the shape and dtype of `aval`; see `in_domain`."""
    return _added(lambda: jnp.copy(jnp.zeros(aval.shape, aval.dtype)), [], aval, want, domain, eqns)


def with_scaled_products(
    eqns: Sequence[Eqn], known: Domains, factor: Var | None = None
) -> tuple[list[Eqn], Domains, dict[Var, Var]]:
    """Multiplies the results of products by the inverses of powers of two, by which launches multiply weights for float16.

    See `_function.products`. Takes and returns what `rewritten` does, and also maps weights to inverses. `factor`: by what the
    operands of all products are multiplied, if by anything; the results are divided by it.
    """
    out: list[Eqn] = []
    domain, inverses, roots = dict(known), dict[Var, Var](), dict[Var, Var]()
    for e in eqns:
        if not is_product(e, {**domain}):
            out.append(e)
            continue
        w, z = e.invars[1], e.outvars[0]
        assert is_var(w)
        if w not in inverses:
            inverses[w] = Var(w.aval.update(shape=()))
            out += _traced(lambda w: inverse_scale(exponent_of(w)), [w], [inverses[w]])
            if factor is not None:  # what both scales are divided by may overflow
                roots[w] = Var(factor.aval)
                out += _traced(lambda inverse, s: root_of_product(inverse, 1 / s), [inverses[w], factor], [roots[w]])
        product = Var(z.aval)
        if w in roots:
            back = _traced(lambda x, root: x * root * root, [product, roots[w]], [z])
        else:
            back = _traced(lambda x, inverse: x * inverse, [product, inverses[w]], [z])
        new_eqns = [e.replace(outvars=[product]), *back]
        domain |= dict.fromkeys([v for eqn in new_eqns for v in eqn.outvars], domain[z])
        out += new_eqns
    return out, domain, inverses


def multiplied(x: Var, factor: Var, domain: Domains, eqns: list[Eqn]) -> Var:
    """Returns a variable for `x * factor`, and appends its equations; see `in_domain`. `factor`: a static scalar."""
    return _added(lambda x, factor: x * factor, [x, factor], x.aval, domain[x], domain, eqns)


def _added(
    fn: Callable[..., object], operands: Sequence[Atom], aval: ShapedArray, want: Domain, domain: Domains, eqns: list[Eqn]
) -> Var:
    v = Var(aval)
    eqns += _traced(fn, operands, [v])
    domain[v] = want
    return v


def _replacement(e: Eqn, domain: Domains) -> Callable[..., jax.Array] | None:
    """Returns a function that computes the equation in another way, or `None`."""
    if not e.invars:
        return None
    name, x = e.primitive.name, e.invars[0].aval
    if name == "dot_general":
        (over, _), (batch, _) = e.params["dimension_numbers"]
        ranks = x.ndim, e.invars[1].aval.ndim
        if ranks == (1, 1) and over:
            return lambda x, y: (x * y).sum() if x.size > 1 else (x * y).reshape(())
        if 0 in ranks and not batch:
            return lambda x, y: x * y
    if name in REDUCTIONS and x.size == 1:
        return lambda x: x.reshape(e.outvars[0].aval.shape)
    if e.primitive is spread_p and domain_of(e.invars[0], domain) == STATIC:
        return jnp.copy
    return None if domain[e.outvars[0]] == STATIC else written(e)


def _traced(fn: Callable[..., object], invars: Sequence[Atom], outvars: Sequence[Var]) -> list[Eqn]:
    """Returns the equations of `outvars = fn(*invars)`."""
    program, _, _ = trace(fn, *map(shape_of, invars))
    names: dict[Any, Any] = dict(zip((*program.invars, *program.outs), (*invars, *outvars), strict=True))
    return [renamed(e, names) for e in program.eqns]
