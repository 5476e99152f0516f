"""What the device operations must know of a phase's products: which rows, which packed weights, and where sums go."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows that one warpgroup holds as arrays of `shape` (rows, units): from `row` on, none past `last`."""

    shape: tuple[int, int]
    row: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One packed weight.

    Attributes:
        tiles: The number of its tiles of 16 columns, for each thread block.
        half: Whether the last tile has only 8 columns.
        operands: The operands that it multiplies.
        columns: For each operand, the first column of the partial sums.
        offset: The word at which it begins in a thread block's packed weights; of a wide product, its first column among those
            of a chunk.
    """

    tiles: int
    half: bool
    operands: tuple[int, ...]
    columns: tuple[int, ...]
    offset: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return 16 * self.tiles - 8 * self.half


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """Rows that a product reads.

    Attributes:
        column: The column at which the K elements begin.
        awaited: Whether other thread blocks may still have to write them (`LaunchConfig.dataflow`).
    """

    column: int
    awaited: bool = False


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """The products of a phase that sum over the same K; see `_mosaic.products.product`.

    Attributes:
        rows: The rows of a tile.
        splits: The warps that divide K.
        slots: The partial sums that these leave: as many, or half of them if they add theirs two by two.
        chunk: The elements of K that are read at a time.
        chunks: The number of chunks.
        sources: The rows that are read.
        joined: The number of sources that lie side by side, each with an equal part of K.
        operands: For each operand, the joined sources whose sum it is.
        weights: The weights.
        words: The 32-bit words of a thread block's packed weights.
        resident: Whether the weights are in shared memory.
        tight: Whether three tf32 weights are packed into two words.
        precision: See `LaunchConfig`.
        in_flight: See `LaunchConfig`.
        spins: See `LaunchConfig`.
        hb: The units that a thread block owns.
        split: The thread blocks that divide K as well: `chunks` and `slots` are those of one of them.
        ring: Of a wide product, the word at which its weights begin (`_layout.pack.pack_ring`).
    """

    rows: int
    splits: int
    slots: int
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
    split: int
    ring: int = 0

    @property
    def all_slots(self) -> int:
        """The partial sums of a product: those of its own warps, and one of each other thread block that divides K."""
        return self.slots + self.split - 1
