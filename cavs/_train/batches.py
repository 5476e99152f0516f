"""Batches: what a `cavs.data.Loader` needs of each part of the data, and the padded arrays of a batch."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from jax.sharding import Mesh

from cavs._feed.loader import Loader
from cavs._feed.settings import Sample, Source
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule
from cavs._train.data import root_rows

SHAPES = 3  # the most shapes of shuffled batches; others have one
IN_ORDER = 64  # graphs per batch of `in_order`

A = TypeVar("A")  # np.ndarray on the host, jax.Array within a step


class Feed(NamedTuple):
    """A part of the data, as a `Loader` takes it.

    Attributes:
        sources: the data sets.
        collate: creates the arrays of a batch. Samples that are not `present` must not count.
    """

    sources: list[Source]
    collate: Callable[[Sample], PyTree]

    def loader(
        self,
        batch: int,
        seed: int | None = None,
        steps: int | None = 1,
        parts: int | None = None,
        mesh: Mesh | None = None,
    ) -> Loader:
        """The batches of this part, shuffled in every epoch if there is a `seed`. All have the same number of samples."""
        return Loader(
            self.sources,
            batch,
            seed=seed,
            fields=(),
            collate=self.collate,
            last="pad",
            shapes=1 if seed is None else SHAPES,
            steps=steps,
            parts=parts,
            mesh=mesh,
            kinds=False,
        )


class StepInput(NamedTuple, Generic[A]):
    """The input of one step, a pytree of int32 arrays. Vp is `sched.shape.vertices`, U the rows read from the table.

    Attributes:
        sched: the schedule of the batch.
        words: (U,) the distinct words of the batch, as rows of the table; out of range in padding.
        word: (Vp,) the index into `words` of each vertex; -1 if it reads nothing.
        label: (Vp,) the label of each vertex; -1 if it has none.
        roots: (R,) the rows of the roots; Vp in padding.
        sample: (G,) the number of each graph in the data set.
    """

    sched: Schedule
    words: A
    word: A
    label: A
    roots: A
    sample: A


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


def labels_of(graphs: Graphs, present: np.ndarray) -> np.ndarray:
    """(V,) labels of a batch; -1 for vertices without a label and for graphs that are not `present`."""
    label = np.full(graphs.num_vertices, -1, np.int32) if graphs.label is None else graphs.label
    return label if present.all() else np.where(np.repeat(present, np.diff(graphs.vertex_offsets)), label, -1)


def feed(graphs: Graphs, num_words: int) -> Feed:
    """Batches of labelled graphs, as `StepInput`."""

    def collate(sample: Sample) -> StepInput[np.ndarray]:
        graphs, sched = one_of(sample)
        words, word = distinct(input_ids(graphs), sched.shape.vertices, num_words)
        label = sched.pad(labels_of(graphs, sample.present), -1)
        return StepInput(sched, words, sched.pad(word, -1), label, padded_roots(graphs, sched), numbers_of(sample))

    return Feed([graphs], collate)


def numbers_of(sample: Sample) -> np.ndarray:
    """(G,) int32, the number of each graph of a batch in the data set."""
    return np.asarray(sample.numbers, np.int32)


def one_of(sample: Sample) -> tuple[Graphs, Schedule]:
    """The graphs and the schedule of a batch of one data set, given in a list."""
    ((graphs,), (sched,)) = cast(Any, (sample.graphs, sample.sched))
    return graphs, sched


def input_ids(graphs: Graphs) -> np.ndarray:
    """`input_id`, which all graphs of a task have."""
    assert graphs.input_id is not None
    return graphs.input_id


def padded_roots(graphs: Graphs, sched: Schedule) -> np.ndarray:
    """The rows of the roots; Vp in padding. Their number follows from the shape of the schedule."""
    if sched.shape.rooted:
        return sched.roots
    roots = root_rows(graphs).astype(np.int32)
    return np.append(roots, np.full(sched.shape.vertices - len(roots), sched.shape.vertices, np.int32))


def in_order(graphs: Graphs, feed: Feed) -> Iterator[tuple[np.ndarray, np.ndarray, PyTree]]:
    """Visits all graphs once. Yields the numbers of graphs, the rows of their vertices in `graphs`, and their batch.

    The vertices of these graphs are the first ones of the batch.
    """

    def collate(sample: Sample) -> PyTree:
        return sample.numbers, sample.present, feed.collate(sample)

    for numbers, present, batch in Feed(feed.sources, collate).loader(IN_ORDER):
        some = np.asarray(numbers)[np.asarray(present)]
        starts, stops = graphs.vertex_offsets[some].tolist(), graphs.vertex_offsets[some + 1].tolist()
        yield some, np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]), batch
