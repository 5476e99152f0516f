"""What the levels store of the cut cotangents: parts of them, if several consist of the same parts or a part has a place.

The cotangent of what is split, such as the gates of a GRU, is a concatenation. The cotangents of x W and of h U are then two
concatenations that differ in one part. If the levels store the parts, each is stored once, and each can overwrite a kept value
of its own size. After the levels they are put together again.
"""

import dataclasses
import math

from cavs._function.domains import Domains, domain_of
from cavs._function.joint import Joint
from cavs._function.keeping import reused, side_by_side
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import needed
from cavs._jaxpr.jaxprs import Eqn, Var, is_var

_LAYOUT = {"broadcast_in_dim", "concatenate", "expand_dims", "reshape", "squeeze", "stack"}


@dataclasses.dataclass(frozen=True, eq=False)
class StoredCuts:
    """What the levels store for the gradients of the lazy and eager parts."""

    values: list[Var]  # the values, cut cotangents or parts of them, each once
    domain: Domains  # the domain of each: ROW or EDGE
    # The parts of cut cotangents that are stored as they are, if other cut cotangents have some of these parts, too.
    within: dict[Var, list[Var]]
    parts: dict[Var, list[Var]]  # the parts of each cut cotangent that is not stored, in the order of its elements
    eqns: list[Eqn]  # put these together


def stored_cuts(joint: Joint, parts: bool = True) -> StoredCuts:
    """Returns what the levels store: with `parts`, parts of cut cotangents if that takes less memory."""
    whole = StoredCuts(joint.reverse.cuts, joint.reverse.cut_domain, {}, {}, [])
    if not parts or joint.forward.together is None and not any(len(cut_parts) > 1 for cut_parts in _parts(joint).values()):
        return whole
    divided = _divided(joint, whole)
    return divided if _bytes(joint, divided) < _bytes(joint, whole) else whole


def with_kept_together(joint: Joint) -> Joint:
    """Returns the joint program with the kept values side by side that one cut cotangent can overwrite."""
    parts = _parts(joint)
    return side_by_side(joint, [(v, parts[v]) for v in _stored_whole(parts) if len(parts.get(v, ())) > 1])


def _parts(joint: Joint) -> dict[Var, list[Var]]:
    makers = {v: e for e in joint.program.eqns for v in e.outvars}
    return {v: _parts_of(v, makers, joint.domain) for v in joint.reverse.cuts}


def _stored_whole(parts: dict[Var, list[Var]]) -> list[Var]:
    """Returns the cut cotangents with parts that no larger one has; the part itself if there is only one."""
    whole: list[Var] = []
    covered: set[Var] = set()
    for v in sorted(parts, key=lambda v: -v.aval.size):
        if covered.isdisjoint(parts[v]):
            whole.append(v if len(parts[v]) > 1 else parts[v][0])
            covered.update(parts[v])
    return whole


def _divided(joint: Joint, whole: StoredCuts) -> StoredCuts:
    """Returns what is stored if some cut cotangents are stored in parts: all of them, or those that share parts with others."""
    parts_of = _parts(joint)
    if joint.forward.together is None:
        undivided = [v for v, parts in parts_of.items() if parts == [v]]
    else:
        undivided = _stored_whole(parts_of)
    covered = {x for v in undivided for x in parts_of.get(v, [v])}
    values = [*undivided, *dict.fromkeys(x for parts in parts_of.values() for x in parts if x not in covered)]
    domain = {x: whole.domain[v] for v, parts in parts_of.items() for x in (v, *parts)}
    divided = {v: parts for v, parts in parts_of.items() if v not in undivided}
    shared = {x for parts in divided.values() for x in parts}
    within = {v: parts for v, parts in parts_of.items() if v in undivided and len(parts) > 1 and not shared.isdisjoint(parts)}
    eqns, _ = needed(joint.program.eqns, list(divided), {*values, *covered})
    return StoredCuts(values, {v: domain[v] for v in values}, within, divided, eqns)


def _parts_of(cut: Var, makers: dict[Var, Eqn], domain: Domains) -> list[Var]:
    """Returns the values that a cut cotangent concatenates, in the order of its elements; itself if it is no concatenation."""
    parts: list[Var] = []
    todo = [cut]
    while todo:
        x = todo.pop()
        if x in makers and _is_layout(makers[x]):
            todo += reversed([y for y in makers[x].invars if is_var(y)])
        else:
            parts.append(x)
    same = all(x.aval.dtype == cut.aval.dtype and domain_of(x, domain) == domain_of(cut, domain) for x in parts)
    return parts if same else [cut]


def _is_layout(e: Eqn) -> bool:
    """Returns whether the result has the elements of the operands, in their order."""
    if e.primitive.name not in _LAYOUT or not all(map(is_var, e.invars)):
        return False
    axis = e.params.get("dimension", e.params.get("axis", 0)) if len(e.invars) > 1 else 0
    return math.prod(e.invars[0].aval.shape[:axis]) == 1 and sum(x.aval.size for x in e.invars) == e.outvars[0].aval.size


def _bytes(joint: Joint, stored: StoredCuts) -> int:
    """Returns the bytes that a vertex or an edge needs beside its kept values."""
    overwriting = reused(joint, stored.values, stored.domain)
    return sum(bytes_of_var(v) for v in stored.values if v not in overwriting)
