"""A graph does not see its neighbours in a batch, nor labels its schedule; how much padding there is.

`test_run` fills padding with NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._graphs.counted import counted
from cavs._schedule.schedule import padding_of
from cavs.kernels import H200, Target, native_unavailable, persistent
from tests.odd_graphs import BATCHES, GRAPHS, joined, random_binary_tree
from tests.persistent_programs import INTERPRETED
from tests.programs import PROGRAMS
from tests.slow import few
from tests.truth import assert_close


@pytest.mark.parametrize("name", few(["lazy push", "BinaryTreeLSTM", "ChildSumTreeLSTM"], 1))
def test_a_graph_alone_and_in_a_batch(name: str) -> None:
    program = PROGRAMS[name]
    batch = GRAPHS["trees"] + GRAPHS["shared children"]
    inputs = program.inputs(batch.num_vertices)

    def gradient(graphs: cavs.Graphs, x: np.ndarray, ct: np.ndarray) -> tuple[jax.Array, jax.Array]:
        schedule = cavs.schedule(graphs)

        @jax.jit
        def both(x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, vjp = jax.vjp(lambda x: cavs.run(program.function, program.params, schedule, x), x)
            return y, vjp(ct)[0]

        return both(x, ct)

    ct = np.random.default_rng(5).standard_normal((batch.num_vertices, 5))
    together = gradient(batch, inputs, ct)
    for g in (1, 5):
        rows = slice(*batch.vertex_offsets[g : g + 2])
        alone = gradient(batch[g], inputs[rows], ct[rows])
        assert_close(alone, tuple(x[rows] for x in together), 1e-12)


@pytest.mark.parametrize("engine", ["scan", "native", "persistent"])
@pytest.mark.parametrize("lazy_push", [False, True])
def test_batches_whose_vertices_have_no_children(engine: str, lazy_push: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between batches of chains, in the same shape: the rows of their leaves are not those of vertices with children."""
    reasons = {"scan": None, "native": native_unavailable(), "persistent": persistent.unsupported(H200)}
    if reasons[engine]:
        pytest.skip(reasons[engine])

    def chained(w: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() + v.gather(0) @ w)
        v.scatter(h)
        v.push(h @ w if lazy_push else h)

    F, rng = cavs.VertexFunction(chained, state=(16,), arity=1), np.random.default_rng(0)
    graphs = cavs.from_lengths([3, 1, 2])
    w, x = (rng.normal(0, 0.4, shape).astype(np.float32) for shape in ((16, 16), (graphs.num_vertices, 16)))
    if engine == "persistent":
        monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))  # whose schedules have scripts
    sample = lambda s: (s.sched, s.sched.pad(x[slice(*graphs.vertex_offsets[s.numbers[0] : s.numbers[0] + 2])]))  # noqa: E731
    loader = cavs.data.Loader(graphs, 1, collate=sample, shapes=1, seed=None, steps=1, ahead=0)
    for (sched, rows), graph in zip(loader, graphs, strict=True):

        def loss(w: Any, rows: Any, by: Any, weights: Any, sched: Any = sched, graph: Any = graph) -> Any:
            out = cavs.interpret(F, w, graph, rows) if by is None else cavs.run(F, w, sched, rows, engine=by)
            return (jnp.sin(out)[: len(weights)] * weights).sum()

        n, by = graph.num_vertices, INTERPRETED if engine == "persistent" else engine
        weights = rng.normal(size=(n, 16)).astype(np.float32)
        value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(w, rows, by, weights)
        want = jax.value_and_grad(loss, (0, 1))(w, np.asarray(rows)[:n], None, weights)
        assert_close((value, (dw, dx[:n])), want, 2e-3)
        assert not np.asarray(dx)[n:].any()


