"""Turns a traced vertex function into straight-line equations: inlines calls, and unrolls loops that call `gather_all`.

Other loops and conditions of `jax.lax` stay single equations, which are batched over vertices as a whole. That is impossible
if one calls `gather_all`: it then mixes values of vertices with values of their children.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.children import has_children_in
from cavs._function.jaxprs import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, bodies_in, body_of, is_var, opened, scan_parts
from cavs._function.lines import line_of
from cavs._function.reverse_only import forward_only_p

# Calls that are inlined. `jax.checkpoint` has no effect of its own: `_function.minimum_cut` decides for F as a whole what is
# stored.
_PLAIN = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "core_call")

# Elementwise primitives whose operands may have axes of 1 where others are longer.
_STRETCH = frozenset(
    "add add_any sub mul div rem max min pow atan2 nextafter complex mulhi and or xor shift_left shift_right_logical "
    "shift_right_arithmetic eq ne lt le gt ge eq_to le_to lt_to igamma igammac igamma_grad_a random_gamma_grad zeta "
    "polygamma regularized_incomplete_beta".split()
)

MSG_CONTROL = (
    "gather_all is called inside {name}{where}, which cannot be batched over vertices with different numbers of children. Call "
    "gather_all before it and use the result inside. jax.vmap, jax.checkpoint, jax.grad, lax.scan and lax.cond may contain it."
)


def unrolled(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr in which every `scan` that calls `gather_all` is unrolled, and every such `cond` runs all branches.

    Raises:
        TypeError: `gather_all` is called inside a `while_loop` or a function with custom derivatives; the message names the
            line of F.
    """
    if not any(_needs_unrolling(e) for e in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return cast(ClosedJaxpr, jax.make_jaxpr(lambda *args: _run(closed.jaxpr, closed.consts, args))(*shapes))


def _needs_unrolling(eqn: Eqn) -> bool:
    """Returns whether an equation is a loop, a condition or the like that calls `gather_all`."""
    inside = bodies_in(eqn)
    if eqn.primitive.name in _PLAIN:
        return any(_needs_unrolling(e) for body in inside for e in body.eqns)
    return any(map(has_children_in, inside))


def _run(jaxpr: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates a jaxpr, and unrolls what needs it."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for e in jaxpr.eqns:
        values = [env[x] if is_var(x) else x.val for x in e.invars]
        if not _needs_unrolling(e):
            params = e.primitive.get_bind_params(e.params)
            subfuns, params = ((), params) if isinstance(params, dict) else params
            outs = e.primitive.bind(*subfuns, *values, **params)
            outs = list(outs) if e.primitive.multiple_results else [outs]
        elif e.primitive.name in _PLAIN:
            outs = _run(*body_of(e), values)
        elif e.primitive.name == "scan":
            outs = _scan(e, values)
        elif e.primitive.name == "cond":
            cases = [_run(*opened(branch), values[1:]) for branch in e.params["branches"]]
            outs = [_pick(values[0], parts) for parts in zip(*cases, strict=True)]
        else:
            raise TypeError(MSG_CONTROL.format(name=e.primitive.name, where=line_of(e)))
        env.update(zip(e.outvars, outs, strict=True))
    return [env[x] if is_var(x) else x.val for x in jaxpr.outvars]


def _pick(which: jax.Array, cases: Iterable[jax.Array]) -> jax.Array:
    """Returns the case of number `which`."""
    *others, out = cases  # `lax.switch` has already clamped `which`
    for i, case in enumerate(others):
        out = jnp.where(which == i, case, out)
    return out


def _scan(eqn: Eqn, values: list[jax.Array]) -> list[jax.Array]:
    """Evaluates a scan step by step."""
    params = eqn.params
    (body, body_consts), length = opened(params["jaxpr"]), params["length"]
    consts, carry, xs = scan_parts(params, values)
    num_carry = len(carry)
    rows: list[list[jax.Array]] = [[]] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        outs = _run(body, body_consts, [*consts, *carry, *(x[i] for x in xs)])
        carry, rows[i] = outs[:num_carry], outs[num_carry:]
    if not length:
        return [*carry, *(jnp.zeros((0, *v.aval.shape), v.aval.dtype) for v in body.outvars[num_carry:])]
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _branch_of_platform(eqn: Eqn) -> ClosedJaxpr | None:
    """Returns the branch of a `lax.platform_dependent` that is compiled for the default backend; `None` if it is none."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if platforms is None:
        return None
    here = {"gpu": ("cuda", "rocm")}.get(jax.default_backend(), (jax.default_backend(),))
    fits = (branch for branch, of in zip(eqn.params["branches"], platforms, strict=True) if of is None or {*of} & {*here})
    return next(fits, None)


def _stretched(x: Atom, eqn: Eqn, out: list[Eqn]) -> Atom:
    """Returns an operand of an equation in the shape of its result. JAX repeats axes of 1 silently; kernels would not."""
    if eqn.primitive.name not in _STRETCH or x.aval.shape == (shape := eqn.outvars[0].aval.shape) or not x.aval.shape:
        return x
    made = _broadcast(x.aval.shape, x.aval.dtype, shape)
    wide = Var(made.outvars[0].aval)
    out.append(made.replace(invars=[x], outvars=[wide], source_info=eqn.source_info))
    return wide


@functools.lru_cache(1 << 12)
def _broadcast(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, wide: tuple[int, ...]) -> Eqn:
    axes = tuple(range(len(wide)))
    traced = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, wide, axes))(jax.ShapeDtypeStruct(shape, dtype))
    return cast(list[Eqn], traced.eqns)[0]


def inlined(
    jaxpr: Jaxpr,
    rename: dict[Var, Atom],
    out: list[Eqn],
    calls: Sequence[str] = _PLAIN,
    where: Callable[[Eqn], bool] = lambda eqn: True,
) -> list[Atom]:
    """Appends the equations of `jaxpr` to `out`, with calls inlined.

    Args:
        jaxpr: the jaxpr.
        rename: replaces variables of `jaxpr`. Its variables are added.
        out: the equations so far.
        calls: the calls that are inlined; "platform_dependent" for the branch of this platform.
        where: which of these calls are inlined.

    Returns:
        The outputs of `jaxpr`, renamed.
    """

    def get(x: Atom) -> Atom:
        return rename.get(x, x) if is_var(x) else x

    for eqn in jaxpr.eqns:
        if not eqn.outvars and not eqn.effects:
            continue  # JAX keeps a condition of which nothing is read
        if eqn.primitive is forward_only_p:
            rename[eqn.outvars[0]] = get(eqn.invars[0])
            continue
        branch = _branch_of_platform(eqn) if "platform_dependent" in calls else None
        if branch is None and not (eqn.primitive.name in calls and where(eqn)):
            fresh = [Var(v.aval) for v in eqn.outvars]  # if a body is inlined twice, it must not define a variable twice
            out.append(eqn.replace(invars=[_stretched(get(x), eqn, out) for x in eqn.invars], outvars=fresh))
            rename.update(zip(eqn.outvars, fresh, strict=True))
            continue
        body, consts = body_of(eqn) if branch is None else opened(branch)
        local = dict(zip(body.invars, [get(x) for x in eqn.invars[len(eqn.invars) - len(body.invars) :]], strict=True))
        for var, value in zip(body.constvars, consts, strict=True):
            local[var] = Literal(value, var.aval)
        rename.update(zip(eqn.outvars, inlined(body, local, out, calls, where), strict=True))
    return [get(x) for x in jaxpr.outvars]
