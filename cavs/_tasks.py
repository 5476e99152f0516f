"""Levels cut into tasks of a few fixed widths, tasks into loops and windows: all that decides padding and compiled code."""

import functools

import numpy as np

# A task costs about as much as this many rows more than it holds (loop, slices, reading the weights): measured on CPU,
# Tree-LSTM, hidden 64 (about 6 rows) to 256 (about 12 rows). It decides between one wide and several narrow tasks.
TASK_OVERHEAD_ROWS = 8
# No task is narrower. XLA turns a gather of ONE row into a slice, fuses it into whatever reads it, and then has to copy
# the whole tensor in every iteration of the loop, because the tensor is written there too (seen with JAX 0.10.2 on CPU).
SMALLEST_TASK = 2
# Inner vertices whose parameter gradients make one lazy product. 4 to 8 thousand saturate it, but each window costs a pass
# over its tensors besides (Tree-FC, 16,320 vertices, hidden 256: 91 ms a step in four windows, 65 ms in one).
LAZY_WINDOW = 32768
# Fan-in up to which a task of W vertices simply gets room for W * fan-in edges.
SMALL_FAN_IN = 4
# Children of one vertex above which it becomes a task of its own.
LARGE_FAN_IN = 64


def power_of_two(n: int) -> int:
    """The power of two at or above `n`."""
    return 1 << max(0, int(n) - 1).bit_length()


def task_classes(num_inner: int, fan_in: int, policy: str) -> tuple[tuple[int, int], ...]:
    """The (vertices, edges) that tasks are padded to, widest first: a ladder of ratio 2 to 4.

    Equal for all batches of a bucket unless the largest fan-in crosses a power of two.
    """
    fan = power_of_two(fan_in)
    room = min(fan, SMALL_FAN_IN)
    if policy == "serial":
        return ((SMALLEST_TASK, SMALLEST_TASK * fan),)
    top = 4 if num_inner <= 64 else 64 if num_inner <= 512 else 128 if num_inner <= 8192 else 1024
    widths = (1024, 256, 64, 16, 4, SMALLEST_TASK) if top == 1024 else (128, 64, 16, 4, SMALLEST_TASK)
    ladder = [w for w in widths if w <= top]
    classes = [(w, w * room) for w in ladder]
    if fan > SMALL_FAN_IN:
        # One vertex of 16 children, then of 64, fits the narrowest tasks; the same classes for all fan-ins up to that.
        classes[-1:] = [(SMALLEST_TASK, 4 * SMALL_FAN_IN), (SMALLEST_TASK, LARGE_FAN_IN)]
    if fan > LARGE_FAN_IN:
        classes.append((SMALLEST_TASK, 2 * fan))
    return tuple(classes)


@functools.lru_cache(maxsize=32)
def _decomposition(widths: tuple[int, ...]) -> np.ndarray:
    """For n = 0 .. widths[0]: how many tasks of each width cover n vertices at the least cost, the last one padded."""
    top = widths[0]
    best = np.full(top + 1, np.inf)
    counts = np.zeros((top + 1, len(widths)), np.int64)
    best[0] = 0
    for n in range(1, top + 1):
        for i, w in enumerate(widths):
            cost = w + TASK_OVERHEAD_ROWS + best[max(n - w, 0)]
            if cost < best[n]:
                best[n] = cost
                counts[n] = counts[max(n - w, 0)]
                counts[n, i] += 1
    return counts