@pytest.mark.parametrize(("last", "engine"), few([(400, "native"), (40, "scan")], 1))
def test_kinds_that_end_early(last: int, engine: str) -> None:
    """A kind whose last vertices come long before the end, a kind of one vertex, and one without children."""
    if engine == "native" and (reason := native_unavailable()):
        pytest.skip(reason)
    kind = np.array([0] + [1] * last + [2] + [3] * (1000 - last))
    names = ("leaf", "low", "once", "high")
    graphs = cavs.Graphs.build([1002], [0] + [1] * 1001, np.arange(1001), kind=kind, kind_names=names)
    F, alone = cavs.VertexFunction(dict.fromkeys(names, cell), state=(4,)), cavs.VertexFunction(cell, state=(4,))
    dtype = np.float32 if engine == "native" else np.float64
    weights = {"w": np.eye(4, dtype=dtype), "u": 0.3 * np.eye(4, dtype=dtype)}

    def gradient(F: cavs.VertexFunction, kinds: bool) -> tuple[Any, jax.Array]:
        sched = cavs.schedule(graphs, kinds=kinds)
        x = sched.pad(np.sin(np.arange(4008.0)).reshape(-1, 4).astype(dtype))
        loss = jax.jit(jax.grad(lambda p, x: (cavs.run(F, p, sched, x, engine=engine) ** 2).sum(), (0, 1)))
        by_params, by_x = loss(weights, x)
        return by_params, by_x[:1002]

    assert_close(gradient(F, True), gradient(alone, False), 1e-4 if engine == "native" else 1e-12)


def cell(params: dict[str, jax.Array], v: cavs.Vertex) -> None:
    s = v.gather_all(lambda h: jnp.tanh(h @ params["u"]))
    z, c = jax.nn.sigmoid(s @ params["u"]), jnp.tanh(s @ params["w"] + v.pull() @ params["w"])
    h = z * s + (1 - z) * c
    v.scatter(h)
    v.push(h)


