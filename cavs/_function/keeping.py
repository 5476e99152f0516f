"""Chooses what the backward of the recurrent part saves from the forward, runs again, and overwrites.

The joint program (`_function.joint`) is the forward and its VJP. By default the levels store the cheapest values from which the
backward follows without running a product again (Echo, section IV). `front` returns the alternatives: the Pareto front of bytes
against FLOPs that run again, from one minimum cut per subset of the products.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from cavs._function.domains import EDGE, STATIC, Domains, domain_of
from cavs._function.joint import Joint
from cavs._jaxpr.costs import bytes_of_var, flops_of, is_costly_in_f
from cavs._jaxpr.derivative import cheapest, read_by
from cavs._jaxpr.equations import depends, needed, reads
from cavs._jaxpr.jaxprs import Eqn, Var, is_var
from cavs._jaxpr.names import Names

MOST_PRODUCTS = 6  # of which `front` tries all subsets; with more, the products that take the fewest FLOPs first
_EDGES_PER_ROW = 2  # an edge value counts for this many of its kind per vertex


@dataclasses.dataclass(frozen=True)
class Tradeoff:
    """A point of the Pareto front."""

    again: tuple[Var, ...]  # results of the products that the backward runs again
    bytes: float  # stored per vertex
    flops: float  # of the products that run again, per vertex


def with_keeping(
    joint: Joint,
    again: Collection[Var] = (),
    overwritten: Collection[int] = (),
    share: bool = False,
    names: Names = (),
    masks: bool = False,
) -> Joint:
    """Returns the joint program with the cheapest keeping.

    Args:
        again: results of products that may run again.
        overwritten: state leaves whose rows the cotangents overwrite, so that the backward cannot read a vertex's own state.
        share: whether values of the shape of a cut cotangent are preferred among equally small ones, as that can overwrite them
            (`reused`). Otherwise those nearest the backward are taken: less runs again, and XLA compiles faster on a CPU.
        names: what the user asks for by name.
        masks: whether results of `compared` are kept, because what runs again can differ in the last bit.
    """
    if not joint.differentiable:
        return joint
    forward, needs = _read_by_backward(joint)
    # A kept value and a cut cotangent of one shape can share a buffer.
    cut_shapes = {(v.aval.shape, v.aval.dtype) for v in joint.reverse.cuts} if share else set()
    f = joint.forward

    def price(i: int) -> float | None:
        return None if is_costly_in_f(forward[i]) and not any(v in again for v in forward[i].outvars) else 0.0

    def size(v: Var) -> float:
        return _bytes(v, joint.domain) * (0.999 if (v.aval.shape, v.aval.dtype) in cut_shapes else 1.0)

    readable = [v for i, v in enumerate(f.states) if i not in overwritten]
    # STATIC values are computed from parameters, which stay: they are not stored.
    static = {v for e in forward for v in e.outvars if domain_of(v, joint.domain) == STATIC}
    free = {*static, *f.cross, *filter(is_var, (*readable, *f.extra))}
    by_name = {"names": names, "named": joint.names}
    keep = cheapest(forward, needs, price, is_costly_in_f, free=free, stored=f.cross, size=size, comparisons=masks, **by_name)
    keep = [v for v in keep if v not in f.cross]
    return dataclasses.replace(joint, forward=dataclasses.replace(f, keep=keep, overwritten=frozenset(overwritten)))


def _read_by_backward(joint: Joint) -> tuple[list[Eqn], list[Var]]:
    """Returns the equations of the forward, and what the backward, lazy gradients included, reads of it."""
    r, eqns = joint.reverse, joint.program.eqns
    cts = [*r.ct_cross.values(), *r.ct_slots.values(), *r.ct_child.values(), *(cut for use in r.uses for cut in use.cuts)]
    later = depends(eqns, {*r.state_cts.values(), *r.extra_cts.values()})
    backward = [e for e in needed(eqns, cts)[0] if not later.isdisjoint(e.outvars)]
    return [e for e in eqns if later.isdisjoint(e.outvars)], read_by(backward, [*cts, *r.operands], later)


def rows_read(joint: Joint) -> set[Var]:
    """Returns the eager rows that the backward reads, so that they are alive until it ends."""
    r = joint.reverse
    results = [*r.ct_slots.values(), *r.ct_child.values(), *r.cuts]
    eqns, available = needed(joint.program.eqns, results, joint.available)
    return (reads(eqns, available) | lazy_reads(joint)) & set(joint.forward.cross)


def lazy_reads(joint: Joint) -> set[Var]:
    """Returns the values that the lazy parameter gradients read after the levels."""
    operands = joint.reverse.operands
    eqns, available = needed(joint.program.eqns, operands, joint.available)
    return reads(eqns, [*operands, *available]) & joint.available


def reused(joint: Joint, stored: Sequence[Var], cut_domain: Domains) -> dict[Var, tuple[Var, ...]]:
    """Maps cut cotangents, or parts of them, to the saved values whose buffer they may reuse, each buffer at most once.

    `stored`: the cut cotangents, or parts of them. `cut_domain`: the domain of each: ROW or EDGE.
    """
    spare = _only_in_levels(joint)
    place_of: dict[Var, tuple[Var, ...]] = {}
    for cut in stored:
        if place := _taken(spare, cut, joint.domain, cut_domain[cut] == EDGE):
            place_of[cut] = place
    return place_of


def _only_in_levels(joint: Joint) -> list[tuple[Var, ...]]:
    """Returns the saved values of each tensor that only the backward's levels read."""
    read_later = lazy_reads(joint)
    return [place for place in joint.forward.places if read_later.isdisjoint(place)]


