"""The buffers that XLA will allocate for a list of equations: how many bytes each has, and from when to when it is alive.

XLA fuses cheap equations with what reads them, so most values never exist in memory. A value has a buffer if a product, a loop,
a kernel, a scatter or a sort makes or reads it. A buffer is free after the last equation that reads it, directly or through
fused equations. Loops and scatters update their operands in place if no later equation reads them. Equal equations run once.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax

from cavs._function.costs import bytes_of_var
from cavs._function.inline import inlined
from cavs._function.jaxprs import CALLS, Atom, Eqn, Jaxpr, Var, is_var, opened, scan_parts
from cavs._memory.operations import MOVES, Operation
from cavs._memory.packing import Buffer, packed
from cavs._memory.simplify import simplified

_CALLS = (*CALLS, "checkpoint", "remat2", "core_call", "platform_dependent")

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
    operations, outs = _operations(opened(closed)[0])
    return peak_of_operations(operations, outs, results=[x for x in outs if is_var(x)])


def _operations(jaxpr: Jaxpr) -> tuple[list[Operation], list[Atom]]:
    """The operations that XLA makes of a jaxpr, and what is read after the last of them."""
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, _CALLS)
    eqns, outs = simplified(eqns, outs)
    return list(map(Operation, eqns)), outs


def peak_of_operations(
    operations: Sequence[Operation],
    outs: Iterable[Atom],
    results: Collection[Any] = (),
    kept: Collection[Any] = (),
) -> Peak:
    """Returns the peak of the memory of buffers while operations run one after the other.

    Args:
        operations: the operations.
        outs: what is read after the last of them.
        results: values whose buffers belong to somebody else.
        kept: values that always have a buffer.
    """
    timeline = _Timeline()
    timeline.run(operations, outs, results, kept=kept)
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
    return next(pair for pair in reversed(buffer.held) if pair[1].primitive.name not in MOVES or pair is buffer.held[0])


@dataclasses.dataclass
class _Timeline:
    """The buffers of operations that have run, and the time, which is the number of buffers that were made."""

    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    now: int = 0

    def run(
        self,
        operations: Sequence[Operation],
        outs: Iterable[Atom],
        results: Collection[Any] = (),
        given: Sequence[Var] = (),
        kept: Collection[Any] = (),
    ) -> None:
        """Runs operations. `given` are inputs that may be overwritten, in buffers that exist already."""
        outs = {x for x in outs if is_var(x)}
        made = {v: o for o in operations for v in o.outvars}
        stored = _stored(operations, made) | (outs & made.keys()) | set(kept)
        sources, ends = _uses(operations, outs, stored)
        in_place = _in_place(operations, stored)
        read = outs.union(*(o.reads for o in operations))
        # XLA drops results that no equation reads, but not those of a library or a kernel.
        dropped = {v for v, o in made.items() if o.facts.is_dropped and v not in read}
        elsewhere = _in_results(operations, set(results), ends) | dropped
        of: dict[Any, Buffer] = {v: Buffer(0, self.now) for v in given}
        for i, o in enumerate(operations):
            dying = {x: made.get(x) for x in ends.get(i, ()) if x in of and x not in elsewhere}
            new = [v for v in o.outvars if sources[v] == {v}]
            if new:
                self.now += 1
            for v in new:
                size = 0 if v in elsewhere else bytes_of_var(v)
                over = next((x for x in _overwritable(o, in_place, dying) if bytes_of_var(x) == size), None)
                if over is None:
                    of[v] = Buffer(size, self.now)
                    self.buffers.append(of[v])
                else:
                    del dying[over]
                    of[v] = of.pop(over)
                of[v].held.append((v, o.eqn))
            if new:
                for body in o.facts.bodies:
                    self._inside(o, body)
            for x in ends.get(i, ()):
                if x in of:
                    of.pop(x).end = self.now
        for buffer in of.values():
            buffer.end = self.now

    def _inside(self, o: Operation, body: Jaxpr) -> None:
        """Runs one step of a loop, or a branch."""
        if body not in o.facts.inside:
            o.facts.inside[body] = _step(o, body)
        step = o.facts.inside[body]
        self.buffers += [dataclasses.replace(b, start=b.start + self.now, end=b.end + self.now) for b in step.buffers]
        self.now += step.now + 1


def _step(o: Operation, body: Jaxpr) -> _Timeline:
    """The buffers of one step of a loop, or of a branch."""
    operations, outs = _operations(body)
    carry: list[Any] = []
    if o.facts.name == "scan":
        consts, carry, _ = cast(Any, scan_parts(o.eqn.params, cast(Any, body.invars)))
        operations, early = _invariant(operations, {*body.constvars, *consts})
        outs = [*outs, *early]
    elif o.facts.name == "while" and len(outs) == len(o.outvars):
        carry = list(body.invars[len(body.invars) - len(outs) :])
    timeline = _Timeline()
    timeline.run(operations, outs, given=carry)
    return timeline


def _stored(operations: Sequence[Operation], made: dict[Any, Operation]) -> set[Any]:
    """The values among `made` that have a buffer."""
    readers: Counter[Any] = Counter()
    for o in operations:
        readers.update(set(o.reads))
    stored: set[Any] = set()
    for o in operations:
        if o.facts.alone or o.facts.twice and readers[o.outvars[0]] > 1:
            stored.update(o.outvars)
        stored.update(_behind_views(x, made, o.facts.views) for i in o.facts.stored if is_var(x := o.invars[i]))
    return stored & made.keys()


def _behind_views(x: Any, made: dict[Any, Operation], views: Collection[str]) -> Any:
    while x in made and made[x].facts.name in views and made[x].reads:
        x = made[x].reads[0]
    return x


def _uses(operations: Sequence[Operation], outs: set[Any], stored: set[Any]) -> tuple[dict[Any, Sources], dict[int, list[Any]]]:
    """For each value the buffers that it is computed from, and the buffers that each operation is the last to read."""
    sources: dict[Any, Sources] = {}
    last: dict[Any, int] = {}
    for i, o in enumerate(operations):
        for x in o.reads:
            if x not in sources:
                sources[x] = frozenset([x])
        read = _union([sources[x] for x in o.reads])
        if o.facts.is_barrier:
            sources.update({v: sources[x] if is_var(x) else frozenset() for x, v in zip(o.invars, o.outvars, strict=True)})
            last.update(dict.fromkeys(read, i))
        elif any(v in stored for v in o.outvars):
            sources.update({v: frozenset([v]) for v in o.outvars})
            last.update(dict.fromkeys(read, i))
            last.update(dict.fromkeys(o.outvars, i))
        else:
            sources.update(dict.fromkeys(o.outvars, read))
    last.update(dict.fromkeys((s for x in outs for s in sources.get(x, ())), len(operations)))
    ends: dict[int, list[Any]] = {}
    for x, i in last.items():
        ends.setdefault(i, []).append(x)
    return sources, ends


def _union(sets: Sequence[Sources]) -> Sources:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


def _invariant(operations: list[Operation], consts: set[Any]) -> tuple[list[Operation], list[Var]]:
    """Moves the operations of a loop that depend on its constants alone to its beginning, where XLA for CPUs runs them once.

    Returns:
        All operations, and the values with buffers that live as long as the loop.
    """
    if jax.default_backend() != "cpu":
        return operations, []
    known, moved = set(consts), []
    for o in operations:
        if o.reads and not o.eqn.effects and all(x in known for x in o.reads):
            known.update(o.outvars)
            moved.append(o)
    made = {v: o for o in moved for v in o.outvars}
    alive = _stored(operations, {v: o for o in operations for v in o.outvars}) & made.keys()
    others = [o for o in operations if not o.outvars or o.outvars[0] not in made]
    return [*moved, *others], [v for v in made if v in alive]


def _in_place(operations: Sequence[Operation], stored: set[Any]) -> dict[Any, Sources]:
    """For each value the buffers that it reads only at its own place: a fusion that makes it can overwrite them."""
    found: dict[Any, Sources] = {}
    for o in operations:
        for x in o.reads:
            if x not in found:
                found[x] = frozenset([x])
        alike = o.reads if o.facts.is_view else [x for i in o.facts.alike if is_var(x := o.invars[i])]
        read = _union([found[x] for x in alike]) if alike else frozenset()
        found.update({v: frozenset([v]) if v in stored else read for v in o.outvars})
    return found


def _in_results(operations: Sequence[Operation], results: set[Any], ends: dict[int, list[Any]]) -> set[Any]:
    """The values in the buffers of results: these, and what loops begin with whose last states they are."""
    found = set(results)
    for i in reversed(range(len(operations))):
        o = operations[i]
        begin: list[Any] = []
        if o.facts.name == "scan":
            begin = cast(list[Any], scan_parts(o.eqn.params, cast(Any, o.invars))[1])
        elif o.facts.name == "while":
            begin = list(o.invars[-len(o.outvars) :])
        dying = ends.get(i, ())
        found.update(x for x, v in zip(begin, o.outvars, strict=False) if v in found and is_var(x) and x in dying)
    return found


def _overwritable(o: Operation, sources: dict[Any, Sources], dying: dict[Any, Operation | None]) -> Iterator[Any]:
    """The buffers among `dying` that an operation, the last to read them, may overwrite with its results.

    On a GPU a fusion overwrites no result of a product or of a loop: XLA shares the buffer of an operand only if it is all that
    another operation returns, and these return tuples, a product with the workspace of its library.
    """
    tuples = not o.facts.alone and jax.default_backend() != "cpu"
    places = (x for i in o.facts.overwritable if is_var(x := o.invars[i]))
    for x in (x for place in places for x in sources[place] if x in dying):
        maker = dying[x]
        if not (tuples and maker is not None and maker.facts.costly):
            yield x
