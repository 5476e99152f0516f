"""Engine `native`: follows the values of a program through memory, and asserts that nothing overwrites what is still read.

Values share slots of the arena, and some replace what the call is given: in rows of a vertex, or of its children. The library
runs the operations of a segment on one chunk of rows after another, and then its products on all rows. `check_accesses` does so
for two chunks, with the number of a base in place of its elements: each operation must find the numbers of what it reads.
Chunks do not share rows: no vertex accesses the rows of another one of its level, or in a forest of another one's children.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cavs._engines.native.operations import CODE
from cavs._engines.native.values import NOT_GATHERED, Base, Op, Opcode, Place, Segment, Slot, View

_CHUNKS = 0, 1
_GIVEN = 0  # the number of all that the call is given


def check_accesses(segments: Sequence[Segment], bases: Mapping[Base, int | None], slots: Sequence[Slot]) -> None:
    """Raises `AssertionError` if an operation finds another value than that which it is to read, or if a result is overwritten.

    `bases`: all memory that they access, each with its slot of the arena; `None` if it lies elsewhere. `slots`: the slots of
    the arena.
    """
    memory = _Memory(segments, bases, slots)
    for segment in segments:
        for chunk in _CHUNKS:
            for op in segment.ops:
                memory.run(op, chunk)
        for op in segment.products:
            for chunk in _CHUNKS:
                memory.run(op, chunk)
    memory.check_results()


class _Piece(NamedTuple):
    """Elements of a base."""

    base: Base
    which: slice

    def meets(self, other: "_Piece", slots: Mapping[Base, int | None]) -> bool:
        """Returns whether two pieces may share memory."""
        overlap = self.which.start < other.which.stop and other.which.start < self.which.stop
        if self.base is other.base:
            return overlap
        if Place.ARENA in (self.base.place, other.base.place):
            return self.base.place == other.base.place and slots[self.base] == slots[other.base]
        return self.base.tensor == other.base.tensor and self.base.place == other.base.place == Place.ROWS and overlap


def _piece(view: View, begin: int, count: int) -> _Piece:
    """Returns `count` elements of a view's base, with the view's step, from element `begin` on."""
    base, offset = view.base.root()
    begin += offset
    elements = slice(begin, begin + (1 + view.step * (count - 1) if count else 0), max(view.step, 1))
    assert base.place == Place.LITERAL or elements.stop <= base.n, f"engine native: access to {elements} of {base.n} elements"
    return _Piece(base, elements)


class _Memory:
    """For each chunk, the number of the base whose values the elements of slots and of rows hold."""

    def __init__(self, segments: Sequence[Segment], bases: Mapping[Base, int | None], slots: Sequence[Slot]):
        written = {op.to.base.root()[0] for segment in segments for ops in segment for op in ops if op.to}
        self._bases, self._slots = bases, slots
        self._number = {base: n if base in written else _GIVEN for n, base in enumerate(bases, 1)}
        self._arena: dict[int, tuple[Base, dict[int, np.ndarray]]] = {}  # by slot: a base, and by chunk its known elements
        self._rows: dict[tuple[Any, int], np.ndarray] = {}  # by tensor and chunk
        self._children: dict[tuple[Any, int], list[int]] = {}  # whose rows of a tensor the vertices of a chunk have written

    def run(self, op: Op, chunk: int) -> None:
        """Reads and writes what an operation does."""
        for child, tensor in _gathers(op):
            if (tensor, chunk) in self._children:
                _refuse(op, f"gathers rows of {tensor} of child {child}, which are overwritten")
        reads = [_piece(view, view.offset, count) for view, count in _reads(op)]
        writes = [_piece(op.to, op.to.offset + begin, count) for begin, count in _writes(op) if op.to]
        if any(a.meets(b, self._bases) for a in reads for b in writes):
            _refuse(op, "writes where it reads")
        for piece in reads:
            self._read(op, piece, chunk)
        for piece in writes:
            self._write(op, piece, chunk)
        if op.opcode == Opcode.SCATTER:
            self._scatter(op, chunk)

    def check_results(self) -> None:
        """Asserts that nothing has overwritten what the operations stored in rows."""
        for base, number in self._number.items():
            if number and base.place == Place.ROWS:
                assert all((self._rows_of(base, chunk) == number).all() for chunk in _CHUNKS), f"{base.tensor} is overwritten"

    def _read(self, op: Op, piece: "_Piece", chunk: int) -> None:
        base, elements = piece
        if base.place == Place.ARENA:
            held, known = self._arena.get(self._slot(op, base), (None, {}))
            if held is not base or chunk not in known or not known[chunk][elements].all():
                _refuse(op, "reads a value of the arena that is not there")
        elif base.place == Place.ROWS and (self._rows_of(base, chunk)[elements] != self._number[base]).any():
            _refuse(op, f"reads rows of {base.tensor} that are overwritten, or not yet written")

    def _write(self, op: Op, piece: "_Piece", chunk: int) -> None:
        base, elements = piece
        if base.place == Place.ARENA:
            slot = self._slot(op, base)
            held, known = self._arena.get(slot, (None, {}))
            if held is not base or self._slots[slot].chunk and chunk not in known:
                known = {}
            self._arena[slot] = base, known
            known.setdefault(chunk, np.zeros(base.n, bool))[elements] = True
        elif base.place == Place.ROWS:
            self._rows_of(base, chunk)[elements] = self._number[base]
        else:
            _refuse(op, "writes a constant")

    def _scatter(self, op: Op, chunk: int) -> None:
        """Notes a write to rows of children: sums may be repeated, but a row is overwritten once. Child -1 means all."""
        written = self._children.setdefault((op.tensor, chunk), [])
        if op.code != CODE["add"] and (op.child in written or -1 in written or op.child == -1 and written):
            _refuse(op, f"overwrites rows of {op.tensor} of child {op.child}, which are overwritten")
        written.append(op.child)

    def _rows_of(self, base: Base, chunk: int) -> np.ndarray:
        return self._rows.setdefault((base.tensor, chunk), np.full(base.n, _GIVEN))

    def _slot(self, op: Op, base: Base) -> int:
        slot = self._bases[base]
        if slot is None or self._slots[slot].n < base.n or self._slots[slot].domain != base.domain:
            _refuse(op, "accesses a slot that does not fit")
        return slot


def _gathers(op: Op) -> list[tuple[int, Any]]:
    """Returns the children whose rows an operation reads, and from which tensors."""
    if op.opcode == Opcode.GATHER:
        return [(op.child, op.tensor)]
    return [(child, tensor) for child, tensor in op.gathered if child != NOT_GATHERED]


def _reads(op: Op) -> Iterator[tuple[View, int]]:
    """Yields the views that an operation reads, and the number of elements of each."""
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
    """Returns where an operation writes in `op.to`, and how many elements."""
    if op.opcode == Opcode.SCATTER:
        return []
    return [(to, count) for _, to, count in op.runs] if op.opcode == Opcode.MOVE else [(0, op.n)]


def _refuse(op: Op, problem: str) -> NoReturn:
    raise AssertionError(f"engine native: {op.opcode.name} of {op.n} elements {problem}")
