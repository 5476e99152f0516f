"""Tasks that mix kinds: `cavs.schedule(graphs, kinds="mixed")`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import BATCHES, joined, random_binary_tree, random_dag, with_kinds
from tests.persistent_programs import INTERPRETED, INTERPRETER
from tests.programs import PROGRAMS
from tests.schedule_checks import options_for
from tests.slow import few
from tests.truth import assert_close, assert_is_truth

OF_KINDS = [(name, batch) for name, one in PROGRAMS.items() for batch in one.batches if None not in one.function.fns]


@pytest.mark.parametrize(("name", "batch"), few(OF_KINDS, 2))
def test_programs_of_kinds_are_the_loop_over_vertices(name: str, batch: str) -> None:
    sched = cavs.schedule(BATCHES[batch], kinds="mixed", scripts=True)
    assert sched.shape.inner[1:] == (0,) * (len(sched.shape.kinds) - 1)
    assert_is_truth(cavs.run, sched, name, batch)


def of_poles(poles: bool) -> cavs.VertexFunction:
    """Functions of two kinds. With `poles`, that of "b" is infinite, or has an infinite derivative, for what "a" gathers."""

    def leaf(p: Any, v: cavs.Vertex) -> None:
        v.scatter(v.pull())
        v.push(v.pull())

    def a(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather(0) @ p["w"]) + v.gather(1)
        v.scatter(jnp.zeros_like(h) + 0 * h)  # zeros, which "b" would divide by
        v.push(h)

    def b(p: Any, v: cavs.Vertex) -> None:
        x, y = v.gather(0), v.gather(1)
        z = x / y + jnp.log(jnp.abs(y)) + jnp.sqrt(jnp.abs(x)) if poles else x + y
        h = jnp.tanh((z * p["c"]) @ p["u"] / p["d"] + jnp.exp(p["c"] * 1e30 * y * y))
        v.scatter(1 + h * h)
        v.push(h)

    return cavs.VertexFunction({"leaf": leaf, "a": a, "b": b}, state=(16,), arity=2)


@pytest.mark.parametrize("engine", few(["scan", "native", pytest.param(INTERPRETED, id="persistent", marks=INTERPRETER)], 1))
def test_what_other_kinds_compute_for_a_vertex_takes_no_part(engine: Any) -> None:
    """Vertices of kind "a" alone: the function of "b" is evaluated at its poles, and its parameters get zeros, not NaN."""
    tree = random_binary_tree(9, seed=3)
    kind = (tree.height > 0).astype(np.int32)
    both = dataclasses.replace(joined([tree, tree]), kind=np.concatenate([kind, 2 * kind]), kind_names=("leaf", "a", "b"))
    graphs, rng = both[:1], np.random.default_rng(0)  # of a data set in which vertices of both kinds have children
    sched = cavs.schedule(graphs, kinds="mixed", scripts=True)
    assert sched.shape.mixed == (1, 2)
    params = {k: np.float32(rng.normal(size=s)) for k, s in {"w": (16, 16), "u": (16, 16), "c": (16,), "d": (16,)}.items()}
    x = np.float32(rng.normal(size=(graphs.num_vertices, 16)))

    def value(poles: bool, sched: cavs.Schedule, engine: Any) -> Any:
        F = of_poles(poles)
        both = jax.value_and_grad(lambda p, x: (cavs.run(F, p, sched, x, engine=engine) ** 2).sum(), (0, 1))
        return (jax.jit(both) if engine == "scan" else both)(params, x)

    got, want = value(True, sched, engine), value(False, cavs.schedule(graphs), "scan")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    assert_close(got, want, 2e-5)
    assert not any(np.any(got[1][0][name]) for name in "ucd")


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
def test_parameters_that_are_reduced_over_children(reduce: str) -> None:
    """At vertices of another kind, which have no children there, a mean divides by zero."""

    def one(p: Any, v: cavs.Vertex) -> None:
        v.scatter(p["b"])
        v.push(p["b"])

    def other(p: Any, v: cavs.Vertex) -> None:
        v.scatter(p["b"])
        v.push(v.gather_all(lambda s: p["c"] * p["b"], reduce=reduce))

    F = cavs.VertexFunction({"one": one, "other": other}, state=(4,))
    graphs = cavs.from_edges([3], [[(1, 0), (2, 1)]], kind=[1, 1, 0], kind_names=("one", "other"))
    params, sched = {"b": np.arange(1.0, 5), "c": np.arange(2.0, 6)}, cavs.schedule(graphs, kinds="mixed")
    got = jax.grad(lambda p: cavs.run(F, p, sched).sum())(params)
    assert_close(got, jax.grad(lambda p: cavs.interpret(F, p, graphs, None).sum())(params), 1e-12)


def test_more_children_than_a_kind_gathers_are_an_error() -> None:
    def first(p: Any, v: cavs.Vertex) -> None:
        v.scatter(v.gather(0))
        v.push(v.gather(0))

    def every(p: Any, v: cavs.Vertex) -> None:
        h = v.gather_all()
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction({"first": first, "all": every}, state=(2,), arity=1)
    wide = cavs.from_edges([4], [[(3, 0), (3, 1), (3, 2)]], kind=[0, 0, 0, 1], kind_names=("first", "all"))
    graphs = cavs.Graphs.concat([wide, cavs.from_edges([2], [[(1, 0)]], kind=[1, 0], kind_names=("first", "all"))])
    p = {"w": jnp.ones(2)}
    assert cavs.run(F, p, cavs.schedule(graphs, kinds="mixed")).shape == (6, 2)
    bad = cavs.from_edges([4], [[(3, 0), (3, 1), (2, 0)]], kind=[0, 0, 1, 0], kind_names=("first", "all"))
    for sched in (cavs.schedule(bad, kinds="mixed"), cavs.schedule(bad)):
        with pytest.raises(ValueError, match="a vertex of kind 'first' with 2 children"):
            cavs.run(F, p, sched)
        with pytest.raises(Exception, match="a vertex of kind 'first' with 2 children"):
            jax.block_until_ready(jax.jit(lambda s: cavs.run(F, p, s))(sched))
            jax.effects_barrier()


def test_kinds_must_push_the_same() -> None:
    def of(push: Any) -> Any:
        def fn(p: Any, v: cavs.Vertex) -> None:
            v.scatter(jnp.ones(2))
            v.push(push)

        return fn

    F = cavs.VertexFunction({"a": of(jnp.ones(2)), "b": of(jnp.ones(3))}, state=(2,), arity=2)
    graphs = with_kinds(random_binary_tree(9, seed=0), ("a", "b"), seed=0)
    with pytest.raises(ValueError, match="All vertices must push the same"):
        cavs.run(F, {}, cavs.schedule(graphs, kinds="mixed"))


def test_a_loader_mixes_kinds_in_one_shape() -> None:
    """Also batches in which fewer kinds have children; `F` for kinds, and one that does not distinguish them."""
    graphs = joined([with_kinds(random_dag(n, (1, 2), seed=n), ("a", "b", "c"), seed=n) for n in range(3, 15)])
    loader = cavs.data.Loader(graphs, 3, kinds="mixed", steps=1, seed=None, shapes=1, fields=())
    assert {sched.shape.mixed for sched in loader} == {graphs._inner_kinds} and len({s.shape for s in loader}) == 1

    def of(scale: float) -> Any:
        def fn(p: Any, v: cavs.Vertex) -> None:
            h = jnp.tanh(scale * v.gather_all(lambda h: h @ p) + 1)
            v.scatter(h)
            v.push(h)

        return fn

    p = np.float32(np.random.default_rng(0).normal(size=(4, 4)))
    for F in (
        cavs.VertexFunction({"a": of(1.0), "b": of(-2.0), "c": of(0.5)}, state=(4,)),
        cavs.VertexFunction(of(1.0), state=(4,)),
    ):
        for index, sched in enumerate(loader):
            some = graphs[3 * index : 3 * index + 3]
            want = cavs.interpret(F, p, some)
            assert_close(np.asarray(cavs.run(F, p, sched))[: some.num_vertices], want, 1e-5)


def test_what_is_no_way_to_schedule_kinds_is_refused() -> None:
    graphs = with_kinds(random_binary_tree(3, seed=0), ("a", "b"), seed=0)
    with pytest.raises(ValueError, match="kinds: got 'mix'; expected None, True, False or 'mixed'"):
        options_for(graphs, kinds="mix")


@INTERPRETER
@pytest.mark.slow
def test_lattices_fit_one_launch() -> None:
    """Characters and words are two kinds with children."""
    F, rng = vp.LatticeLSTM(16, 16).vertex_function(), np.random.default_rng(0)
    params = vp.LatticeLSTM(16, 16).init(jax.random.key(0))
    graphs = BATCHES["lattices"]
    x = np.float32(rng.normal(size=(graphs.num_vertices, 16)))

    def value(sched: cavs.Schedule, engine: Any) -> Any:
        both = jax.value_and_grad(lambda p, x: (cavs.run(F, p, sched, x, engine=engine) ** 2).sum(), (0, 1))
        return (jax.jit(both) if engine == "scan" else both)(params, x)

    want = value(cavs.schedule(graphs), "scan")
    assert_close(value(cavs.schedule(graphs, scripts=True), INTERPRETED), want, 1e-5)  # as on a GPU
    with pytest.raises(ValueError, match="kinds='mixed'"):
        value(cavs.schedule(graphs, kinds=True, scripts=True), INTERPRETED)


@pytest.mark.slow
def test_mixed_kinds_under_compositions() -> None:
    def of(scale: float) -> Any:
        def fn(p: Any, v: cavs.Vertex) -> None:
            h = jnp.tanh(scale * v.gather_all(lambda h: h @ p["u"]) + v.pull() @ p["w"])
            v.scatter(h)
            v.push(h)

        return fn

    graphs, rng = BATCHES["lattices"], np.random.default_rng(0)
    F = cavs.VertexFunction({kind: of((-1) ** k / 2) for k, kind in enumerate(graphs.kind_names)}, state=(8,))
    params = {name: np.float32(rng.normal(size=(8, 8)) / 4) for name in "uw"}
    xs = np.float32(rng.normal(size=(2, graphs.num_vertices, 8)))

    def found(kinds: Any, engine: str) -> Any:
        sched = cavs.schedule(graphs, kinds=kinds)
        one = lambda p, x: (cavs.run(F, p, sched, x, engine=engine) ** 2).sum()  # noqa: E731
        each = jax.vmap(jax.grad(one, (0, 1)), (None, 0))
        return jax.jit(each)(params, xs), jax.grad(lambda p: jax.lax.map(jax.checkpoint(lambda x: one(p, x)), xs).sum())(params)

    want = found(True, "scan")
    for engine in ("scan", "native"):
        assert_close(found("mixed", engine), want, 1e-5)
