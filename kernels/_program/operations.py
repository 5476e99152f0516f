"""The operations of a level's program: loads, products, equations and stores, in phases.

`_program.phases.cut` creates them once. Layouts, kernels and cost models read them, and none of them interprets the
equations' variables again.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import numpy as np

from cavs.kernels._program.jaxprs import Domain, Eqn, Var, aval, is_var
from cavs.kernels._program.names import Index, Tensor

# Where a value comes from, or goes to.


@dataclasses.dataclass(frozen=True)
class RowRead:
    """A row of a tensor for each row (or edge) r of the phase.

    Attributes:
        tensor: The tensor.
        index: If given, the row is `index[r]`, otherwise r.
        base: If given, `scalars[base]` is added to the row.
        part: The block of the tensor's columns at which the value begins.
    """

    tensor: Tensor
    index: Index | None = None
    base: int | None = None
    part: int = 0


@dataclasses.dataclass(frozen=True)
class ParentSum:
    """The sum of `direct`, if given, and of the rows that a vertex's parents wrote for it.

    `direct` and each of `parts` name row `index[r]` of a tensor; a negative index contributes nothing. If `first` and `count`
    are given, a vertex may have several parents: rows `index[e]`, for `count[r]` values of e from `first[r]` on.
    """

    direct: tuple[Tensor, Index] | None
    parts: tuple[tuple[Tensor, Index], ...]
    first: Index | None = None
    count: Index | None = None


@dataclasses.dataclass(frozen=True)
class ConstantRead:
    """A STATIC array, the same for all rows."""

    tensor: Tensor


Source: TypeAlias = RowRead | ParentSum | ConstantRead


def tensors_of(source: Source) -> set[Tensor]:
    """The tensors that a source reads."""
    if isinstance(source, ParentSum):
        return {tensor for tensor, _ in (*source.parts, *([source.direct] if source.direct else []))}
    return {source.tensor}


@dataclasses.dataclass(frozen=True)
class RowAddress:
    """Row r of a tensor for each row (or edge) r of the phase; `scalars[base]` is added to the row.

    The value begins at element `offset` of the row, where units are not padded.
    """

    tensor: Tensor
    base: int | None = None
    offset: int = 0


# The operations. Values are the variables of the equations; an operation's identity is that of the object.


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Reads an input of the level, or a value that an earlier phase stored.

    An `early` load is issued when a tile begins, so that its latency overlaps the products; another when it is needed.
    """

    value: Var
    source: Source
    early: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """x @ W for each leading index of x.

    Attributes:
        eqn: The `dot_general`.
        weight: The variable of W.
        axis: The axis of W that is contracted.
        operands: For each leading index of x, its sources, which are summed; each source is some rows side by side.
        blocks: The number of unit vectors in a result.
    """

    eqn: Eqn
    weight: Var
    axis: int
    operands: tuple[tuple[tuple[RowRead, ...], ...], ...]
    blocks: int

    @property
    def value(self) -> Var:
        """The variable of the result."""
        return self.eqn.outvars[0]

    @property
    def size(self) -> int:
        """The number of elements that the product sums over."""
        return aval(self.weight).shape[self.axis]

    @property
    def joined(self) -> int:
        """The number of rows, side by side, that each source consists of."""
        return len(self.operands[0][0])

    def rows(self) -> Iterator[RowRead]:
        """All rows that the product reads."""
        return (row for operand in self.operands for source in operand for row in source)

    def tensors(self) -> set[Tensor]:
        """The tensors that the product reads."""
        return {row.tensor for row in self.rows()}


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An elementwise equation, or one that moves whole unit vectors. Its operands are values of the phase, or literals."""

    eqn: Eqn


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Gives each edge the value of the row that it belongs to; the value is read where it is stored."""

    value: Var
    operand: Var
    source: RowRead


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceChildren:
    """Reduces ("sum" or "max") the values of a row's edges, read where they are stored."""

    value: Var
    operand: Var
    source: RowRead
    operation: str


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceVector:
    """Reduces ("sum", "max" or "min") all elements of a row's vector, read where it is stored."""

    value: Var
    operand: Var
    source: RowRead
    operation: str


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """Writes a value to a tensor."""

    value: Var
    place: RowAddress


