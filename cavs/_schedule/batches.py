"""Schedules batches in C++ if that was compiled, else in NumPy: one in a shape of its own, or several in a known shape."""

from collections.abc import Sequence

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule.compiled import CompiledBatch, Source, schedule_stack
from cavs._schedule.reference import ReferenceBatch
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape, aligned, length_of
from cavs._schedule.shapes import NoRoom, Options, SortedBatch, kind_names, no_room, shape_of
from cavs._schedule.tasks import Cut
from cavs.kernels import schedule_library


def compiled() -> bool:
    """Returns whether the scheduler in C++ was compiled; else the one in NumPy runs."""
    return schedule_library() is not None


def sort_batch(graphs: Graphs, num_kinds: int, with_kinds: bool, fields: Sequence[str]) -> SortedBatch:
    """Sorts the vertices of a batch by height and kind.

    Args:
        graphs: the batch.
        num_kinds: the number of kinds.
        with_kinds: whether vertices are sorted by kind, or scheduled as one kind.
        fields: the fields of the graphs that the schedule includes.
    """
    if not compiled():
        return ReferenceBatch(graphs, num_kinds, with_kinds)
    return CompiledBatch(Source(graphs, num_kinds, with_kinds, fields))


def schedule_batch(graphs: Graphs, options: Options) -> Schedule:
    """Schedules a batch in a shape of its own, or in one of `options.shapes`."""
    names = kind_names(graphs, options.kinds)
    batch = sort_batch(graphs, len(names), options.kinds, options.fields)
    shape = shape_of(batch, options, names, graphs._arity)
    return Schedule(batch.write(shape), shape)


class StackScheduler:
    """Schedules batches of one data set, several of one shape at a time.

    Args:
        graphs: the data set.
        options: the options of the schedules. The caller chooses the shapes.
    """

    def __init__(self, graphs: Graphs, options: Options):
        self._graphs, self._options = graphs, options
        self._num_kinds = len(kind_names(graphs, options.kinds))
        self._source = Source(graphs, self._num_kinds, options.kinds, options.fields) if compiled() else None

    def stack(self, batches: Sequence[np.ndarray], shape: Shape, room: int | None = None) -> np.ndarray:
        """Returns the integers of the schedules of several batches, (batches, length) int32.

        Args:
            batches: of each batch, the numbers of its graphs.
            shape: the shape of all schedules.
            room: the first axis of the result, if it is longer; it ends with zeros.

        Raises:
            NoRoom: a batch does not fit `shape`.
        """
        out = aligned(room or len(batches), length_of(shape))
        out[len(batches) :] = 0
        cut = Cut(shape.classes, self._options.policy == "serial")
        if self._source is not None:
            schedule_stack(self._source, batches, cut, shape, out)
            return out
        for row, index in zip(out, batches, strict=False):
            batch = ReferenceBatch(self._graphs[index], self._num_kinds, self._options.kinds)
            try:
                batch.cut(cut)
                row[:] = batch.write(shape)
            except NoRoom:
                raise no_room(index, shape) from None
        return out
