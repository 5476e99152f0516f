"""Scripts of engine `persistent`: parts of graphs at each level, and the reverse of the child edges."""

import numpy as np
import pytest

import cavs
from tests.odd_graphs import BATCHES, WIDE, chain, joined
from tests.persistent_programs import CHAINS, DAG, TREES


@pytest.mark.parametrize("name", [*BATCHES, *WIDE])
@pytest.mark.parametrize("changed", [{}, {"exact": True}, {"policy": "serial"}, {"kinds": False}, {"kinds": "mixed"}], ids=str)
def test_scripts_of_odd_graphs(name: str, changed: dict) -> None:
    graphs, found = (BATCHES | WIDE)[name], 0
    for some in (graphs, graphs[: len(graphs) // 2], *graphs):
        scripted = cavs.schedule(some, scripts=True, **changed)
        check_scripts(scripted)
        found += bool(scripted.shape.levels)
    assert found or name in ("empty", "kinds") or graphs.kind is not None or not graphs.num_edges


def check_scripts(schedule: cavs.Schedule) -> None:
    """Parts cover each level's rows in order, graphs stay in one part, and parents are the reverse of the child edges."""
    if not schedule.shape.levels:
        assert (schedule.inner_count > 0).sum() != 1
        return
    (kind,) = np.flatnonzero(schedule.inner_count)
    before, count = sum(schedule.shape.inner[:kind]), schedule.inner_count[kind]
    tasks = schedule.num_tasks
    level = np.repeat(schedule.task_level[:tasks], schedule.task_size[:tasks])
    assert schedule.num_levels == level[-1] <= schedule.shape.levels
    starts = schedule.part_start
    assert starts[0] == 0 and starts[-1] == count and (np.diff(starts) >= 0).all()
    slot = np.searchsorted(starts, np.arange(count), side="right") - 1
    assert (slot // 16 == level - 1).all()
    graph = schedule.graph[schedule.inner_vertex[before : before + count]]
    assert len(set(zip(graph.tolist(), (slot % 16).tolist(), strict=True))) == len(set(graph.tolist()))
    edges = sum(schedule.num_children[before : before + count])
    child = schedule.edge_child[(at := sum(schedule.shape.edges[:kind])) : at + edges]
    for row in range(schedule.shape.rows):
        wanted = np.flatnonzero(child == row).tolist()
        if schedule.shape.forest:
            assert [schedule.parent_edge[row]] == (wanted or [-1])
        else:
            first = schedule.parent_first[row]
            assert schedule.parent_edge[first : first + schedule.parent_count[row]].tolist() == wanted


def test_scripts_of_programs() -> None:
    for graphs in (TREES, DAG, CHAINS, joined([chain(3)] * 40)):
        check_scripts(cavs.schedule(graphs, scripts=True))


def test_a_known_shape_with_room_for_two_kinds_has_no_scripts() -> None:
    """Scripts are of one kind: a launch would run the levels once for each kind that has room."""

    def chain_of(n: int, others: int) -> cavs.Graphs:
        kind = [0] * (n - others) + [1] * others
        return cavs.from_edges([n], [[(i + 1, i) for i in range(n - 1)]], kind=kind, kind_names=("a", "b"))

    shapes: list = []
    both = cavs.schedule(chain_of(300, 2), kinds=True, scripts=True, shapes=shapes)
    one = cavs.schedule(chain_of(290, 0), kinds=True, scripts=True, shapes=shapes)
    assert one.shape == both.shape
    assert one.shape.levels == 0
