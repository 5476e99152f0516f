"""Equations of one vertex as the persistent kernels compute them: rewritten where they know another way."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cavs._function.children import spread, spread_p
from cavs._function.domains import ROW, STATIC, Domain, Domains, domain_of, domains
from cavs._function.equations import open_custom_calls, trace
from cavs._function.jaxprs import Var, is_var
from cavs._function.products import power_of, two_to
from cavs.kernels import REDUCTIONS, is_product


def rewritten(eqns: Sequence[Any], level: Domains) -> tuple[list[Any], Domains]:
    """`eqns` with custom derivatives opened up, products that have no matrix as elementwise maths, and so on.

    A product of two vectors is a sum over one: exact in float32, and no work for tensor cores. Returns the levels of all
    variables, too. Only for what is not differentiated any more.
    """
    eqns, level = open_custom_calls(eqns, level)
    out: list[Any] = []
    for e in eqns:
        fn = _another_way(e, level)
        mine = [e] if fn is None else _traced(fn, e.invars, e.outvars)
        if fn is not None:
            level = domains(mine, level) | {v: level[v] for v in e.outvars}
        out += mine
    return out, level


def at_level(x: Any, want: Domain, level: Domains, eqns: list[Any]) -> Any:
    """A variable of level `want` with the value of `x`, which may be a constant or the same for all of a vertex's edges.

    Adds what makes it to `eqns` and `level`, where it is not `x` itself.
    """
    have = domain_of(x, level)
    if is_var(x) and have == want:
        return x
    assert have < want, "a vertex has no one value of what its edges have each"
    made = Var(x.aval)
    eqns += _traced(spread if have == ROW else jnp.copy, [x], [made])
    level[made] = want
    return made


def zeros_at(aval: Any, want: Domain, level: Domains, eqns: list[Any]) -> Any:
    """A variable of level `want` like `aval` that is zero; see `at_level`."""
    made = Var(aval)
    eqns += _traced(lambda: jnp.copy(jnp.zeros(aval.shape, aval.dtype)), [], [made])
    level[made] = want
    return made


def with_scaled_weights(eqns: Sequence[Any], level: Domains) -> tuple[list[Any], Domains]:
    """Each product with a matrix of row values as one with that times a power of two, which float16 holds; see
    `_function.products`."""
    out: list[Any] = []
    level, scaled = dict(level), {}
    for e in eqns:
        if not is_product(e, {**level}):
            out.append(e)
            continue
        w, z = e.invars[1], e.outvars[0]
        if w not in scaled:
            scaled[w] = Var(w.aval), Var(w.aval.update(shape=()))
            out += _traced(_times_power, [w], scaled[w])
        product = Var(z.aval)
        mine = [e.replace(invars=[e.invars[0], scaled[w][0]], outvars=[product])]
        mine += _traced(lambda x, back: x * back, [product, scaled[w][1]], [z])
        level |= dict.fromkeys([v for new in mine for v in new.outvars], level[z])
        out += mine
    return out, level


def _times_power(w: Any) -> tuple[Any, Any]:
    power = power_of(w)
    return w * two_to(power), two_to(-power)


def _another_way(e: Any, level: Domains) -> Callable[..., Any] | None:
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
    if e.primitive is spread_p and domain_of(e.invars[0], level) == STATIC:
        return jnp.copy
    return None


def _traced(fn: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations of `outvars = fn(invars)`."""
    program, _, _ = trace(fn, *[jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in invars])
    rename = dict(zip(program.invars, invars, strict=True)) | dict(zip(program.outs, outvars, strict=True))
    return [
        e.replace(
            invars=[rename.get(x, x) if is_var(x) else x for x in e.invars],
            outvars=[rename.get(v, v) for v in e.outvars],
        )
        for e in program.eqns
    ]
