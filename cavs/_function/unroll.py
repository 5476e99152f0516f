"""Turns a traced vertex function into straight-line equations: inlines calls, and unrolls loops that call `gather_all`.

Other loops and conditions of `jax.lax` stay single equations, which are batched over vertices as a whole. That is impossible
if one calls `gather_all`: it then mixes values of vertices with values of their children.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._function.children import has_children_in
from cavs._function.domains import STATIC, Domains, domain_of, domains
from cavs._jaxpr.choices import every_branch, is_choice, run_every_branch, with_shared_operands
from cavs._jaxpr.derivative import vjp_at
from cavs._jaxpr.equations import Program, bind, is_float, renamed, run_jaxpr, shape_of
from cavs._jaxpr.inline import PLAIN, inlined
from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Eqn, Literal, PyTreeDef, Var, bodies_in, body_of, is_var, opened, scan_parts
from cavs._jaxpr.source_lines import line_of

MSG_CONTROL = (
    "gather_all is called inside {name}{where}, which cannot be batched over vertices with different numbers of children. Call "
    "gather_all before it and use the result inside. jax.vmap, jax.checkpoint, jax.grad, lax.scan and lax.cond may contain it."
)


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, PyTreeDef, PyTreeDef]:
    """Traces `fn` to a `Program` with inner calls inlined.

    Returns the program, and the tree structures of the arguments and of the result.
    """
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, values = opened(unrolled(cast(ClosedJaxpr, closed)))
    eqns, outs = inlined(jaxpr)
    consts = dict(zip(jaxpr.constvars, values, strict=True))
    program = with_shared_operands(Program(tuple(jaxpr.invars), tuple(eqns), tuple(outs), consts))
    return program, jax.tree.structure(args), jax.tree.structure(out_shape)


def traced_vjp(eqn: Eqn, places: Sequence[int]) -> Program:
    """Traces the VJP of an equation.

    Returns a program of its operands and the cotangents of its float results, with the cotangents of the operands at `places`.
    """

    def cotangents(args: list[jax.Array], cts: list[jax.Array]) -> Any:
        return vjp_at(lambda *args: bind(eqn, args), args, places)[1](cts)

    return trace(cotangents, list(map(shape_of, eqn.invars)), [shape_of(v) for v in eqn.outvars if is_float(v)])[0]


def unrolled(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr in which every `scan` that calls `gather_all` is unrolled, and every such `cond` runs all branches.

    Raises `TypeError` if `gather_all` is called inside a `while_loop` or a function with custom derivatives; the message names
    the line of F.
    """
    if not any(_needs_unrolling(e) for e in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return cast(ClosedJaxpr, jax.make_jaxpr(lambda *args: run_jaxpr(*opened(closed), args, _results))(*shapes))


def _needs_unrolling(eqn: Eqn) -> bool:
    """Returns whether an equation is a loop, a condition or the like that calls `gather_all`.

    Also `lax.ragged_dot`, and what pads with a computed value.
    """
    inside = bodies_in(eqn)
    if eqn.primitive.name == "ragged_dot_general":
        of = eqn.params["ragged_dot_dimension_numbers"]
        ((contracted, _), (batch, _)), groups = of.dot_dimension_numbers, of.rhs_group_dimensions
        return (tuple(contracted), tuple(batch), tuple(of.lhs_ragged_dimensions), tuple(groups)) == ((1,), (), (0,), (0,))
    if eqn.primitive.name == "pad":
        return is_var(eqn.invars[1]) and is_float(eqn.invars[1])
    if eqn.primitive.name in PLAIN:
        return any(_needs_unrolling(e) for body in inside for e in body.eqns)
    return any(map(has_children_in, inside))


def _results(eqn: Eqn, operands: list[Any]) -> Sequence[jax.Array]:
    """Runs an equation, and unrolls it if it needs that."""
    name = eqn.primitive.name
    if not _needs_unrolling(eqn):
        return bind(eqn, operands)
    if name in PLAIN:
        return run_jaxpr(*body_of(eqn), operands, _results)
    if name == "pad":
        return _padded(eqn, *operands)
    if name == "ragged_dot_general":
        return _ragged_dot(eqn, *operands)
    if name == "scan":
        return _scan(eqn, operands)
    if name == "cond":
        return run_every_branch(eqn, operands, _results)
    raise TypeError(MSG_CONTROL.format(name=name, where=line_of(eqn)))


def _padded(eqn: Eqn, x: jax.Array, value: jax.Array) -> list[jax.Array]:
    """Pads with a computed value, by which JAX (0.10, 0.11) cannot differentiate alone."""
    config = eqn.params["padding_config"]
    inside = lax.pad(jnp.ones(x.shape, bool), np.zeros((), bool), config)
    return [jnp.where(inside, lax.pad(x, np.zeros((), x.dtype), config), value)]


def _ragged_dot(eqn: Eqn, x: jax.Array, w: jax.Array, sizes: jax.Array) -> list[jax.Array]:
    """Multiplies each group of rows by its matrix, (m, k) by (groups, k, n). JAX (0.11) does not batch `ragged_dot`."""
    ends, row = jnp.cumsum(sizes), jnp.arange(len(x))
    in_group = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])
    x = jnp.where(in_group[..., None], x, jnp.zeros((), x.dtype))  # (groups, m, k)
    options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    (_, (contracted,)), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return [lax.dot_general(x, w, (((0, 2), (0, contracted)), ((), ())), **options)]


