"""Engine `native`: follows the values of a program through memory, and asserts that nothing overwrites what is still read.

Values share slots of the arena, and some replace what the call is given: in rows of a vertex, or of its children. The library
runs the operations of a segment on one chunk of rows after another, and then its products on all rows. `check_accesses` does so
for two chunks, with the number of a base in place of its elements: each operation must find the numbers of what it reads.
Chunks do not share rows: no vertex accesses the rows of another one of its level, or in a forest of another one's children.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cavs._engines.native_operations import CODE
from cavs._engines.native_values import NOT_GATHERED, Base, Op, Opcode, Place, Segment, Slot, View

_CHUNKS = 0, 1
_GIVEN = 0  # the number of all that the call is given


def check_accesses(segments: Sequence[Segment], bases: Mapping[Base, int | None], slots: Sequence[Slot]) -> None:
    """Raises `AssertionError` if an operation reads memory that holds something else than the value that it is to read.

    Args:
        segments: The operations.
        bases: All memory that they access, each with its slot of the arena; `None` if it lies elsewhere.
        slots: The slots of the arena.
    """
    memory = _Memory(segments, bases, slots)
    for segment in segments:
        for chunk in _CHUNKS:
            for op in segment.ops:
                memory.run(op, chunk)
        for op in segment.products:
            for chunk in _CHUNKS:
                memory.run(op, chunk)


class _Elements(NamedTuple):
    """Elements of a slot of the arena, or of a tensor's rows."""

    where: Any
    which: slice

    def overlaps(self, other: "_Elements") -> bool:
        """Returns whether an element is among both."""
        apart = self.which.stop <= other.which.start or other.which.stop <= self.which.start
        return self.where == other.where and not apart


class _Memory:
    """The number of the base whose values each element of a slot, or of a tensor's rows, holds; of each chunk."""

    def __init__(self, segments: Sequence[Segment], bases: Mapping[Base, int | None], slots: Sequence[Slot]):
        made = {op.to.base.root()[0] for segment in segments for ops in segment for op in ops if op.to}
        self._bases, self._slots = bases, slots
        self._number = {base: n if base in made else _GIVEN for n, base in enumerate(bases, 1)}
        self._arena: dict[int, tuple[Base, dict[int, np.ndarray]]] = {}  # by slot: a base, and by chunk its known elements
        self._rows: dict[tuple[Any, int], np.ndarray] = {}  # by tensor and chunk
        self._children: dict[tuple[Any, int], list[int]] = {}  # whose rows of a tensor the vertices of a chunk have written

    def run(self, op: Op, chunk: int) -> None:
        """Reads and writes what an operation does."""
        for child, tensor in _gathers(op):
            if (tensor, chunk) in self._children:
                _refuse(op, f"gathers rows of {tensor} of child {child}, which are overwritten")
        read = [self._read(op, view, count, chunk) for view, count in _reads(op)]
        if op.opcode == Opcode.SCATTER:
            self._scatter(op, chunk)
        for begin, count in _writes(op):
            assert op.to is not None
            if any(map(self._write(op, op.to, begin, count, chunk).overlaps, read)):
                _refuse(op, "writes where it reads")

    def _read(self, op: Op, view: View, count: int, chunk: int) -> "_Elements":
        """Returns what it reads."""
        base, begin = view.base.root()
        if base.place in (Place.STATIC, Place.LITERAL):
            return _Elements(base, slice(0, 0))
        begin += view.offset
        which = slice(begin, begin + 1 + view.step * (count - 1), max(view.step, 1))
        if which.stop > base.n:
            _refuse(op, f"reads beyond a value of {base.n} elements")
        if base.place == Place.ARENA:
            held, known = self._arena.get(self._slot(op, base), (None, {}))
            if held is not base or chunk not in known or not known[chunk][which].all():
                _refuse(op, "reads a value of the arena that is not there")
            return _Elements(self._bases[base], which)
        if (self._rows_of(base, chunk)[which] != self._number[base]).any():
            _refuse(op, f"reads rows of {base.tensor} that are overwritten, or not yet written")
        return _Elements(base.tensor, which)

    def _write(self, op: Op, to: View, begin: int, count: int, chunk: int) -> "_Elements":
        """Returns what it writes."""
        base, offset = to.base.root()
        which = slice(begin + offset + to.offset, begin + offset + to.offset + count)
        if which.stop > base.n:
            _refuse(op, f"writes beyond a value of {base.n} elements")
        if base.place == Place.ARENA:
            slot = self._slot(op, base)
            held, known = self._arena.get(slot, (None, {}))
            if held is not base or self._slots[slot].chunk and chunk not in known:
                known = {}
            self._arena[slot] = base, known
            known.setdefault(chunk, np.zeros(base.n, bool))[which] = True
            return _Elements(slot, which)
        if base.place != Place.ROWS:
            _refuse(op, "writes a constant")
        self._rows_of(base, chunk)[which] = self._number[base]
        return _Elements(base.tensor, which)

    def _scatter(self, op: Op, chunk: int) -> None:
        """A row is added to any number of times, but overwritten once. Child -1 stands for all children."""
        before = self._children.setdefault((op.tensor, chunk), [])
        if op.code != CODE["add"] and (op.child in before or -1 in before or op.child == -1 and before):
            _refuse(op, f"overwrites rows of {op.tensor} of child {op.child}, which are overwritten")
        before.append(op.child)

    def _rows_of(self, base: Base, chunk: int) -> np.ndarray:
        return self._rows.setdefault((base.tensor, chunk), np.full(base.n, _GIVEN))

    def _slot(self, op: Op, base: Base) -> int:
        slot = self._bases[base]
        if slot is None or self._slots[slot].n < base.n or self._slots[slot].domain != base.domain:
            _refuse(op, "accesses a slot that does not fit")
        return slot


def _gathers(op: Op) -> list[tuple[int, Any]]:
    """The children whose rows it reads, and the tensors."""
    if op.opcode == Opcode.GATHER:
        return [(op.child, op.tensor)]
    return [(child, tensor) for child, tensor in op.gathered if child != NOT_GATHERED]


def _reads(op: Op) -> Iterator[tuple[View, int]]:
    """The views that it reads, and the number of elements of each."""
    sizes = op.sizes
    match op.opcode:
        case Opcode.MOVE:
            yield from ((view, count) for view, _, count in op.runs)
        case Opcode.REDUCE:
            yield op.sources[0], sizes[0] * sizes[1] * sizes[2]
        case Opcode.PRODUCT:
            yield from ((view, op.weight[2]) for view in op.sources)
        case Opcode.DOT:
            batch, m, n, k = sizes[:4]
            yield from zip(op.sources, (batch * m * k, batch * n * k), strict=True)
        case _:
            yield from ((view, op.n) for view in op.sources)
    if op.bias is not None:
        yield op.bias, op.n


def _writes(op: Op) -> list[tuple[int, int]]:
    """Where it writes in `op.to`, and how many elements."""
    if op.opcode == Opcode.SCATTER:
        return []
    return [(to, count) for _, to, count in op.runs] if op.opcode == Opcode.MOVE else [(0, op.n)]


def _refuse(op: Op, what: str) -> NoReturn:
    raise AssertionError(f"engine native: {op.opcode.name} of {op.n} elements {what}")
