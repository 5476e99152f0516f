"""Batches: which graphs form a batch, and the padded arrays of a batch, so that only a few shapes are compiled."""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cavs._feed.epochs import strata
from cavs._feed.plan import Shapes, plan
from cavs._feed.schedules import planned_schedules
from cavs._feed.settings import Source, members_of
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.buckets import bucket
from cavs._schedule.schedule import Schedule
from cavs._schedule.tasks import LAZY_WINDOW
from cavs._train.data import root_rows

SHAPES = 3  # the most shapes of a part of the data

A = TypeVar("A")  # np.ndarray on the host, jax.Array within a step


class Batch(NamedTuple, Generic[A]):
    """The input of one step, a pytree of int32 arrays. Vp is `sched.shape.vertices`, U the rows read from the table.

    Attributes:
        sched: the schedule of the batch.
        words: (U,) the distinct words of the batch, as rows of the table; out of range in padding.
        word: (Vp,) the index into `words` of each vertex; -1 if it reads nothing.
        label: (Vp,) the label of each vertex; -1 if it has none.
        roots: (R,) the rows of the roots; Vp in padding.
    """

    sched: Schedule
    words: A
    word: A
    label: A
    roots: A


class Prepare(Protocol):
    """Creates the batches of a part of the data, in order."""

    def __call__(self, grid: np.ndarray, workers: int = 0) -> Iterator[PyTree]:
        """Yields a batch in host memory for each row of `grid`.

        Args:
            grid: (batches, batch) numbers of samples; -1 where a batch has fewer.
            workers: as in `cavs.data.Loader`.
        """
        ...


def epoch_batches(sizes: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The batches of one epoch. They depend only on seed and epoch, so that a resumed run gets the same ones."""
    return strata(sizes, batch, np.random.default_rng([seed, 2, epoch]))


def distinct(ids: np.ndarray, padded: int, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words that a batch reads.

    Args:
        ids: (V,) the word of each vertex; -1 if it reads nothing.
        padded: the padded number of vertices.
        num_words: the rows of the table.

    Returns:
        (U,) the distinct words, where U = min(padded, num_words), padded with row numbers beyond the table; and (V,) the index
        of each vertex's word among them, or -1.
    """
    words, word = np.unique(ids, return_inverse=True)
    skip = int(len(words) > 0 and words[0] < 0)
    rows = np.arange(num_words, num_words + min(padded, num_words), dtype=np.int32)
    rows[: len(words) - skip] = words[skip:]
    return rows, word.astype(np.int32) - skip


def with_stand_ins(grid: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each -1 by the number of the smallest graph. Also returns which entries were not -1."""
    present = grid >= 0
    return (grid, present) if present.all() else (np.where(present, grid, np.argmin(sizes)), present)


def labels_of(graphs: Graphs, present: np.ndarray) -> np.ndarray:
    """(V,) labels of a batch; -1 for vertices without a label and for graphs that are not `present`."""
    label = np.full(graphs.num_vertices, -1, np.int32) if graphs.label is None else graphs.label
    return label if present.all() else np.where(np.repeat(present, np.diff(graphs.vertex_offsets)), label, -1)


class FewSchedules:
    """Schedules of the batches of a part of the data, in at most `SHAPES` shapes.

    The shapes are chosen once, from the batches of the first epoch, so that a resumed run has the same ones. Nearly all batches
    take the first shape, because the loop draws batches of nearly equal size.
    """

    def __init__(self, sources: Sequence[Source], grid: np.ndarray):
        """`sources` are data sets as `cavs.data.Loader` takes them; `grid` (batches, batch) contains typical batches."""
        self._members = members_of(list(sources), (), "batching", False, LAZY_WINDOW)[0]
        self._shapes = Shapes(self._members)
        self._sizes = np.diff(self._members[0].graphs.vertex_offsets)
        if len(grid):
            self._shapes.add([*grid], SHAPES, closed=False)

    def __call__(self, numbers: np.ndarray, workers: int = 0) -> Iterator[tuple[tuple[Graphs, Schedule], ...]]:
        """Yields (graphs, schedule) of each source for each row of `numbers` (batches, batch)."""
        planned = plan(self._members, self._shapes, [*numbers], self._sizes, 1)
        streams = []
        for m, member in enumerate(self._members):
            asked = zip(planned.graphs[m], planned.shape.tolist(), strict=True)
            options = member.options._replace(fixed=self._shapes.fixed(m))
            streams.append(planned_schedules(member.graphs, asked, options, workers))
        return zip(*streams, strict=True)


def preparer(graphs: Graphs, num_words: int, grid: np.ndarray) -> Prepare:
    """Returns the function that creates the batches of a part. The smallest graph, without its labels, replaces each -1."""
    sizes = np.diff(graphs.vertex_offsets)
    few = FewSchedules([graphs], with_stand_ins(grid, sizes)[0])

    def prepare(grid: np.ndarray, workers: int = 0) -> Iterator[Batch[np.ndarray]]:
        numbers, presents = with_stand_ins(grid, sizes)
        for present, ((some, sched),) in zip(presents, few(numbers, workers), strict=True):
            padded = sched.shape.vertices
            assert some.input_id is not None
            words, word = distinct(some.input_id, padded, num_words)
            if sched.shape.rooted:
                roots = sched.roots
            else:
                roots = root_rows(some).astype(np.int32)
                roots = np.append(roots, np.full(bucket(len(roots)) - len(roots), padded, np.int32))
            yield Batch(sched, words, sched.pad(word, -1), sched.pad(labels_of(some, present), -1), roots)

    return prepare


# Graphs per batch of `in_order`.
IN_ORDER = 64


def in_order_grid(sizes: np.ndarray) -> np.ndarray:
    """The batches of `in_order`: the entries -1 come last."""
    grid = strata(sizes, IN_ORDER, None)
    return np.take_along_axis(grid, np.argsort(grid < 0, axis=1, kind="stable"), 1)


def in_order(graphs: Graphs, prepare: Prepare) -> Iterator[tuple[np.ndarray, PyTree]]:
    """Visits all graphs once. Yields each batch with the rows in `graphs` of its first vertices."""
    grid = in_order_grid(np.diff(graphs.vertex_offsets))
    for numbers, batch in zip(grid, prepare(grid), strict=True):
        present = numbers[numbers >= 0]
        starts, stops = graphs.vertex_offsets[present].tolist(), graphs.vertex_offsets[present + 1].tolist()
        yield np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]), batch
