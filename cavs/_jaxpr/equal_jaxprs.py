"""Whether two jaxprs are the same but for the names of their variables."""

from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, is_var, opened
from cavs._jaxpr.source_lines import source_line


def equal_jaxprs(a: Jaxpr | ClosedJaxpr, b: Jaxpr | ClosedJaxpr) -> bool:
    """Returns whether two jaxprs have the same equations, from the same lines of code, and the same constants."""
    (first, consts), (second, other_consts) = opened(a), opened(b)
    names: dict[Var, Var] = {}
    return (
        len(consts) == len(other_consts)
        and all(x is y for x, y in zip(consts, other_consts, strict=True))
        and _same_types(first.constvars, second.constvars, names)
        and _same_types(first.invars, second.invars, names)
        and len(first.eqns) == len(second.eqns)
        and all(_same_equation(e, f, names) for e, f in zip(first.eqns, second.eqns, strict=True))
        and _same_values(first.outvars, second.outvars, names)
    )


def _same_equation(e: Eqn, f: Eqn, names: dict[Var, Var]) -> bool:
    return (
        e.primitive is f.primitive
        and e.effects == f.effects
        and _same_values(e.invars, f.invars, names)
        and _same_types(e.outvars, f.outvars, names)
        and same_parameters(e, f)
        and source_line(e) == source_line(f)
    )


def same_parameters(e: Eqn, f: Eqn) -> bool:
    return e.params.keys() == f.params.keys() and all(_same_parameter(x, f.params[name]) for name, x in e.params.items())


def _same_types(first: list[Var], second: list[Var], names: dict[Var, Var]) -> bool:
    """Returns whether new variables have the same types. Adds their names."""
    names.update(zip(second, first, strict=False))
    return len(first) == len(second) and all(v.aval == w.aval for v, w in zip(first, second, strict=True))


def _same_values(first: list[Atom], second: list[Atom], names: dict[Var, Var]) -> bool:
    def same(x: Atom, y: Atom) -> bool:
        if is_var(x) or is_var(y):
            return is_var(y) and names.get(y) is x
        return literal_key(x) == literal_key(y)

    return len(first) == len(second) and all(map(same, first, second))


def literal_key(x: Literal) -> Any:
    """Returns what is equal for literals of one type with the same bytes: 0 and -0 differ, and NaN is equal to itself."""
    if jax.dtypes.issubdtype(x.aval.dtype, jax.dtypes.extended):
        return x.aval, id(x.val)
    return x.aval, np.asarray(x.val, x.aval.dtype).tobytes()


def _same_parameter(x: Any, y: Any) -> bool:
    if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr) and isinstance(y, jex.Jaxpr | jex.ClosedJaxpr):
        return equal_jaxprs(x, y)  # type: ignore[arg-type]
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_same_parameter, x, y))
    if isinstance(x, jax.Array | np.ndarray) or isinstance(y, jax.Array | np.ndarray):
        return x is y
    if isinstance(x, float | complex | np.generic) and type(x) is type(y):
        return np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return type(x) is type(y) and bool(x == y)
