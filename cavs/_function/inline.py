"""A traced vertex function as straight-line equations: calls are inlined, and loops that call `gather_all` are unrolled.

Loops and conditions of `jax.lax` otherwise stay single equations, which are batched over vertices as a whole. One that
gathers children cannot be: inside it are values of vertices and of their children.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from cavs._function.children import has_children_in
from cavs._function.jaxprs import body_of, opened, scan_parts
from cavs._function.lines import line_of

# Calls that are inlined. What `jax.checkpoint` keeps is decided for F as a whole (`_function.minimum_cut`).
_PLAIN = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "core_call")

MSG_CONTROL = (
    "gather_all is called inside {name}{where}, which cannot be batched over vertices with different numbers of children. Call "
    "gather_all before it and use the result inside. jax.vmap, jax.checkpoint, jax.grad, lax.scan and lax.cond may contain it."
)


def unrolled(closed: Any) -> Any:
    """`closed`, a closed jaxpr, with every `scan` and `cond` that calls `gather_all` written out.

    **Raises:** `TypeError`, with the line of F, if `gather_all` is called inside a `while_loop` or a function with custom
    derivatives.
    """
    if not any(_needs_unrolling(e) for e in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args))(*shapes)


def _needs_unrolling(eqn: Any) -> bool:
    inside = jex.jaxprs_in_params(eqn.params)
    if eqn.primitive.name in _PLAIN:
        return any(_needs_unrolling(e) for body in inside for e in body.eqns)
    return any(map(has_children_in, inside))


def _run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for e in jaxpr.eqns:
        values = [x.val if isinstance(x, jex.Literal) else env[x] for x in e.invars]
        if not _needs_unrolling(e):
            params = e.primitive.get_bind_params(e.params)
            subfuns, params = ((), params) if isinstance(params, dict) else params
            outs = e.primitive.bind(*subfuns, *values, **params)
            outs = list(outs) if e.primitive.multiple_results else [outs]
        elif e.primitive.name in _PLAIN:
            outs = _run(*body_of(e), values)
        elif e.primitive.name == "scan":
            outs = _scan(e.params, values)
        elif e.primitive.name == "cond":
            cases = [_run(*opened(branch), values[1:]) for branch in e.params["branches"]]
            outs = [_pick(values[0], parts) for parts in zip(*cases, strict=True)]
        else:
            raise TypeError(MSG_CONTROL.format(name=e.primitive.name, where=line_of(e)))
        env.update(zip(e.outvars, outs, strict=True))
    return [x.val if isinstance(x, jex.Literal) else env[x] for x in jaxpr.outvars]


def _pick(which: Any, cases: Any) -> Any:
    *others, out = cases  # `lax.switch` has clamped the index
    for i, case in enumerate(others):
        out = jnp.where(which == i, case, out)
    return out


def _scan(params: dict[str, Any], values: list[Any]) -> list[Any]:
    (body, body_consts), length = opened(params["jaxpr"]), params["length"]
    consts, carry, xs = scan_parts(params, values)
    num_carry = len(carry)
    rows: list[Any] = [None] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        outs = _run(body, body_consts, [*consts, *carry, *(x[i] for x in xs)])
        carry, rows[i] = outs[:num_carry], outs[num_carry:]
    if not length:
        return [*carry, *(jnp.zeros((0, *v.aval.shape), v.aval.dtype) for v in body.outvars[num_carry:])]
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def inlined(jaxpr: Any, rename: dict[Any, Any], out: list[Any]) -> list[Any]:
    """Appends the equations of `jaxpr` to `out` with plain calls opened up; returns its outputs, renamed."""

    def get(x: Any) -> Any:
        return x if isinstance(x, jex.Literal) else rename.get(x, x)

    for eqn in jaxpr.eqns:
        if not eqn.outvars and not eqn.effects:
            continue  # JAX leaves a condition behind of which nothing is read
        if eqn.primitive.name not in _PLAIN:
            fresh = [jex.Var(v.aval) for v in eqn.outvars]  # a body inlined twice must not define a variable twice
            out.append(eqn.replace(invars=[get(x) for x in eqn.invars], outvars=fresh))
            rename.update(zip(eqn.outvars, fresh, strict=True))
            continue
        body, consts = body_of(eqn)
        local = dict(zip(body.invars, [get(x) for x in eqn.invars], strict=True))
        for var, value in zip(body.constvars, consts, strict=True):
            local[var] = jex.Literal(value, var.aval)
        rename.update(zip(eqn.outvars, inlined(body, local, out), strict=True))
    return [get(x) for x in jaxpr.outvars]
