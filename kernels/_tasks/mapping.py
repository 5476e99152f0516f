"""The task mapping of MegaKernels (section 5.5, Algorithm 1): the order in which a launch begins its tasks.

A launch has four kinds of tasks. FILTER tasks come first, as all products need them. The others belong to groups of tiles, and
a group passes INPUT, PRODUCT and OUTPUT one after another. Tasks of different groups are interleaved: memory-bound and
compute-bound tasks then run at the same time, and a task begins a distance after those that it depends on, so that it seldom
waits.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

FILTER, INPUT, PRODUCT, OUTPUT = range(4)  # the kinds of tasks


class TaskCounts(NamedTuple):
    """The numbers of tasks.

    Attributes:
        filters: Tasks of kind FILTER, in all (N_F in the paper).
        groups: Groups of tiles.
        inputs: Tasks of kind INPUT in a group (S_I).
        products: Tasks of kind PRODUCT in a group, one for each block of a filter matrix (S_G).
        outputs: Tasks of kind OUTPUT in a group (S_O).
    """

    filters: int
    groups: int
    inputs: int
    products: int
    outputs: int


@dataclasses.dataclass(frozen=True)
class Distances:
    """The parameters of the mapping, in groups of tiles.

    Attributes:
        share: How many groups multiply one block of a filter matrix one after another, while it is in the cache (M).
        lead: How many groups INPUT is ahead of PRODUCT; at least `share` (D_IG, there counted in tasks).
        lag: How many times `share` groups OUTPUT is behind PRODUCT; at least 1 (D_GO).
    """

    share: int
    lead: int
    lag: int

    def __post_init__(self) -> None:
        if self.share < 1 or self.lead < self.share or self.lag < 1:
            raise ValueError(f"Distances: got {self}; expected share >= 1, lead >= share and lag >= 1.")

    @property
    def input_slots(self) -> int:
        """For how many groups transformed inputs must be kept: the next INPUT that overwrites one comes after its PRODUCTs."""
        return self.lead + self.share

    @property
    def output_slots(self) -> int:
        """For how many groups products must be kept."""
        return (self.lag + 1) * self.share


def task_mapping(counts: TaskCounts, distances: Distances) -> np.ndarray:
    """Returns the tasks in their order, int32 of shape (tasks, 3): kind, group, and number in the group.

    Each task comes after all tasks that it depends on, and after those whose results it overwrites if the results of
    `input_slots` and `output_slots` groups are kept. So thread blocks that take tasks in this order never wait in a circle.
    """
    share = distances.share

    def tasks(kind: int, each: int, shift: int) -> tuple[np.ndarray, ...]:
        """Tasks with the step of the mapping's loop in which they come, and the turn of the inner loop."""
        group, number = np.divmod(np.arange(counts.groups * each, dtype=np.int32), each)
        step = np.maximum((group + shift) // share, -1)
        turn = number if kind == PRODUCT else (group % share * each + number) * counts.products // (share * each)
        return np.full_like(group, kind), group, number, step, turn

    first = np.arange(counts.filters, dtype=np.int32)
    every = [
        (np.full_like(first, FILTER), np.zeros_like(first), first, np.full_like(first, -2), first),
        tasks(INPUT, counts.inputs, -distances.lead),
        tasks(PRODUCT, counts.products, 0),
        tasks(OUTPUT, counts.outputs, distances.lag * share),
    ]
    kind, group, number, step, turn = map(np.concatenate, zip(*every, strict=True))
    early = step == -1  # initial INPUTs come group by group
    order = np.lexsort((number, group, kind, np.where(early, 0, turn), step))
    return np.stack([kind, group, number], 1)[order]
