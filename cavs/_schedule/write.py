"""Writes the integers of many schedules into one vector."""

import functools
import itertools

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._graphs.segments import Segments
from cavs._schedule import group_rows
from cavs._schedule.order import Order, spread, take
from cavs._schedule.rounds import Rounds
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import ALIGNED, PARTS, Shape, end_of, length_of, slots_of
from cavs._schedule.tasks import Tasks


def write_schedules(
    graphs: Graphs,
    batches: np.ndarray,
    order: Order,
    tasks: Tasks,
    rounds: Rounds,
    num_loops: np.ndarray,
    scripts: group_rows.Scripted | None,
    shapes: list[Shape],
    which: list[int],
) -> list[Schedule]:
    """Creates the schedules of K batches, with all their integers in one vector. Batch b has the shape `shapes[which[b]]`."""
    columns, begins = _places(shapes[0])[0], _places(shapes[0])[2]
    table = np.array([_places(shape)[1] for shape in shapes])[which]
    end = table[:, -1].cumsum()
    start = end - table[:, -1]
    table[:, :begins] += start[:, None]

    def at(name: str) -> np.ndarray:
        return table[:, columns[name]]

    leaf_size, inner_size, edge_size, pad = at("leaves"), at("inner"), at("edges"), at("pad")[:, 0]
    leaf_count, inner_count, vertices, num_edges = order.leaf_count, order.inner_count, order.vertices, order.num_edges
    row = pad.astype(np.int32)  # of the first vertex
    one = np.ones_like(vertices)

    out = Segments()
    header = np.array([vertices, tasks.count, rounds.count, one]).T
    header = np.concatenate([header, leaf_count, inner_count, pad[:, None] + leaf_count.cumsum(1) - leaf_count], 1)
    out.add(at("num_vertices"), header.shape[1] * one, header.ravel())
    out.add(at("leaf_vertex"), leaf_count, order.leaf, leaf_size)
    out.add(at("inner_vertex"), inner_count, order.inner, inner_size)
    out.add(at("row"), vertices, order.position + spread(row, vertices))
    out.add(at("graph_end"), batches, order.graph_end)
    edge_child = order.child + spread(row, num_edges.sum(1))
    out.add(at("edge_child"), num_edges, edge_child, edge_size)
    if order.ragged is not None:
        out.add(at("first_edge"), inner_count, order.ragged.first_edge, inner_size)
        out.add(at("num_children"), inner_count, order.ragged.num_children, inner_size)
        out.add(at("edge_owner"), num_edges, order.ragged.owner, edge_size, inner_size)
        out.add(at("task_edge"), tasks.count, tasks.edge)
        out.add(at("task_edges"), tasks.count, tasks.edges)
    out.add(at("task_row"), tasks.count, tasks.row + (pad + leaf_count.sum(1)).repeat(tasks.count))
    out.add(at("task_start"), tasks.count, tasks.start)
    out.add(at("task_size"), tasks.count, tasks.size)
    out.add(at("task_level"), tasks.count, tasks.level)
    out.add(at("round_end"), rounds.count * num_loops, rounds.ends)
    out.add(at("window_round") + 1, one, rounds.count)
    out.add(at("roots")[order.rooted], batches[order.rooted], order.root[order.rooted.repeat(batches)])
    for name in shapes[0].fields:
        out.add(at(name), vertices, take(getattr(graphs, name), order.source), at("vertices"), -one)
    if scripts is not None and scripts.batch.any():
        sizes = np.array([(s.levels, s.rows, sum(s.edges)) for s in shapes])[which]
        _add_scripts(out, scripts, at("scripts")[:, 0], sizes, order, batches, edge_child)
    data = np.zeros(int(end[-1]) + ALIGNED, np.int32)
    data = data[-(data.ctypes.data // 4) % ALIGNED :]
    out.write(data)
    bounds = zip(start.tolist(), end.tolist(), which, strict=True)
    return [Schedule(data[a:b], shapes[i]) for a, b, i in bounds]


def _add_scripts(
    out: Segments,
    found: group_rows.Scripted,
    at: np.ndarray,
    sizes: np.ndarray,
    order: Order,
    batches: np.ndarray,
    child: np.ndarray,
) -> None:
    """Adds the scripts of K batches.

    Args:
        out: receives them.
        found: the scripts.
        at: (K,) where the scripts of each batch begin.
        sizes: (K, 3) levels, rows and edges of each batch's shape.
        order: the order of the batches.
        batches: (K,) number of graphs of each batch.
        child: (E,) row of each edge's child.
    """
    padded, rows, edges = sizes.T
    num_edges = order.num_edges.sum(1)
    some = found.batch
    out.add(at[some], np.ones_like(at)[some], found.levels[some])
    starts = group_rows.part_starts(found, padded, batches)
    out.add(at[some] + 1, padded[some] * PARTS + 1, starts)
    at = at + padded * PARTS + 2
    forests, dags = some & found.forest, some & ~found.forest
    if forests.any():
        mine = child if forests.all() else child[forests.repeat(num_edges)]
        out.add(at[forests], rows[forests], group_rows.parents_of_forests(rows[forests], num_edges[forests], mine))
    if dags.any():
        mine = child if dags.all() else child[dags.repeat(num_edges)]
        edge, first, count = group_rows.parents_of_dags(rows[dags], num_edges[dags], mine)
        out.add(at[dags], num_edges[dags], edge)
        at = at + edges
        out.add(at[dags], rows[dags], first)
        out.add((at + rows)[dags], rows[dags], count)


def write_windows(sched: Schedule, window_of: np.ndarray, number: np.ndarray, cls: np.ndarray) -> None:
    """Writes the windows of lazy batching into a schedule that has several. The arrays are those of its tasks.

    In windows after the last task of a kind, its rows begin where they end: all of them belong to the windows before.
    """
    if sched.shape.windows[0] == 1 or not len(cls):
        return
    windows = np.arange(window_of[-1] + 1)
    sched.num_windows[...] = len(windows)
    sched.window_round[: len(windows)] = number[np.searchsorted(window_of, windows)] - number[0]
    sched.window_round[len(windows) :] = sched.num_rounds
    kind = cls // len(sched.shape.classes)
    for k in range(len(sched.shape.kinds)):
        mine = np.flatnonzero(kind == k)
        if len(mine):
            first = np.searchsorted(window_of[mine], windows)
            for begins, start, size in (
                (sched.window_start, sched.task_start, sched.task_size),
                (sched.window_edge, sched.task_edge, sched.task_edges),
            ):
                begins[: len(first), k] = np.append(start[mine], start[mine[-1]] + size[mine[-1]])[first]


_OF_KINDS = {"leaf_vertex": "leaves", "edge_child": "edges", "edge_owner": "edges"} | dict.fromkeys(
    ("inner_vertex", "first_edge", "num_children"), "inner"
)


@functools.lru_cache(maxsize=1024)
def _places(shape: Shape) -> tuple[dict[str, slice], np.ndarray, int]:
    """Where the arrays of a schedule begin, and its sizes, as one row of integers.

    Returns:
        The columns of each name, the row of integers, and how many of its first columns are beginnings. An array with a part
        for each kind has a column for each kind. The last column is the length of the whole vector.
    """
    bare = shape._replace(levels=0)  # without scripts
    places = {}
    for name, (begin, _, _) in slots_of(bare).items():
        sizes = getattr(shape, _OF_KINDS[name]) if name in _OF_KINDS else ()
        places[name] = [begin, *itertools.accumulate(sizes[:-1], initial=begin)][-max(len(sizes), 1) :]
    places["scripts"] = [end_of(bare)]
    begins = sum(map(len, places.values()))
    places |= {"leaves": shape.leaves, "inner": shape.inner, "edges": shape.edges}
    places |= {"vertices": [shape.vertices], "pad": [shape.pad]}
    places["whole"] = [length_of(shape)]
    ends = itertools.accumulate(map(len, places.values()))
    columns = {name: slice(end - len(places[name]), end) for name, end in zip(places, ends, strict=True)}
    return columns, np.array([n for place in places.values() for n in place]), begins
