"""Engine `native`: where values of F lie while its library computes them, and operations before they are encoded."""

import dataclasses
import enum
from typing import Any, NamedTuple, TypeAlias

from cavs._function.domains import Domain

NOT_GATHERED = -2


class Place(enum.IntEnum):
    """Where a base lies; `Place` in kernels/_cpu/program.h."""

    ARENA = 0
    ROWS = 1
    STATIC = 2
    LITERAL = 3


class Shift(enum.IntEnum):
    """Where row 0 lies in a tensor; `Shift` in kernels/_cpu/program.h."""

    STATE = 0
    PADDED = 1
    NONE = 2


class Opcode(enum.IntEnum):
    """`Opcode` in kernels/_cpu/program.h."""

    ELEMENTWISE = 0
    GATHER = 1
    MOVE = 2
    REDUCE = 3
    PRODUCT = 4
    DOT = 5
    SPREAD = 6
    CHILDREN = 7
    SCATTER = 8


@dataclasses.dataclass(eq=False)
class Base:
    """Memory of `n` elements for each row or edge; a static value or a literal has them once.

    `inside` is set if the memory is a part of another base. `tensor` names a tensor of the call, or is a literal's bits.
    """

    n: int
    domain: Domain
    place: Place = Place.ARENA
    tensor: Any = None
    shift: Shift = Shift.NONE
    inside: "tuple[Base, int] | None" = None

    def root(self) -> "tuple[Base, int]":
        """Returns the outermost base that contains this one, and where this one begins there."""
        if self.inside is None:
            return self, 0
        base, offset = self.inside[0].root()
        return base, offset + self.inside[1]


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """Elements of a base: `offset + step * i`. With `step` 0 all are one element."""

    base: Base
    offset: int = 0
    step: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """A child's row of a tensor of states; `child` is its number, -1 for the child of an edge."""

    tensor: Any
    child: int
    n: int


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Values that follow each other, of these sizes. They become one base if something reads them as one."""

    of: "list[tuple[Value, int]]"


Value: TypeAlias = View | Gathered | Parts


@dataclasses.dataclass(eq=False)
class Op:
    """An operation, as in kernels/_cpu/program.h. `weight` is (name of the tensor, whether it is turned, K, N)."""

    opcode: Opcode
    domain: Domain
    n: int
    to: View | None = None
    code: int = 0
    sources: list[View] = dataclasses.field(default_factory=list)
    imm: int = 0
    tensor: Any = None
    child: int = 0
    weight: Any = None
    bias: View | None = None
    gathered: list[tuple[int, Any]] = dataclasses.field(default_factory=list)  # of PRODUCT: (child, tensor) or NOT_GATHERED
    runs: list[tuple[View, int, int]] = dataclasses.field(default_factory=list)  # of MOVE: from, to, count
    sizes: list[int] = dataclasses.field(default_factory=list)
    last: bool = False  # it may overwrite what others read, so it comes after all of them

    def reads(self) -> list[Base]:
        """Returns the outermost bases that it reads."""
        views = [*self.sources, *(v for v, _, _ in self.runs), *([self.bias] if self.bias else [])]
        return [v.base.root()[0] for v in views]


class Segment(NamedTuple):
    """Operations, which run on a few rows at a time (a chunk), and products after them, which run on all rows of a tile."""

    ops: list[Op]
    products: list[Op]


class Slot(NamedTuple):
    """A part of the arena: room for `n` elements for each row or edge, of a tile, or with `chunk` of a chunk."""

    n: int
    domain: Domain
    chunk: bool
