"""Which phase computes each value of a level's program.

A thread block owns some units of every vector, so elementwise maths and sums over children need only its own units. A product
(or a sum over a vector) reads ALL units of its operand: the operand must have been gathered, or stored by an earlier phase.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from cavs.kernels._program.fit import ACROSS, REDUCTIONS, Unfit, is_product, reads_all_units, varying
from cavs.kernels._program.jaxprs import EDGE, ROW, Atom, Domain, Domains, Eqn, Var, aval, describe, is_var
from cavs.kernels._program.operations import ConstantRead, RowRead, Source

Operands: TypeAlias = list[list[tuple[RowRead, ...]]]  # for each leading index, the sources that are summed
Readable: TypeAlias = Callable[[Atom], Operands | None]


def phase_of_values(eqns: Sequence[Eqn], domains: Domains, sources: Mapping[Var, Source], readable: Readable) -> dict[Var, int]:
    """Returns the phase of every value that equations compute, and of inputs that must be stored before a product reads them.

    `readable` returns the rows that a product can read instead of a stored operand, or `None`.
    """
    phase: dict[Var, int] = {}
    left, n = list(eqns), 0
    unread = {x for e in eqns for x in e.invars if is_var(x) and x in sources and not can_read(e, x, domains, sources)}
    for domain in sorted({domains[x] for x in unread}):
        phase |= {x: n for x in unread if domains[x] == domain}
        n += 1
    while left:
        best = None
        for domain in (ROW, EDGE):
            got = _runnable(left, domains, domain, phase, sources, readable)
            # Products last: a phase without any needs no barrier.
            key = (any(reads_all_units(e, domains) for e in got), -len(got))
            if got and (best is None or key < best[0]):
                best = key, got
        if best is None:
            raise Unfit(f"no order of phases runs {describe(left[0])}")
        ids = {id(e) for e in best[1]}
        left = [e for e in left if id(e) not in ids]
        phase |= {v: n for e in best[1] for v in e.outvars}
        n += 1
    return phase


def _runnable(
    eqns: Sequence[Eqn],
    domains: Domains,
    domain: Domain,
    phase: Mapping[Var, int],
    sources: Mapping[Var, Source],
    readable: Readable,
) -> list[Eqn]:
    """The equations of `domain` that can run in the next phase."""
    here: set[Var] = set()
    got = []
    for e in eqns:
        if domains[e.outvars[0]] != domain:
            continue
        read = varying(e, domains)
        name = e.primitive.name
        if is_product(e, domains):
            ok = readable(e.invars[0]) is not None or e.invars[0] in phase
        elif name in REDUCTIONS or name in ACROSS:
            ok = all(x in phase or x in sources for x in read)
        else:
            ok = all(x in phase or x in sources or x in here for x in read)
        if ok:
            got.append(e)
            here.update(e.outvars)
    return got


def can_read(eqn: Eqn, x: Var, domains: Domains, sources: Mapping[Var, Source]) -> bool:
    """Whether an equation can read the input `x` from its source; otherwise `x` must be stored as rows first."""
    source, name = sources[x], eqn.primitive.name
    if isinstance(source, ConstantRead):
        return True
    if name in REDUCTIONS or name == "spread":
        return isinstance(source, RowRead) and source.index is None
    if is_product(eqn, domains) or name in ACROSS:
        return isinstance(source, RowRead)
    return True


def gathered_sum(
    x: Atom, producer: Mapping[Var, Eqn], sources: Mapping[Var, Source], joinable: Callable[[int], bool]
) -> Operands | None:
    """For each leading index of `x` the gathered rows, perhaps several side by side, that it is the sum of.

    Returns `None` if `x` is something else. `joinable` says whether rows of a width may lie side by side.
    """
    if not is_var(x):
        return None
    source = sources.get(x)
    if isinstance(source, RowRead) and len(aval(x).shape) == 1 and x not in producer:
        return [[(source,)]]
    e = producer.get(x)
    if e is None:
        return None
    found = [gathered_sum(y, producer, sources, joinable) for y in e.invars]
    parts = [p for p in found if p is not None]
    if len(parts) < len(found):
        return None
    name, rank = e.primitive.name, len(aval(x).shape)
    if name == "concatenate" and rank == 1:
        return _side_by_side(e, parts, joinable)
    if name in ("add", "add_any") and rank == 1:
        a, b = parts
        return [[*a[0], *b[0]]] if a and b and len(a[0]) + len(b[0]) <= 4 and len(a[0][0]) == len(b[0][0]) else None
    if name in ("stack", "concatenate") and rank == 2 and e.params.get("axis", 0) == 0:
        return [rows for p in parts for rows in p] if name == "stack" or e.params["dimension"] == 0 else None
    if name in ("broadcast_in_dim", "reshape", "expand_dims", "squeeze") and rank <= 2:
        return parts[0] if parts[0] and len(parts[0]) == int(np.prod(aval(x).shape[:-1])) else None
    return None


def _side_by_side(eqn: Eqn, parts: list[Operands], joinable: Callable[[int], bool]) -> Operands | None:
    """Two gathered rows of equal width as one source, which the product reads side by side."""
    widths = {aval(y).shape[0] for y in eqn.invars}
    found = [source for p in parts for operand in p for source in operand]
    whole = len(found) == len(parts) == 2 and len(widths) == 1 and joinable(*widths)
    if not whole or any(len(source) != 1 for source in found):
        return None
    return [[tuple(row for source in found for row in source)]]
