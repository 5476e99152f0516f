"""Cuts levels into tasks of a few fixed widths. This decides the padding."""

import bisect
import functools
from typing import NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.facts import SMALL_FAN_IN
from cavs._schedule.order import Order

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
# Number of inner vertices whose parameter gradients are one lazy product. 4 to 8 thousand saturate it, but each window costs
# a pass over its tensors (Tree-FC, 16,320 vertices, hidden 256: 91 ms per step with four windows, 65 ms with one).
LAZY_WINDOW = 32768
# A vertex with more children is a task of its own.
LARGE_FAN_IN = 64
# With more levels than this, in all batches, NumPy finds the next task of every level at once; with fewer, a Python loop is
# faster.
FEW_RUNS = 24


class Cost(NamedTuple):
    """What decides between a wide task and narrow ones, in rows."""

    task: int  # the fixed cost of a task (loop, slices, reading the weights)
    padding: int  # of a row of padding, besides its computation


def cost_of(widths: tuple[int, ...]) -> Cost:
    """The costs of tasks of these widths, widest first.

    Measured on a CPU with Tree-LSTM: a task costs about 6 rows at hidden 64 and 12 at hidden 256. On a GPU hundreds of rows
    take no longer than a few. The costs follow from the widths alone, so a batch that is scheduled into a known shape gets the
    same tasks.
    """
    if {*widths} <= {SMALLEST_TASK, *(w for _, some in WIDTHS_GPU for w in some)}:
        return Cost(256, 0)
    return Cost(8, 4 if widths[0] <= 32 else 1)


