"""Batches scheduled together are equal to those scheduled one by one; fields, selections and known shapes."""

import dataclasses
import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cavs
from cavs._feed.schedules import schedules
from cavs._graphs.deferred import consecutive
from cavs._schedule import tasks
from cavs._schedule.batches import Options, schedule_batches
from cavs._schedule.shape import slots_of
from tests.odd_graphs import BATCHES, GRAPHS, WIDE, chain, from_children, joined, random_binary_tree, star, with_kinds
from tests.schedule_checks import assert_same, check, dags


@pytest.mark.parametrize("name", [*BATCHES, *WIDE])
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"policy": "serial"}, {"kinds": False}, {"window": 256}], ids=str)
def test_many_batches_at_once_are_scheduled_as_one_by_one(name: str, options: dict) -> None:
    graphs, rng = (BATCHES | WIDE)[name], np.random.default_rng(0)
    known: list = []
    known_at_once: list = []
    for batch in (1, 3):
        order = rng.permutation(len(graphs))
        batches = [*np.split(order, range(batch, len(order), batch)), slice(0, 2), [], 0, -1, order % 2 == 0]
        found = list(schedules(graphs, iter(batches), shapes=known_at_once, **options))
        assert len(found) == len(batches)
        for index, (some, sched) in zip(batches, found, strict=True):
            alone = graphs[index]
            for field in ("vertex_offsets", "child_offsets", "children", "height", "kind", "input_id", "label"):
                np.testing.assert_array_equal(getattr(some, field), getattr(alone, field))
            assert_same(sched, cavs.schedule(alone, shapes=known, **options))
    assert known == known_at_once


def test_a_tuple_of_shapes_stays_as_it_is() -> None:
    graphs = joined([random_binary_tree(n, seed=n) for n in (40, 38, 9, 300)])
    known = (cavs.schedule(graphs[:1]).shape,)
    (_, fits), (_, small), (_, large) = schedules(graphs, [[1], [2], [3]], shapes=known)
    assert fits.shape in known and small.shape not in known
    assert_same(small, cavs.schedule(graphs[2]))
    assert_same(large, cavs.schedule(graphs[3], shapes=known))


@pytest.mark.parametrize("name", ["kinds", "dags", "odd"])
@pytest.mark.parametrize("scripts", [False, True])
def test_a_schedule_includes_fields(name: str, scripts: bool) -> None:
    graphs = with_kinds((BATCHES | WIDE).get(name, joined([chain(3), chain(1), star(9)])), ("a", "b"), seed=1)
    ids = np.arange(graphs.num_vertices, dtype=np.int32)
    graphs = dataclasses.replace(graphs, input_id=ids, label=ids[::-1].copy())
    fields = ("label", "input_id", "kind")
    options = Options("batching", kinds=False, exact=False, window=32768, shapes=None, scripts=scripts)
    for batches in ([len(graphs)], [1] * len(graphs)):
        plain, more = (schedule_batches(graphs, np.array(batches), o) for o in (options, options._replace(fields=fields)))
        for one, other, some in zip(plain, more, consecutive(graphs, np.array(batches)), strict=True):
            assert other.shape._replace(fields=()) == one.shape != other.shape
            for field in fields:
                np.testing.assert_array_equal(getattr(other, field), one.pad(getattr(some, field), -1))
            for field in slots_of(one.shape):
                if field != "roots" or one.shape.rooted:
                    np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_fields_that_the_graphs_do_not_have() -> None:
    graphs = dataclasses.replace(joined([chain(3)]), input_id=np.arange(3, dtype=np.int32), label=None, kind=None)
    with pytest.raises(ValueError, match=r"schedule: fields: got 'label'; expected fields that these graphs have: input_id\."):
        cavs.schedule(graphs, fields=("input_id", "label"))
    with pytest.raises(ValueError, match="schedules: fields: got 'words'"):
        schedules(graphs, [[0]], fields=("words",))
    with pytest.raises(AttributeError, match=r"no attribute 'label'. Write .*fields=\('label',\)"):
        _ = cavs.schedule(graphs, fields=("input_id",)).label


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(dags(), dags(), st.booleans())
def test_many_random_batches_at_once(a: cavs.Graphs, b: cavs.Graphs, exact: bool) -> None:
    for graphs in (a, b):  # kinds without names, too: numbered up to the largest of a batch
        graphs = dataclasses.replace(graphs, kind_names=None)
        for some, sched in schedules(graphs, [[i] for i in range(len(graphs))] + [range(len(graphs))], exact=exact):
            check(some, sched)
            assert_same(sched, cavs.schedule(some, exact=exact))


