"""Decides how levels are cut into tasks of a few fixed widths, and so the padding."""

import functools
from typing import NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.graphs import SMALL_FAN_IN

Classes: TypeAlias = tuple[tuple[int, int], ...]  # (vertices, edges) that tasks are padded to, widest first

# The widths of tasks, widest first, of batches of at most so many inner rows. Each width is compiled, forward and backward, in
# about half a second, so there are few. They leave at most 5 % of padding in the levels of parse trees (SST, batches of 1, 16,
# 64, 256), and a level of 16, 64 or 128 sequences is one task. The widest task is also the slack at both ends of dynamic
# tensors.
WIDTHS = (
    (64, (2, 1)),
    (512, (32, 16, 8, 4, 2)),
    (3072, (64, 24, 16, 3)),
    (8192, (128, 48, 16, 3)),
    (np.inf, (1024, 256, 64, 16, 3)),
)
# Tasks of vertices with many children are not narrower. Gathers of one row become slices, which XLA may fuse with their
# readers. It then copies a whole tensor in every iteration, because the loop also writes the tensor (seen with JAX 0.10.2 on
# CPU). That is cheap in the small tensors of batches with tasks of one vertex.
SMALLEST_TASK = 2
NARROW_TASK = 4
# On a GPU a task is some dozen small kernels one after another, whatever its width. Fewer widths compile faster.
WIDTHS_GPU = ((64, (16,)), (512, (64, 16)), (2048, (128, 16)), (8192, (256, 64, 16)), (np.inf, (1024, 256, 64, 16)))
# A vertex with more children is a task of its own.
LARGE_FAN_IN = 64


class Cost(NamedTuple):
    """What decides between a wide task and narrow ones, in rows."""

    task: int  # the fixed cost of a task (loop, slices, reading the weights)
    padding: int  # of a row of padding, besides its computation


def cost_of(widths: tuple[int, ...]) -> Cost:
    """Returns the costs of tasks of these widths, widest first.

    Measured on a CPU with Tree-LSTM: a task costs about 6 rows at hidden 64 and 12 at hidden 256. On a GPU hundreds of rows
    take no longer than a few. The costs follow from the widths alone, so a batch that is scheduled into a known shape gets the
    same tasks.
    """
    if {*widths} <= {SMALLEST_TASK, *(w for _, gpu_widths in WIDTHS_GPU for w in gpu_widths)}:
        return Cost(256, 0)
    return Cost(8, 4 if widths[0] <= 32 else 1)


def power_of_two(n: int) -> int:
    """Returns the power of two at or above `n`."""
    return 1 << max(0, int(n) - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def task_classes(num_inner: int, fan_in: int, policy: str, edges_per_row: int = 0, gpu: bool = False) -> Classes:
    """Returns the (vertices, edges) to which tasks are padded, widest first: a ladder of ratio 2 to 4.

    The classes are equal for all batches of a shape bucket, unless the largest fan-in crosses a power of two.

    Args:
        num_inner: number of inner rows, padded.
        fan_in: the largest number of children of a vertex.
        policy: "batching" or "serial".
        edges_per_row: the average number of children, as a power of two. If there are many, as in attention over a sentence,
            tasks have room for them.
        gpu: whether tasks are as wide as suits a GPU.
    """
    fan = power_of_two(fan_in)
    room = min(fan, max(SMALL_FAN_IN, edges_per_row if num_inner > 64 else 0))
    if policy == "serial":
        return ((SMALLEST_TASK, SMALLEST_TASK * fan),)
    widths = next(widths for most, widths in (WIDTHS_GPU if gpu else WIDTHS) if num_inner <= most)
    classes = [(w, w * room) for w in widths]
    if fan > room:
        classes = classes if widths[0] > SMALLEST_TASK else [(NARROW_TASK, NARROW_TASK * room)]
        # The narrowest tasks have room for a vertex of 16 children, or of 64. All fan-ins up to that have the same classes.
        narrow = [(SMALLEST_TASK, n) for n in sorted({4 * room, max(4 * room, LARGE_FAN_IN)})]
        classes = [c for c in classes if c[0] > SMALLEST_TASK] + narrow
    if fan > max(4 * room, LARGE_FAN_IN):
        classes.append((SMALLEST_TASK, 2 * fan))
    return tuple(classes)


@functools.lru_cache(maxsize=32)
def decomposition(widths: tuple[int, ...]) -> np.ndarray:
    """Returns for n = 0 .. widths[0] how many tasks of each width cover n vertices at the least cost, and their number.

    The last task is padded.
    """
    top, costs = widths[0], cost_of(widths)
    best = np.full(top + 1, np.inf)
    counts = np.zeros((top + 1, len(widths)), np.int64)
    best[0] = 0
    for n in range(1, top + 1):
        for i, w in enumerate(widths):
            cost = w + costs.task + costs.padding * max(w - n, 0) + best[max(n - w, 0)]
            if cost < best[n]:
                best[n] = cost
                counts[n] = counts[max(n - w, 0)]
                counts[n, i] += 1
    return np.concatenate([counts, counts.sum(1, keepdims=True)], 1)


class LimitedClass(NamedTuple):
    """A class of tasks whose numbers of vertices and of edges are both limited, and what such a task costs, in rows."""

    cls: int
    vertices: int
    edges: int
    cost: float


class Cut(NamedTuple):
    """How the levels of a batch are cut into tasks."""

    classes: Classes  # the classes of tasks
    serial: bool = False  # whether each task has one vertex

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of vertices of a task of each class, widest first."""
        return (1,) if self.serial else tuple(width for width, _ in self.classes)

    @property
    def limited(self) -> list[LimitedClass]:
        """The classes of which the cheapest per vertex is taken; none if every task has room for its edges."""
        if len({edges // width for width, edges in self.classes}) == 1:
            return []
        fixed = cost_of(self.widths).task
        limits = [LimitedClass(i, w, e, w + e / SMALL_FAN_IN + fixed) for i, (w, e) in enumerate(self.classes)]
        return [limit for limit in limits if limit.vertices > SMALLEST_TASK or limit.edges <= LARGE_FAN_IN]
