"""The buffers that XLA will allocate for a list of equations, and how many bytes of them are alive at most.

XLA fuses cheap equations with what reads them, so most values never exist in memory. A value has a buffer if a product, a loop,
a scatter or a sort makes or reads it. A buffer is free after the last equation that reads it, directly or through fused
equations. Loops and scatters update their operands in place if nobody reads them afterwards.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

from cavs._function.costs import CUMULATIVE, REDUCTIONS, bytes_of_var, is_costly
from cavs._function.inline import inlined
from cavs._function.jaxprs import Atom, Eqn, Var, bodies_in, is_var, opened, scan_parts

_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose"}
_UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"}
_REDUCTIONS = REDUCTIONS | CUMULATIVE
_GATHERS = {"gather", "dynamic_slice"}
# XLA does not compute these twice to fuse them into two readers.
_EXPENSIVE = {"tanh", "logistic", "exp", "log", "div", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "log1p", "expm1"}

Sources = frozenset[Any]


class Peak(NamedTuple):
    """The moment at which most memory is in use.

    Attributes:
        bytes: of the buffers that are alive.
        alive: the values in these buffers, with the equations that make them; of loops also those inside.
    """

    bytes: int
    alive: list[tuple[Var, Eqn]]


def peak_of(closed: Any) -> Peak:
    """Returns the peak of temporary memory of a closed jaxpr, inputs and results aside."""
    jaxpr, _ = opened(closed)
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns)
    return peak_of_eqns(_live(eqns, outs), outs, results=[x for x in outs if is_var(x)])


def peak_of_eqns(
    eqns: Sequence[Eqn],
    outs: Iterable[Atom],
    results: Collection[Any] = (),
    given: Sequence[Var] = (),
    kept: Collection[Any] = (),
) -> Peak:
    """Returns the peak of the memory of buffers while equations run one after the other.

    Args:
        eqns: the equations.
        outs: what is read after the last of them.
        results: values whose buffers belong to somebody else.
        given: inputs that may be overwritten. Their bytes are there before, and are not counted.
        kept: values that have a buffer in any case.
    """
    outs = {x for x in outs if is_var(x)}
    made = {v: e for e in eqns for v in e.outvars}
    stored = _stored(eqns, made) | (outs & set(made)) | set(kept)
    sources, ends = _uses(eqns, outs, stored)
    start = alive = sum(map(bytes_of_var, given))
    live, most = set(given), Peak(start, [])
    read = outs | {x for e in eqns for x in e.invars if is_var(x)}
    elsewhere = set(results) | (set(made) - read)  # XLA drops results that nobody reads
    for i, e in enumerate(eqns):
        new = [v for v in e.outvars if sources[v] == {v}]
        dying = {x for x in ends.get(i, ()) if x in live and x not in elsewhere}
        for v in new:
            size = 0 if v in elsewhere else bytes_of_var(v)
            over = next((x for x in _overwritable(e, sources) if x in dying and bytes_of_var(x) == size), None)
            if over is None:
                alive += size
            else:
                dying.discard(over)
                live.discard(over)
            live.add(v)
        if new:
            inside = _inside(e)
            if alive + inside.bytes > most.bytes:
                mine = [(v, made[v]) for v in live if v in made and v not in elsewhere]
                most = Peak(alive + inside.bytes, mine + inside.alive)
        for x in ends.get(i, ()):
            if x in live:
                live.discard(x)
                alive -= 0 if x in elsewhere else bytes_of_var(x)
    return most._replace(bytes=most.bytes - start)


def _live(eqns: list[Eqn], outs: Iterable[Atom]) -> list[Eqn]:
    """The equations whose results are read."""
    read, kept = {x for x in outs if is_var(x)}, []
    for e in reversed(eqns):
        if e.effects or any(v in read for v in e.outvars):
            kept.append(e)
            read.update(x for x in e.invars if is_var(x))
    return kept[::-1]


def _stands_alone(e: Eqn) -> bool:
    """Whether an equation is an operation of its own, with buffers for its results."""
    name = e.primitive.name
    return name in _UPDATES or name in _REDUCTIONS or is_costly(e) or bool(bodies_in(e))


def _stored(eqns: Sequence[Eqn], made: dict[Any, Eqn]) -> set[Any]:
    """The values among `made` that have a buffer."""
    readers: dict[Any, set[int]] = {}
    for i, e in enumerate(eqns):
        for x in e.invars:
            if is_var(x):
                readers.setdefault(x, set()).add(i)
    stored: set[Any] = set()
    for e in eqns:
        name = e.primitive.name
        if _stands_alone(e):
            stored.update(e.outvars)
            # What a reduction reads, and the rows of a scatter, are fused into it; products read views of buffers.
            operands = [] if name in _REDUCTIONS else e.invars[:1] if name in _UPDATES else e.invars
            stored.update(_behind_views(x, made) if name == "dot_general" else x for x in operands if is_var(x))
        elif name == "optimization_barrier":
            stored.update(x for x in e.invars if is_var(x))
        elif name in _GATHERS:
            stored.update(_behind_views(x, made) for x in e.invars[:1] if is_var(x))
        elif name in _EXPENSIVE and len(readers.get(e.outvars[0], ())) > 1:
            stored.update(e.outvars)
    return stored & set(made)


def _behind_views(x: Any, made: dict[Any, Eqn]) -> Any:
    while x in made and made[x].primitive.name in _VIEWS and is_var(made[x].invars[0]):
        x = made[x].invars[0]
    return x


def _uses(eqns: Sequence[Eqn], outs: set[Any], stored: set[Any]) -> tuple[dict[Any, Sources], dict[int, list[Any]]]:
    """For each value the buffers that it is computed from, and the buffers that each equation is the last to read."""
    sources: dict[Any, Sources] = {}
    last: dict[Any, int] = {}
    for i, e in enumerate(eqns):
        for x in e.invars:
            if is_var(x):
                sources.setdefault(x, frozenset([x]))
        read = frozenset().union(*(sources[x] for x in e.invars if is_var(x)))
        if e.primitive.name == "optimization_barrier":
            sources.update({v: sources[x] if is_var(x) else frozenset() for x, v in zip(e.invars, e.outvars, strict=True)})
            last.update(dict.fromkeys(read, i))
        elif any(v in stored for v in e.outvars):
            sources.update({v: frozenset([v]) for v in e.outvars})
            last.update(dict.fromkeys(read, i))
            last.update(dict.fromkeys(e.outvars, i))
        else:
            sources.update(dict.fromkeys(e.outvars, read))
    last.update(dict.fromkeys((s for x in outs for s in sources.get(x, ())), len(eqns)))
    ends: dict[int, list[Any]] = {}
    for x, i in last.items():
        ends.setdefault(i, []).append(x)
    return sources, ends


def _overwritable(e: Eqn, sources: dict[Any, Sources]) -> list[Any]:
    """The buffers that an equation may overwrite with its results if it is the last to read them."""
    name = e.primitive.name
    if name in _UPDATES:
        operands = e.invars[:1]
    elif name == "while":
        operands = e.invars[e.params["cond_nconsts"] + e.params["body_nconsts"] :]
    else:
        operands = e.invars if name == "scan" or not _stands_alone(e) else []
    return [s for x in operands if is_var(x) for s in sources[x]]


def _inside(e: Eqn) -> Peak:
    """The peak of one step of a loop, or of the larger branch."""
    most = Peak(0, [])
    for body in bodies_in(e) if _stands_alone(e) else ():
        eqns: list[Eqn] = []
        outs = inlined(body, {}, eqns)
        carry: list[Any] = []
        if e.primitive.name == "scan":
            carry = cast(list[Any], scan_parts(e.params, cast(Any, body.invars))[1])
        elif e.primitive.name == "while" and len(outs) == len(e.outvars):
            carry = list(body.invars[len(body.invars) - len(outs) :])
        most = max(most, peak_of_eqns(eqns, outs, given=carry), key=lambda peak: peak.bytes)
    return most
