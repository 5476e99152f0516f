"""Fields that schedules include, known shapes, and batches that were selected from a data set."""

import dataclasses
import pickle

import numpy as np
import pytest

import cavs
from cavs._schedule.shape import slots_of
from tests.odd_graphs import BATCHES, GRAPHS, WIDE, chain, from_children, joined, random_binary_tree, star, with_kinds
from tests.schedule_checks import assert_same, check, schedules


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
    for some in (graphs, *(graphs[i] for i in range(len(graphs)))):
        one, other = (cavs.schedule(some, kinds=False, scripts=scripts, fields=f) for f in ((), fields))
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
    with pytest.raises(TypeError, match=r"fields: got 'label'; expected a sequence of names. Write fields=\('label',\)"):
        cavs.schedule(graphs, fields="label")
    with pytest.raises(TypeError, match=r"fields: got None; expected a sequence of names. Write fields=\(\)"):
        cavs.schedule(graphs, fields=None)
    with pytest.raises(
        ValueError, match=r"fields: got 'label'; expected \(\), as the graphs have none of \('input_id', 'label',"
    ):
        cavs.schedule(cavs.from_lengths([3]), fields=("label",))
    with pytest.raises(TypeError, match="schedule: shapes: got 3; expected a list of shapes. Write shapes = .. once"):
        cavs.schedule(graphs, shapes=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule: fields: got 'words'"):
        cavs.schedule(graphs, fields=("words",))
    with pytest.raises(AttributeError, match=r"no attribute 'label'. Write .*fields=\('label',\)"):
        _ = cavs.schedule(graphs, fields=("input_id",)).label


@pytest.mark.parametrize("seed", range(4))
def test_tasks_of_mixed_fan_in_fit_their_classes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graphs = []
    for _ in range(40):  # narrow and wide levels; a few vertices of more children than a common task has room for
        fan_in = rng.choice([1, 2, 5, 9, 80], size=rng.integers(1, 200), p=[0.4, 0.4, 0.1, 0.09, 0.01])
        inner = (rng.integers(0, max(1, i + 20), n) for i, n in enumerate(fan_in))
        graphs.append(from_children([[]] * 20 + [sorted(set(kids.tolist())) for kids in inner]))
    for some in (*graphs[:20], joined(graphs[20:])):
        sched = cavs.schedule(some)
        check(some, sched)
    assert len({edges // width for width, edges in sched.shape.classes}) > 1


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


def test_graphs_are_checked() -> None:
    with pytest.raises(TypeError, match=r"schedule: graphs: got a list; expected cavs\.Graphs"):
        cavs.schedule([GRAPHS["trees"]])  # type: ignore[arg-type]
