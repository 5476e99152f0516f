"""The domain of a value of a vertex function: whether it has one value for all vertices, one per vertex, or one per child edge.

A vertex function is traced for a single vertex; its equations are then evaluated for many vertices at once.
"""

from collections.abc import Sequence

from cavs._function.children import TO_EDGES, TO_ROWS
from cavs._jaxpr.jaxprs import Eqn
from cavs.kernels import (
    EDGE as EDGE,
    ROW as ROW,
    STATIC as STATIC,
    Domain as Domain,
    Domains as Domains,
    domain_of as domain_of,
)


def domains(eqns: Sequence[Eqn], known: Domains) -> Domains:
    """Returns the domain of every variable, given the domains of the inputs (`known`; absent inputs are STATIC)."""
    domain = dict(known)
    for eqn in eqns:
        if eqn.primitive in TO_EDGES:
            result_domain = EDGE
        elif eqn.primitive in TO_ROWS:
            result_domain = ROW
        else:
            result_domain = max((domain_of(x, domain) for x in eqn.invars), default=STATIC)
        domain |= dict.fromkeys(eqn.outvars, result_domain)
    return domain
