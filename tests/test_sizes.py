"""Values of width 0 and 1, and kinds of which a batch has no leaf, no other vertex, or no vertex: as vertex by vertex."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._engines.persistent.lower import recurrence_of
from cavs._readers.json_values import as_values
from cavs._run.plans import plan_of
from cavs.kernels import Unfit
from tests.odd_graphs import GRAPHS, children_of, joined, random_binary_tree
from tests.per_vertex import PerVertex, Steps, with_edges
from tests.slow import few
from tests.truth import assert_close


def products(p: Any, v: cavs.Vertex) -> None:
    """Two rows, and the rows of a matrix, times one weight."""
    x = v.pull()
    h = jnp.sin(x["x"]) @ p["w"] + jnp.cos(x["y"]) @ p["w"] + v.gather_all(lambda s: s["h"] @ p["u"])
    h = jnp.tanh(h + (jnp.stack([h, 2 * h, v.gather(0)["h"]]) @ p["u"]).sum(0) + p["w"].T @ v.gather(1)["z"])
    v.scatter({"h": h, "z": x["x"]})
    v.push(h)


def attention(p: Any, v: cavs.Vertex) -> None:
    x = v.pull()
    q = x["x"] @ p["w"]
    a = v.gather_all(lambda s: (q @ s["h"], s["h"] * p["b"]), reduce="softmax")
    m = v.gather_all(lambda s: s["z"] * 2, reduce="max")
    h = jnp.tanh(jnp.concatenate([a, v.gather(0)["z"]]) @ p["c"] + jnp.outer(q, x["x"]) @ m)
    v.scatter({"h": h, "z": jnp.tanh(m) + x["y"]})
    v.push({"a": a, "z": m, "lazy": jnp.stack([h, a]) @ p["u"].T})


def edges(p: Any, v: cavs.Vertex) -> None:
    s = v.gather_all(lambda s, e: jnp.tanh(s["h"] @ p["u"] + e @ p["w"]), edges=True)
    h = jnp.tanh(s + v.pull()["x"] @ p["w"])
    v.scatter({"h": h, "z": v.pull()["y"]})
    v.push(h)


FUNCTIONS: dict[str, Callable[..., None]] = {"products": products, "attention": attention, "edges": edges}
TREE = [[(2, 0), (2, 1), (4, 2), (4, 3)], []]  # and a vertex alone
BATCHES: dict[str, cavs.Graphs] = {
    "words and operators": cavs.from_edges([5, 1], TREE, kind=np.array([1, 1, 0, 1, 0, 1]), kind_names=("op", "word")),
    "a kind of leaves alone": cavs.from_edges([5, 1], TREE, kind=np.array([1, 0, 0, 0, 0, 1]), kind_names=("a", "b")),
    "a kind without vertices": cavs.from_edges([5, 1], TREE, kind=np.array([2, 0, 0, 2, 2, 0]), kind_names=("a", "b", "c")),
    "leaves alone": cavs.from_edges([1, 1], [[], []]),
}
WIDTHS = [(0, 3), (3, 0), (1, 1)]  # of what vertices pull, and of their state
# Engine scan in float64; in float32 the engine that `cavs` chooses. Any two of function, batch, widths and engine meet.
CASES = [
    (name, batch, *WIDTHS[(i + j) % 3], ("scan", None)[(i + j) % 2])
    for i, name in enumerate(FUNCTIONS)
    for j, batch in enumerate(BATCHES)
    if name != "edges" or batch != "leaves alone"
]


def random(n: int, h: int, graphs: cavs.Graphs) -> tuple[Any, Any, Any]:
    """Returns parameters, rows of vertices, and rows of edges."""
    rng, count = np.random.default_rng(0), graphs.num_vertices
    shapes = {"w": (n, h), "u": (h, h), "b": (h,), "c": (h + n, h)}
    params = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}
    return params, {name: rng.standard_normal((count, n)) for name in "xy"}, rng.standard_normal((graphs.num_edges, n))


def loss(pushes: Any) -> tuple[Any, Any]:
    weighted = [(jnp.sin(x) * (1 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in jax.tree.leaves(pushes)]
    return sum(weighted), pushes


def truth(name: str, batch: str, n: int, h: int) -> Any:
    """Returns the pushes and gradients of the loss, vertex by vertex in float64."""
    graphs = BATCHES[batch]
    lists = [children_of(graphs, g) for g in range(len(graphs))]
    kinds: list[Any] = [None] * graphs.num_vertices
    if graphs.kind is not None and graphs.kind_names:
        kinds = [graphs.kind_names[k] for k in graphs.kind]
    net = PerVertex(Steps(dict.fromkeys(kinds, FUNCTIONS[name]), {"h": jnp.zeros(h), "z": jnp.zeros(n)}), lists, kinds)

    def of(params: Any, x: Any, e: Any) -> Any:
        return loss(net(params, with_edges(x, e, lists) if name == "edges" else x))

    return jax.value_and_grad(of, (0, 1, 2) if name == "edges" else (0, 1), has_aux=True)(*random(n, h, graphs))


@pytest.mark.parametrize(("name", "batch", "n", "h", "engine"), few(CASES, 5))
def test_values_and_gradients_are_those_vertex_by_vertex(name: str, batch: str, n: int, h: int, engine: str | None) -> None:
    graphs, dtype = BATCHES[batch], np.float64 if engine == "scan" else np.float32
    state = {"h": jax.ShapeDtypeStruct((h,), dtype), "z": jax.ShapeDtypeStruct((n,), dtype)}
    fns = dict.fromkeys(graphs.kind_names, FUNCTIONS[name]) if graphs.kind_names else FUNCTIONS[name]
    F, sched = cavs.VertexFunction(fns, state=state, arity=2), cavs.schedule(graphs)

    def of(params: Any, x: Any, e: Any) -> Any:
        return loss(cavs.run(F, params, sched, x, edges=e if name == "edges" else None, engine=engine))

    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), random(n, h, graphs))
    got = jax.jit(jax.value_and_grad(of, (0, 1, 2) if name == "edges" else (0, 1), has_aux=True))(*given)
    want = jax.tree.map(lambda x: jnp.asarray(x, dtype), truth(name, batch, n, h))
    assert_close(got, want, 1e-11 if engine == "scan" else 2e-4)


@pytest.mark.parametrize(("n", "h"), [(0, 64), (64, 0)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_engine_persistent_refuses_values_of_width_0(name: str, n: int, h: int) -> None:
    """On a GPU engine scan then runs."""
    params, x, e = random(n, h, BATCHES["leaves alone"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), (params, x | {"edges": e}))
    x = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like[1])
    e = x.pop("edges") if name == "edges" else None
    state = {"h": jax.ShapeDtypeStruct((h,), np.float32), "z": jax.ShapeDtypeStruct((n,), np.float32)}
    F = cavs.VertexFunction(FUNCTIONS[name], state=state, arity=2)
    plan = plan_of(F, like[0], x, edges=e)
    for forward in (True, False):
        with pytest.raises(Unfit, match="it computes with values of width 0"):
            recurrence_of(plan, None, forward)


def test_stacked_batches_have_arrays_of_width_0() -> None:
    def collate(sample: Any) -> Any:
        return sample.sched, np.zeros((3, 0), np.float32), np.zeros(0, np.int32)

    loader = cavs.data.Loader(GRAPHS["trees"], [[0, 1], [2, 3], [1, 4], [2, 0]], collate=collate, steps=2, shapes=1)
    found = [[x.shape for x in jax.tree.leaves(batch.tree[1:])] for batch in loader]
    assert found == [[(2, 3, 0), (2, 0)]] * 2


def test_no_rows_have_no_values() -> None:
    assert as_values(np.zeros((0, 3))) == [] and as_values(np.zeros((2, 0))) == [[], []]
    assert as_values(np.array([[1.0, np.nan], [np.nan, np.nan], [1.0, 2.0]])) == [[1.0, None], None, [1.0, 2.0]]


@pytest.mark.parametrize("engine", ["scan", "native"])
def test_what_parameters_alone_give_counts_for_vertices_that_are_there(engine: str) -> None:
    """F at vertices of kind "b", and at leaves of it, has poles that depend on parameters alone; the batch has none of them."""

    def leaf(p: Any, v: cavs.Vertex) -> None:
        v.scatter(v.pull())
        v.push(v.pull())

    def a(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather(0) @ p["w"] + v.gather(1))
        v.scatter(h)
        v.push(h)

    def b(p: Any, v: cavs.Vertex) -> None:
        x, y = v.gather(0), v.gather(1)
        h = jnp.tanh((x / y * p["c"]) @ p["w"]) + jnp.sqrt(p["zero"])  # at a leaf, 0 / 0
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction({"leaf": leaf, "a": a, "b": b}, state=(8,), arity=2)
    tree, rng = random_binary_tree(9, seed=9), np.random.default_rng(0)
    kind = (tree.height > 0) * (1 + np.arange(3)[:, None] // 2)  # of three trees, the last one has vertices of kind "b"
    trees = dataclasses.replace(joined([tree] * 3), kind=kind.reshape(-1).astype(np.int32), kind_names=("leaf", "a", "b"))
    params = {"w": np.float32(rng.normal(size=(8, 8))), "c": np.ones(8, np.float32), "zero": np.zeros(8, np.float32)}
    x = np.float32(rng.normal(size=(tree.num_vertices, 8)))
    room = next(iter(cavs.data.Loader(trees, 1, steps=1, shapes=1, seed=None)))
    assert all(room.shape.inner[1:]) and room.inner_count.tolist() == [0, 8, 0]
    for sched in (cavs.schedule(trees[:1]), room):
        grads = jax.grad(lambda p, s=sched: (cavs.run(F, p, s, x, engine=engine) ** 2).sum())(params)
        assert np.isfinite(grads["w"]).all() and grads["w"].any() and not grads["c"].any() and not grads["zero"].any()
