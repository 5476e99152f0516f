"""What every schedule must be, and random graphs to schedule."""

from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np

import cavs
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Options
from tests.odd_graphs import from_children, joined, with_kinds


@st.composite
def dags(draw: st.DrawFn) -> cavs.Graphs:
    """A few random directed acyclic graphs, renumbered, some with kinds."""
    graphs = []
    for _ in range(draw(st.integers(1, 4))):
        vertices = draw(st.integers(1, 25))
        most = draw(st.sampled_from([1, 2, 6]))
        number = draw(st.permutations(range(vertices)))
        children: list[list[int]] = [[] for _ in range(vertices)]
        for r in range(1, vertices):
            children[number[r]] = [number[k] for k in draw(st.lists(st.integers(0, r - 1), max_size=most))]
        graphs.append(from_children(children))
    batch = joined(graphs)
    kinds = draw(st.sampled_from([0, 1, 3]))
    return with_kinds(batch, tuple("abc"[:kinds]), seed=draw(st.integers(0, 9))) if kinds else batch


def schedules(graphs: cavs.Graphs, batches: Iterable[Any], **options: Any) -> Iterator[tuple[cavs.Graphs, cavs.Schedule]]:
    """Selects and schedules one batch after another."""
    for index in batches:
        yield graphs[index], cavs.schedule(graphs[index], **options)


def options_for(graphs: cavs.Graphs, **changed: Any) -> Options:
    """The options of schedules, with the arguments of `cavs.schedule`."""
    return options_of("schedule", graphs, Options(**{"scripts": False, **changed}))


def check(graphs: cavs.Graphs, schedule: cavs.Schedule) -> None:
    """All that an engine relies on."""
    shape, kinds = schedule.shape, len(schedule.shape.kinds)
    count, tasks = graphs.num_vertices, int(schedule.num_tasks)
    leaves, inner, classes = schedule.leaf_count, schedule.inner_count, schedule.shape.classes
    assert schedule.num_vertices == count == leaves.sum() + inner.sum()
    assert schedule.vertex_mask.sum() == count and shape.vertices >= count

    # Every vertex has a row of its own, leaves first, and row 0 belongs to none.
    assert sorted(schedule.row[:count]) == list(range(shape.pad, shape.pad + count)) and not schedule.row[count:].any()
    leaf_at, inner_at, seen = np.cumsum([0, *shape.leaves]), np.cumsum([0, *shape.inner]), []
    for k in range(kinds):
        vertices = schedule.leaf_vertex[leaf_at[k] : leaf_at[k] + leaves[k]]
        assert (schedule.row[vertices] == schedule.leaf_row[k] + np.arange(leaves[k])).all()
        assert (graphs.height[vertices] == 0).all()
        mine = [*vertices, *schedule.inner_vertex[inner_at[k] : inner_at[k] + inner[k]]]
        own = vertices if shape.mixed else mine
        if graphs.kind is not None and kinds > 1 and len(own):
            assert (graphs.kind[own] == k).all()
        seen += mine
    assert sorted(seen) == list(range(count))

    # Edges: each inner row has its own children, in order.
    edge_at = np.cumsum([0, *shape.edges])
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    for k in range(kinds):
        for i in range(inner[k]):
            r = schedule.inner_vertex[inner_at[k] + i]
            first, n = schedule.first_edge[inner_at[k] + i], schedule.num_children[inner_at[k] + i]
            edges = slice(edge_at[k] + first, edge_at[k] + first + n)
            kids = graphs.children[graphs.child_offsets[r] : graphs.child_offsets[r + 1]] + base[r]
            assert (schedule.edge_child[edges] == schedule.row[kids]).all() and (schedule.edge_owner[edges] == i).all()

    # Tasks: the loops of all rounds run each once; a task is contiguous, of one kind and one level, and fits its class.
    ends = schedule.round_end[: schedule.num_rounds].reshape(-1)
    assert (np.diff(ends, prepend=0) >= 0).all() and (ends[-1] if len(ends) else 0) == tasks
    loop = np.repeat(np.tile(np.arange(kinds * len(classes)), schedule.num_rounds), np.diff(ends, prepend=0))
    done = schedule.row[: graphs.num_vertices][graphs.height == 0].tolist()
    covered = [0] * kinds
    for t in range(tasks):
        k, (width, room) = loop[t] // len(classes), classes[loop[t] % len(classes)]
        start, size = schedule.task_start[t], schedule.task_size[t]
        assert 1 <= size <= width and schedule.task_edges[t] <= room
        assert start == covered[k]
        covered[k] += size
        rows = schedule.task_row[t] + np.arange(size)
        vertices = schedule.inner_vertex[inner_at[k] + start : inner_at[k] + start + size]
        assert (schedule.row[vertices] == rows).all()
        assert (graphs.height[vertices] == schedule.task_level[t]).all()
        edges = slice(edge_at[k] + schedule.task_edge[t], edge_at[k] + schedule.task_edge[t] + schedule.task_edges[t])
        assert (schedule.edge_owner[edges] >= start).all() and (schedule.edge_owner[edges] < start + size).all()
        assert schedule.task_edges[t] == schedule.num_children[inner_at[k] + start : inner_at[k] + start + size].sum()
        assert set(schedule.edge_child[edges]) <= set(done)  # children before parents
        done += rows.tolist()
    assert covered == inner.tolist()
    assert (schedule.widths == np.bincount(graphs.height)).all() if count else len(schedule.widths) == 0
    assert 0 <= schedule.waste <= 1


def assert_same(one: cavs.Schedule, other: cavs.Schedule) -> None:
    assert one.shape == other.shape
    np.testing.assert_array_equal(one.data, other.data)
