"""The buffers that XLA will allocate for a list of operations: how many bytes each has, and from when to when it is alive.

A buffer is free after the last operation that reads it, directly or through fused equations (`_memory.fusion`). Loops and
scatters update their operands in place if no later operation reads them. Equal equations run once.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax

from cavs._function.costs import bytes_of_var
from cavs._function.inline import inlined
from cavs._function.jaxprs import Atom, Eqn, Jaxpr, Var, is_var, opened, scan_parts
from cavs._memory.fusion import behind_views, in_place, overwritable, read_whole, stored_values, uses
from cavs._memory.operations import MOVES, Operation
from cavs._memory.order import ordered
from cavs._memory.packing import Buffer, packed
from cavs._memory.simplify import CALLED, simplified
from cavs._memory.split_k import parts_of_product


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
    results = [x for x in outs if is_var(x)]
    return peak_of_operations(operations, outs, results, any_order=jax.default_backend() != "cpu")


def _operations(jaxpr: Jaxpr) -> tuple[list[Operation], list[Atom]]:
    """The operations that XLA makes of a jaxpr, and what is read after the last of them."""
    eqns: list[Eqn] = []
    outs = inlined(jaxpr, {}, eqns, CALLED)
    eqns, outs = simplified(eqns, outs)
    return list(map(Operation, eqns)), outs


def peak_of_operations(
    operations: Sequence[Operation],
    outs: Iterable[Atom],
    results: Collection[Any] = (),
    kept: Collection[Any] = (),
    any_order: bool = False,
) -> Peak:
    """Returns the peak of the memory of buffers while operations run one after the other.

    Args:
        operations: the operations.
        outs: what is read after the last of them.
        results: values whose buffers belong to somebody else.
        kept: values that always have a buffer.
        any_order: whether XLA for GPUs chooses the order.
    """
    timeline = _Timeline(any_order)
    timeline.run(operations, outs, results, kept=kept)
    buffers = [buffer for buffer in timeline.buffers if buffer.size]
    changes = sorted([(b.start, 0, b.size) for b in buffers] + [(b.end, 1, -b.size) for b in buffers])
    total, most, when = 0, 0, 0
    for time, _, change in changes:
        total += change
        if total > most:
            most, when = total, time
    alive = [_maker(b) for b in buffers if b.start <= when <= b.end]
    return Peak(packed(buffers, by_size_alone=any_order), alive)


def _fits(x: Var, buffer: Buffer, size: int) -> bool:
    """Whether the buffer of `x` has the given size, or belongs to somebody else."""
    return bytes_of_var(x) == size and buffer.size in (0, size)


def _maker(buffer: Buffer) -> tuple[Var, Eqn]:
    """The last value that a buffer holds, with the equation that made it: a loop rather than its initial state."""
    return next(pair for pair in reversed(buffer.held) if pair[1].primitive.name not in MOVES or pair is buffer.held[0])


@dataclasses.dataclass
class _Timeline:
    """The buffers of operations that have run, and the time, which is the number of buffers that were made."""

    any_order: bool = False
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    now: int = 0

    def run(
        self,
        operations: Sequence[Operation],
        outs: Iterable[Atom],
        results: Collection[Any] = (),
        given: Sequence[Var] = (),
        slices: Sequence[Var] = (),
        kept: Collection[Any] = (),
    ) -> None:
        """Runs operations.

        Args:
            operations: the operations.
            outs: what is read after the last of them.
            results: values whose buffers belong to somebody else.
            given: inputs that may be overwritten, in buffers that exist already.
            slices: inputs that are parts of arrays.
            kept: values that always have a buffer.
        """
        last = [x for x in outs if is_var(x)]
        made = {v: o for o in operations for v in o.outvars}
        stored = stored_values(operations, made) | ({*last} & made.keys()) | set(kept)
        if self.any_order:
            operations = ordered(operations, last, stored)
        sources, ends = uses(operations, {*last}, stored)
        places = in_place(operations, stored)
        read = {*last}.union(*(o.reads for o in operations))
        # XLA drops results that no equation reads, but not those of a library or a kernel.
        dropped = {v for v, o in made.items() if o.facts.is_dropped and v not in read}
        elsewhere = _in_results(operations, set(results), ends, made) | dropped
        whole = {*last, *read_whole(operations, made)}
        of: dict[Any, Buffer] = {v: Buffer(0, self.now) for v in given} | self._copied(operations, made, slices)
        for i, o in enumerate(operations):
            freed = sorted((x for x in ends.get(i, ()) if x in of and x not in elsewhere), key=lambda x: of[x].start)
            dying = {x: made.get(x) for x in freed}
            if new := [v for v in o.outvars if sources[v] == {v}]:
                self.now += 1
                for v in new:
                    size = self._size(v, o, v in whole, v in elsewhere)
                    over = next((x for x in overwritable(o, places, dying) if _fits(x, of[x], size)), None)
                    if over is not None:
                        del dying[over]
                    of[v] = self._made(size) if over is None else of.pop(over)
                    of[v].held.append((v, o.eqn))
                for body in o.facts.bodies:
                    self._inside(o, body)
            for x in ends.get(i, ()):
                if x in of:
                    of.pop(x).end = self.now
        for buffer in of.values():
            buffer.end = self.now

    def _made(self, size: int) -> Buffer:
        """Returns a new buffer."""
        self.buffers.append(Buffer(size, self.now))
        return self.buffers[-1]

    def _size(self, v: Var, o: Operation, whole: bool, elsewhere: bool) -> int:
        """Returns the bytes of the buffer of a value. What reads a product in parts adds these up, unless it reads it whole."""
        size = 0 if elsewhere else bytes_of_var(v)
        parts = parts_of_product(o.eqn) if self.any_order and o.facts.name == "dot_general" else 1
        if parts > 1 and whole:
            self.buffers.append(Buffer(parts * bytes_of_var(v), self.now, self.now, [(v, o.eqn)]))
        return size if whole else size * parts

    def _copied(self, operations: Sequence[Operation], made: dict[Any, Operation], slices: Sequence[Var]) -> dict[Any, Buffer]:
        """Returns the buffers of parts of arrays that loops read. Other operations read them where they lie."""
        found: dict[Any, Buffer] = {}
        for o in operations:
            for x in [behind_views(x, made, o.facts.views) for x in o.reads] if o.facts.bodies else ():
                if x in slices and x not in found:
                    found[x] = self._made(bytes_of_var(x))
                    found[x].held.append((x, o.eqn))
        return found

    def _inside(self, o: Operation, body: Jaxpr) -> None:
        """Runs one step of a loop, or a branch."""
        if (key := (body, self.any_order)) not in o.facts.inside:
            o.facts.inside[key] = _step(o, body, self.any_order)
        step = o.facts.inside[key]
        self.buffers += [dataclasses.replace(b, start=b.start + self.now, end=b.end + self.now) for b in step.buffers]
        self.now += step.now + 1


def _step(o: Operation, body: Jaxpr, any_order: bool) -> _Timeline:
    """The buffers of one step of a loop, or of a branch."""
    operations, outs = _operations(body)
    carry: list[Any] = []
    slices: list[Any] = []
    if o.facts.name == "scan":
        consts, carry, slices = cast(Any, scan_parts(o.eqn.params, cast(Any, body.invars)))
        operations, early = _invariant(operations, {*body.constvars, *consts})
        outs = [*outs, *early]
    elif o.facts.name == "while" and len(outs) == len(o.outvars):
        carry = list(body.invars[len(body.invars) - len(outs) :])
    timeline = _Timeline(any_order)
    timeline.run(operations, outs, given=carry, slices=slices)
    return timeline


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
    alive = stored_values(operations, {v: o for o in operations for v in o.outvars}) & made.keys()
    others = [o for o in operations if not o.outvars or o.outvars[0] not in made]
    return [*moved, *others], [v for v in made if v in alive]


def _in_results(
    operations: Sequence[Operation], results: set[Any], ends: dict[int, list[Any]], made: dict[Any, Operation]
) -> set[Any]:
    """The values in the buffers of results: these, what loops begin with whose last states they are, and transposed products.

    XLA makes one product of a product and its transpose: that of the operands in the other order.
    """
    found = set(results)
    for i in reversed(range(len(operations))):
        o = operations[i]
        begin: list[Any] = []
        if o.facts.name == "scan":
            begin = cast(list[Any], scan_parts(o.eqn.params, cast(Any, o.invars))[1])
        elif o.facts.name == "while":
            begin = list(o.invars[-len(o.outvars) :])
        elif o.facts.name == "transpose" and _is_product(made.get(o.invars[0])):
            begin = list(o.invars)
        dying = ends.get(i, ())
        found.update(x for x, v in zip(begin, o.outvars, strict=False) if v in found and is_var(x) and x in dying)
    return found


def _is_product(o: Operation | None) -> bool:
    """Whether an operation is a product of two matrices."""
    return (
        o is not None
        and o.facts.name == "dot_general"
        and o.outvars[0].aval.ndim == 2
        and not o.eqn.params["dimension_numbers"][1][0]
    )
