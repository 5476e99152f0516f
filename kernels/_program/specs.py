"""What a level's program is made of: where values come from and go to, products, phases (see `_program.phases`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

STATIC, ROW, EDGE = 0, 1, 2
# What the numbers that a launch writes and its products read are before (`Config.dataflow`): the bits of a NaN that no
# computation makes (GPUs make 0x7FFFFFFF, and its negative; in 16 bits 0x7FFF, and its negative).
UNWRITTEN = np.uint32(0xFFE5A5A5).astype(np.int32)
UNWRITTEN_HALF = np.uint16(0xFFE5)
HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}  # precisions of products of numbers of 16 bits
FACTOR = {"bf16": 1.0, "f16": 256.0}  # what these are multiplied by: float16 keeps its eleven bits from 2^-14 on


class Unfit(ValueError):
    """Why a program cannot run in the persistent kernels; its text names the equation."""


# Where the value of an input of the program comes from. `tensor`, `index`, ... are names of arrays.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row `base + r` of a tensor (`base`: an index into the kernel's scalars); at an index, row `index[r]`; r: row or edge."""

    tensor: str
    index: str | None = None
    base: int | None = None
    part: int = 0  # block of the tensor's columns at which the value begins


@dataclasses.dataclass(frozen=True)
class Sum:
    """`direct`, where there is one, plus what a vertex's parents left for it.

    `direct` and each of `parts` are (tensor, index): row `index[r]` of the tensor, none where that is negative. With `first`
    and `count` a vertex may have several parents: rows `index[e]` for e from `first[r]`, `count[r]` of them.
    """

    direct: tuple[str, str] | None
    parts: tuple[tuple[str, str], ...]
    first: str | None = None
    count: str | None = None


@dataclasses.dataclass(frozen=True)
class Constant:
    """A STATIC array, the same for all rows."""

    tensor: str


