"""Batches: which graphs go together, and a batch's arrays, padded so that few shapes occur."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule.schedule import Schedule, Shape
from cavs._schedule.scheduler import bucket, schedules
from cavs._train.data import root_rows


class Batch(NamedTuple):
    """What one step sees; a pytree of integers (Vp, `sched.shape.vertices`; U, the rows read from the table).

    - `words`: (U,) the distinct words of the batch: rows of the table; beyond its end in padding.
    - `word`: (Vp,) for each vertex the index into `words`; -1 where it reads nothing.
    - `label`: (Vp,) -1 where there is none.
    - `roots`: (R,) rows of the roots; Vp in padding.
    """

    sched: Schedule
    words: Any
    word: Any
    label: Any
    roots: Any


class Prepare(Protocol):
    """Makes the batches of some samples, one after another and several ahead."""

    def __call__(self, grid: np.ndarray, workers: int = 0) -> Iterator[Any]:
        """A batch in host memory for each row of `grid` (batches, batch): numbers of samples, -1 where there are too few.

        `workers` as in `cavs.data.schedules`.
        """
        ...


def strata(sizes: np.ndarray, batch: int, rng: np.random.Generator | None) -> np.ndarray:
    """Groups graphs into batches of nearly equal total size: (batches, batch) graph numbers, -1 where there are too few.

    Graphs sorted by size, equals in random order, are cut into as many strata as a batch has places; a batch takes one
    graph of each stratum: of the upper half at random, of the lower half so that the batch that is smallest so far takes
    the largest. Batches are random, but as large as each other: the schedule's buckets, and with them the number of
    compilations, are few. Without `rng` the same batches every time.
    """
    total = len(sizes)
    batch = min(batch, total)
    count = -(-total // batch)
    tie = np.arange(total) if rng is None else rng.permutation(total)
    order = np.lexsort((tie, sizes))
    grid = np.concatenate([np.full(count * batch - total, -1), order]).reshape(batch, count)
    size = np.where(grid >= 0, sizes[grid], sizes.min())
    sums = np.zeros(count, np.int64)
    for i in reversed(range(batch)):
        if rng is not None and i >= batch // 2:
            take = rng.permutation(count)
        else:
            take = np.empty(count, np.int64)
            take[np.argsort(sums, kind="stable")] = np.arange(count)[::-1]
        grid[i] = grid[i, take]
        sums += size[i, take]
    out = np.ascontiguousarray(grid.T)
    return out if rng is None else out[rng.permutation(count)]


def epoch_batches(sizes: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The batches of one epoch; a function of seed and epoch alone, so that resuming finds them again."""
    return strata(sizes, batch, np.random.default_rng([seed, 2, epoch]))


def distinct(ids: np.ndarray, padded: int, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of `ids` (V,), -1 where there is none, and for each vertex its index among them.

    The first is (U,), U what `padded` vertices may read of `num_words` rows, with numbers beyond the table in padding.
    """
    words, word = np.unique(ids, return_inverse=True)
    skip = int(len(words) > 0 and words[0] < 0)
    rows = np.arange(num_words, num_words + min(padded, num_words), dtype=np.int32)
    rows[: len(words) - skip] = words[skip:]
    return rows, word.astype(np.int32) - skip


def with_stand_ins(grid: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Graph numbers with the smallest graph of all in place of each -1, and which are present."""
    present = grid >= 0
    return (grid, present) if present.all() else (np.where(present, grid, np.argmin(sizes)), present)


def labels_of(graphs: Graphs, present: np.ndarray) -> np.ndarray:
    """(V,) labels of a batch, without those of the graphs that are not `present`; -1 where there is none."""
    label = np.full(graphs.num_vertices, -1, np.int32) if graphs.label is None else graphs.label
    return label if present.all() else np.where(np.repeat(present, np.diff(graphs.vertex_offsets)), label, -1)


def shapes_of(graphs: Graphs, grid: np.ndarray) -> tuple[Shape, ...]:
    """Few shapes into which the schedules of these batches fit, taken up from the largest."""
    edges = np.diff(graphs.child_offsets[graphs.vertex_offsets])[grid].sum(1)
    shapes: list[Shape] = []
    for _ in schedules(graphs, grid[np.argsort(-edges, kind="stable")], shapes=shapes):
        pass
    # One number of tasks for all: it is that of the deepest batch, and costs integers alone.
    return tuple(dict.fromkeys(shape._replace(tasks=max(s.tasks for s in shapes)) for shape in shapes))


def prepare(graphs: Graphs, num_words: int, grid: np.ndarray, workers: int = 0) -> Iterator[Batch]:
    """As `Prepare` has it. For each -1 the smallest graph of all stands in, without labels."""
    numbers, presents = with_stand_ins(grid, np.diff(graphs.vertex_offsets))
    found = schedules(graphs, numbers, kinds=False, workers=workers)
    for present, (some, sched) in zip(presents, found, strict=True):
        padded = sched.shape.vertices
        assert some.input_id is not None
        words, word = distinct(some.input_id, padded, num_words)
        if sched.shape.rooted:
            roots = sched.roots
        else:
            roots = root_rows(some).astype(np.int32)
            roots = np.append(roots, np.full(bucket(len(roots)) - len(roots), padded, np.int32))
        yield Batch(sched, words, sched.pad(word, -1), sched.pad(labels_of(some, present), -1), roots)


# Graphs a batch in which order is kept.
IN_ORDER = 64


def in_order_grid(sizes: np.ndarray) -> np.ndarray:
    """The batches of `in_order`."""
    grid = strata(sizes, IN_ORDER, None)
    return np.take_along_axis(grid, np.argsort(grid < 0, axis=1, kind="stable"), 1)  # what stands in comes last


def in_order(graphs: Graphs, prepare: Prepare) -> Iterator[tuple[np.ndarray, Any]]:
    """All graphs once: the rows in `graphs` of the first vertices of a batch, and the batch, as `prepare` makes it."""
    grid = in_order_grid(np.diff(graphs.vertex_offsets))
    for numbers, batch in zip(grid, prepare(grid), strict=True):
        present = numbers[numbers >= 0]
        starts, stops = graphs.vertex_offsets[present].tolist(), graphs.vertex_offsets[present + 1].tolist()
        yield np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]), batch