def fit(place: Sequence[Var], v: Var, domain: Domains, edge: bool) -> bool:
    """Returns whether a tensor of saved values has room for `v`, which has a row for each edge or for each vertex."""
    shape = place[0].aval.shape if len(place) == 1 else (sum(x.aval.size for x in place),)
    same = shape == (v.aval.shape if len(place) == 1 else (v.aval.size,))
    return same and all(x.aval.dtype == v.aval.dtype and (domain_of(x, domain) == EDGE) == edge for x in place)


def _taken(places: list[tuple[Var, ...]], v: Var, domain: Domains, edge: bool) -> tuple[Var, ...] | None:
    """Removes and returns the first of the places with room for `v`; `None` if there is none."""
    taken = next((place for place in places if fit(place, v, domain, edge)), None)
    if taken is not None:
        places.remove(taken)
    return taken


def side_by_side(joint: Joint, cuts: Sequence[tuple[Var, Sequence[Var]]]) -> Joint:
    """Returns the joint program that stores kept values side by side where a cut cotangent can then overwrite them.

    `cuts`: the cut cotangents, and their parts.
    """
    spare, domain, together = _only_in_levels(joint), joint.domain, []
    for cut, parts in cuts:
        edge = joint.reverse.cut_domain[cut] == EDGE
        if any(fit(place, cut, domain, edge) for place in spare):
            continue
        remaining, group = list(spare), []
        for part in parts:
            group += _taken(remaining, part, domain, edge) or ()
        if len(group) == len(parts) > 1:
            together.append(tuple(group))
            spare = remaining
    return dataclasses.replace(joint, forward=dataclasses.replace(joint.forward, together=tuple(together)))


def overwritten_rows(joint: Joint, copies: Collection[Var]) -> dict[tuple[Var, ...], Var]:
    """Maps tensors of saved values to the eager rows whose buffer they may reuse, each buffer at most once.

    Nothing reads these rows after the forward's levels. They are one of `Forward.cross`, or a part of it if the recurrent part
    splits it.

    `copies`: the variables of `Forward.cross` that are copies.
    """
    read_later, domain, f = rows_read(joint), joint.domain, joint.forward
    eqns, _ = needed(joint.program.eqns, [*f.states, *f.extra, *f.keep])
    places, row_of = f.places, {}

    def overwrite(x: Var, edge: bool) -> bool:
        if place := _taken(places, x, domain, edge):
            row_of[place] = x
        return place is not None

    for v, v_domain in zip(f.cross, joint.reverse.cross_domain, strict=True):
        if v not in copies or v in read_later or v in f.states or overwrite(v, v_domain == EDGE):
            continue
        readers = [e for e in eqns if v in e.invars]
        if len(readers) == 1 and readers[0].primitive.name == "split":
            for x in readers[0].outvars:
                overwrite(x, v_domain == EDGE)
    return row_of


def can_overwrite(joint: Joint, slots: Collection[tuple[int, int]], child: Collection[int]) -> set[int]:
    """Finds the state leaves that only the backward's levels read: in a forest, their cotangents may overwrite them."""
    read_later, f = lazy_reads(joint), joint.forward
    read = {i for i, v in enumerate(f.states) if is_var(v) and v in read_later}
    read |= {i for v, (_, i) in zip(f.slots, slots, strict=True) if v in read_later}
    read |= {i for v, i in zip(f.child, child, strict=True) if v in read_later}
    # A state that is passed on as it is has no equation that could compute it again.
    computed = {v for e in joint.program.eqns for v in e.outvars}
    return {i for i, v in enumerate(f.states) if i in joint.reverse.state_cts and is_var(v) and v in computed} - read


def front(joint: Joint, overwritten: Collection[int] = ()) -> list[Tradeoff]:
    """Returns the Pareto front, from the point that runs no product again to the one that keeps the fewest bytes."""
    if not joint.differentiable:
        return [Tradeoff((), 0.0, 0.0)]
    domain = joint.domain
    products = [
        (e.outvars[0], flops_of(e) * _times(e.outvars[0], domain))
        for e in _read_by_backward(joint)[0]
        if e.primitive.name == "dot_general" and domain_of(e.outvars[0], domain) != STATIC
    ]

    def stored(again: Collection[Var]) -> float:
        kept = with_keeping(joint, again, overwritten)
        return float(sum(_bytes(v, domain) for v in (*kept.forward.keep, *rows_read(kept))))

    most_bytes, least_bytes = stored(()), stored([v for v, _ in products])
    if most_bytes == least_bytes:
        return [Tradeoff((), most_bytes, 0.0)]
    products.sort(key=lambda p: p[1])
    if len(products) <= MOST_PRODUCTS:
        subsets = [s for n in range(len(products) + 1) for s in itertools.combinations(products, n)]
    else:
        subsets = [tuple(products[:n]) for n in range(len(products) + 1)]
    points = [Tradeoff(tuple(v for v, _ in s), stored([v for v, _ in s]), sum(n for _, n in s)) for s in subsets]
    best: list[Tradeoff] = []
    for point in sorted(points, key=lambda p: (p.flops, p.bytes)):
        if not best or point.bytes < best[-1].bytes:
            best.append(point)
    return best


def _bytes(v: Var, domain: Domains) -> float:
    """Returns the bytes of a value per vertex."""
    return bytes_of_var(v) * _times(v, domain)


def _times(v: Var, domain: Domains) -> int:
    return _EDGES_PER_ROW if domain.get(v) == EDGE else 1
