"""A level's program cut into phases: what a group of CTAs can run without meeting (VPPS section III, Cavs section 3.5).

A program is straight-line equations for ONE vertex (or one of its child edges), at levels STATIC, ROW and EDGE. CTA j of a
group owns units j*hb ... of every vector, so elementwise maths and sums over children are its own affair. A product (or a
sum over a vector) reads ALL units of its operand: what it reads must have been stored by every CTA of the group, and the
group must have met since (or the product waits for it: `Config.dataflow`). So the program is cut into phases: of one domain
(rows or edges), and such that a product's operand was gathered or stored before the phase.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cavs.kernels._program.fit import ACROSS, ELEMENTWISE, REDUCTIONS, STRUCTURE, check, check_known, is_product
from cavs.kernels._program.specs import (
    EDGE,
    ROW,
    STATIC,
    Constant,
    Level,
    Phase,
    Place,
    Product,
    Rows,
    Source,
    Unfit,
    describe,
    is_var,
    num_blocks,
    padded_unit,
    stored_dtype,
    unit_width,
)


def cut(
    eqns: Sequence[Any],
    level: dict[Any, int],
    sources: dict[Any, Source],
    outputs: dict[Any, list[Place]],
    written: frozenset[str],
    multiple: int = 16,
) -> Level:
    """Cuts a program into phases.

    **Arguments:** the equations of ROW and EDGE level in order (STATIC ones are done before), every variable's level,
    the source of each input, the tensors that each output is stored in, which tensors other CTAs of the group write in
    earlier levels, and what sums of products must be a multiple of. Raises [`Unfit`][] for what the kernels cannot do.
    """
    for e in eqns:
        check_known(e)
    inside = [v for e in eqns for v in (*e.invars, *e.outvars) if is_var(v) and level.get(v, STATIC) != STATIC]
    unit = unit_width([*inside, *(v for v, s in sources.items() if not isinstance(s, Constant))])
    summed = [e.invars[1].aval.shape[e.params["dimension_numbers"][0][1][0]] for e in eqns if is_product(e, level)]
    padded = padded_unit(unit)
    if any(k // unit * padded % multiple for k in summed):
        padded = padded_unit(unit, multiple)
    if padded > 2 * unit:
        raise Unfit(
            f"the greatest common divisor of the widths in F's recurrent part is {unit}, and vectors of {unit} would be "
            f"padded to {padded}; choose widths that are multiples of 16, or of one hidden size that is at least 8"
        )
    for e in eqns:
        check(e, level, unit)
    producer = {v: e for e in eqns for v in e.outvars}
    sources = dict(sources)

    def readable(x: Any) -> list[list[tuple[Rows, ...]]] | None:
        return _raw_sum(x, producer, sources, lambda width: width // unit * padded % multiple == 0)

    made = _assign(eqns, level, sources, readable)
    domains = [next(level[v] for v, n in made.items() if n == i) for i in range(max(made.values(), default=-1) + 1)]
    # An input may be stored as it is where no phase has its domain.
    domains += [d for d in (ROW, EDGE) if d not in domains and any(level[v] == d for v in outputs)]
    count = len(domains)
    phases = [Phase(domain, {}, [], {}) for domain in domains]

    def home(v: Any) -> int:
        """The phase in which a value is at hand first."""
        if v in made:
            return made[v]
        return domains.index(level[v])

    for v, names in outputs.items():
        phases[home(v)].stores.setdefault(v, []).extend(names)

    # From the last phase to the first: what its stores need. What another phase made is stored there, unless it is cheap
    # to compute again.
    scratch: dict[str, tuple[int, int, Any]] = {}
    for n in reversed(range(count)):
        phase = phases[n]
        todo, seen = list(phase.stores), set()

        def stored(x: Any) -> None:
            if x not in producer:
                phases[home(x)].inputs.setdefault(x, sources[x])
            there = phases[home(x)].stores.setdefault(x, [])
            if not there:
                there.append(Place(f"scratch{len(scratch)}"))
                scratch[there[0].tensor] = (level[x], max(1, num_blocks(x.aval, unit)) * padded, stored_dtype(x.aval))
            sources[x] = Rows(there[0].tensor, base=there[0].base)

        while todo:
            x = todo.pop()
            if not is_var(x) or x in seen or level.get(x, STATIC) == STATIC or x not in producer:
                continue
            seen.add(x)
            e = producer[x]
            if made[x] != n and (level[x] != phase.domain or not _cheap(e, producer, level, phase.domain)):
                stored(x)
                continue
            for v in e.outvars:
                phase.eqns[v] = e
                seen.add(v)
            if is_product(e, level):
                if readable(e.invars[0]) is None:
                    stored(e.invars[0])
                if all(p.eqn is not e for p in phase.products):
                    phase.products.append(Product(e, e.invars[1], e.params["dimension_numbers"][0][1][0], [], 0))
            elif e.primitive.name in REDUCTIONS or e.primitive.name in ACROSS:
                y = e.invars[0]
                if is_var(y) and level.get(y, STATIC) != STATIC and (y not in sources or not _readable(e, y, level, sources)):
                    stored(y)
            else:
                todo += list(e.invars)

    fresh = set(written)
    for phase in phases:
        for p in phase.products:
            p.operands = readable(p.eqn.invars[0]) or _operands(p.eqn, sources, unit)
            p.blocks = p.weight.aval.shape[1 - p.axis] // unit
        read = {name for p in phase.products for name in p.tensors()}
        whole = [sources[e.invars[0]] for e in phase.eqns.values() if e.primitive.name in REDUCTIONS]
        read |= {s.tensor for s in whole if isinstance(s, Rows)}
        if read & fresh:
            phase.meet = True
            fresh = set()
        fresh |= {place.tensor for places in phase.stores.values() for place in places}
    out = Level([p for p in phases if p.stores], sources, level, unit, padded, scratch)
    for phase in out.phases:
        _check_domain(phase, out)
    out.flows = _flows(out)
    return out


def _check_domain(phase: Phase, level: Level) -> None:
    """All that a phase makes, stores and reads by its own row is of its domain: else it would read and write other rows, or
    none. Between rows and edges lead the equations `ACROSS` alone, each by an index of the schedule."""
    wrong = [v for v in (*phase.eqns, *phase.stores) if level.level[v] != phase.domain]
    for e in phase.eqns.values():
        if e.primitive.name not in ACROSS:
            wrong += [x for x in e.invars if is_var(x) and level.level.get(x, STATIC) not in (STATIC, phase.domain)]
    assert not wrong, f"a phase over {'rows' if phase.domain == ROW else 'edges'} has values of another domain: {wrong}"


def _flows(level: Level) -> bool:
    """Whether products alone read, in float32 (or what `_program.halves` makes of it), what CTAs make for each other."""
    reductions = [e for p in level.phases for e in p.eqns.values() if e.primitive.name in REDUCTIONS]
    whole = {s.tensor for e in reductions if isinstance(s := level.sources[e.invars[0]], Rows)}
    read = {q.eqn.invars[0].aval.dtype for p in level.phases for q in p.products}
    return read == {np.dtype(np.float32)} and not whole & level.stored()


def _assign(
    eqns: Sequence[Any], level: dict[Any, int], sources: dict[Any, Source], readable: Callable[[Any], Any]
) -> dict[Any, int]:
    """The phase of every value that equations make, and of inputs that must be stored before a product reads them; `readable`
    are operands of products that need not be stored."""
    made: dict[Any, int] = {}
    left, n = list(eqns), 0
    unread = {x for e in eqns for x in e.invars if is_var(x) and x in sources and not _readable(e, x, level, sources)}
    for domain in sorted({level[x] for x in unread}):
        made |= {x: n for x in unread if level[x] == domain}
        n += 1
    while left:
        best = None
        for domain in (ROW, EDGE):
            got = _closure(left, level, domain, made, sources, readable)
            # Products last: a phase without any needs no meeting.
            key = (any(_needs_rows(e, level) for e in got), -len(got))
            if got and (best is None or key < best[0]):
                best = key, got
        if best is None:
            raise Unfit(f"no order of phases runs {describe(left[0])}")
        ids = {id(e) for e in best[1]}
        left = [e for e in left if id(e) not in ids]
        made |= {v: n for e in best[1] for v in e.outvars}
        n += 1
    return made


def _needs_rows(eqn: Any, level: dict[Any, int]) -> bool:
    """Whether an equation reads all units of its operand."""
    return is_product(eqn, level) or eqn.primitive.name in REDUCTIONS


def _readable(eqn: Any, x: Any, level: dict[Any, int], sources: dict[Any, Source]) -> bool:
    """Whether an equation can read the input `x` where it is; else `x` must be stored as rows first."""
    s, name = sources[x], eqn.primitive.name
    if isinstance(s, Constant):
        return True
    if name in REDUCTIONS or name == "spread":
        return isinstance(s, Rows) and s.index is None
    if is_product(eqn, level) or name in ACROSS:
        return isinstance(s, Rows)
    return True


def _closure(
    eqns: Sequence[Any],
    level: dict[Any, int],
    domain: int,
    made: dict[Any, int],
    sources: dict[Any, Source],
    readable: Callable[[Any], Any],
) -> list[Any]:
    """Equations of `domain` that can run in the next phase."""
    here: set[Any] = set()
    got = []
    for e in eqns:
        if level[e.outvars[0]] != domain:
            continue
        read = [x for x in e.invars if is_var(x) and level.get(x, STATIC) != STATIC]
        name = e.primitive.name
        if is_product(e, level):
            ok = readable(e.invars[0]) is not None or e.invars[0] in made
        elif name in REDUCTIONS or name in ACROSS:
            ok = all(x in made or x in sources for x in read)
        else:
            ok = all(x in made or x in sources or x in here for x in read)
        if ok:
            got.append(e)
            here.update(e.outvars)
    return got


def _raw_sum(
    x: Any, producer: dict[Any, Any], sources: dict[Any, Source], joinable: Callable[[int], bool]
) -> list[list[tuple[Rows, ...]]] | None:
    """For each leading index of `x` the gathered rows, perhaps several side by side, that it is the sum of; `None` where it is
    something else. `joinable` are widths that rows side by side may have."""
    s = sources.get(x)
    if isinstance(s, Rows) and len(x.aval.shape) == 1 and x not in producer:
        return [[(s,)]]
    e = producer.get(x)
    if e is None:
        return None
    parts = [_raw_sum(y, producer, sources, joinable) if is_var(y) else None for y in e.invars]
    if any(p is None for p in parts):
        return None
    if e.primitive.name == "concatenate" and len(x.aval.shape) == 1:
        widths, found = {y.aval.shape[0] for y in e.invars}, [source for p in parts if p for o in p for source in o]
        whole = len(found) == len(parts) == 2 and len(widths) == 1 and joinable(*widths)
        return [[tuple(r for source in found for r in source)]] if whole and all(len(f) == 1 for f in found) else None
    if e.primitive.name in ("add", "add_any") and len(x.aval.shape) == 1:
        a, b = parts
        return [[*a[0], *b[0]]] if a and b and len(a[0]) + len(b[0]) <= 4 and len(a[0][0]) == len(b[0][0]) else None
    if e.primitive.name in ("stack", "concatenate") and len(x.aval.shape) == 2 and e.params.get("axis", 0) == 0:
        return [rows for p in parts if p for rows in p] if e.primitive.name == "stack" or e.params["dimension"] == 0 else None
    if e.primitive.name in ("broadcast_in_dim", "reshape", "expand_dims", "squeeze") and len(x.aval.shape) <= 2:
        return parts[0] if parts[0] and len(parts[0]) == int(np.prod(x.aval.shape[:-1])) else None
    return None


def _operands(eqn: Any, sources: dict[Any, Source], unit: int) -> list[list[tuple[Rows, ...]]]:
    """The rows that a product reads, for each leading index of its operand, which was stored."""
    x = eqn.invars[0]
    s = sources[x]
    assert isinstance(s, Rows), "a product's operand is stored"
    lead, k = int(np.prod(x.aval.shape[:-1])), x.aval.shape[-1] // unit
    return [[(dataclasses.replace(s, part=s.part + i * k),)] for i in range(lead)]


def _cheap(eqn: Any, producer: dict[Any, Any], level: dict[Any, int], domain: int) -> bool:
    """Whether a value follows from inputs by elementwise maths of the same domain alone."""
    if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name not in STRUCTURE:
        return False
    read = [x for x in eqn.invars if is_var(x) and level.get(x, STATIC) != STATIC]
    return all(level[x] == domain and (x not in producer or _cheap(producer[x], producer, level, domain)) for x in read)