Source = Rows | Sum | Constant


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows that one warpgroup holds as arrays of `shape` (rows, units): from `row`, none past `last`."""

    shape: tuple[int, int]
    row: Any
    last: Any


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One packed weight: its tiles of 16 columns (for each CTA), the operands it multiplies, and where they leave sums.

    The last tile may be `half` a one, of 8 columns.
    """

    tiles: int
    half: bool
    operands: tuple[int, ...]
    columns: tuple[int, ...]  # first column of the partial sums, per operand
    offset: int  # in words within a CTA's packed weights; of a wide product its first column among those of a chunk

    @property
    def width(self) -> int:
        """Columns."""
        return 16 * self.tiles - 8 * self.half


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """Rows that a product reads: the column at which its K numbers begin."""

    column: int
    awaited: bool = False  # other CTAs may be about to write it (`Config.dataflow`)


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """All that `_mosaic.products.product` must know; see there.

    What is read is `joined` sources side by side, each with as much of K; `operands` count such.
    """

    rows: int
    splits: int  # warps that divide K
    slots: int  # sums that these leave: as many, or half of them where they add theirs two by two
    chunk: int
    chunks: int
    sources: tuple[SourceSpec, ...]
    joined: int
    operands: tuple[tuple[int, ...], ...]
    weights: tuple[WeightSpec, ...]
    words: int
    resident: bool
    tight: bool
    precision: str
    in_flight: int
    spins: int
    hb: int
    split: int  # CTAs that divide K as well: `chunks` and `slots` are of one of them
    ring: int = 0  # of a wide product: the word at which its weights begin (`_layout.pack.pack_ring`)

    @property
    def all_slots(self) -> int:
        """Sums of a product: its own warps', and one of each other CTA that divides K."""
        return self.slots + self.split - 1


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is stored: rows `base + r` of a tensor."""

    tensor: str
    base: int | None = None


@dataclasses.dataclass(eq=False)
class Product:
    """x @ W for each leading index of x: `operands[i]` are the sources (summed) of the i-th, each of them rows side by side."""

    eqn: Any
    weight: Any  # variable of W
    axis: int  # of W that is contracted
    operands: list[list[tuple[Rows, ...]]]
    blocks: int  # of units in a result

    @property
    def joined(self) -> int:
        """How many rows, side by side, each source is."""
        return len(self.operands[0][0])

    def tensors(self) -> set[str]:
        """Names of the tensors that it reads."""
        return {r.tensor for operand in self.operands for source in operand for r in source}


@dataclasses.dataclass(eq=False)
class Phase:
    """Equations of one domain, the products among them, and what they store."""

    domain: int
    eqns: dict[Any, Any]  # variable -> the equation that makes it here
    products: list[Product]
    stores: dict[Any, list[Place]]
    meet: bool = False  # whether the group must meet before
    inputs: dict[Any, Source] = dataclasses.field(default_factory=dict)  # sources of what it stores for later phases to read


@dataclasses.dataclass(eq=False)
class Level:
    """A program for one level, ready to be made into a kernel."""

    phases: list[Phase]
    sources: dict[Any, Source]  # of inputs and of values stored by earlier phases
    level: dict[Any, int]
    valid: int  # numbers in a unit vector
    unit: int  # as it lies in memory: zeros after the valid numbers
    scratch: dict[str, tuple[int, int, Any]]  # tensors for values between phases: name -> (domain, width, dtype)
    halves: dict[str, str] = dataclasses.field(default_factory=dict)  # in 16 bits, for products -> of which tensor; `halves`
    flows: bool = False  # products alone read what CTAs make for each other: `Config.dataflow` is possible

    def size(self, width: int) -> int:
        """How wide a vector of so many numbers is in memory."""
        return width // self.valid * self.unit

    def tensors(self) -> set[str]:
        """Names of the tensors that some phase reads."""
        read = {x for p in self.phases for e in p.eqns.values() for x in e.invars if is_var(x)}
        read |= {v for p in self.phases for v in p.stores}
        found = {name for p in self.phases for q in p.products for name in q.tensors()}
        used = [self.sources[x] for x in read & set(self.sources)]
        for s in [*used, *(s for p in self.phases for s in p.inputs.values())]:
            found |= tensors_of(s)
        return found

    def stored(self) -> set[str]:
        """Names of the tensors that some phase writes."""
        return {place.tensor for p in self.phases for places in p.stores.values() for place in places}

    def exchanged(self) -> set[str]:
        """Names of the tensors that phases write and products read: the CTAs of a group make parts of them for each other."""
        return self.stored() & {name for p in self.phases for q in p.products for name in q.tensors()}


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor that a launch writes: (rows, width) of `dtype`, for rows or edges (`domain`) from `base` on.

    Unless `sparse`, rows after the last vertex are filled with zeros; those before `base` never are.
    """

    rows: int
    width: int
    dtype: Any
    domain: int
    base: int | None = None
    sparse: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of a launch, by the names that the `Level` uses.

    `tensors`: (rows, width), read; `constants`: the same for all rows, flat float32 vectors; `integers`: int32 vectors,
    among them `scalars` (NUM_LEVELS ... and the bases that sources name), `starts` (levels * PARTS + 1: first row of each
    part at each level), `first` and `count` (a row's edges), `edge_owner`; `updated`: tensors that are read and written;
    `made`: what the launch writes.
    """

    tensors: dict[str, Any]
    constants: dict[str, Any]
    integers: dict[str, Any]
    updated: dict[str, Any]
    made: dict[str, Made]


def concatenated(vectors: dict[str, Any], dtype: Any) -> tuple[Any, dict[str, tuple[int, int]]]:
    """All vectors as one, and (begin, size) of each."""
    parts = [jnp.asarray(x, dtype).reshape(-1) for x in vectors.values()]
    ends = np.cumsum([x.shape[0] for x in parts])
    whole = jnp.concatenate([*parts, jnp.zeros(4, dtype)])
    return whole, {k: (int(e) - x.shape[0], x.shape[0]) for k, x, e in zip(vectors, parts, ends, strict=True)}


def tensors_of(source: Source) -> set[str]:
    """Names of the tensors that an input is read from."""
    if isinstance(source, Sum):
        return {name for name, _ in (*source.parts, *([source.direct] if source.direct else []))}
    return {source.tensor}


def is_var(x: Any) -> bool:
    """Whether `x` is a variable rather than a literal."""
    return not isinstance(x, jex.Literal)


def describe(eqn: Any) -> str:
    """An equation in few words, for messages."""
    shapes = ", ".join(x.aval.str_short() for x in eqn.invars)
    return f"{eqn.primitive.name}({shapes}) -> {', '.join(v.aval.str_short() for v in eqn.outvars)}"


def unit_width(program_vars: Sequence[Any]) -> int:
    """The greatest common divisor of the last axes of all values that are vectors."""
    widths = [v.aval.shape[-1] for v in program_vars if v.aval.shape and int(np.prod(v.aval.shape)) > 1]
    return int(np.gcd.reduce(widths)) if widths else 1


def padded_unit(valid: int, multiple: int = 16) -> int:
    """How wide a unit vector of so many numbers is in memory: a multiple of 16, as the products of `mma.sync` are.

    Where it must be padded, up to a multiple of 32, so that more warps share a sum over it than one.
    """
    if valid % multiple == 0:
        return valid
    step = max(multiple, 16 if valid < 16 else 32)
    return -(-valid // step) * step


def blocks(aval: Any, unit: int) -> tuple[int, ...]:
    """A value's shape in blocks of one unit vector; () for a scalar of a row."""
    if int(np.prod(aval.shape)) == 1:
        return ()
    return (*aval.shape[:-1], aval.shape[-1] // unit)


def stored_dtype(aval: Any) -> Any:
    """How a value lies in memory: bools as int32."""
    return np.dtype(np.int32) if aval.dtype == np.bool_ else aval.dtype


def half_of(dtype: Any) -> str | None:
    """The precision of which numbers of a dtype are: see `HALVES`."""
    return next((name for name, half in HALVES.items() if dtype == half), None)


def num_blocks(aval: Any, unit: int) -> int:
    """Unit vectors in a value; 0 for a scalar of a row."""
    shape = blocks(aval, unit)
    return int(np.prod(shape)) if shape else 0
