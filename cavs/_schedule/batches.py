"""Schedules batches in C++ (kernels/_cpu/schedule.cpp) if that was compiled, else in NumPy (`reference`).

The library is called without the interpreter's lock.
"""

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._schedule.memory import Recycled, aligned, pinned
from cavs._schedule.reference import ReferenceBatch
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import PARTS, Shape, length_of, slots_of
from cavs._schedule.shape_choice import (
    BatchSizes,
    Kinds,
    NoRoom,
    Options,
    kind_names,
    no_room,
    scheduled_kinds,
    shape_of,
)
from cavs._schedule.tasks import LARGE_FAN_IN, Cut, decomposition
from cavs.kernels import BAD_GRAPHS, BAD_INDEX, LAYOUT, NO_ROOM, TOO_LARGE, CutTables, GraphArrays, schedule_library

PER_THREAD = 16_384  # vertices of a stack for each thread, about 0.4 ms


def compiled() -> bool:
    """Returns whether the scheduler in C++ was compiled; else the one in NumPy runs."""
    return schedule_library() is not None


@contextlib.contextmanager
def sorted_batch(
    graphs: Graphs, num_kinds: int, kinds: Kinds, fields: Sequence[str]
) -> "Iterator[CompiledBatch | ReferenceBatch]":
    """A context manager that sorts the vertices of a batch by height and kind, and frees the memory of the library at the end.

    It is freed here and not in a `__del__`, in which Python loses a Ctrl-C.

    `kinds`: as in `cavs.schedule`. `fields`: the fields of the graphs that the schedule includes.
    """
    if not compiled():
        yield ReferenceBatch(graphs, num_kinds, kinds)
        return
    closing = contextlib.closing
    with closing(Source(graphs, num_kinds, kinds, fields)) as source, closing(CompiledBatch(source)) as batch:
        yield batch


def schedule_batch(graphs: Graphs, options: Options) -> Schedule:
    """Schedules a batch in a shape of its own, or in one of `options.shapes`."""
    names = kind_names(graphs, options.kinds)
    with sorted_batch(graphs, len(names), options.kinds, options.fields) as batch:
        shape = shape_of(batch.sizes, batch.cut, names, graphs, options)
        return Schedule(batch.write(shape), shape)


