"""The buffers that XLA will allocate for a list of equations: how many bytes each has, and from when to when it is alive.

XLA fuses cheap equations with what reads them, so most values never exist in memory. A value has a buffer if a product, a loop,
a kernel, a scatter or a sort makes or reads it. A buffer is free after the last equation that reads it, directly or through
fused equations. Loops and scatters update their operands in place if no later equation reads them. Equal equations run once.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax

from cavs._function.costs import CUMULATIVE, REDUCTIONS, bytes_of_var, is_costly
from cavs._function.inline import inlined
from cavs._function.jaxprs import CALLS, Atom, Eqn, Var, bodies_in, is_var, opened, scan_parts
from cavs._memory.packing import Buffer, packed
from cavs._memory.simplify import simplified

_VIEWS = {"reshape", "squeeze", "expand_dims"}
_UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"}
# A reference takes over the buffer of the array that it begins as, and the array that it is frozen to takes it back.
_MOVES = {"new_ref", "freeze"}
_IN_PLACE = {*_UPDATES, *_MOVES}
_MOVING = {"transpose", "rev", "gather", "dynamic_slice", "concatenate", "pad", "slice", "roll"}
_EXTERNAL = {"ffi_call", "native_call"}
_LAUNCHES = {"mpmd_map", "pallas_call", "core_map"}  # kernels: what is inside lies on the chip
_CALLS = (*CALLS, "checkpoint", "remat2", "core_call", "platform_dependent")
_REDUCTIONS = REDUCTIONS | CUMULATIVE
_GATHERS = {"gather"}
# XLA does not compute these twice to fuse them into two readers.
_EXPENSIVE = {"tanh", "logistic", "exp", "log", "div", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "log1p", "expm1"}

Sources = frozenset[Any]


class Peak(NamedTuple):
    """The memory of temporary buffers.

    Attributes:
        bytes: of the heap that holds them all.
        alive: the values that are alive when most bytes are, with the equations that make them; of loops also those inside.
    """

    bytes: int
    alive: list[tuple[Var, Eqn]]


def peak_of(closed: Any) -> Peak:
    """Returns the peak of temporary memory of a closed jaxpr, inputs and results aside."""
    jaxpr, _ = opened(closed)
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, _CALLS)
    eqns, outs = simplified(eqns, outs)
    return peak_of_eqns(eqns, outs, results=[x for x in outs if is_var(x)])


def peak_of_eqns(
    eqns: Sequence[Eqn],
    outs: Iterable[Atom],
    results: Collection[Any] = (),
    kept: Collection[Any] = (),
) -> Peak:
    """Returns the peak of the memory of buffers while equations run one after the other.

    Args:
        eqns: the equations.
        outs: what is read after the last of them.
        results: values whose buffers belong to somebody else.
        kept: values that always have a buffer.
    """
    timeline = _Timeline()
    timeline.run(eqns, outs, results, kept=kept)
    buffers = [buffer for buffer in timeline.buffers if buffer.size]
    changes = sorted([(b.start, 0, b.size) for b in buffers] + [(b.end, 1, -b.size) for b in buffers])
    total, most, when = 0, 0, 0
    for time, _, change in changes:
        total += change
        if total > most:
            most, when = total, time
    alive = [_maker(b) for b in buffers if b.start <= when <= b.end]
    return Peak(packed(buffers), alive)


def _maker(buffer: Buffer) -> tuple[Var, Eqn]:
    """The last value that a buffer holds, with the equation that made it: a loop rather than its initial state."""
    return next(pair for pair in reversed(buffer.held) if pair[1].primitive.name not in _MOVES or pair is buffer.held[0])


@dataclasses.dataclass
class _Timeline:
    """The buffers of equations that have run, and the time, which is the number of buffers that were made."""

    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    now: int = 0

    def run(
        self,
        eqns: Sequence[Eqn],
        outs: Iterable[Atom],
        results: Collection[Any] = (),
        given: Sequence[Var] = (),
        kept: Collection[Any] = (),
    ) -> None:
        """Runs equations. `given` are inputs that may be overwritten, in buffers that exist already."""
        outs = {x for x in outs if is_var(x)}
        made = {v: e for e in eqns for v in e.outvars}
        stored = _stored(eqns, made) | (outs & set(made)) | set(kept)
        sources, ends = _uses(eqns, outs, stored)
        in_place = _in_place(eqns, stored)
        read = outs | {x for e in eqns for x in e.invars if is_var(x)}
        # XLA drops results that no equation reads, but not those of a library or a kernel.
        dropped = {v for v in set(made) - read if made[v].primitive.name not in (*_EXTERNAL, *_LAUNCHES)}
        elsewhere = _in_results(eqns, set(results), ends) | dropped
        of: dict[Any, Buffer] = {v: Buffer(0, self.now) for v in given}
        for i, e in enumerate(eqns):
            dying = {x for x in ends.get(i, ()) if x in of and x not in elsewhere}
            new = [v for v in e.outvars if sources[v] == {v}]
            if new:
                self.now += 1
            for v in new:
                size = 0 if v in elsewhere else bytes_of_var(v)
                over = next((x for x in _overwritable(e, in_place) if x in dying and bytes_of_var(x) == size), None)
                if over is None:
                    of[v] = Buffer(size, self.now)
                    self.buffers.append(of[v])
                else:
                    dying.discard(over)
                    of[v] = of.pop(over)
                of[v].held.append((v, e))
            if new:
                self._inside(e)
            for x in ends.get(i, ()):
                if x in of:
                    of.pop(x).end = self.now
        for buffer in of.values():
            buffer.end = self.now

    def _inside(self, e: Eqn) -> None:
        """Runs one step of a loop, or each branch."""
        for body in bodies_in(e) if _stands_alone(e) and e.primitive.name not in _LAUNCHES else ():
            eqns: list[Eqn] = []
            outs = inlined(body, {}, eqns, _CALLS)
            eqns, outs = simplified(eqns, outs)
            carry: list[Any] = []
            if e.primitive.name == "scan":
                consts, carry, _ = cast(Any, scan_parts(e.params, cast(Any, body.invars)))
                eqns, early = _invariant(eqns, {*body.constvars, *consts})
                outs = [*outs, *early]
            elif e.primitive.name == "while" and len(outs) == len(e.outvars):
                carry = list(body.invars[len(body.invars) - len(outs) :])
            self.run(eqns, outs, given=carry)
            self.now += 1


def _stands_alone(e: Eqn) -> bool:
    """Whether an equation is an operation of its own, with buffers for its results."""
    name = e.primitive.name
    return name in (*_IN_PLACE, *_REDUCTIONS, *_EXTERNAL) or is_costly(e) or bool(bodies_in(e))


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
            # XLA fuses the operands of a reduction, and the rows of a scatter, into it. Products read views of buffers.
            operands = [] if name in _REDUCTIONS else e.invars[:1] if name in _IN_PLACE else e.invars
            views = _VIEWS | {"transpose"} if name == "dot_general" else _VIEWS
            stored.update(_behind_views(x, made, views) for x in operands if is_var(x))
        elif name == "optimization_barrier":
            stored.update(_behind_views(x, made) for x in e.invars if is_var(x))
        elif name in _GATHERS:
            stored.update(_behind_views(x, made) for x in e.invars[:1] if is_var(x))
        elif name in _EXPENSIVE and len(readers.get(e.outvars[0], ())) > 1:
            stored.update(e.outvars)
    return stored & set(made)


def _behind_views(x: Any, made: dict[Any, Eqn], views: Collection[str] = _VIEWS) -> Any:
    while x in made and made[x].primitive.name in views and is_var(made[x].invars[0]):
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


def _invariant(eqns: list[Eqn], consts: set[Any]) -> tuple[list[Eqn], list[Var]]:
    """Moves the equations of a loop that depend on its constants alone to its beginning, where XLA for CPUs runs them once.

    Returns:
        All equations, and the values with buffers that live as long as the loop.
    """
    if jax.default_backend() != "cpu":
        return eqns, []
    known, moved = set(consts), []
    for e in eqns:
        operands = [x for x in e.invars if is_var(x)]
        if operands and not e.effects and all(x in known for x in operands):
            known.update(e.outvars)
            moved.append(e)
    made = {v: e for e in moved for v in e.outvars}
    alive = _stored(eqns, {v: e for e in eqns for v in e.outvars}) & set(made)
    others = [e for e in eqns if not e.outvars or e.outvars[0] not in made]
    return [*moved, *others], [v for v in made if v in alive]


def _in_place(eqns: Sequence[Eqn], stored: set[Any]) -> dict[Any, Sources]:
    """For each value the buffers that it reads only at its own place: a fusion that makes it can overwrite them."""
    found: dict[Any, Sources] = {}
    for e in eqns:
        found.update({x: frozenset([x]) for x in e.invars if is_var(x) and x not in found})
        alike = e.invars if e.primitive.name in _VIEWS else _alike(e)
        read = frozenset().union(*(found[x] for x in alike if is_var(x)))
        found.update({v: frozenset([v]) if v in stored else read for v in e.outvars})
    return found


def _in_results(eqns: Sequence[Eqn], results: set[Any], ends: dict[int, list[Any]]) -> set[Any]:
    """The values in the buffers of results: these, and what loops begin with whose last states they are."""
    found = set(results)
    for i in reversed(range(len(eqns))):
        e = eqns[i]
        begin: list[Any] = []
        if e.primitive.name == "scan":
            begin = cast(list[Any], scan_parts(e.params, cast(Any, e.invars))[1])
        elif e.primitive.name == "while":
            begin = list(e.invars[-len(e.outvars) :])
        dying = ends.get(i, ())
        found.update(x for x, v in zip(begin, e.outvars, strict=False) if v in found and is_var(x) and x in dying)
    return found


def _overwritable(e: Eqn, sources: dict[Any, Sources]) -> list[Any]:
    """The buffers that an equation may overwrite with its results if it is the last to read them."""
    name = e.primitive.name
    if name in _IN_PLACE:
        operands = e.invars[:1]
    elif name in _EXTERNAL:
        operands = [e.invars[i] for i, _ in e.params["input_output_aliases"]]
    elif name == "while":
        operands = e.invars[e.params["cond_nconsts"] + e.params["body_nconsts"] :]
    else:
        operands = e.invars if name == "scan" or name in _VIEWS else _alike(e)
    return [s for x in operands if is_var(x) for s in sources[x]]


def _alike(e: Eqn) -> list[Atom]:
    """The operands of a cheap equation that it reads at the places that it writes."""
    if _stands_alone(e) or e.primitive.name in _MOVING:
        return []
    return [x for x in e.invars if x.aval.shape == e.outvars[0].aval.shape]