def _scan(eqn: Eqn, values: list[jax.Array]) -> list[jax.Array]:
    """Evaluates a scan step by step."""
    params = eqn.params
    (body, body_consts), length = opened(params["jaxpr"]), params["length"]
    consts, carry, xs = scan_parts(params, values)
    num_carry = len(carry)
    rows: list[list[jax.Array]] = [[]] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        outs = run_jaxpr(body, body_consts, [*consts, *carry, *(x[i] for x in xs)], _results)
        carry, rows[i] = outs[:num_carry], outs[num_carry:]
    if not length:
        return [*carry, *(jnp.zeros((0, *v.aval.shape), v.aval.dtype) for v in body.outvars[num_carry:])]
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def opened_calls(eqns: Sequence[Eqn], domain: Domains) -> tuple[list[Eqn], Domains]:
    """Inlines functions with custom derivatives, such as `jax.nn.relu`, and all branches of each `cond` that vertices decide.

    Only for equations that are not differentiated any more: a derivative of the result would have the infinities of branches
    that are not taken. Returns the equations, and the domains of all variables.
    """
    out: list[Eqn] = []
    domain = dict(domain)
    for eqn in eqns:
        result_domain = domain_of(eqn.outvars[0], domain) if eqn.outvars else STATIC
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call") or (is_choice(eqn) and result_domain != STATIC):
            inside = _inside(eqn)
            domain = domains(inside, domain) | dict.fromkeys(eqn.outvars, result_domain)
            inside, domain = opened_calls(inside, domain)
            out += inside
        else:
            out.append(eqn)
    return out, domain


def _inside(eqn: Eqn) -> list[Eqn]:
    """Returns the equations inside of a call or condition, with its operands and results."""
    jaxpr, consts = every_branch(eqn) if is_choice(eqn) else body_of(eqn)
    local: dict[Var, Atom] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    local |= {var: Literal(value, var.aval) for var, value in zip(jaxpr.constvars, consts, strict=True)}
    inside, returned = inlined(jaxpr, rename=local)
    computed, results = {v for e in inside for v in e.outvars}, dict[Var, Var]()
    for x, v in zip(returned, eqn.outvars, strict=True):
        if is_var(x) and x in computed and x not in results:
            results[x] = v
        else:  # an argument, as of a rule that changes cotangents alone; or a constant, or a value that is returned twice
            copy = cast(Eqn, jax.make_jaxpr(jnp.copy)(shape_of(x)).eqns[0])
            inside.append(copy.replace(invars=[x], outvars=[v], source_info=eqn.source_info))
    return [renamed(e, results) for e in inside]
