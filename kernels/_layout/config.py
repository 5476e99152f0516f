"""The layout of a launch on the chip: groups of thread blocks, tiles, and how products are computed."""

import dataclasses

from cavs.kernels.precision import PRECISIONS

PARTS = 16  # the schedule assigns each graph to one of so many parts; a group takes PARTS / groups of them
EXCHANGE_WORDS = 8  # of shared memory for each warpgroup if `LaunchConfig.split` > 1, for `_mosaic.exchange`
STAGES = 4  # the chunks of weights that a wide product has in shared memory (`_mosaic.wide`)
RING_WORDS = 4 * STAGES  # of shared memory, for their barriers


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The layout of a launch on the chip.

    Attributes:
        hb: The units that a thread block owns.
        groups: The number of groups of thread blocks, each with all weights.
        rows: The rows of a tile, which one warpgroup runs.
        warpgroups: The warpgroups of a thread block.
        precision: Of products: a name of `kernels.precision.PRECISIONS`.
        resident: Whether weights stay in shared memory; otherwise they stream from L2.
        tight: Whether three tf32 weights are packed into two words (`_layout.pack`), so that a thread block holds half as many
            again.
        in_flight: The reads of rows, 16 bytes each, that a thread has outstanding.
        paired: Whether four warps add their sums of a product two by two, so that these take half the room.
        spins: After so many unsuccessful reads of a counter, a thread block reports it and goes on.
        interpret: The module whose device operations run, in Pallas' interpreter, for tests (`_body.device`); `None` on a GPU.
        dataflow: Whether groups never synchronise, and products poll the rows that they read instead
            (`LevelProgram.flows`): these hold `UNWRITTEN` before.
        split: The thread blocks of a cluster that divide K of every product, each for the units of all of them, and send each
            other sums (`_mosaic.exchange`).
        spread: Whether the groups share the rows of every level, so that one large graph occupies the chip. All thread blocks
            then synchronise before each level.
        registers: Whether each warp keeps its part of the weights in registers (`_mosaic.held`).
        wide: Whether the launch runs the widest levels alone: `groups` share their rows tile by tile, and weights stream
            (`_mosaic.wide`).
    """

    hb: int
    groups: int
    rows: int
    warpgroups: int
    precision: str
    resident: bool
    tight: bool = False
    in_flight: int = 12
    paired: bool = False
    spins: int = 1 << 22
    interpret: str | None = None
    dataflow: bool = False
    split: int = 1
    spread: bool = False
    registers: bool = False
    wide: bool = False

    @property
    def chunk(self) -> int:
        """The elements of K that a product reads at a time."""
        return 32 if self.wide else PRECISIONS[self.precision].chunk