def power_of_two(n: int) -> int:
    """The power of two at or above `n`."""
    return 1 << max(0, int(n) - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def task_classes(
    num_inner: int, fan_in: int, policy: str, edges_per_row: int = 0, window: int = LAZY_WINDOW, gpu: bool = False
) -> Classes:
    """The (vertices, edges) to which tasks are padded, widest first: a ladder of ratio 2 to 4.

    The classes are equal for all batches of a shape bucket, unless the largest fan-in crosses a power of two.

    Args:
        num_inner: number of inner rows, padded.
        fan_in: the largest number of children of a vertex.
        policy: "batching" or "serial".
        edges_per_row: the average number of children, as a power of two. If there are many, as in attention over a sentence,
            tasks have room for them.
        window: rows of a window of lazy batching. The widest task has at most half as many, so that windows consist of tasks.
        gpu: whether tasks are as wide as suits a GPU.
    """
    fan = power_of_two(fan_in)
    room = min(fan, max(SMALL_FAN_IN, edges_per_row if num_inner > 64 else 0))
    if policy == "serial":
        return ((SMALLEST_TASK, SMALLEST_TASK * fan),)
    widths = next(widths for most, widths in (WIDTHS_GPU if gpu else WIDTHS) if num_inner <= most)
    ladder = [w for w in widths if w <= window // 2]
    classes = [(w, w * room) for w in ladder]
    if fan > room:
        classes = classes if ladder[0] > SMALLEST_TASK else [(NARROW_TASK, NARROW_TASK * room)]
        # The narrowest tasks have room for a vertex of 16 children, or of 64. All fan-ins up to that have the same classes.
        few = [(SMALLEST_TASK, n) for n in sorted({4 * room, max(4 * room, LARGE_FAN_IN)})]
        classes = [c for c in classes if c[0] > SMALLEST_TASK] + few
    if fan > max(4 * room, LARGE_FAN_IN):
        classes.append((SMALLEST_TASK, 2 * fan))
    return tuple(classes)


@functools.lru_cache(maxsize=32)
def decomposition(widths: tuple[int, ...]) -> np.ndarray:
    """For n = 0 .. widths[0]: how many tasks of each width cover n vertices at the least cost, and how many tasks that is.

    The last task is padded.
    """
    top, fixed = widths[0], cost_of(widths)
    best = np.full(top + 1, np.inf)
    counts = np.zeros((top + 1, len(widths)), np.int64)
    best[0] = 0
    for n in range(1, top + 1):
        for i, w in enumerate(widths):
            cost = w + fixed.task + fixed.padding * max(w - n, 0) + best[max(n - w, 0)]
            if cost < best[n]:
                best[n] = cost
                counts[n] = counts[max(n - w, 0)]
                counts[n, i] += 1
    return np.concatenate([counts, counts.sum(1, keepdims=True)], 1)


class Tasks(NamedTuple):
    """The tasks of K batches, batch after batch. `row` counts from a batch's first inner row, the others within the kind."""

    batch: np.ndarray
    cls: np.ndarray  # kind * number of classes + class
    row: np.ndarray
    start: np.ndarray
    size: np.ndarray
    edge: np.ndarray
    edges: np.ndarray
    level: np.ndarray
    count: np.ndarray  # (K,) tasks of each batch
    first: np.ndarray  # (K,) first task of each batch


def cut_tasks(order: Order, classes: list[Classes], class_of: np.ndarray, num_classes: np.ndarray, serial: bool) -> Tasks:
    """Cuts the levels of K batches into tasks.

    Args:
        order: the order of the batches.
        classes: the distinct classes.
        class_of: (K,) index into `classes` of each batch.
        num_classes: (K,) number of classes of each batch.
        serial: whether each task has one vertex.
    """
    counts, edges_before = order.counts[:, 1:], order.edges_before
    num_children = None if order.ragged is None else order.ragged.num_children
    num_batches, levels, num_kinds = counts.shape
    by_row = counts.reshape(num_batches, levels * num_kinds)  # (level, kind): the order of the rows
    run = by_row.ravel().nonzero()[0]
    run_batch, run_kind = run // max(levels * num_kinds, 1), run % num_kinds
    run_size = by_row.ravel()[run]
    run_row = (by_row.cumsum(1) - by_row).ravel()[run]
    run_start = (counts.cumsum(1) - counts).ravel()[run]
    run_first = order.inner_start[run_batch, run_kind]
    if len(classes) == 1:
        of, cls, offset, size = _pieces(run_size, run_first + run_start, num_children, classes[0], serial)
    else:
        cut = []
        of_run, at = class_of[run_batch], run_first + run_start
        for i, some in enumerate(classes):
            mine = np.flatnonzero(of_run == i)
            pieces = _pieces(run_size[mine], at[mine], num_children, some, serial)
            cut.append((mine[pieces[0]], *pieces[1:]))
        of, cls, offset, size = (np.concatenate(x) for x in zip(*cut, strict=True))
        by_run = np.argsort(of, kind="stable")
        of, cls, offset, size = of[by_run], cls[by_run], offset[by_run], size[by_run]
    batch, start = run_batch[of], run_start[of] + offset
    at = run_first[of] + start
    edge = edges_before[at]
    count = np.bincount(batch, minlength=num_batches)
    return Tasks(
        batch,
        cls + run_kind[of] * num_classes[batch],
        run_row[of] + offset,
        start,
        size,
        edge - edges_before[run_first[of]],
        edges_before[at + size] - edge,
        run[of] // num_kinds % max(levels, 1) + 1,
        count,
        count.cumsum() - count,
    )


def _pieces(
    run_size: np.ndarray,
    run_at: np.ndarray,
    num_children: np.ndarray | None,
    classes: Classes,
    serial: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(run, class, offset in the run, number of vertices) of each task. A run is the vertices of one level and kind."""
    if len({edges // width for width, edges in classes}) > 1:
        assert num_children is not None, "at most SMALL_FAN_IN children"
        return _pieces_by_edges(run_size, run_at, num_children, classes)
    # A task always has room for the edges of its vertices.
    widths = (1,) if serial else tuple(w for w, _ in classes)
    whole, rest = np.divmod(run_size, widths[0])
    pieces = decomposition(widths)[rest]
    per_run = pieces[:, -1] + whole
    pieces = pieces[:, :-1]
    pieces[:, 0] += whole
    cls = (np.arange(pieces.size) % len(widths)).repeat(pieces.ravel())
    run = np.arange(len(run_size)).repeat(per_run)
    width = np.array(widths)[cls]
    before = width.cumsum() - width
    offset = before - before[per_run.cumsum() - per_run].repeat(per_run) if len(run) else before
    return run, cls, offset, np.minimum(width, run_size[run] - offset)


def _pieces_by_edges(
    run_size: np.ndarray, run_at: np.ndarray, num_children: np.ndarray, classes: Classes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`_pieces` for mixed fan-in, if a task must fit both the vertices and the edges of its class.

    Chooses the class of the least cost per vertex. While there are many runs, NumPy finds the next task of every run at once.
    A Python loop over tasks processes the rest of few, long runs.
    """
    ends = num_children.cumsum()
    fixed = cost_of(tuple(w for w, _ in classes)).task
    ladder = [
        (i, w, e, w + e / SMALL_FAN_IN + fixed) for i, (w, e) in enumerate(classes) if w > SMALLEST_TASK or e <= LARGE_FAN_IN
    ]
    special = len(classes) - 1  # the class of one vertex with very many children, if there is one
    run, offset = np.arange(len(run_size)), np.zeros(len(run_size), np.int64)
    found = []
    while len(run) > FEW_RUNS:
        here, end = run_at[run] + offset, run_at[run] + run_size[run]
        done = ends[here] - num_children[here]
        best, cls, taken = np.full(len(run), np.inf), np.full(len(run), special), np.ones(len(run), np.int64)
        for i, w, e, cost in ladder:
            take = np.minimum(ends.searchsorted(done + e, side="right"), np.minimum(here + w, end)) - here
            score = cost / np.maximum(take, 1e-9)
            better = (take > 0) & (score < best)
            best[better], cls[better], taken[better] = score[better], i, take[better]
        large = num_children[here] > LARGE_FAN_IN
        cls[large], taken[large] = special, 1
        found.append((run, cls, offset, taken))
        more = offset + taken < run_size[run]
        run, offset = run[more], (offset + taken)[more]
    found.append(_pieces_one_by_one(run, offset, run_size, run_at, num_children, ends, ladder, special))
    of, cls, offset, size = (np.concatenate(x) for x in zip(*found, strict=True))
    by_run = np.argsort(of, kind="stable")
    return of[by_run], cls[by_run], offset[by_run], size[by_run]


def _pieces_one_by_one(
    runs: np.ndarray,
    offsets: np.ndarray,
    run_size: np.ndarray,
    run_at: np.ndarray,
    num_children: np.ndarray,
    ends: np.ndarray,
    ladder: list[tuple[int, int, int, float]],
    special: int,
) -> tuple[np.ndarray, ...]:
    """The tasks of the rest of `runs`, from `offsets` on."""
    groups, cls, starts, sizes = [], [], [], []
    ends_list, many = (ends.tolist(), (num_children > LARGE_FAN_IN).tolist()) if len(runs) else ([], [])
    for g, offset in zip(runs.tolist(), offsets.tolist(), strict=True):
        total, at = int(run_size[g]), int(run_at[g])
        while offset < total:
            here = at + offset
            if many[here]:
                i, take = special, 1
            else:
                done = ends_list[here - 1] if here else 0
                best: tuple[float, int, int] | None = None
                for i, w, e, cost in ladder:
                    take = bisect.bisect_right(ends_list, done + e, here, at + min(offset + w, total)) - here
                    score = cost / max(take, 1e-9)
                    if take and (best is None or score < best[0]):
                        best = (score, i, take)
                assert best is not None, "a vertex that fits no class"
                _, i, take = best
            groups.append(g)
            cls.append(i)
            starts.append(offset)
            sizes.append(take)
            offset += take
    return tuple(np.array(x, np.int64) for x in (groups, cls, starts, sizes))
