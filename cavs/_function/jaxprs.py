"""Types of the parts of a jaxpr, and the jaxprs that equations call."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
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

    class Jaxpr(jex.Jaxpr):
        constvars: list[Var]  # type: ignore[assignment]
        invars: list[Var]  # type: ignore[assignment]
        outvars: list["Var | Literal"]  # type: ignore[assignment]
        eqns: list[Eqn]  # type: ignore[assignment]

    class ClosedJaxpr(jex.ClosedJaxpr):
        jaxpr: Jaxpr  # type: ignore[assignment]
        consts: list[jax.Array]  # type: ignore[assignment]
else:
    Var, Literal, Eqn, Jaxpr, ClosedJaxpr = jex.Var, jex.Literal, jex.JaxprEqn, jex.Jaxpr, jex.ClosedJaxpr

Atom: TypeAlias = Var | Literal
PyTreeDef: TypeAlias = Any  # `jax.tree_util.PyTreeDef`, which no type checker can read
Env: TypeAlias = dict[Var, jax.Array]

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def is_var(x: Atom) -> "TypeIs[Var]":
    """Returns whether `x` is a variable rather than a literal."""
    return not isinstance(x, Literal)


def bodies_in(eqn: Eqn) -> list[Jaxpr]:
    """Returns the jaxprs in the parameters of an equation."""
    return cast(list[Jaxpr], list(jex.jaxprs_in_params(eqn.params)))


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns a jaxpr, closed or not, and its constants."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr)), getattr(jaxpr, "consts", ())


def body_of(eqn: Eqn) -> tuple[Jaxpr, Sequence[jax.Array]]:
    """Returns the jaxpr that an equation calls, and its constants. The equation is one of `CALLS` or a `checkpoint`."""
    return opened(next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params))


def scan_parts(
    params: dict[str, Any], operands: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Splits the operands of a scan into constants, initial carry and xs."""
    if "ft_in" in params:  # jax 0.11
        consts, init, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
        return consts, init, xs
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(operands[:first]), list(operands[first:last]), list(operands[last:])