class StackScheduler:
    """Schedules batches of one data set, several of one shape at a time.

    Args:
        graphs: The data set.
        options: The options of the schedules. The caller chooses the shapes.
        threads: How many may schedule large batches.
        for_gpu: Whether a GPU reads the results.
    """

    def __init__(self, graphs: Graphs, options: Options, threads: int = 1, for_gpu: bool = False):
        self._graphs, self._options, self._threads = graphs, options, threads
        self._num_kinds, self._memory = len(kind_names(graphs, options.kinds)), Recycled(pinned if for_gpu else aligned)
        self._source = Source(graphs, self._num_kinds, options.kinds, options.fields) if compiled() else None
        if self._source is not None:  # at exit, a thread may still read it
            weakref.finalize(self._source, _library().cavs_forget, self._source.data).atexit = False

    def stack(self, batches: Sequence[np.ndarray], shape: Shape, room: int | None = None) -> np.ndarray:
        """Returns the integers of the schedules of several batches, (batches, length) int32.

        `batches`: of each batch, the numbers of its graphs. `room`: the first axis of the result, if it is longer; it ends with
        zeros. Raises `NoRoom` if a batch does not fit `shape`.
        """
        out = self._memory.empty(room or len(batches), length_of(shape))
        out[len(batches) :] = 0
        cut = Cut(shape.classes, self._options.policy == "serial")
        if self._source is not None:
            self._compiled(self._source, batches, cut, shape, out)
            return out
        for row, index in zip(out, batches, strict=False):
            batch = ReferenceBatch(self._graphs[index], self._num_kinds, self._options.kinds)
            try:
                batch.cut(cut)
                row[:] = batch.write(shape)
            except NoRoom:
                raise no_room(index, shape) from None
        return out

    def _compiled(self, source: "Source", batches: Sequence[np.ndarray], cut: Cut, shape: Shape, out: np.ndarray) -> None:
        """Schedules the batches in one call of the library, which writes to `out`."""
        index = np.concatenate(batches, dtype=np.int64)
        counts, failed = np.array([len(batch) for batch in batches], np.int64), np.zeros(1, np.int64)
        tables, layout = _tables(cut), _layout(shape)  # held here: a cache may drop them
        threads = max(1, min(self._threads, len(batches), len(batches) * shape.vertices // PER_THREAD))
        arguments = source.data, _address(index), _address(counts), len(counts), tables.of, _address(layout)
        status = _library().cavs_schedule(*arguments, _address(out), threads, _address(failed))
        if status == NO_ROOM:
            raise no_room(batches[int(failed[0])], shape)
        _check(status)


class Source:
    """Graphs that the library has read: it knows the sizes, levels and root of each, and the addresses of their arrays.

    Raises `ValueError` if the arrays contradict each other.
    """

    def __init__(self, graphs: Graphs, num_kinds: int, kinds: Kinds, fields: Sequence[str]):
        self.data = ctypes.c_void_p()
        vertices, edges = len(graphs.height), len(graphs.children)
        kind = scheduled_kinds(graphs, kinds)
        offsets = [(graphs.vertex_offsets, len(graphs) + 1), (graphs.child_offsets, vertices + 1)]
        arrays = [(graphs.children, edges), (graphs.height, vertices), (kind, vertices)]
        arrays += [(getattr(graphs, name), vertices) for name in fields]
        checked = [_checked(x, np.int64, n) for x, n in offsets] + [_checked(x, np.int32, n) for x, n in arrays]
        self._kept = checked  # the library has their addresses
        pointers = [None if x is None else _address(x) for x in checked]
        arrays = GraphArrays(len(graphs), vertices, edges, num_kinds, *pointers[:5], (ctypes.c_void_p * 3)(*pointers[5:]))
        self.num_kinds, self.num_graphs = num_kinds, len(graphs)
        _check(_library().cavs_read(arrays, self.data))

    def close(self) -> None:
        """Frees the memory of the library."""
        _library().cavs_forget(self.data)


def _checked(x: np.ndarray | None, dtype: type, count: int) -> np.ndarray | None:
    """Returns an array as the library reads it, a copy if necessary."""
    if x is None:
        return None
    x = np.ascontiguousarray(x, dtype)
    if x.shape != (count,):
        raise ValueError(f"graphs: got an array of shape {x.shape} instead of ({count},). Write cavs.Graphs.build(...).")
    return x


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class CompiledBatch:
    """A batch whose vertices the library has sorted. `ReferenceBatch` is the same in NumPy.

    `source`: the graphs of the batch.
    """

    def __init__(self, source: Source):
        self._library, self._source, self._batch = _library(), source, ctypes.c_void_p()
        facts = np.empty(5 + 3 * source.num_kinds, np.int64)
        status = self._library.cavs_open(source.data, None, source.num_graphs, _address(facts), self._batch)
        if status:
            self.close()
        _check(status)
        vertices, height, fan_in, rooted, forest, *counts = facts.tolist()
        per_kind = [tuple(counts[i : i + source.num_kinds]) for i in range(0, len(counts), source.num_kinds)]
        self.sizes = BatchSizes(source.num_graphs, vertices, height, fan_in, bool(rooted), bool(forest), *per_kind)

    def close(self) -> None:
        """Frees the memory of the library."""
        self._library.cavs_close(self._batch)

    def cut(self, cut: Cut) -> int:
        """Cuts the levels into tasks. Returns their number.

        Raises `NoRoom` if a vertex has more children than a task has room for.
        """
        count, tables = np.empty(1, np.int64), _tables(cut)
        status = self._library.cavs_cut(self._batch, tables.of, _address(count))
        _check(status, f"a batch has {self.sizes}; tasks have room for {cut.classes}.")
        return int(count[0])

    def write(self, shape: Shape) -> np.ndarray:
        """Returns the integers of the schedule, after `cut`. Raises `NoRoom` if the batch does not fit `shape`."""
        out, layout = aligned(length_of(shape)), _layout(shape)
        status = self._library.cavs_write(self._batch, _address(layout), _address(out))
        _check(status, f"a batch has {self.sizes}; its shape is {shape}.")
        return out


def _library() -> ctypes.CDLL:
    library = schedule_library()
    assert library is not None, "the caller knows that it was compiled"
    return library


def _check(status: int, room: str = "") -> None:
    """Raises the error that a function of the library returned; `room` is the message if there is not enough."""
    if status == NO_ROOM:
        raise NoRoom(room)
    if status == BAD_INDEX:
        raise IndexError("index: got a graph number out of range.")
    if status == BAD_GRAPHS:
        raise ValueError("graphs: got arrays that contradict each other. Create graphs with cavs.Graphs.build(...).")
    if status == TOO_LARGE:
        raise ValueError(
            "graphs: got a batch of 2^31 vertices, edges or levels of kinds; expected fewer. Write a smaller batch."
        )
    if status:
        raise MemoryError("schedule: not enough memory for the batch.")


class _Tables:
    """The tables by which levels are cut, as the library reads them."""

    def __init__(self, cut: Cut):
        limited, widths = cut.limited, np.array(cut.widths, np.int64)
        pieces = np.zeros((0, 0), np.int64) if limited else np.ascontiguousarray(decomposition(cut.widths), np.int64)
        limits, cost = np.array([cls[:3] for cls in limited], np.int64), np.array([cls.cost for cls in limited], np.float64)
        self._kept = widths, pieces, limits, cost
        classes = len(cut.classes)
        sizes = classes, len(limited), classes - 1, LARGE_FAN_IN
        self.of = CutTables(*sizes, *map(_address, self._kept))


_tables = functools.lru_cache(maxsize=1024)(_Tables)


@functools.lru_cache(maxsize=1024)
def _layout(shape: Shape) -> np.ndarray:
    """Returns the numbers that `LAYOUT` names, and then the sizes of each kind."""
    numbers: dict[str, int] = {name: begin for name, (begin, _, _) in slots_of(shape).items()}
    numbers |= {f"field {i}": numbers[name] for i, name in enumerate(shape.fields)}
    of_shape = ("pad", "vertices", "graphs", "tasks", "levels", "rows", "rooted", "forest", "arity", "most_children")
    numbers |= {name: getattr(shape, name) for name in of_shape}
    numbers |= {"length": length_of(shape), "kinds": len(shape.kinds), "classes": len(shape.classes), "parts": PARTS}
    return np.array([*(numbers.get(name, -1) for name in LAYOUT), *shape.leaves, *shape.inner, *shape.edges], np.int64)
