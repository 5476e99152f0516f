"""Asserts that what a level's program reads from memory is stored there before, and overwritten after.

A level's rows are divided among groups of thread blocks, and in all phases of one domain alike among their warpgroups. A thread
block loads and stores its own columns of a row, each element in one thread. So for any two accesses to an element:

- Those of a thread happen in the order of its program: early loads of a phase, products, then all else in any order.
- What a thread block stores, its other warpgroups see in later phases and levels, because they meet before each phase.
- What other thread blocks store is there after a barrier, in place of which products may poll. Only products and reductions of
  vectors read it.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from cavs.kernels._program.jaxprs import Atom, Domain, aval
from cavs.kernels._program.names import Tensor
from cavs.kernels._program.operations import (
    LevelProgram,
    Load,
    ParentSum,
    Phase,
    Product,
    ReduceChildren,
    ReduceVector,
    RowRead,
    Spread,
    tensors_of,
)
from cavs.kernels._program.widths import num_blocks


def check_accesses(program: LevelProgram, overwritten: Mapping[Tensor, Tensor]) -> None:
    """Raises `AssertionError` if a read could find another value than the one that it is to read.

    Args:
        program: The program.
        overwritten: Maps tensors that the launch is given to those that it stores in their place.
    """
    stores = [store for n, phase in enumerate(program.phases) for store in _stores(program, n, phase)]
    for n, store in enumerate(stores):
        if any(_meet(store, other) for other in stores[:n]):
            _refuse(store, "stored twice")
    for read in (read for n, phase in enumerate(program.phases) for read in _reads(program, n, phase)):
        for store in stores:
            if store.tensor == overwritten.get(read.tensor) and not _before(read, store):
                _refuse(read, f"read when {store.tensor} may have replaced it")
        written = [store for store in stores if store.tensor == read.tensor]
        if written and not _after(program, read, written):
            _refuse(read, "read before it is stored")


class _Rows(enum.Enum):
    """Which rows an operation accesses for a row (or edge) of its phase."""

    OWN = enum.auto()
    OTHER_DOMAIN = enum.auto()  # the edges of the row, or the row of the edge
    OTHER_LEVEL = enum.auto()  # by number


class _Access(NamedTuple):
    """A read or a store. `columns` are unit vectors, perhaps not only those of the thread block's `own_columns`."""

    phase: int
    domain: Domain
    tensor: Tensor
    base: int | None
    columns: range
    rows: _Rows = _Rows.OWN
    own_columns: bool = True
    early: bool = False  # before the stores of the phase


def _meet(a: _Access, b: _Access) -> bool:
    """Whether two stores write the same elements."""
    return (a.tensor, a.base) == (b.tensor, b.base) and not set(a.columns).isdisjoint(b.columns)


def _before(read: _Access, store: _Access) -> bool:
    """Whether a read comes before a store to the same element, whichever other threads run when: it is of the same thread."""
    same = read.rows == _Rows.OWN and read.own_columns and (read.domain, read.base) == (store.domain, store.base)
    return same and (read.phase, not read.early) <= (store.phase, False)


def _after(program: LevelProgram, read: _Access, stores: Sequence[_Access]) -> bool:
    """Whether a read finds what the launch stores in its tensor."""
    if read.rows == _Rows.OTHER_LEVEL:
        met = [n <= read.phase or n > max(store.phase for store in stores) for n in _barriers(program)]
    else:
        own = read.rows == _Rows.OWN
        stores = [s for s in stores if s.phase < read.phase and s.base == read.base and (s.domain == read.domain) == own]
        met = [max((store.phase for store in stores), default=0) < n <= read.phase for n in _barriers(program)]
    return {c for store in stores for c in store.columns}.issuperset(read.columns) and (read.own_columns or any(met))


def _barriers(program: LevelProgram) -> list[int]:
    return [n for n, phase in enumerate(program.phases) if phase.barrier]


def _stores(program: LevelProgram, n: int, phase: Phase) -> Iterator[_Access]:
    for value, place in ((store.value, store.place) for store in phase.stores):
        columns = _columns(program, place.offset // program.valid, value)
        yield _Access(n, phase.domain, place.tensor, place.base, columns)


def _reads(program: LevelProgram, n: int, phase: Phase) -> Iterator[_Access]:
    """What a phase reads of tensors of rows."""

    def of_row(read: RowRead, columns: range, own_rows: _Rows = _Rows.OWN, **how: bool) -> _Access:
        rows = own_rows if read.index is None else _Rows.OTHER_LEVEL
        return _Access(n, phase.domain, read.tensor, read.base, columns, rows, **how)

    for op in phase.operations:
        match op:
            case Load(value, RowRead() as source, early):
                yield of_row(source, _columns(program, source.part, value), early=early)
            case Load(value, ParentSum() as source, early):
                columns = _columns(program, 0, value)
                for tensor in tensors_of(source):
                    yield _Access(n, phase.domain, tensor, None, columns, _Rows.OTHER_LEVEL, early=early)
            case Product():
                width = op.size // op.joined // program.valid
                for read in op.rows():
                    yield of_row(read, range(read.part, read.part + width), own_columns=False, early=True)
            case Spread(_, operand, source) | ReduceChildren(_, operand, source, _):
                yield of_row(source, _columns(program, source.part, operand), _Rows.OTHER_DOMAIN)
            case ReduceVector(_, operand, source, _):
                yield of_row(source, _columns(program, source.part, operand), own_columns=False)


def _columns(program: LevelProgram, begin: int, value: Atom) -> range:
    return range(begin, begin + max(1, num_blocks(aval(value), program.valid)))


def _refuse(access: _Access, what: str) -> NoReturn:
    raise AssertionError(f"engine persistent: {access.tensor}, columns {access.columns}, is {what}, in phase {access.phase}")
