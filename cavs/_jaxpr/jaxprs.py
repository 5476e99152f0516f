"""Jaxprs, the jaxprs that equations call, and types of their parts; those that the kernels need come from `cavs.kernels`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import jax
from jax.extend import core as jex

from cavs.kernels import Atom as Atom, Eqn as Eqn, Literal as Literal, Var as Var, is_var as is_var

if TYPE_CHECKING:

    class Jaxpr(jex.Jaxpr):
        constvars: list[Var]  # type: ignore[assignment]
        invars: list[Var]  # type: ignore[assignment]
        outvars: list["Var | Literal"]  # type: ignore[assignment]
        eqns: list[Eqn]  # type: ignore[assignment]

    class ClosedJaxpr(jex.ClosedJaxpr):
        jaxpr: Jaxpr  # type: ignore[assignment]
        consts: list[jax.Array]  # type: ignore[assignment]
else:
    Jaxpr, ClosedJaxpr = jex.Jaxpr, jex.ClosedJaxpr

PyTreeDef: TypeAlias = Any  # `jax.tree_util.PyTreeDef`, which no type checker can read
Env: TypeAlias = dict[Var, jax.Array]
Arrays: TypeAlias = list[jax.Array]
_T = TypeVar("_T")

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "call_with_rules")


def bodies_in(eqn: Eqn) -> list[Jaxpr]:
    """Returns the jaxprs in the parameters of an equation."""
    return cast(list[Jaxpr], list(jex.jaxprs_in_params(eqn.params)))


def all_equations(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Yields equations, each followed by those in the jaxprs in its parameters, and in jaxprs inside these."""
    for eqn in eqns:
        yield eqn
        for body in bodies_in(eqn):
            yield from all_equations(body.eqns)


def opened(jaxpr: jex.Jaxpr | jex.ClosedJaxpr) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns a jaxpr, closed or not, and its constants."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr)), getattr(jaxpr, "consts", ())


def without_constants(jaxpr: jex.Jaxpr | jex.ClosedJaxpr) -> tuple[ClosedJaxpr, Sequence[jax.Array]]:
    """Returns a jaxpr whose constants are its first arguments, and these constants."""
    inside, consts = opened(jaxpr)
    invars = [*inside.constvars, *inside.invars]
    return cast(ClosedJaxpr, jex.ClosedJaxpr(inside.replace(constvars=[], invars=invars), [])), consts


def body_of(eqn: Eqn) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns the jaxpr that an equation calls, and its constants. The equation is one of `CALLS` or a `checkpoint`."""
    return opened(next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params))


def scan_parts(params: dict[str, Any], operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
    """Splits the operands of a scan, or a list with an entry for each, into constants, initial carry and xs."""
    if "ft_in" in params:  # jax 0.11
        consts, init, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
        return consts, init, xs
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(operands[:first]), list(operands[first:last]), list(operands[last:])
