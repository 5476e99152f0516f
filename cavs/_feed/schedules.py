"""`schedules`: schedules of many batches, several in one pass of NumPy, in this process or in workers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cavs._feed.serve import Request
from cavs._feed.workers import schedules_of_workers
from cavs._graphs.checks import Index
from cavs._graphs.deferred import DeferredGraphs, Pass
from cavs._graphs.graphs import Graphs
from cavs._schedule.batches import schedule_batches
from cavs._schedule.buckets import Options
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape import Shape
from cavs._schedule.tasks import LAZY_WINDOW

# The most vertices and batches of one pass. The fixed cost of NumPy's calls, hundreds of microseconds per pass, is then paid
# once for many batches. With twice as many vertices, the arrays of a pass would not fit most caches.
VERTICES_PER_PASS = 1 << 17
BATCHES_PER_PASS = 1024


def schedules(
    graphs: Graphs,
    batches: Iterable[Index],
    *,
    policy: str = "batching",
    kinds: bool = True,
    exact: bool = False,
    window: int = LAZY_WINDOW,
    shapes: list[Shape] | tuple[Shape, ...] | None = None,
    fields: Sequence[str] = (),
    scripts: bool | None = None,
    workers: int = 0,
) -> Iterator[tuple[Graphs, Schedule]]:
    """Selects and schedules one batch after another.

    ```python
    for batch, sched in schedules(graphs, np.split(order, range(16, len(order), 16))):
        params, loss = step(params, sched, sched.pad(batch.input_id), batch.label[sched.roots])
    ```

    The results are those of `batch = graphs[index]` and `cavs.schedule(batch)` for each `index` of `batches`, in order. This
    function is faster, because it schedules several batches in one pass of NumPy. It runs ahead of the loop by at most 2^17
    vertices and 1024 batches.

    With `workers=1`, another process creates the schedules, up to three passes of 2^16 vertices ahead, and this process only
    reads them. Use it if Python limits the training loop (on a GPU, steps below a millisecond) and a core is free. The worker
    takes a second to start, receives a copy of `graphs`, is reused by the next call with the same `graphs`, and ends when
    `graphs` is deleted. With `fields`, the graphs of a batch are not transferred; they are selected in this process when one
    of their fields is first read.

    With `workers=4`, four processes create smaller passes in turn, for steps that are shorter than the creation of their
    schedule. The results are the same, in the same order. Concurrent passes cannot add to a list of `shapes`: collect the
    shapes in a loop over `schedules(graphs, batches, shapes=shapes)` first, and pass `tuple(shapes)`.

    Args:
        graphs: the data set.
        batches: an iterable, which may be infinite, of indices that select graphs: integer arrays, slices, boolean arrays.
        policy: as in [`cavs.schedule`][].
        kinds: as in [`cavs.schedule`][].
        exact: as in [`cavs.schedule`][].
        window: as in [`cavs.schedule`][].
        shapes: as in [`cavs.schedule`][].
        fields: as in [`cavs.schedule`][].
        scripts: as in [`cavs.schedule`][].
        workers: the number of processes that create schedules; 0 for this process.

    Returns:
        An iterator over pairs (batch, schedule).

    Raises:
        TypeError: at the call, if `graphs` is not [`cavs.Graphs`][] or `workers` is not an int.
        ValueError: at the call, as [`cavs.schedule`][], if `workers` is negative, or if there are several workers and `shapes`
            is a list.
        IndexError: while iterating, if a graph index is out of range.
        RuntimeError: while iterating, if a worker ended or did not answer for ten minutes, or in a process that was forked
            from the one that began to iterate. Errors in a worker are raised here, with their traceback as a note.
    """
    options = options_of("schedules", graphs, policy, kinds, exact, window, shapes, fields, scripts)
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise TypeError(f"schedules: workers: got {workers!r}; expected an int >= 0, the number of processes. Write workers=1.")
    if workers < 0:
        raise ValueError(f"schedules: workers: got {workers}; expected an int >= 0, the number of processes. Write workers=1.")
    if workers > 1 and isinstance(shapes, list):
        raise ValueError(
            f"schedules: shapes: got a list with workers={workers}; expected a tuple or None, as several workers cannot add to "
            "a list. Write shapes=tuple(shapes), collected before, or workers=1."
        )
    indices: Iterator[Index | tuple[np.ndarray, int]] = iter(batches)
    return _in_passes(graphs, indices, options, workers)


def planned_schedules(
    graphs: Graphs, batches: Iterator[tuple[np.ndarray, int]], options: Options, workers: int
) -> Iterator[tuple[Graphs, Schedule]]:
    """As `schedules`, if the shape of each batch is known: `batches` yields its graphs and its index into `options.fixed`."""
    return _in_passes(graphs, batches, options, workers)


def _in_passes(
    graphs: Graphs, batches: Iterator[Index | tuple[np.ndarray, int]], options: Options, workers: int
) -> Iterator[tuple[Graphs, Schedule]]:
    # Kinds without names are numbered up to the largest kind of a batch, so a pass has one batch.
    unnamed_kinds = options.kinds and graphs.kind is not None and graphs.kind_names is None and not options.fixed
    most = 1 if unnamed_kinds else BATCHES_PER_PASS
    if workers:  # the first passes are small, so that training begins while the next ones are created
        first, limit = VERTICES_PER_PASS // 64, VERTICES_PER_PASS // min(2 * workers, 4)
        passes = _passes(graphs, batches, bool(options.fixed), most, first, limit, 2 ** (1 / workers))
        return schedules_of_workers(graphs, passes, options, workers, _schedules_here)
    passes = _passes(graphs, batches, bool(options.fixed), most, VERTICES_PER_PASS, VERTICES_PER_PASS)
    return _schedules_here(graphs, passes, options)


def _passes(
    graphs: Graphs,
    batches: Iterator[Index | tuple[np.ndarray, int]],
    planned: bool,
    most: int,
    first: float,
    limit: int,
    growth: float = 1,
) -> Iterator[Request]:
    """Groups batches into passes. If they are `planned`, they are pairs as in `planned_schedules`.

    A pass has at most `most` batches. The first pass has about `first` vertices, and each further one `growth` times as many,
    up to `limit`.
    """
    numbers, mean = np.arange(len(graphs)), graphs.num_vertices / max(len(graphs), 1)
    error: Exception | None = None
    while error is None:
        picked: list[np.ndarray] = []
        shapes: list[int] = []
        vertices = 0.0
        while len(picked) < most and vertices < first:
            try:
                batch: Any = next(batches)
                if planned:
                    batch, shape = batch
                    shapes.append(shape)
                index = numbers[batch]
            except Exception as e:  # the end of the batches or an error, raised after the batches before it
                error = e
                break
            picked.append(index if index.ndim else index[None])
            vertices += mean * index.size
        if picked:
            counts = np.array([len(index) for index in picked])
            yield Request(np.concatenate(picked), counts, np.array(shapes) if shapes else None)
        first = min(growth * first, limit)
    if not isinstance(error, StopIteration):
        raise error


def _schedules_here(graphs: Graphs, passes: Iterator[Request], options: Options) -> Iterator[tuple[Graphs, Schedule]]:
    for index, counts, shapes in passes:
        of_pass = Pass(graphs, index, counts)
        for number, sched in enumerate(schedule_batches(graphs, counts, options, index, shapes)):
            yield DeferredGraphs.of(of_pass, number), sched
