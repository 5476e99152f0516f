"""Rows of edges: `gather_all(..., edges=True)` in every transformation and on both engines; `Graphs.edge_attr` and its formats.

Values and gradients are compared with the loop over vertices in `test_run`, for the programs of the table.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import GRAPHS, joined, random_dag
from tests.persistent_programs import INTERPRETED, INTERPRETER, assert_near
from tests.programs import PROGRAMS, E, H
from tests.truth import WithEdges, assert_close, call, loss

PROGRAM, GRAPH = PROGRAMS["edge messages"], GRAPHS["shared children"]


def small(graphs: cavs.Graphs = GRAPH) -> WithEdges:
    return WithEdges(PROGRAM.inputs(graphs.num_vertices), PROGRAM.edges_of(graphs.num_edges))


def message(p: Any, v: cavs.Vertex) -> None:
    """A product of the child and an eager one of the edge, scaled by a row of the edge."""
    x = v.pull() @ p["w"]
    m = v.gather_all(lambda s, e: jax.nn.relu(s @ p["u"] + e["x"] @ p["e"] + x) * e["h"], edges=True)
    h = jnp.tanh(m + x)
    v.scatter(h)
    v.push(jnp.sin(h))


def attention(p: Any, v: cavs.Vertex) -> None:
    """A score and a value of the edge; a maximum of edges before the levels."""
    x = v.pull() @ p["w"]
    m = v.gather_all(lambda s, e: ((s * x).sum() + e["x"].sum(), s + e["h"]), reduce="softmax", edges=True)
    h = jnp.tanh(m @ p["u"] + x + v.gather_all(lambda s, e: jnp.tanh(e["x"] @ p["e"]), reduce="max", edges=True))
    v.scatter(h)
    v.push({"h": h, "mean": v.gather_all(lambda s, e: s * e["h"], reduce="mean", edges=True)})


@INTERPRETER
@pytest.mark.parametrize(("fn", "hidden"), [(attention, 10)])
def test_kernels_in_the_interpreter(fn: Any, hidden: int) -> None:
    graphs, rng = joined([random_dag(9, (1, 2, 3), seed=4), GRAPH]), np.random.default_rng(3)
    shapes = {"w": (E, hidden), "u": (hidden, hidden), "e": (4, hidden)}
    params = {name: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for name, s in shapes.items()}
    x = rng.standard_normal((graphs.num_vertices, E)).astype(np.float32)
    edge, h = (rng.standard_normal((graphs.num_edges, w)).astype(np.float32) for w in (4, hidden))
    sched = cavs.schedule(graphs, scripts=True)

    def found(engine: Any) -> Any:
        function = cavs.VertexFunction(fn, state=(hidden,))

        def f(params: Any, x: Any, edges: Any) -> Any:
            pushes = cavs.run(function, params, sched, x, edges=edges, engine=engine)
            return loss(pushes, graphs.num_vertices), pushes

        both = jax.value_and_grad(f, (0, 1, 2), has_aux=True)
        return (jax.jit(both) if engine == "scan" else both)(params, x, {"x": edge, "h": h})

    with jax.default_matmul_precision("highest"):
        assert_near(found(INTERPRETED), found("scan"), 1e-5)


def test_vmap_and_jit_over_edges() -> None:
    schedule, x = cavs.schedule(GRAPH), small()
    rows, edges = schedule.pad(x.rows), jax.tree.map(schedule.pad_edges, x.edges)
    stacked = edges | {"x": np.stack([edges["x"], 2 * edges["x"]])}

    def gradient(schedule: cavs.Schedule, vector: Any) -> Any:
        def f(vector: Any) -> Any:
            pushes = cavs.run(PROGRAM.function, PROGRAM.params, schedule, rows, edges=edges | {"x": vector})
            return (pushes["h"] ** 2).sum() + pushes["top"].sum()

        return jax.value_and_grad(f)(vector)

    together = jax.jit(jax.vmap(gradient, (None, 0)))(schedule, stacked["x"])
    alone = [gradient(schedule, one) for one in stacked["x"]]
    assert_close(together, jax.tree.map(lambda *xs: jnp.stack(xs), *alone), 1e-12)


def test_the_eager_part_runs_once_for_all_edges() -> None:
    edge = {"x": jax.ShapeDtypeStruct((4,), jnp.float64), "h": jax.ShapeDtypeStruct((H,), jnp.float64)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float64) for name, s in {"w": (E, H), "u": (H, H), "e": (4, H)}.items()}
    F = cavs.VertexFunction(message, state=(H,))
    text = cavs.explain(F, params, jax.ShapeDtypeStruct((E,), jnp.float64), edge)
    assert re.search(r"reads rows of edges: \d+ eager equations?, once for all edges; the levels read 2 values an edge", text)
    assert f"{2 * H * H} FLOPs in products a vertex (between gather" in text  # only the child's product is recurrent


def test_debug_tools_read_edges() -> None:
    def weighted(params: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather_all(lambda s, e: s * e["w"], edges=True) + v.pull())
        v.scatter(h)
        v.push(h)

    F, rows = cavs.VertexFunction(weighted, state=(2,)), np.ones((GRAPH.num_vertices, 2))
    edges = {"w": np.ones(GRAPH.num_edges)}
    assert not cavs.debug.compare(F, {}, GRAPH, rows, edges=edges).differences
    edges["w"][3] = np.nan
    report = cavs.debug.find_nan(F, {}, GRAPH, rows, edges=edges)
    assert report is not None and report.where == "edges" and report.symbol == "edges['w']" and report.vertex == 3

    def root(params: Any, v: cavs.Vertex) -> None:
        h = v.gather_all(lambda s, e: s + jnp.sqrt(e), edges=True) + v.pull()
        v.scatter(h)
        v.push(h)

    F, weights = cavs.VertexFunction(root, state=()), np.ones(GRAPH.num_edges)
    weights[2] = 0
    report = cavs.debug.find_nan(F, {}, GRAPH, np.ones(GRAPH.num_vertices), edges=weights, infinities=True)
    assert report is not None and report.symbol == "gradient of edges" and report.vertex == 3


def tree(fn: Any, edges: Any = None) -> Any:
    graphs = cavs.from_parents([[2, 2, -1]])
    F = cavs.VertexFunction(fn, state=(H,))
    return cavs.run(F, {}, cavs.schedule(graphs), np.ones((3, H)), edges=edges)


def reads(p: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull() + v.gather_all(lambda s, e: s * e, edges=True))
    v.push(v.pull())


def reads_none(p: Any, v: cavs.Vertex) -> None:
    v.scatter(v.pull() + v.gather_all())
    v.push(v.pull())


@pytest.mark.parametrize(
    ("fn", "edges", "match"),
    [
        (reads, None, "got edges=True in a run without edges; expected edges. Write cavs.run(F, params, sched, inputs, edges"),
        (reads, np.ones((3, H)), f"run: edges: got leaves of shapes [(3, {H})]; expected a first axis of 2 (one row per edge)"),
        (reads, np.ones(()), "run: edges: got leaves of shapes [()]; expected a first axis of 2"),
        (reads_none, np.ones((2, H)), "run: edges: got edges, which F does not read; expected None. Write v.gather_all(lambda"),
    ],
)
def test_misuse_is_refused_by_name(fn: Any, edges: Any, match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        tree(fn, edges)


def test_a_function_that_reads_no_edge_is_refused() -> None:
    match = "gather_all: fn: got <lambda>(state); expected a function of 2 arguments, (state, edge). Write v.gather_all(lambda "
    with pytest.raises(TypeError, match=re.escape(match)):
        tree(lambda p, v: v.gather_all(edges=True), np.ones((2, H)))


def test_edges_under_jit_must_be_padded() -> None:
    schedule = cavs.schedule(GRAPH)
    with pytest.raises(ValueError, match=re.escape("(padded). The rows have the order of Graphs.children. Under jax.jit")):
        jax.jit(lambda s, x: call(cavs.run, PROGRAM.function, PROGRAM.params, s, x))(
            schedule, WithEdges(schedule.pad(small().rows), small().edges)
        )
    with pytest.raises(ValueError, match=re.escape("pad_edges: array: got shape (3,); expected (12, ...), one row per edge")):
        schedule.pad_edges(np.ones(3))
    with pytest.raises(ValueError, match="interpret: edges: got leaves of shapes .* one row per edge"):
        cavs.interpret(
            PROGRAM.function, PROGRAM.params, GRAPH, small().rows, edges=jax.tree.map(lambda x: x[1:], small().edges)
        )


# ---- Graphs.edge_attr ----


def pairs(graphs: cavs.Graphs) -> list[tuple[int, int, int, float]]:
    """(graph, parent, child, value) of each edge."""
    assert graphs.edge_attr is not None
    vertex = np.arange(graphs.num_vertices).repeat(np.diff(graphs.child_offsets))
    graph = np.searchsorted(graphs.vertex_offsets, vertex, side="right") - 1
    ends = zip(graph, vertex - graphs.vertex_offsets[graph], graphs.children, graphs.edge_attr, strict=True)
    return [(int(g), int(p), int(c), float(value)) for g, p, c, value in ends]


INDEX = np.array([[0, 1, 4, 0, 2, 3, 0], [1, 2, 5, 2, 3, 1, 1]])
INDEX[:, 5] = 0, 3
VALUES = np.array([0.5, 1, 2, 3, 4, 5, 6])
WANT = [(0, 1, 0, 0.5), (0, 1, 0, 6.0), (0, 2, 1, 1.0), (0, 2, 0, 3.0), (0, 3, 2, 4.0), (0, 3, 0, 5.0), (1, 1, 0, 2.0)]


def batch() -> cavs.Graphs:
    return cavs.interop.from_edge_index(INDEX, num_nodes=[4, 2], edge_attr=VALUES)


def test_edge_attr_follows_its_edge() -> None:
    graphs = batch()
    assert pairs(graphs) == WANT
    assert pairs(cavs.from_edges([4, 2], INDEX[::-1].T, edge_attr=VALUES)) == WANT
    assert pairs(graphs[1]) == [(0, 1, 0, 2.0)]
    assert [edge[1:] for edge in pairs(graphs[[1, 0, 1]])] == [edge[1:] for edge in (*WANT[6:], *WANT[:6], *WANT[6:])]
    assert pairs(graphs[:1] + graphs[1:]) == WANT
    assert sorted((g, c, p, x) for g, p, c, x in pairs(graphs.reversed())) == sorted(WANT)
    with pytest.raises(ValueError, match="graphs . other: got edge_attr in some graphs only"):
        graphs + cavs.from_lengths([2])
    with pytest.raises(ValueError, match=re.escape("from_edge_index: edge_attr: got shape (2,); expected (7, ...), one row")):
        cavs.interop.from_edge_index(INDEX, num_nodes=[4, 2], edge_attr=VALUES[:2])
    with pytest.raises(ValueError, match=re.escape("edge_attr: got shape (3,); expected (1, ...), one row per edge")):
        cavs.Graphs.build([2], [0, 1], [0], edge_attr=[1, 2, 3])
    with pytest.raises(TypeError, match="from_parents: got unknown argument 'edge_attr'"):
        cavs.from_parents([[1, -1]], edge_attr=[1])


@pytest.mark.parametrize("name", ["g.jsonl", "g.npz"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_files_hold_edge_attr(tmp_path: Any, name: str, shape: tuple[int, ...]) -> None:
    graphs = cavs.interop.from_edge_index(
        INDEX, num_nodes=[4, 2], edge_attr=VALUES.reshape(-1, *(1,) * len(shape)) + np.ones(shape)
    )
    (cavs.io.save_npz if name == "g.npz" else cavs.io.write_edges)(graphs, tmp_path / name)
    np.testing.assert_array_equal(cavs.read(tmp_path / name).edge_attr, graphs.edge_attr)


def test_values_of_pairs_in_json_lines(tmp_path: Any) -> None:
    path, first = tmp_path / "g.jsonl", '{"edges": [[2, 1], [1, 0], [2, 0]], "num_vertices": 3, "edge_attr": [7, 8, 9]}\n'
    path.write_text(first + '{"children": [[]], "edge_attr": []}\n')
    assert pairs(cavs.read(path)) == [(0, 1, 0, 8), (0, 2, 1, 7), (0, 2, 0, 9)]
    assert cavs.read(path).edge_attr.dtype == np.int64
    for line, match in (
        ('"edge_attr": [1, 2]', "'edge_attr' to be a list of 1 value, one per edge"),
        ('"edge_attr": [[1]]', "'edge_attr' to be numbers, or lists of numbers of one shape"),
        ('"edge_attr": [true]', "'edge_attr' to be numbers"),
        ('"edge_attr": [null]', "'edge_attr' to be numbers"),
        ('"edge_attr": [NaN]', "'edge_attr' to be numbers"),
        ('"kinds": [1, 1]', "'edge_attr' on every line or on none; the first has it"),
    ):
        path.write_text(first + f'{{"children": [[], [0]], {line}}}\n')
        with pytest.raises(cavs.io.FormatError, match=f"line 2: .*{match}"):
            cavs.read(path)
    with pytest.raises(ValueError, match="write_edges: edge_attr: got float64 with values that are not finite"):
        cavs.io.write_edges(cavs.from_edges(2, [(1, 0)], edge_attr=[np.nan]), path)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_loader_delivers_edge_attr(ahead: int) -> None:
    graphs = joined([batch()[[i % 2]] for i in range(10)])

    def collate(sample: cavs.data.Sample) -> Any:
        assert isinstance(sample.graphs, cavs.Graphs) and isinstance(sample.sched, cavs.Schedule)
        return sample.sched, sample.sched.pad_edges(sample.graphs.edge_attr), np.array(pairs(sample.graphs))

    def weighted(p: Any, v: cavs.Vertex) -> None:
        count = v.gather_all(lambda s, e: e * s, edges=True) + v.is_leaf()
        v.scatter(count)
        v.push(count)

    F = cavs.VertexFunction(weighted, state=jax.ShapeDtypeStruct((), jnp.float64))
    for sched, edges, listed in cavs.data.Loader(graphs, 3, steps=1, collate=collate, ahead=ahead, fields=()):
        got = np.sort(cavs.run(F, {}, sched, edges=edges)[sched.roots])
        assert edges.shape == (sched.shape.all_edges,) and sched.num_edges == len(listed)
        assert set(got) <= {4 * (0.5 + 6 + 3) + 5.0, 2.0, 4 * (6.5 + 3) + 5}
