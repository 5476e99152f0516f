"""The scheduler in NumPy: what kernels/_cpu/schedule.cpp must return, and what runs where that was not compiled.

The breadth-first order of Cavs' Algorithm 1 is a sort: the level of a vertex is its height.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cavs._graphs.flat import ranges
from cavs._graphs.graphs import Graphs
from cavs._schedule.memory import aligned
from cavs._schedule.shape import PARTS, Shape, length_of, slots_of
from cavs._schedule.shape_choice import BatchSizes, Kinds, NoRoom, has_room, scheduled_kinds
from cavs._schedule.tasks import LARGE_FAN_IN, Cut, decomposition


class Tasks(NamedTuple):
    """The tasks of a batch, (tasks,) ints each. `row` counts from the first inner row, `start` and `edge` within the kind."""

    loop: np.ndarray  # kind * number of classes + class
    row: np.ndarray
    start: np.ndarray
    size: np.ndarray
    edge: np.ndarray
    edges: np.ndarray
    level: np.ndarray


class ReferenceBatch:
    """A batch whose vertices are sorted by (height, kind). See `cavs._schedule.batches.CompiledBatch`.

    `kinds`: as in `cavs.schedule`.
    """

    def __init__(self, graphs: Graphs, num_kinds: int, kinds: Kinds):
        self._graphs = graphs
        sizes, num_children = np.diff(graphs.vertex_offsets), np.diff(graphs.child_offsets)
        vertex = np.arange(graphs.num_vertices)
        self._graph = np.arange(len(graphs)).repeat(sizes)
        child = graphs.children + graphs.vertex_offsets[self._graph.repeat(num_children)]

        scheduled = scheduled_kinds(graphs, kinds)
        kind = np.zeros(len(vertex), np.int64) if scheduled is None else scheduled
        levels = int(graphs.height.max(initial=0)) + 1
        key = graphs.height.astype(np.int64) * num_kinds + kind
        self._counts = np.bincount(key, minlength=levels * num_kinds).reshape(levels, num_kinds)
        order = np.argsort(key, kind="stable")
        self._position = np.empty_like(vertex)
        self._position[order] = vertex
        self._leaf, inner = np.split(order, [self._counts[0].sum()])
        self._inner = inner[np.argsort(kind[inner], kind="stable")]

        # Edges are sorted by their parents.
        self._num_children = num_children[self._inner]
        self._before = np.append(0, self._num_children.cumsum())
        self._child = self._position[child[ranges(graphs.child_offsets[self._inner], self._num_children)]]
        leaves, inner_count = self._counts[0], self._counts[1:].sum(0)
        self._inner_start = inner_count.cumsum() - inner_count
        num_edges = self._before[self._inner_start + inner_count] - self._before[self._inner_start]

        is_root = np.ones(len(vertex), bool)
        is_root[child] = False
        roots = np.flatnonzero(is_root)
        self._root = graphs.vertex_offsets[:-1].copy()
        self._root[self._graph[roots][::-1]] = roots[::-1]  # the first one of each graph
        self.sizes = BatchSizes(
            graphs=len(graphs),
            vertices=len(vertex),
            height=levels - 1,
            fan_in=int(num_children.max(initial=0)),
            rooted=bool((np.bincount(self._graph[roots], minlength=len(graphs)) == 1).all()),
            forest=len(vertex) - len(roots) == graphs.num_edges,
            leaves=tuple(leaves.tolist()),
            inner=tuple(inner_count.tolist()),
            edges=tuple(num_edges.tolist()),
        )

    def cut(self, cut: Cut) -> int:
        """Cuts the levels into tasks. Returns their number.

        Raises `NoRoom` if a vertex has more children than a task has room for.
        """
        tasks: list[tuple[int, ...]] = []
        row, starts = 0, [0] * len(self.sizes.inner)
        for level, counts in enumerate(self._counts[1:].tolist(), 1):
            for kind, count in enumerate(counts):
                first, start = self._inner_start[kind], starts[kind]
                for cls, size in self._pieces(cut, int(first) + start, count):
                    edge, end = self._before[[first + start, first + start + size]] - self._before[first]
                    tasks.append((kind * len(cut.classes) + cls, row, start, size, edge, end - edge, level))
                    row, start = row + size, start + size
                starts[kind] = start
        self._tasks = Tasks(*np.array(tasks, np.int64).reshape(-1, 7).T)
        return len(tasks)

    def _pieces(self, cut: Cut, row: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields (class, number of vertices) of each task of a run: the `count` inner rows from `row` on are of one level."""
        limited, end = cut.limited, row + count
        if not limited:  # a task always has room for the edges of its vertices
            whole, rest = divmod(count, cut.widths[0])
            tasks = decomposition(cut.widths)[rest, :-1].tolist()
            tasks[0] += whole
            for cls, (width, number) in enumerate(zip(cut.widths, tasks, strict=True)):
                for _ in range(number):
                    yield cls, min(width, end - row)
                    row += width
            return
        while row < end:
            cls, size = len(cut.classes) - 1, 1  # a vertex of very many children, and its own class
            if self._num_children[row] <= LARGE_FAN_IN:
                best = np.inf
                for limit in limited:  # the class of the least cost per vertex
                    most = min(row + limit.vertices, end)
                    take = bisect.bisect_right(self._before, self._before[row] + limit.edges, row + 1, most + 1) - 1 - row
                    if take and limit.cost / take < best:
                        best, cls, size = limit.cost / take, limit.cls, take
                if not np.isfinite(best):
                    raise NoRoom(f"a vertex has {self._num_children[row]} children; tasks have room for {cut.classes}.")
            yield cls, size
            row += size

    def write(self, shape: Shape) -> np.ndarray:
        """Returns the integers of the schedule, after `cut`. Raises `NoRoom` if the batch does not fit `shape`."""
        if not has_room(shape, self.sizes, len(self._tasks.row)):
            raise NoRoom(f"a batch has {self.sizes}; its shape is {shape}.")
        data = aligned(length_of(shape))
        data[:] = 0
        slots = {name: data[begin:end].reshape(dims) for name, (begin, end, dims) in slots_of(shape).items()}
        self._write_vertices(slots, shape)
        self._write_edges(slots, shape)
        self._write_tasks(slots, shape)
        if shape.levels:
            self._write_scripts(slots, shape)
        return data

    def _write_vertices(self, slots: dict[str, np.ndarray], shape: Shape) -> None:
        sizes, graphs, vertices = self.sizes, self._graphs, self.sizes.vertices
        slots["num_vertices"][...] = vertices
        slots["leaf_count"][:], slots["inner_count"][:] = sizes.leaves, sizes.inner
        slots["leaf_row"][:] = shape.pad + np.cumsum(sizes.leaves) - sizes.leaves
        _by_kind(slots["leaf_vertex"], self._leaf, sizes.leaves, shape.leaves)
        _by_kind(slots["inner_vertex"], self._inner, sizes.inner, shape.inner)
        slots["row"][:vertices] = shape.pad + self._position
        slots["graph_end"][:] = vertices  # also for the graphs that a server adds
        slots["graph_end"][: len(graphs)] = graphs.vertex_offsets[1:]
        if sizes.rooted:
            slots["roots"][:] = self._root[0] if len(graphs) else 0
            slots["roots"][: len(graphs)] = self._root
        for name in shape.fields:
            slots[name][:] = -1
            slots[name][:vertices] = getattr(graphs, name)

    def _write_edges(self, slots: dict[str, np.ndarray], shape: Shape) -> None:
        sizes = self.sizes
        _by_kind(slots["edge_child"], shape.pad + self._child, sizes.edges, shape.edges)
        if not shape.arity:
            start = self._inner_start.repeat(sizes.inner)
            _by_kind(slots["first_edge"], self._before[:-1] - self._before[start], sizes.inner, shape.inner)
            _by_kind(slots["num_children"], self._num_children, sizes.inner, shape.inner)
            owner = (np.arange(len(self._inner)) - start).repeat(self._num_children)
            _by_kind(slots["edge_owner"], owner, sizes.edges, shape.edges, shape.inner)

    def _write_tasks(self, slots: dict[str, np.ndarray], shape: Shape) -> None:
        """Writes tasks, and rounds: a round is one pass through all loops, in ascending order."""
        tasks, count, loops = self._tasks, len(self._tasks.row), len(shape.kinds) * len(shape.classes)
        slots["task_row"][:count] = shape.pad + sum(self.sizes.leaves) + tasks.row
        for name in ("start", "size", "level") if shape.arity else ("start", "size", "level", "edge", "edges"):
            slots[f"task_{name}"][:count] = getattr(tasks, name)
        new = np.ones(count, bool)
        new[1:] = np.diff(tasks.loop) < 0
        number, rounds = new.cumsum() - 1, int(new.sum())
        ends = np.bincount(number * loops + tasks.loop, minlength=rounds * loops).cumsum()
        slots["round_end"][:rounds] = ends.reshape(rounds, loops)
        slots["num_tasks"][...], slots["num_rounds"][...] = count, rounds

    def _write_scripts(self, slots: dict[str, np.ndarray], shape: Shape) -> None:
        """Writes scripts of engine `persistent` (VPPS, section III-B): the rows that each virtual processor runs at each level.

        Graphs are divided, in order, into `PARTS` parts of about equal work. The rows of a level are sorted by graph, so the
        rows of a part at a level are contiguous. A group of thread blocks runs one or more parts. The scripts also contain the
        edges from children to parents: in the backward pass, a vertex reads the cotangents that its parents wrote, without
        atomics, and the sums are the same in every run.
        """
        height = self._graphs.height[self._inner]
        slots["num_levels"][...] = self.sizes.height
        # The part of a graph follows from the number of inner vertices before it, plus half of its own.
        work = np.bincount(self._graph[self._inner], minlength=self.sizes.graphs)
        done = np.maximum(work.cumsum() - work // 2 - 1, 0)
        part = np.minimum(done * PARTS // max(len(height), 1), PARTS - 1)
        slot = (height - 1) * PARTS + part[self._graph[self._inner]]
        slots["part_start"][1:] = np.bincount(slot, minlength=shape.levels * PARTS).cumsum()
        edge, child = np.arange(len(self._child)), shape.pad + self._child
        if shape.forest:
            slots["parent_edge"][:] = -1
            slots["parent_edge"][child] = edge
        else:
            count = np.bincount(child, minlength=shape.rows)
            slots["parent_edge"][: len(edge)] = np.argsort(child, kind="stable")
            slots["parent_first"][:], slots["parent_count"][:] = count.cumsum() - count, count


def _by_kind(
    out: np.ndarray, values: np.ndarray, counts: tuple[int, ...], sizes: tuple[int, ...], fill: tuple[int, ...] | None = None
) -> None:
    """Writes the values of each kind, padded with `fill`, or with the first one: padding computes what a real row computes."""
    begin = done = 0
    for kind, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if count or fill is not None:
            out[begin : begin + size] = values[done] if fill is None else fill[kind]
        out[begin : begin + count] = values[done : done + count]
        begin, done = begin + size, done + count
