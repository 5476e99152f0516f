"""A forward that is exported for a ladder of sizes serves any batch that fits, and refuses the others."""

import dataclasses
import functools
import pickle
import re
from typing import Any

import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import cavs
from cavs import vertex_programs as vp
from cavs._schedule.ladder import ladder, schedule_into, why_not
from cavs._schedule.scheduler import options_of
from cavs._schedule.shape_choice import Options
from cavs.kernels import native_unavailable
from tests.odd_graphs import BATCHES, joined, random_binary_tree, random_dag, star, with_kinds
from tests.schedule_checks import check, dags

H = 4


def ladder_of(graphs: cavs.Graphs, most: int, count: int, scripts: bool = False) -> tuple[Any, ...]:
    options = options_of("test", graphs, Options(scripts=scripts))
    return ladder(graphs, most, count, options)


@settings(deadline=None, max_examples=60)
@given(dags(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_all_batches_of_graphs_of_the_data_set_fit(graphs: cavs.Graphs, most: int, count: int, seed: int) -> None:
    rng, shapes = np.random.default_rng(seed), ladder_of(graphs, most, count, scripts=bool(seed % 2))
    assert len(shapes) <= count
    for size in range(most + 1):
        batch = graphs[rng.integers(0, len(graphs), size)]
        if seed % 3 == 0 and size:  # as a server gets it, which does not know the data set
            batch = joined([batch[i] for i in range(size)])
        sched = schedule_into(batch, shapes)
        assert sched is not None and sched.shape in shapes
        check(batch, sched)
        assert sched.graph_end[:size].tolist() == batch.vertex_offsets[1:].tolist()
        assert (sched.graph_end[size:] == batch.num_vertices).all() and len(sched.graph_end) == most


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_odd_graphs_fit_their_own_ladder(name: str) -> None:
    shapes = ladder_of(BATCHES[name], len(BATCHES[name]), 3)
    sched = schedule_into(BATCHES[name], shapes)
    assert sched is not None, why_not(BATCHES[name], shapes)
    check(BATCHES[name], sched)


@pytest.mark.parametrize("chains", [40, 200])
def test_levels_of_several_kinds_fit_the_ladder_of_a_gpu(chains: int) -> None:
    graphs = with_kinds(cavs.from_lengths([30] * chains), ("a", "b"), seed=1)
    for scripts in (False, True):
        shapes = ladder_of(graphs, len(graphs), 3, scripts=scripts)
        sched = schedule_into(graphs, shapes)
        assert sched is not None, why_not(graphs, shapes)
        check(graphs, sched)


def test_any_batch_of_trees_through_one_file() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    trees = joined([random_binary_tree(n, seed=n) for n in (1, 2, 3, 5, 8, 13, 21)])
    program = vp.BinaryTreeLSTM(hidden=H, inputs=H)
    F, rng = program.vertex_function(), np.random.default_rng(0)
    params = {"cell": program.init(jax.random.key(0)), "words": rng.standard_normal((9, H)).astype(np.float32)}

    def forward(params: Any, sched: cavs.Schedule, inputs: Any) -> Any:
        h = cavs.run(F, params["cell"], sched, params["words"][inputs["word"]] + inputs["table"][0])
        return {"h": h, "root": h[sched.roots] + inputs["shift"][:, None], "mean": cavs.readout(h, sched, "mean")}

    words, shift = rng.integers(0, 9, trees.num_vertices), rng.standard_normal(len(trees)).astype(np.float32)
    table, sched = np.ones((2, H), np.float32), cavs.schedule(trees)
    inputs = {"word": words, "shift": shift, "table": table}
    want = jax.tree.map(np.asarray, jax.jit(forward)(params, sched, {**inputs, "word": sched.pad(words)}))
    exported = cavs.interop.export_server(forward, params, trees, inputs, most_graphs=4, count=3)
    assert len(exported.shapes) == 3 and {shape.graphs for shape in exported.shapes} == {4}
    assert len(repr(exported)) < 300 and "4 graphs of" in repr(exported)
    served = cavs.interop.load_forward(exported.to_bytes())
    for some in [[i] for i in range(7)] + [rng.integers(0, 7, n).tolist() for n in (2, 3, 4, 9, 0)]:
        numbers = np.array(some, int)
        batch = trees[numbers]
        rows = np.array([r for i in some for r in range(*trees.vertex_offsets[i : i + 2])], int)
        if len(some) % 2:  # as a server gets it, which does not know the data set
            batch = joined([trees[i] for i in some])
        got = served.serve(params, batch, {"word": words[rows], "shift": shift[numbers], "table": table})
        np.testing.assert_allclose(got["h"], want["h"][rows], atol=1e-6)
        np.testing.assert_allclose(got["root"], want["root"][numbers], atol=1e-6)
        np.testing.assert_allclose(got["mean"], want["mean"][numbers], atol=1e-6)


@pytest.mark.parametrize("engine", [None, "native"])
def test_code_that_jax_exports_needs_no_library(engine: str | None) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    if engine and (reason := native_unavailable()):
        pytest.skip(reason)
    program = vp.LSTM(hidden=4, inputs=3)
    F, sched, params = program.vertex_function(), cavs.schedule(cavs.from_lengths([3, 5])), program.init(jax.random.key(0))
    with jax.enable_x64(False):
        args = jax.tree.map(lambda x: x.astype(jnp.float32), (params, jnp.ones((8, 3))))
        run = jax.jit(jax.value_and_grad(lambda p, x: cavs.run(F, p, sched, x, engine=engine).sum()))
        exported = jax.export.export(run)(*args)
        assert "custom_call" not in exported.mlir_module()
        got, want = jax.export.deserialize(exported.serialize()).call(*args), run(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), jax.tree.leaves(got), jax.tree.leaves(want))


def test_a_number_of_python_among_the_parameters() -> None:
    """It raised an `AttributeError`. It promotes no dtype, as without an export."""
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")

    def scaled(params: Any, v: cavs.Vertex) -> None:
        h = v.pull() * params["scale"] + v.gather(0)
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(scaled, state=jax.ShapeDtypeStruct((2,), jnp.bfloat16), arity=1), cavs.from_lengths([3, 2])
    params, x = {"scale": 2.0}, np.ones((5, 2), jnp.bfloat16)
    exported = cavs.interop.export_server(lambda p, s, x: cavs.run(F, p, s, x), params, graphs, x, count=1, most_graphs=2)
    for loaded in (exported, cavs.interop.load_forward(exported.to_bytes())):
        got = loaded.serve(params, graphs, x)
        assert got.dtype == jnp.bfloat16 and got.tolist() == cavs.run(F, params, cavs.schedule(graphs), x).tolist()
    copied = pickle.loads(pickle.dumps(exported))  # after a call, whose compiled program cannot be pickled
    assert copied.shapes == exported.shapes and copied.serve(params, graphs, x).tolist() == got.tolist()
    masked = np.ma.array(np.ones((5, 2), np.float32), mask=np.eye(5, 2))
    for wrong, kind, text in (
        (None, ValueError, "got nothing at ''; expected an array with one row per vertex. The forward reads one array"),
        ([0] * 5, ValueError, "got nothing at ''; expected an array with one row per vertex"),
        (x[:4], ValueError, r"got shape \(4, 2\) at ''; expected \(5, ...\), one row per vertex of the batch, without"),
        (masked, TypeError, "got an array with masked values at ''; expected all values"),
    ):
        with pytest.raises(kind, match="Exported.serve: inputs: " + text):
            exported.serve(params, graphs, wrong)
    with pytest.raises(TypeError, match="export_forward: params: got a str at 'scale'; expected arrays and numbers"):
        cavs.interop.export_forward(lambda p, s, x: x, {"scale": "2"}, [(cavs.schedule(graphs), x)])
    with pytest.raises(TypeError, match="export_forward: examples: got a Schedule; expected a list of pairs. Write"):
        cavs.interop.export_forward(lambda p, s, x: x, params, cavs.schedule(graphs))  # type: ignore[arg-type]


@pytest.mark.slow
@jax.enable_x64(False)
def test_a_server_takes_the_64_bits_of_numpy() -> None:
    """An export of ids of int64, which JAX reads as int32, refused such ids, after a warning of JAX."""
    program = vp.LSTM(hidden=4, inputs=3)
    F, params, graphs = program.vertex_function(), program.init(jax.random.key(0)), cavs.from_lengths([3, 2])
    table, ids = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.arange(5)
    forward = lambda p, s, x: cavs.run(F, p, s, cavs.data.rows(jnp.asarray(table), x))  # noqa: E731
    exported = cavs.interop.export_server(forward, params, graphs, ids, count=1, most_graphs=2)
    got = exported.serve(jax.tree.map(lambda x: np.asarray(x, np.float64), params), graphs, ids)
    np.testing.assert_allclose(got, cavs.run(F, params, cavs.schedule(graphs), table[ids]), atol=1e-6)
    with pytest.raises(ValueError, match="Exported: inputs: got a leaf of dtype int64 with values from 1099511627776"):
        exported.serve(params, graphs, ids + 2**40)


def test_a_server_of_dags_with_kinds() -> None:
    names, kind = ("a", "b", "c"), np.arange(29, dtype=np.int32) * 2 % 3
    dags = joined([random_dag(n, (1, 2, 5), seed=n) for n in (6, 9, 14)])
    graphs = dataclasses.replace(dags, kind=kind, kind_names=names)

    def of_kind(scale: float, params: Any, v: cavs.Vertex) -> None:
        h = v.gather_all(lambda h: 2 * h, "sum") + scale * v.pull()
        v.scatter(jnp.tanh(h))
        v.push(h)

    functions = {name: functools.partial(of_kind, 10.0**i) for i, name in enumerate(names)}
    F = cavs.VertexFunction(functions, state=jax.ShapeDtypeStruct((H,), jnp.float32))
    x = np.random.default_rng(0).standard_normal((graphs.num_vertices, H)).astype(np.float32)
    served = cavs.interop.export_server(lambda p, s, x: cavs.run(F, p, s, x), {}, graphs, x, most_graphs=2, count=2)
    want = cavs.run(F, {}, cavs.schedule(graphs), x, engine="scan")  # exported code cannot call the library of engine native
    for g in range(3):
        rows = slice(*graphs.vertex_offsets[g : g + 2])
        np.testing.assert_allclose(served.serve({}, graphs[g], x[rows]), want[rows], rtol=1e-6, atol=1e-6)
    # The same kinds, numbered in another order.
    other = cavs.Graphs.build(
        np.diff(graphs.vertex_offsets), np.diff(graphs.child_offsets), graphs.children, kind=2 - kind, kind_names=names[::-1]
    )
    np.testing.assert_allclose(served.serve({}, other, x), want, rtol=1e-6, atol=1e-6)


def test_a_server_of_dags_with_edges() -> None:
    dags = joined([random_dag(n, (0, 1, 2, 5), seed=n) for n in (6, 9, 14, 3)])
    rng = np.random.default_rng(0)
    x, edges = (rng.standard_normal((n, H)).astype(np.float32) for n in (dags.num_vertices, dags.num_edges))

    def message(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() + v.gather_all(lambda h, edge: params * h * edge, edges=True))
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(message, state=jax.ShapeDtypeStruct((H,), jnp.float32))
    params = np.float32(0.7)

    def forward(params: Any, sched: cavs.Schedule, inputs: Any) -> Any:
        return cavs.run(F, params, sched, inputs["x"], edges=inputs["edges"])

    exported = cavs.interop.export_server(forward, params, dags, {"x": x, "edges": edges}, most_graphs=2, count=2)
    assert exported.serving is not None and exported.serving.inputs == {"edges": "edge", "x": "vertex"}
    served = cavs.interop.load_forward(exported.to_bytes())
    want = np.asarray(cavs.run(F, params, cavs.schedule(dags), x, edges=edges))
    for some in ([0], [3], [2, 1], [3, 0, 2, 1, 3]):
        rows, own = (
            np.concatenate([np.arange(*offsets[i : i + 2]) for i in some])
            for offsets in (dags.vertex_offsets, dags.child_offsets[dags.vertex_offsets])
        )
        got = served.serve(params, dags[np.array(some)], {"x": x[rows], "edges": edges[own]})
        np.testing.assert_allclose(got, want[rows], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=re.escape("one row per edge of the batch, without padding")):
        served.serve(params, dags, {"x": x, "edges": edges[1:]})


def test_graphs_that_do_not_fit_are_refused() -> None:
    trees = joined([random_binary_tree(n, seed=n) for n in (2, 8)])
    mixed = with_kinds(joined([random_dag(9, (0, 1, 2, 3), seed=1)]), ("a", "b"), seed=0)
    binary, dag = ladder_of(trees, 2, 2), ladder_of(mixed, 1, 1)
    for graphs, shapes, match in (
        (
            random_binary_tree(40, seed=1),
            binary,
            "40 leaves (expected at most 16) and 39 vertices with children (expected at most 16)",
        ),
        (star(3), binary, "a vertex with 3 children; expected 2 at each vertex that has any"),
        (random_dag(9, (2,), seed=0), binary, "a vertex with two parents (expected trees)"),
        (trees, dag, "vertices without kinds; expected the kinds a, b"),
        (with_kinds(trees, ("a", "z"), seed=0), dag, "the kind 'z'; expected one of a, b"),
        (with_kinds(star(90), ("a", "b"), seed=0), dag, "a vertex with 90 children; expected at most"),
    ):
        assert schedule_into(graphs, shapes) is None
        assert match in why_not(graphs, shapes)
    chains = ladder_of(cavs.from_lengths([3] * 90), 1, 1)[0]._replace(tasks=8, leaves=(64,), inner=(256,), edges=(256,))
    assert schedule_into(cavs.from_lengths([30]), [chains]) is None
    assert why_not(cavs.from_lengths([30]), [chains]) == "30 levels; expected fewer, which fit 8 tasks"


def test_kinds_without_names_are_numbers_of_the_ladder_s_kinds() -> None:
    trees = joined([random_binary_tree(n, seed=n) for n in (2, 8)])
    kind = np.where(trees.height > 0, 1 + np.arange(trees.num_vertices) % 2, 0).astype(np.int32)
    named = dataclasses.replace(trees, kind=kind, kind_names=("leaf", "a", "b"))
    shapes = ladder(named, 2, 2, options_of("ladder", named, Options(kinds="mixed")))
    one, other = (schedule_into(graphs, shapes) for graphs in (named, dataclasses.replace(named, kind_names=None)))
    assert one is not None and other is not None
    np.testing.assert_array_equal(one.data, other.data)


def test_errors_of_a_server() -> None:
    graphs, x = cavs.from_lengths([3, 5]), np.ones((8, H), np.float32)
    F = vp.GRU(hidden=H, inputs=H)
    params = F.init(jax.random.key(0))

    def forward(params: Any, sched: cavs.Schedule, x: Any) -> Any:
        return cavs.run(F.vertex_function(), params, sched, x, select=sched.roots)

    served = cavs.interop.export_server(forward, params, graphs, x, most_graphs=2, count=1)
    cases: list[Any] = [
        (
            (params, cavs.schedule(graphs), x),
            TypeError,
            "graphs: got a Schedule; expected cavs.Graphs, which are not scheduled",
        ),
        ((params, graphs, x[1:]), ValueError, "inputs: got shape (7, 4) at ''; expected (8, ...), one row per vertex"),
        ((params, graphs, x.astype(np.float16)), ValueError, "inputs: got float16[16, 4] at ''; expected float32[16, 4]."),
        (
            (params, cavs.from_lengths([2, 99]), np.ones((101, H), np.float32)),
            ValueError,
            "98 vertices with children (expected at most 8) and 98 edges (expected at most 8), in graph 1",
        ),
        ((params, cavs.from_lengths([2, 99]), np.ones((101, H), np.float32)), ValueError, "in graph 1. Export again"),
    ]
    for arguments, error, match in cases:
        with pytest.raises(error, match=re.escape(match)):
            served.serve(*arguments)
    with pytest.raises(ValueError, match=re.escape("forward: got float32[4] at '' of its result; expected one row per vertex")):
        cavs.interop.export_server(lambda p, s, x: forward(p, s, x).sum(0), params, graphs, x)
    with pytest.raises(ValueError, match="most_graphs: got 0; expected an int >= 1"):
        cavs.interop.export_server(forward, params, graphs, x, most_graphs=0)
    with pytest.raises(ValueError, match="graphs: got none; expected the data set that chooses the sizes"):
        cavs.interop.export_server(forward, params, graphs[:0], x[:0])
    sched = cavs.schedule(graphs)
    plain = cavs.interop.export_forward(forward, params, [(sched, sched.pad(x))])
    with pytest.raises(ValueError, match=re.escape("Write cavs.interop.export_server(forward, params, graphs, inputs)")):
        plain.serve(params, graphs, x)
