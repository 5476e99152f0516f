"""Inlines calls of functions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
from jax import lax

from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, body_of, is_var, opened
from cavs._jaxpr.reverse_only import forward_only_p
from cavs.kernels import Target

# Calls that are inlined where `jax.checkpoint` is not, because its user chose what to keep.
JITTED = ("jit", "pjit", "closed_call", "core_call")
# Calls that are inlined in F: `_jaxpr.minimum_cut` decides for F as a whole what is stored.
PLAIN = (*JITTED, "checkpoint", "remat2")

# Elementwise primitives whose operands may have axes of 1 where others are longer.
_STRETCH = frozenset(
    "add add_any sub mul div rem max min pow atan2 nextafter complex mulhi and or xor shift_left shift_right_logical "
    "shift_right_arithmetic eq ne lt le gt ge eq_to le_to lt_to igamma igammac igamma_grad_a random_gamma_grad zeta "
    "polygamma regularized_incomplete_beta".split()
)


def _branch_of_platform(eqn: Eqn) -> ClosedJaxpr | None:
    """Returns the branch of a `lax.platform_dependent` that is compiled for the default backend; `None` if it is none."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if platforms is None:
        return None
    platform = Target.here().platform
    aliases = {"gpu": ("cuda", "rocm")}.get(platform, (platform,))
    fits = (branch for branch, of in zip(eqn.params["branches"], platforms, strict=True) if of is None or {*of} & {*aliases})
    return next(fits, None)


def _stretched(x: Atom, eqn: Eqn, out: list[Eqn]) -> Atom:
    """Returns an operand of an equation in the shape of its result. JAX repeats axes of 1 silently; kernels would not."""
    if eqn.primitive.name not in _STRETCH or x.aval.shape == (shape := eqn.outvars[0].aval.shape) or not x.aval.shape:
        return x
    broadcast = _broadcast(x.aval.shape, x.aval.dtype, shape)
    wide = Var(broadcast.outvars[0].aval)
    out.append(broadcast.replace(invars=[x], outvars=[wide], source_info=eqn.source_info))
    return wide


@functools.lru_cache(1 << 12)
def _broadcast(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, wide: tuple[int, ...]) -> Eqn:
    axes = tuple(range(len(wide)))
    traced = jax.make_jaxpr(lambda x: lax.broadcast_in_dim(x, wide, axes))(jax.ShapeDtypeStruct(shape, dtype))
    return cast(list[Eqn], traced.eqns)[0]


def inlined(
    jaxpr: Jaxpr,
    calls: Sequence[str] = PLAIN,
    rename: Mapping[Var, Atom] = {},
    where: Callable[[Eqn], bool] = lambda eqn: True,
) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of `jaxpr` with calls inlined, and its outputs.

    `calls`: the calls that are inlined; "platform_dependent" for the branch of this platform. `rename`: replaces variables of
    `jaxpr`. `where`: which of these calls are inlined.
    """
    eqns: list[Eqn] = []
    return eqns, _append(jaxpr, dict(rename), eqns, calls, where)


def _append(
    jaxpr: Jaxpr, rename: dict[Var, Atom], out: list[Eqn], calls: Sequence[str], where: Callable[[Eqn], bool]
) -> list[Atom]:
    """Appends the equations of `jaxpr` to `out`, and its variables to `rename`. Returns its outputs."""

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
        local |= {var: Literal(value, var.aval) for var, value in zip(body.constvars, consts, strict=True)}
        rename.update(zip(eqn.outvars, _append(body, local, out, calls, where), strict=True))
    return [get(x) for x in jaxpr.outvars]
