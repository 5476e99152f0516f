"""Batches: which graphs go together, and a batch's arrays, padded so that few shapes occur."""

from typing import Any, NamedTuple

import jax
import numpy as np

from cavs._graphs import Graphs
from cavs._schedule import Schedule
from cavs._scheduler import bucket, schedule
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


def epoch_batches(graphs: Graphs, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The batches of one epoch; a function of seed and epoch alone, so that resuming finds them again."""
    return strata(np.diff(graphs.vertex_offsets), batch, np.random.default_rng([seed, 2, epoch]))


def prepare(graphs: Graphs, numbers: np.ndarray, num_words: int) -> Batch:
    """A batch of the graphs `numbers` on the device. For each -1 the smallest graph of all stands in, without labels."""
    present = numbers >= 0
    if not present.all():
        numbers = np.where(present, numbers, np.argmin(np.diff(graphs.vertex_offsets)))
    some = graphs[numbers]
    sched = schedule(some, kinds=False)
    padded = sched.shape.vertices
    ids = some.input_id
    assert ids is not None
    label = np.full(some.num_vertices, -1, np.int32) if some.label is None else some.label
    if not present.all():
        label = np.where(np.repeat(present, np.diff(some.vertex_offsets)), label, -1)
    words, word = np.unique(ids, return_inverse=True)
    skip = int(len(words) > 0 and words[0] < 0)
    room = min(padded, num_words)
    rows = np.arange(num_words, num_words + room, dtype=np.int32)  # distinct numbers beyond the table
    rows[: len(words) - skip] = words[skip:]
    roots = root_rows(some)
    if not sched.shape.rooted:
        roots = np.append(roots, np.full(bucket(len(roots)) - len(roots), padded))
    return jax.device_put(
        Batch(
            sched,
            rows,
            sched.pad(word.astype(np.int32) - skip, -1),
            sched.pad(label, -1),
            roots.astype(np.int32),
        )
    )