Operation: TypeAlias = Load | Product | Equation | Spread | ReduceChildren | ReduceVector | Store
Across: TypeAlias = Spread | ReduceChildren | ReduceVector  # these read values where they are stored
_Kind = TypeVar("_Kind", bound=Operation)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """Operations of one domain that a thread block runs without synchronising with others.

    Attributes:
        domain: ROW or EDGE.
        operations: Loads, products, equations in an order in which they can be computed, then stores.
        barrier: Whether the thread blocks of a group must synchronise before the phase.
    """

    domain: Domain
    operations: tuple[Operation, ...]
    barrier: bool

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """The operations of one class."""
        return tuple(op for op in self.operations if isinstance(op, kind))

    @property
    def products(self) -> tuple[Product, ...]:
        """The phase's products."""
        return self.of(Product)

    @property
    def stores(self) -> tuple[Store, ...]:
        """The phase's stores."""
        return self.of(Store)

    @property
    def early_loads(self) -> tuple[Load, ...]:
        """The loads that are issued when a tile begins."""
        return tuple(load for load in self.of(Load) if load.early)

    def in_order(self, stores: tuple[Store, ...]) -> Iterator[Operation]:
        """Yields the operations that each store needs, and the store, for one store after another.

        The products of a phase run before; a `Product` is yielded where its result is first needed.
        """
        producers: dict[Var, Operation] = {}
        for op in self.operations:
            if isinstance(op, Equation):
                producers |= dict.fromkeys(op.eqn.outvars, op)
            elif not isinstance(op, Store):
                producers[op.value] = op
        done: set[Operation] = set()

        def needed(value: Var) -> Iterator[Operation]:
            op = producers[value]
            if op in done:
                return
            if isinstance(op, Equation):
                for x in filter(is_var, op.eqn.invars):
                    yield from needed(x)
            done.add(op)
            yield op

        for store in stores:
            yield from needed(store.value)
            yield store

    def reads(self) -> set[Tensor]:
        """The tensors that operations other than products read."""
        sources = {op.source for op in self.operations if isinstance(op, Load | Across)}
        return {tensor for source in sources for tensor in tensors_of(source)}

    def operands(self) -> set[Tensor]:
        """The tensors that products read."""
        return {tensor for product in self.products for tensor in product.tensors()}

    def writes(self) -> set[Tensor]:
        """The tensors that the phase stores to."""
        return {store.place.tensor for store in self.stores}


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The shape of a tensor for values between phases: one row for each row (or edge), of a width, in a dtype."""

    domain: Domain
    width: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProgram:
    """What a launch runs for every vertex of a level.

    Attributes:
        phases: The phases, in order.
        valid: The number of elements of a unit vector; every vector consists of whole unit vectors.
        unit: The width of a unit vector in memory: zeros follow its `valid` elements.
        scratch: The tensors for values between phases.
        halves: The tensors of 16 bits for products, and the tensors that they are copies of; see `_program.halves`.
        flows: Whether only products read what thread blocks write for each other, so that `LaunchConfig.dataflow` is possible.
        scales: Maps weights that are multiplied by a power of two when they are packed to the constants that hold its inverse.
    """

    phases: tuple[Phase, ...]
    valid: int
    unit: int
    scratch: dict[Tensor, Scratch]
    halves: dict[Tensor, Tensor]
    flows: bool
    scales: dict[Var, Tensor]

    def size(self, width: int) -> int:
        """The width in memory of a vector of `width` elements."""
        return width // self.valid * self.unit

    def products(self) -> list[Product]:
        """The products of all phases."""
        return [product for phase in self.phases for product in phase.products]

    def tensors(self) -> set[Tensor]:
        """The tensors that some phase reads."""
        return {tensor for phase in self.phases for tensor in phase.reads() | phase.operands()}

    def stored(self) -> set[Tensor]:
        """The tensors that some phase writes."""
        return {tensor for phase in self.phases for tensor in phase.writes()}

    def exchanged(self) -> set[Tensor]:
        """The tensors that phases write and products read: the thread blocks of a group write parts of them for each other."""
        return self.stored() & {tensor for phase in self.phases for tensor in phase.operands()}
