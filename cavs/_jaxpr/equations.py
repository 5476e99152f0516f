"""Programs: straight-line equations, written for one vertex, and what can be asked about them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex, source_info_util
from jax.interpreters import ad

from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Jaxpr, Var, is_var

tap_p = jex.Primitive("tap")
tap_p.def_abstract_eval(lambda x, delta: x)


def _tap_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # tap(x, delta) returns x, and its derivative with respect to delta is the cotangent of x. It exposes the cotangent that
    # a product's parameter gradient needs (the "cut cotangent"), and no zero is ever added to x.
    return primals[0], ad.add_tangents(*tangents)


ad.primitive_jvps[tap_p] = _tap_jvp


class Program(NamedTuple):
    """Straight-line equations over flat inputs. `outs` may be inputs or literals."""

    invars: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outs: tuple[Atom, ...]
    consts: Env

    def without(self, same: Callable[[Eqn], Sequence[Atom] | None]) -> "Program":
        """Returns the program without equations whose results are values that exist already, see `without`."""
        eqns, outs = without(self.eqns, self.outs, same)
        return self._replace(eqns=tuple(eqns), outs=tuple(outs))


def is_float(x: Any) -> bool:
    """Returns whether a variable, array or shape has a dtype that can be differentiated."""
    dtype = x.aval.dtype if hasattr(x, "aval") else x.dtype
    return jnp.issubdtype(dtype, jnp.inexact)


def shape_of(x: Atom) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a variable or literal."""
    return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)


def value_of(x: Atom, env: Env) -> jax.Array:
    """Returns the value of a variable or literal."""
    return env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype)


def bind(eqn: Eqn, args: Sequence[Any]) -> list[jax.Array]:
    """Runs one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = ((), params) if isinstance(params, dict) else params
    if eqn.primitive.name == "custom_vjp_call":  # its rule may index a constant of the jaxpr, which can be an array of NumPy
        args = [jnp.asarray(x) for x in args]
    out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def run_equations(eqns: Iterable[Eqn], env: dict[Var, Any], results: Callable[[Eqn, list[Any]], Sequence[Any]] = bind) -> None:
    """Runs equations and adds their results to `env`. `results` runs one equation, given its operands."""
    for eqn in eqns:
        with lines_of(eqn):
            env.update(zip(eqn.outvars, results(eqn, values(eqn.invars, env)), strict=True))


def run_jaxpr(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], results: Callable[[Eqn, list[Any]], Sequence[Any]] = bind
) -> list[Any]:
    """Evaluates a jaxpr; `results` runs one equation, as in `run_equations`."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run_equations(jaxpr.eqns, env, results)
    return values(jaxpr.outvars, env)


def values(atoms: Iterable[Atom], env: dict[Var, Any]) -> list[Any]:
    """Returns the values of variables and literals, these as they are."""
    return [env[x] if is_var(x) else x.val for x in atoms]


def lines_of(eqn: Eqn) -> AbstractContextManager[None]:
    """Returns a context in which new equations get the source lines of `eqn`."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names)


def renamed(eqn: Eqn, names: Mapping[Var, Any]) -> Eqn:
    """Returns an equation in which the variables that are keys of `names` are replaced."""
    invars = [names.get(x, x) if is_var(x) else x for x in eqn.invars]
    return eqn.replace(invars=invars, outvars=[names.get(v, v) for v in eqn.outvars])


def without(
    eqns: Iterable[Eqn], outs: Iterable[Atom], same: Callable[[Eqn], Sequence[Atom] | None]
) -> tuple[list[Eqn], list[Atom]]:
    """Removes equations whose results are values that exist already.

    Returns the other equations, and the outputs. `outs`: what is read after them. `same`: returns these values for an equation
    without the removed ones, `None` for one that stays.
    """
    replaced: dict[Var, Atom] = {}
    kept: list[Eqn] = []

    def get(x: Atom) -> Atom:
        return replaced.get(x, x) if is_var(x) else x

    for e in eqns:
        e = e.replace(invars=[get(x) for x in e.invars])
        if (values := same(e)) is None:
            kept.append(e)
        else:
            replaced.update(zip(e.outvars, values, strict=True))
    return kept, [get(x) for x in outs]


def needed(eqns: Sequence[Eqn], outs: Sequence[Atom], available: Set[Var] = frozenset()) -> tuple[list[Eqn], list[Var]]:
    """Returns the equations that compute `outs` from `available` values, in order, and the available values they read."""
    want = {x for x in outs if is_var(x)}
    used = [x for x in outs if is_var(x) and x in available]
    keep = []
    for eqn in reversed(eqns):
        if any(v in want and v not in available for v in eqn.outvars):
            keep.append(eqn)
            for x in eqn.invars:
                if is_var(x) and x not in want:
                    want.add(x)
                    if x in available:
                        used.append(x)
    return keep[::-1], used


def alive(eqns: Sequence[Eqn], outs: Sequence[Atom], available: Collection[Var] = ()) -> list[Eqn]:
    """Returns the equations that compute `outs` from `available` values, and those with effects, in order."""
    effects = [eqn for eqn in eqns if eqn.effects]
    ids = {id(e) for e in (*effects, *needed(eqns, [*outs, *(x for e in effects for x in e.invars)], {*available})[0])}
    return [eqn for eqn in eqns if id(eqn) in ids]


def reads(eqns: Sequence[Eqn], outs: Iterable[Atom] = ()) -> set[Var]:
    """Returns all variables that `eqns` read, and those among `outs`."""
    return {x for e in eqns for x in e.invars if is_var(x)} | {x for x in outs if is_var(x)}


def depends(eqns: Sequence[Eqn], seeds: set[Var]) -> set[Var]:
    """Returns all variables that depend on `seeds`, which are included."""
    reached = set(seeds)
    for eqn in eqns:
        if any(is_var(x) and x in reached for x in eqn.invars):
            reached.update(eqn.outvars)
    return reached