def test_loops_that_have_no_end_for_padding() -> None:
    """Rows of a level that are not its task's, a branch that no vertex takes, and a kind without vertices in a batch."""

    def steps(n: jax.Array) -> jax.Array:  # to 1; there is no end for 0
        step = lambda s: (jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] != 1, step, (n, jnp.int32(0)))[1]

    def counted(_: Any, v: cavs.Vertex) -> None:
        n = v.pull() if v.is_leaf() else v.gather_all(lambda s: s)
        v.scatter(steps(n) + 1)
        v.push(jax.lax.cond(n > 500, lambda n: steps(n // 1000), steps, n))

    def plain(_: Any, v: cavs.Vertex) -> None:
        v.scatter(v.gather_all(lambda s: s))
        v.push(v.pull())

    F, shapes = cavs.VertexFunction({"counted": counted, "plain": plain}, state=jax.ShapeDtypeStruct((), jnp.int32)), []
    graphs = joined([random_binary_tree(9, seed) for seed in range(10)])
    for count in (graphs[0].num_vertices, 0):
        kind = np.arange(graphs.num_vertices) >= count
        graphs = graphs.replace(kind=kind.astype(np.int32), kind_names=("counted", "plain"))
        inputs = np.where(kind, 0, 1 + np.arange(len(kind)) % 7).astype(np.int32)
        found = cavs.run(F, {}, cavs.schedule(graphs, shapes=shapes), inputs)
        np.testing.assert_array_equal(found, cavs.interpret(F, {}, graphs, inputs))
    assert len(shapes) == 1


@pytest.mark.parametrize("engine", ["scan", *([] if native_unavailable() else ["native"])])
def test_gradients_of_loops_that_have_no_end_for_leaves(engine: str) -> None:
    """Leaves gather zeros, for which the loop of a kind without leaves has no end."""

    def inner(p: Any, v: cavs.Vertex) -> None:
        h = jax.nn.sigmoid(v.gather(0) * p + v.pull())
        v.scatter(h)
        doubled = jax.lax.while_loop(lambda y: y < 1, lambda y: 2 * y, jax.lax.stop_gradient(v.gather(0)))
        v.push(h * doubled * p)

    def leaf(p: Any, v: cavs.Vertex) -> None:
        v.scatter(jax.nn.sigmoid(v.pull()))
        v.push(v.pull() * p)

    F, graphs = cavs.VertexFunction({"inner": inner, "leaf": leaf}, state=(), arity=1), cavs.from_lengths([5, 3])
    graphs = graphs.replace(kind=(graphs.height == 0).astype(np.int32), kind_names=("inner", "leaf"))
    dtype = np.float32 if engine == "native" else np.float64
    x, p = np.linspace(-1, 1, 8, dtype=dtype), dtype(0.5)
    got = jax.grad(lambda p: cavs.run(F, p, cavs.schedule(graphs), x, engine=engine).sum())(p)
    want = jax.grad(lambda p: cavs.interpret(F, p, graphs, x).sum())(p)
    assert_close(got, want, 1e-6 if engine == "native" else 1e-12)


@jax.custom_vjp
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


def _doubled(x: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    """Has no end where both are 0."""
    return (ct * jax.lax.while_loop(lambda y: y < 1, lambda y: 2 * y, jnp.abs(ct) + x),)


twice.defvjp(lambda x: (2 * x, x), _doubled)


@pytest.mark.parametrize("edges", [False, True])
def test_loops_in_the_backward_that_have_no_end_for_padding(edges: bool) -> None:
    """The first vertices of a kind are fewer than the rows of their task."""

    def rare(p: Any, v: cavs.Vertex) -> None:
        child = v.gather_all(twice) if edges else twice(v.gather(0))
        h = 0.1 + jax.nn.sigmoid(child * p + v.pull())
        v.scatter(h)
        v.push(twice(h))

    def usual(p: Any, v: cavs.Vertex) -> None:
        v.scatter(0.1 + jax.nn.sigmoid(v.gather_all() * p + v.pull()))
        v.push(v.pull())

    F, graphs = cavs.VertexFunction({"usual": usual, "rare": rare}, state=(), arity=1), cavs.from_lengths([4] * 64)
    graphs = graphs.replace(kind=(np.arange(256) == 1).astype(np.int32), kind_names=("usual", "rare"))
    sched, x = cavs.schedule(graphs), np.linspace(-1, 1, 256)
    assert sched.shape.classes[-1][0] > 1 == padding_of(sched)[1].levels.vertices
    got = jax.grad(lambda p, x: cavs.run(F, p, sched, x, engine="scan").sum(), (0, 1))(0.5, x)
    assert_close(got, jax.grad(lambda p, x: cavs.interpret(F, p, graphs, x).sum(), (0, 1))(0.5, x), 1e-12)


def eager(p: jax.Array, v: cavs.Vertex) -> jax.Array:
    return jnp.sqrt(v.pull() * p) + v.gather_all(lambda h: h)


def recurrent(p: jax.Array, v: cavs.Vertex) -> jax.Array:
    return jnp.sqrt(v.pull() + p * v.gather_all(lambda h: h, "max"))


def of_children(p: jax.Array, v: cavs.Vertex) -> jax.Array:
    return v.pull() + v.gather_all(lambda h: jnp.sqrt(h * p))


@pytest.mark.parametrize("engine", ["scan", *([] if native_unavailable() else ["native"])])
@pytest.mark.parametrize("state", [eager, recurrent, of_children])
@pytest.mark.parametrize("pushes", ["state", "another"])
def test_an_infinite_derivative_in_one_graph_reaches_no_input_of_another(engine: str, state: Any, pushes: str) -> None:
    def fn(p: jax.Array, v: cavs.Vertex) -> None:
        h = state(p, v)
        v.scatter(h)
        v.push(h if pushes == "state" else jnp.sqrt(v.pull() * (1 + h)))

    F, graphs = cavs.VertexFunction(fn, state=(2,)), cavs.from_parents([[2, 2, -1], [1, 2, -1], [-1], [2, 2, -1]])
    x, sched = np.linspace(0.1, 1, 20, dtype=np.float32).reshape(10, 2), cavs.schedule(graphs)

    def gradient(x: np.ndarray) -> jax.Array:
        return jax.grad(lambda x: cavs.run(F, jnp.ones(2, jnp.float32), sched, x, engine=engine).sum())(x)

    finite = gradient(x)
    assert np.isfinite(finite).all()
    for graph in range(len(graphs)):
        rows = slice(*graphs.vertex_offsets[graph : graph + 2])
        zero = x.copy()
        zero[rows] = 0
        got = gradient(zero)
        assert graph > 0 or not np.isfinite(got[rows]).all()
        assert_close(np.delete(got, np.r_[rows], 0), np.delete(finite, np.r_[rows], 0), 1e-5)


def test_labels_in_a_small_schedule_reach_no_gradient() -> None:
    """Zeros that XLA does not know are made from the integers of the schedule, whatever these are."""
    graphs, program = cavs.from_lengths([5], label=np.full(5, -1)), PROGRAMS["LSTM"]
    with_labels, without = cavs.schedule(graphs, fields=("label",)), cavs.schedule(graphs)
    assert np.asarray(with_labels.data).min() == -1 and np.asarray(without.data).min() == 0
    x = without.pad(program.inputs(5))
    gradient = jax.jit(jax.grad(lambda p, s: cavs.run(program.function, p, s, x).sum()))
    assert_close(gradient(program.params, with_labels), gradient(program.params, without), 1e-12)


@pytest.mark.parametrize("policy", ["batching", "serial"])
def test_explain_counts_the_rows_of_each_kind_and_level(policy: str) -> None:
    graphs = BATCHES["three kinds"]
    found = cavs.schedule(graphs, policy=policy)
    kind, height = np.asarray(graphs.kind), graphs.height
    shown = [x.split("Kind ")[-1].splitlines() for x in found.explain().split("Kind ")[1:]]
    assert len(shown) == len(found.shape.kinds) > 1
    for k, (name, *lines) in enumerate(shown):
        assert name == f"{found.shape.kinds[k]!r}:"
        deep = (kind == k) & (height > 0)
        leaves = ((kind == k) & (height == 0)).sum()
        assert lines[0].startswith(f"leaves, one batch: {leaves} of {found.shape.leaves[k]} rows")
        assert f": {deep.sum()} of {found.shape.inner[k]} rows" in lines[1]
        rows = 0
        for level, line in zip(np.unique(height[deep]), lines[3:], strict=True):
            tasks = [t.split(" x ") for t in line.split("tasks ")[1].split(" + ")]
            computed = sum(int(t[0]) * int(t[-1]) if len(t) == 2 else int(t[0]) for t in tasks)
            assert f"level {level}: {(deep & (height == level)).sum()} of {counted(computed, 'row')} " in line
            rows += computed
        assert f"in tasks: {deep.sum()} of {rows} rows" in lines[2]
        assert rows >= deep.sum()


def test_levels_of_parse_trees_and_sequences_have_little_padding() -> None:
    """At most 5 % of the rows of the levels of trees at any batch size; full levels of as many sequences are one task."""
    leaves = np.random.default_rng(0).integers(2, 36, 256)
    trees = joined([random_binary_tree(n, seed) for seed, n in enumerate(leaves.tolist())])
    for batch in (1, 16, 64, 256):
        scheds = [cavs.schedule(trees[i : i + batch]) for i in range(0, 256, batch)]
        levels = [padding_of(s)[0].levels for s in scheds]
        assert sum(x.rows for x in levels) * 0.95 <= sum(x.vertices for x in levels)
    for batch in (1, 16, 64, 128):
        assert cavs.schedule(cavs.from_lengths([33] * batch), scripts=False).num_tasks == 32
