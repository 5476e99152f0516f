"""JAX's equations by short names, and the three domains in which their values live."""

from typing import Any, TypeAlias, TypeGuard, cast

import jax
import numpy as np
from jax.extend import core as jex

Var: TypeAlias = jex.Var
Literal: TypeAlias = jex.Literal
Atom: TypeAlias = jex.Var | jex.Literal
Eqn: TypeAlias = jex.JaxprEqn
Params: TypeAlias = dict[str, Any]  # what JAX keeps of an equation beside its operands
Domains: TypeAlias = dict[Var, int]

STATIC, ROW, EDGE = 0, 1, 2  # one value for all vertices; one for each vertex (row); one for each of its child edges
DOMAIN_NAMES = {STATIC: "static", ROW: "rows", EDGE: "edges"}


def is_var(x: Atom) -> TypeGuard[Var]:
    """Whether `x` is a variable rather than a literal."""
    return not isinstance(x, jex.Literal)


def aval(x: Atom) -> jax.core.ShapedArray:
    """The shape and dtype of a variable or literal."""
    return cast(jax.core.ShapedArray, x.aval)


def dtype_of(x: Atom) -> np.dtype:
    """The dtype of a variable or literal."""
    return np.dtype(aval(x).dtype)


def domain_of(x: Atom, domains: Domains) -> int:
    """The domain of a variable or literal; variables that `domains` does not list are STATIC."""
    return domains.get(x, STATIC) if is_var(x) else STATIC


def describe(eqn: Eqn) -> str:
    """An equation's primitive and types, for messages."""
    shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
    return f"{eqn.primitive.name}({shapes}) -> {', '.join(v.aval.str_short() for v in eqn.outvars)}"
