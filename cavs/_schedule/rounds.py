"""Groups tasks into windows of lazy batching, and into rounds: passes through the loops of an engine."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavs._schedule.tasks import Classes, Tasks, power_of_two


def cut_windows(
    size: np.ndarray,
    edges_of: np.ndarray,
    inner: Sequence[int],
    edges: Sequence[int],
    classes: Classes,
    window: int,
) -> tuple[tuple[int, int, int], np.ndarray]:
    """(windows, rows, edges) of the backward pass's lazy batching of one batch, and the window of each of its tasks."""
    rows = window
    width, wide = max(w for w, _ in classes), max(e for _, e in classes)
    room = max(rows * max(-(-e // max(n, 1)) for e, n in zip(edges, inner, strict=True)), 2 * wide)
    assert 2 * width <= rows, "`task_classes` knows the window"
    change = np.zeros(len(size), bool)
    for sizes, limit in ((size, rows - width), (edges_of, room - wide)):
        before = sizes.cumsum() - sizes
        change[1:] |= np.diff(before // limit) > 0
    of = change.cumsum()
    return (power_of_two(int(change.sum()) + 1), rows, room), of


class Rounds(NamedTuple):
    """Rounds: a round is one pass through all loops, in ascending order of classes, within one window."""

    number: np.ndarray  # the round of each task, counted through all batches
    count: np.ndarray  # (K,) rounds of each batch
    ends: np.ndarray  # each loop's last task + 1, within the batch; loop after loop, round after round, batch after batch


def cut_rounds(tasks: Tasks, window_of: np.ndarray, num_loops: np.ndarray) -> Rounds:
    """The rounds of K batches. `window_of` is the window of each task, `num_loops` (K,) the number of loops of a round."""
    new = np.zeros(len(tasks.cls), bool)
    new[1:] = (tasks.cls[1:] < tasks.cls[:-1]) | (window_of[1:] > window_of[:-1])
    new[tasks.first[tasks.count > 0]] = True
    number, batch = new.cumsum() - 1, tasks.batch[new]
    loops = num_loops[batch]
    first = loops.cumsum() - loops
    per_loop = np.bincount(first[number] + tasks.cls, minlength=int(loops.sum()))
    ends = per_loop.cumsum() - tasks.first[batch].repeat(loops)
    return Rounds(number, np.bincount(batch, minlength=len(num_loops)), ends)