def test_batches_in_passes_of_many_vertices() -> None:
    graphs = joined([random_binary_tree(40, seed=i) for i in range(64)])
    batches = np.random.default_rng(0).integers(0, 64, (700, 3))  # more vertices, and more batches, than one pass takes
    for index, (_, sched) in zip(batches, schedules(graphs, batches), strict=True):
        assert_same(sched, cavs.schedule(graphs[index]))


@pytest.mark.parametrize("seed", range(4))
def test_tasks_of_mixed_fan_in_are_the_same_found_at_once_and_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(40):  # narrow and wide levels; a few vertices of more children than a common task has room for
        fan_in = rng.choice([1, 2, 5, 9, 80], size=rng.integers(1, 200), p=[0.4, 0.4, 0.1, 0.09, 0.01])
        inner = (rng.integers(0, max(1, i + 20), n) for i, n in enumerate(fan_in))
        graphs.append(from_children([[]] * 20 + [sorted(set(kids.tolist())) for kids in inner]))
    some, found = joined(graphs), []
    for few in (0, 24, 1 << 40):
        monkeypatch.setattr(tasks, "FEW_RUNS", few)
        found.append(schedule_batches(some, np.array([1] * 20 + [20]), Options("batching", True, False, 32768, None)))
    for at_once, mixed, one_by_one in zip(*found, strict=True):
        assert_same(at_once, one_by_one)
        assert_same(mixed, one_by_one)
    assert len({edges // width for width, edges in found[0][-1].shape.classes}) > 1
    for batch, sched in zip(consecutive(some, np.array([1] * 20 + [20])), found[0], strict=True):
        check(batch, sched)


def test_batches_with_fields_are_the_graphs_that_were_selected() -> None:
    graphs = joined([random_binary_tree(n, seed=n) for n in (3, 8, 5)])
    graphs = dataclasses.replace(graphs, label=np.arange(graphs.num_vertices, dtype=np.int32))
    for index, (batch, sched) in zip([[2, 0], [1]], schedules(graphs, [[2, 0], [1]], fields=("label",)), strict=True):
        assert isinstance(batch, cavs.Graphs) and len(batch) == len(index)
        np.testing.assert_array_equal(batch.label, graphs[index].label)
        np.testing.assert_array_equal(sched.label[: batch.num_vertices], batch.label)
        np.testing.assert_array_equal(batch.children, graphs[index].children)


@pytest.mark.parametrize("name", [*BATCHES, *WIDE])
def test_selections_of_selections(name: str) -> None:
    one = (BATCHES | WIDE)[name]
    for graphs in [joined([one, one])] + ([joined([one, star(3), one])] if one.kind is None else []):
        for some in (
            graphs[1:][::-1],
            graphs[::2][1:],
            graphs[np.arange(len(graphs)) % 3 > 0][[-1, 0]] if len(graphs) > 3 else graphs,
        ):
            arrays = (getattr(some, f.name) for f in dataclasses.fields(some))
            assert_equal_but_for_arity(cavs.schedule(some), cavs.schedule(cavs.Graphs(*arrays)))


@pytest.mark.parametrize("first", [star(3), chain(5)])
def test_a_selection_keeps_the_arity_of_its_data_set_without_it(first: cavs.Graphs) -> None:
    """A few graphs may have one arity by chance. They have the shapes of their data set, even if they were pickled."""
    graphs = joined([first, chain(4), chain(4)])
    for some in (graphs[[1, 2]], graphs[1:][:1], graphs[:0]):
        alone = pickle.loads(pickle.dumps(some))
        assert some._source()[0] is graphs and alone._source()[0] is alone
        shape = cavs.schedule(alone).shape
        assert shape == cavs.schedule(some).shape and (shape.arity == 1) == (first.max_fan_in == 1)


def assert_equal_but_for_arity(one: cavs.Schedule, other: cavs.Schedule) -> None:
    """Graphs that were not selected from a data set may have an arity by chance."""
    assert one.shape._replace(arity=0) == other.shape._replace(arity=0)
    for field in slots_of(one.shape._replace(arity=0)):
        if field != "roots" or one.shape.rooted:
            values = getattr(one, field)
            assert values.dtype == np.int32
            np.testing.assert_array_equal(values, getattr(other, field), err_msg=field)


def test_batches_come_before_the_error_of_the_next() -> None:
    found = schedules(GRAPHS["trees"], [[0], [1], [99]])
    assert next(found)[1].num_vertices and next(found)[1].num_vertices
    with pytest.raises(IndexError, match="99"):
        next(found)
    with pytest.raises(TypeError, match=r"schedules: graphs: got a list; expected cavs\.Graphs"):
        schedules([GRAPHS["trees"]], [])  # at the call, not at the first batch
