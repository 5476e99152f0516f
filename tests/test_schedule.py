"""Properties of schedules over random graphs: Cavs Algorithm 1 and the layout of its tasks."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import cavs
from cavs._schedule.shape_choice import bucket, rounded_up
from tests.odd_graphs import BATCHES, GRAPHS, WIDE, chain, joined, random_binary_tree, with_kinds
from tests.schedule_checks import check, dags


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(dags(), st.booleans(), st.booleans(), st.sampled_from(["batching", "serial"]), st.booleans())
def test_schedules_of_random_graphs(graphs: cavs.Graphs, kinds: bool, exact: bool, policy: str, scripts: bool) -> None:
    check(graphs, cavs.schedule(graphs, kinds=kinds, exact=exact, policy=policy, scripts=scripts))


@pytest.mark.parametrize("name", [*BATCHES, *WIDE])
@pytest.mark.parametrize("exact", [False, True])
def test_schedules_of_odd_graphs(name: str, exact: bool) -> None:
    graphs = (BATCHES | WIDE)[name]
    check(graphs, cavs.schedule(graphs, exact=exact))
    check(graphs, cavs.schedule(graphs, exact=exact, scripts=True))
    check(graphs, cavs.schedule(graphs, exact=exact, policy="serial"))


def test_an_empty_batch() -> None:
    schedule = cavs.schedule(GRAPHS["trees"][:0])
    check(GRAPHS["trees"][:0], schedule)
    assert schedule.num_tasks == 0 and schedule.roots.shape == (0,)


def test_serial_tasks_hold_one_vertex() -> None:
    schedule = cavs.schedule(GRAPHS["trees"], policy="serial")
    assert (schedule.task_size[: schedule.num_tasks] == 1).all()
    assert schedule.num_tasks == schedule.inner_count.sum()


def test_a_level_is_few_tasks() -> None:
    graphs = joined([chain(30)] * 64)
    assert cavs.schedule(graphs).num_tasks == 29
    assert cavs.schedule(graphs, policy="serial").num_tasks == 29 * 64


def test_roots() -> None:
    graphs = GRAPHS["trees"]
    roots = cavs.schedule(graphs).roots
    parents = np.bincount(
        graphs.children
        + np.repeat(np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets)), np.diff(graphs.child_offsets)),
        minlength=graphs.num_vertices,
    )
    assert (parents[roots] == 0).all() and (
        np.searchsorted(graphs.vertex_offsets, roots, side="right") == np.arange(1, 6)
    ).all()


def test_kinds_without_names_are_numbered() -> None:
    graphs = dataclasses.replace(with_kinds(GRAPHS["trees"], ("a", "b")), kind_names=None)
    assert cavs.schedule(graphs).shape.kinds == ("0", "1")
    assert cavs.schedule(graphs, kinds=False).shape.kinds == ("",)


def test_numbers_of_rows_that_xla_can_split() -> None:
    given = [0, 1, 511, 513, 4000, 4384, 18449, 73797, 1 << 30]
    assert [rounded_up(n) for n in given] == [8, 8, 512, 544, 4000, 4416, 18496, 73920, 1 << 30]
    sizes = np.arange(4097, 60000, 97)
    found = np.array([rounded_up(n) for n in sizes.tolist()])
    assert (found >= sizes).all() and (found % 32 == 0).all() and (found <= 1.03 * sizes).all()
    for n in found.tolist():
        assert any(n % k == 0 for k in range(math.isqrt(n) // 2 + 1, math.isqrt(n) + 1))


def test_buckets_are_a_ladder() -> None:
    sizes = np.array([bucket(n) for n in range(20000)])
    assert (np.diff(sizes) >= 0).all() and (sizes >= np.arange(20000)).all()
    assert (sizes <= 1.19 * np.arange(20000) + np.where(sizes < 512, 8, 32)).all()
    assert [bucket(int(n)) for n in sizes] == sizes.tolist()
    assert len(set(sizes)) <= 48


def test_a_field_that_is_named_twice() -> None:
    graphs = cavs.from_lengths([3, 2], label=np.arange(5))
    once, twice = (cavs.schedule(graphs, fields=("label",) * n) for n in (1, 2))
    assert once.shape == twice.shape
    np.testing.assert_array_equal(once.data, twice.data)


def test_exact_schedules_have_no_padding() -> None:
    graphs = BATCHES["binary"]
    assert cavs.schedule(graphs, exact=True).shape.vertices == graphs.num_vertices


def test_shuffled_batches_share_few_shapes() -> None:
    rng = np.random.default_rng(0)
    graphs = joined([random_binary_tree(int(n), seed=i) for i, n in enumerate(rng.integers(3, 45, 256))])
    shapes = set()
    for _ in range(20):
        order = rng.permutation(len(graphs))
        shapes |= {cavs.schedule(graphs[order[i : i + 32]]).shape for i in range(0, 256, 32)}
    assert len(shapes) <= 12, sorted((s.vertices, s.leaves, s.inner, s.tasks, s.classes) for s in shapes)


def test_known_shapes_are_taken_again() -> None:
    graphs, rng = joined([random_binary_tree(leaves, leaves) for leaves in range(2, 66)]), np.random.default_rng(0)
    known: list = []
    for _epoch in range(6):
        before = len(known)
        order = rng.permutation(len(graphs))
        for start in range(0, len(graphs), 16):
            schedule = cavs.schedule(graphs[order[start : start + 16]], shapes=known)
            assert schedule.shape in known
            check(graphs[order[start : start + 16]], schedule)
    assert len(known) == before <= 5


@pytest.mark.parametrize("name", BATCHES)
def test_the_graph_of_each_vertex_follows_from_where_graphs_end(name: str) -> None:
    for graphs in (BATCHES[name], BATCHES[name][:0]):
        sched = cavs.schedule(graphs)
        want = np.full(sched.shape.vertices, len(graphs))
        want[: graphs.num_vertices] = np.arange(len(graphs)).repeat(np.diff(graphs.vertex_offsets))
        traced = jax.jit(lambda data, shape=sched.shape: (lambda s: (s.graph, s.vertex_mask))(cavs.Schedule(data, shape)))
        for graph, mask in ((sched.graph, sched.vertex_mask), traced(sched.data)):
            assert graph.dtype == np.int32
            np.testing.assert_array_equal(graph, want)
            np.testing.assert_array_equal(mask, want < len(graphs))
