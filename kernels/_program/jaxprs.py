"""Types of the parts of a jaxpr, and the domains of the values of a vertex function."""

import enum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    # JAX annotates these with `AbstractValue`, which has no shape.
    class Var(jex.Var):
        aval: ShapedArray  # type: ignore[assignment]

    class Literal:
        val: Any
        aval: ShapedArray

        def __init__(self, val: Any, aval: ShapedArray): ...

    class Eqn(jex.JaxprEqn):
        invars: list["Var | Literal"]  # type: ignore[assignment]
        outvars: list[Var]  # type: ignore[assignment]

        def replace(self, **changes: object) -> "Eqn": ...
else:
    Var, Literal, Eqn = jex.Var, jex.Literal, jex.JaxprEqn

Atom: TypeAlias = Var | Literal
Params: TypeAlias = dict[str, Any]  # what JAX keeps of an equation beside its operands


class Domain(enum.IntEnum):
    """What a value has one entry for."""

    STATIC = 0  # one value for all vertices: parameters, and values computed from parameters alone
    ROW = 1  # one value per vertex, which is a row of a batch
    EDGE = 2  # one value per child edge of a vertex, inside `gather_all`


STATIC, ROW, EDGE = Domain
Domains: TypeAlias = dict[Var, Domain]
DOMAIN_NAMES = {STATIC: "static", ROW: "rows", EDGE: "edges"}


def is_var(x: Atom) -> "TypeIs[Var]":
    """Returns whether `x` is a variable rather than a literal."""
    return not isinstance(x, Literal)


def aval(x: Atom) -> ShapedArray:
    """Returns the shape and dtype of a variable or literal."""
    return x.aval


def dtype_of(x: Atom) -> np.dtype:
    """Returns the dtype of a variable or literal."""
    return np.dtype(x.aval.dtype)


def domain_of(x: Atom, domains: Domains) -> Domain:
    """Returns the domain of a variable or literal; variables that `domains` does not list are STATIC."""
    return domains.get(x, STATIC) if is_var(x) else STATIC


def describe(eqn: Eqn) -> str:
    """Returns an equation's primitive and types, for messages."""
    shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
    return f"{eqn.primitive.name}({shapes}) -> {', '.join(v.aval.str_short() for v in eqn.outvars)}"
