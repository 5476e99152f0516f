"""Names of the arrays that a launch reads and writes: tensors of rows, and vectors of indices."""

import dataclasses
import enum
from typing import TypeAlias


class TensorRole(enum.StrEnum):
    """What a tensor holds."""

    STATIC = "static"  # a value that is the same for all rows
    STATE = "state"  # a leaf of the vertices' states
    CROSSING = "cross"  # an output of the eager part
    EXTRA = "extra"  # a value that the lazy part reads
    KEPT = "kept"  # a value that the forward keeps for the backward
    REPLACED = "replaced"  # values kept side by side, in the rows of which the cut cotangent of the same number will be stored
    NUM_CHILDREN = "num_children"
    PUSHED = "g"  # the cotangent of a state, from the pushes
    EXTRA_COTANGENT = "extra_ct"
    TO_SLOT = "up"  # the cotangent of a child's state, by the child's slot
    TO_EDGE = "edge_up"  # the cotangent of a child's state, by the child's edge
    CUT = "cut"  # a cut cotangent, for the lazy batch
    OPERAND = "operand"  # a forward value that the lazy batch reads
    SCRATCH = "scratch"  # a value that one phase stores for a later one


class IndexRole(enum.StrEnum):
    """What a vector of integers holds."""

    SCALARS = "scalars"  # see `_program.arrays.NUM_LEVELS`
    PART_STARTS = "starts"  # for each level and part of the schedule, its first row
    FIRST_EDGE = "first"  # of each row
    EDGE_COUNT = "count"  # of each row
    EDGE_OWNER = "edge_owner"  # of each edge: the row that it belongs to
    EDGE_CHILD = "edge_child"  # of each edge: its child's row in the states
    KID = "kid"  # of each row: the row in the states of its child in one slot
    PUSHED_ROW = "g_row"  # of each row: the row of its pushed cotangent
    PARENT = "parent"  # the edges by which a row's parents gather it
    PARENT_SLOT = "parent_slot"  # the same as rows of `TensorRole.TO_SLOT`
    PARENT_FIRST = "parent_first"  # of each row: its first entry in the two above
    PARENT_COUNT = "parent_count"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The name of a tensor: the `number`-th of its role; `half` for its copy of 16 bits, which products read."""

    role: TensorRole
    number: int | None = None
    half: bool = False

    def __str__(self) -> str:
        return f"{self.role.value}{'' if self.number is None else self.number}{'.half' * self.half}"

    def __lt__(self, other: "Tensor") -> bool:
        return str(self) < str(other)  # JAX sorts the keys of a dict


@dataclasses.dataclass(frozen=True)
class Index:
    """The name of a vector of integers: the `number`-th of its role."""

    role: IndexRole
    number: int | None = None

    def __str__(self) -> str:
        return f"{self.role.value}{'' if self.number is None else self.number}"

    def __lt__(self, other: "Index") -> bool:
        return str(self) < str(other)


Name: TypeAlias = Tensor | Index
SCALARS, PART_STARTS = Index(IndexRole.SCALARS), Index(IndexRole.PART_STARTS)
FIRST_EDGE, EDGE_COUNT = Index(IndexRole.FIRST_EDGE), Index(IndexRole.EDGE_COUNT)
EDGE_OWNER, EDGE_CHILD = Index(IndexRole.EDGE_OWNER), Index(IndexRole.EDGE_CHILD)