def cut_tasks(
    counts: np.ndarray,
    num_children: np.ndarray,
    inner_count: np.ndarray,
    classes: tuple[tuple[int, int], ...],
    serial: bool,
) -> dict[str, np.ndarray]:
    """Levels cut into tasks. `row` counts from the first inner row; `start` and `edge` within the kind."""
    levels, num_kinds = counts[1:].shape
    group_size = counts[1:].ravel()  # (level, kind): the order of the rows
    group_row = np.cumsum(group_size) - group_size
    by_kind = np.cumsum(counts[1:], 0) - counts[1:]
    group_start = by_kind.ravel()
    kind = np.tile(np.arange(num_kinds), levels)
    kind_first = np.cumsum(inner_count) - inner_count
    edges_before = np.zeros(len(num_children) + 1, np.int64)
    np.cumsum(num_children, out=edges_before[1:])
    if all(edges >= w * num_children.max(initial=1) for w, edges in classes):
        widths = (1,) if serial else tuple(w for w, _ in classes)
        n = np.array(widths)
        pieces = _decomposition(widths)[group_size % n[0]]
        pieces[:, 0] += group_size // n[0]
        cls = np.repeat(np.tile(np.arange(len(n)), len(group_size)), pieces.ravel())
        per_group = pieces.sum(1)
        group = np.repeat(np.arange(len(group_size)), per_group)
        before = np.cumsum(n[cls]) - n[cls]
        first = np.cumsum(per_group) - per_group
        offset = before - before[np.repeat(first, per_group)] if len(cls) else before
        size = np.minimum(n[cls], group_size[group] - offset)
    else:
        group, cls, offset, size = _tasks_by_edges(group_size, group_start + kind_first[kind], num_children, classes)
    start = group_start[group] + offset
    at = kind_first[kind[group]] + start
    base = edges_before[kind_first]
    edge = edges_before[at]
    return {
        "class": kind[group] * len(classes) + cls,
        "row": group_row[group] + offset,
        "start": start,
        "size": size,
        "edge": edge - base[kind[group]],
        "edges": edges_before[at + size] - edge,
        "level": group // num_kinds + 1,
    }


def _tasks_by_edges(
    group_size: np.ndarray, group_at: np.ndarray, num_children: np.ndarray, classes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tasks that fit both a class's vertices and its edges, for wide and mixed fan-in. Python runs once per task."""
    edges_end = np.cumsum(num_children)
    ladder = [(i, w, e) for i, (w, e) in enumerate(classes) if w > SMALLEST_TASK or e <= LARGE_FAN_IN]
    special = len(classes) - 1  # the class of one vertex with very many children, where there is one
    groups, cls, offsets, sizes = [], [], [], []
    for g in np.flatnonzero(group_size):
        offset, total, at = 0, int(group_size[g]), int(group_at[g])
        while offset < total:
            here = at + offset
            if num_children[here] > LARGE_FAN_IN:
                i, take = special, 1
            else:
                done = int(edges_end[here - 1]) if here else 0
                best: tuple[float, int, int] | None = None
                for i, w, e in ladder:
                    take = int(np.searchsorted(edges_end[here : at + min(offset + w, total)], done + e, side="right"))
                    score = (w + e / SMALL_FAN_IN + TASK_OVERHEAD_ROWS) / max(take, 1e-9)  # cost of a vertex
                    if take and (best is None or score < best[0]):
                        best = (score, i, take)
                assert best is not None, "a vertex that fits no class"
                _, i, take = best
            groups.append(g)
            cls.append(i)
            offsets.append(offset)
            sizes.append(take)
            offset += take
    return np.array(groups, np.int64), np.array(cls, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64)


def cut_windows(
    tasks: dict[str, np.ndarray],
    inner: tuple[int, ...],
    edges: tuple[int, ...],
    classes: tuple[tuple[int, int], ...],
    window: int,
) -> tuple[tuple[int, int, int], np.ndarray]:
    """(windows, rows, edges) of the backward's lazy batching, and the window of each task."""
    if sum(inner) <= window:
        return (1, max(inner), max(edges)), np.zeros(len(tasks["class"]), np.int64)
    rows = window
    width, wide = max(w for w, _ in classes), max(e for _, e in classes)
    room = max(rows * max(-(-e // max(n, 1)) for e, n in zip(edges, inner, strict=True)), 2 * wide)
    change = np.zeros(len(tasks["class"]), bool)
    for sizes, limit in ((tasks["size"], rows - width), (tasks["edges"], room - wide)):
        before = np.cumsum(sizes) - sizes
        change[1:] |= np.diff(before // limit) > 0
    of = np.cumsum(change)
    return (power_of_two(int(of[-1]) + 1), rows, room), of


def cut_rounds(cls: np.ndarray, window_of: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Tasks in order, as rounds of loops over ascending classes, each within one window.

    Returns the last task + 1 of each loop, and the first round of each window.
    """
    if not len(cls):
        return np.zeros((0, num_classes), np.int64), np.zeros(1, np.int64)
    number = np.cumsum((np.diff(cls, prepend=cls[0]) < 0) | (np.diff(window_of, prepend=0) > 0))
    per_loop = np.bincount(number * num_classes + cls, minlength=(number[-1] + 1) * num_classes)
    first_task = np.searchsorted(window_of, np.arange(window_of[-1] + 1))
    return np.cumsum(per_loop).reshape(-1, num_classes), number[first_task]
