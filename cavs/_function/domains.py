"""The domain of a value of a vertex function: whether it has one value for all vertices, one per vertex, or one per child edge.

A vertex function is traced for a single vertex; its equations are then evaluated for many vertices at once.
"""

import enum
from collections.abc import Sequence
from typing import TypeAlias

from cavs._function.children import TO_EDGES, TO_ROWS
from cavs._function.jaxprs import Atom, Eqn, Var, is_var


class Domain(enum.IntEnum):
    """What a value has one entry for. The primitives of `_function.children` move values between `ROW` and `EDGE`."""

    STATIC = 0  # one value for all vertices: parameters, and values computed from parameters alone
    ROW = 1  # one value per vertex
    EDGE = 2  # one value per child edge of a vertex, inside `gather_all`


STATIC, ROW, EDGE = Domain
Domains: TypeAlias = dict[Var, Domain]


def domain_of(x: Atom, domain: Domains) -> Domain:
    """Returns the domain of a variable or literal. Absent variables are STATIC."""
    return domain.get(x, STATIC) if is_var(x) else STATIC


def domains(eqns: Sequence[Eqn], known: Domains) -> Domains:
    """Returns the domain of every variable, given those of the inputs (`known`; absent inputs are STATIC)."""
    domain = dict(known)
    for eqn in eqns:
        if eqn.primitive in TO_EDGES:
            own = EDGE
        elif eqn.primitive in TO_ROWS:
            own = ROW
        else:
            own = max((domain_of(x, domain) for x in eqn.invars), default=STATIC)
        domain |= dict.fromkeys(eqn.outvars, own)
    return domain
