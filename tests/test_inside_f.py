"""What users write inside F beyond cells: norms, noise from explicit keys, residuals, attention over children, dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import GRAPHS, chain, from_children, joined
from tests.programs import E, H
from tests.slow import few
from tests.truth import assert_close, gradients

# Small, as every vertex of a loop is traced. One vertex alone, one child, the same child twice, several parents and roots.
DAG = from_children([[], [], [0, 1], [0, 0], [2, 3], [2], [4, 5]])
BATCHES = {"chains": joined([chain(n) for n in (4, 1, 2)]), "binary": joined([DAG, chain(1)])}
RNG = np.random.default_rng(5)
SHAPES = {"u": (H, H), "w": (E, H), "q": (E, H), "v": (H, H)}
PARAMS = {name: 0.5 * RNG.standard_normal(shape) for name, shape in SHAPES.items()}
PARAMS |= {"scale": 1 + 0.1 * RNG.standard_normal(H), "shift": 0.1 * RNG.standard_normal(H)}


def layer_norm(params: Any, x: Any) -> Any:
    """Ba, Kiros and Hinton, 2016."""
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5) * params["scale"] + params["shift"]


def dropout(key: Any, x: Any, rate: float) -> Any:
    """Srivastava et al., 2014."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def regularised(params: Any, v: cavs.Vertex) -> None:
    """Layer norm, dropout and zoneout (Krueger et al., 2017) from a key of the vertex's own, and a residual."""
    drop, zone = jax.random.split(v.pull("key"))
    before = 0.5 * (v.gather(0) + v.gather(1))
    z = layer_norm(params, before @ params["u"] + dropout(drop, v.pull("x") @ params["w"], 0.4))
    h = before + jnp.tanh(z)
    h = jnp.where(jax.random.bernoulli(zone, 0.3, h.shape), before, h)
    v.scatter(h)
    v.push(h)


def variational(params: Any, v: cavs.Vertex) -> None:
    """One mask for a whole graph (Gal and Ghahramani, 2016), and one for all graphs from a key among the parameters."""
    h = jnp.tanh(dropout(v.pull("key"), v.gather(0), 0.4) @ params["u"] + v.pull("x") @ params["w"])
    v.scatter(h)
    v.push(dropout(params["key"], h, 0.5))


def folded(params: Any, v: cavs.Vertex) -> None:
    """A key of the vertex's own, made of one key and the vertex's number."""
    key = jax.random.fold_in(params["key"], v.pull("number"))
    h = jnp.tanh(v.gather(0) @ params["u"] + dropout(key, v.pull("x") @ params["w"], 0.5))
    v.scatter(h)
    v.push(h)


def attention(params: Any, v: cavs.Vertex) -> None:
    """Attention over the children with dropout on the values, integer and boolean side inputs, named pulls and pushes."""
    query = v.pull("x") @ params["q"] + params["table"][v.pull("tag")]
    key = v.pull("key")

    def child(s: Any) -> tuple[Any, Any]:
        return query @ jnp.tanh(s["h"] @ params["u"]) / np.sqrt(H), dropout(key, s["h"] @ params["v"], 0.3)

    told = v.gather_all(child, reduce="softmax")
    some = jnp.asarray(False) if v.is_leaf() else v.gather_all(lambda s: s["flag"].astype(jnp.int32), reduce="max") > 0
    flag = some ^ v.pull("flag")
    h = jnp.tanh(query + jnp.where(flag, told, -told))
    v.scatter({"h": h, "flag": flag})
    v.push(h, "h")
    v.push({"flag": flag, "tag": v.pull("tag") + 1}, "side")


CASES = {
    "regularised": (regularised, (H,), 2, "binary"),
    "variational": (variational, (H,), 1, "chains"),
    "folded": (folded, (H,), 1, "chains"),
    "attention": (attention, {"h": (H,), "flag": jax.ShapeDtypeStruct((), bool)}, 0, "binary"),
}


def case(name: str) -> tuple[cavs.VertexFunction, Any, Any, str]:
    """F, parameters, inputs of exactly one row per vertex, batch."""
    fn, state, arity, batch = CASES[name]
    n, schedule = BATCHES[batch].num_vertices, cavs.schedule(BATCHES[batch])
    rng, key = np.random.default_rng(0), jax.random.key(7)
    graph = np.asarray(schedule.graph[:n])
    columns = {
        "x": rng.standard_normal((n, E)),
        "key": jax.random.split(key, len(BATCHES[batch]))[graph] if name == "variational" else jax.random.split(key, n),
        "tag": rng.integers(0, 4, n).astype(np.int32),
        "flag": rng.integers(0, 2, n).astype(bool),
        "number": np.arange(n),
    }
    wants = {"folded": ("x", "number"), "attention": ("x", "key", "tag", "flag")}.get(name, ("x", "key"))
    params = PARAMS | {"table": RNG.standard_normal((4, H)), "key": jax.random.key(3)}
    return cavs.VertexFunction(fn, state=state, arity=arity), params, {c: jnp.asarray(columns[c]) for c in wants}, batch


def pad(schedule: cavs.Schedule, x: Any) -> Any:
    """Rows up to the schedule's size: of keys, too."""
    return x.at[jnp.arange(schedule.shape.vertices)].get(mode="clip")


@pytest.mark.parametrize("name", few(CASES, 1))
def test_run_and_its_gradients_are_those_of_interpret(name: str) -> None:
    function, params, inputs, batch = case(name)
    schedule, rows = cavs.schedule(BATCHES[batch]), BATCHES[batch].num_vertices
    padded = jax.tree.map(lambda x: pad(schedule, x), inputs)
    (got_p, got_x), got = gradients(jax.jit(lambda p, x: cavs.run(function, p, schedule, x)), params, padded, rows)
    (want_p, want_x), want = gradients(lambda p, x: cavs.interpret(function, p, BATCHES[batch], x), params, inputs, rows)
    assert_close(jax.tree.map(lambda x: x[:rows], got), want, 1e-12)
    assert_close((got_p, jax.tree.map(lambda x: x[:rows], got_x)), (want_p, want_x), 1e-10)


@pytest.mark.slow
def test_masks_are_the_same_wherever_they_are_made_again() -> None:
    function, params, _, _ = case("folded")
    graphs = GRAPHS["chain of 500"]
    x = {"x": np.random.default_rng(0).standard_normal((500, E)), "number": np.arange(500)}

    def of(run: Any) -> Any:
        return jax.jit(lambda p, x: gradients(run, p, x, 500))(params, x)

    plain = of(lambda p, x: cavs.run(function, p, cavs.schedule(graphs), x))
    # The segments of levels, and jax.checkpoint, evaluate everything once more.
    narrow = cavs.schedule(graphs, segments=4)
    again = of(jax.checkpoint(lambda p, x: cavs.run(function, p, narrow, x)))
    assert_close(again, plain, 1e-11)


def test_masks_are_of_a_vertex_or_of_a_graph() -> None:
    def masks(params: Any, v: cavs.Vertex) -> None:
        v.scatter(v.pull("x"))
        v.push(jax.random.bernoulli(v.pull("key"), 0.6, (40,)))

    function, graphs = cavs.VertexFunction(masks, state=(E,), arity=2), BATCHES["binary"]
    schedule, key = cavs.schedule(graphs), jax.random.key(0)
    x = np.zeros((schedule.shape.vertices, E))
    of_vertex = np.asarray(cavs.run(function, {}, schedule, {"x": x, "key": jax.random.split(key, len(x))}))
    of_graph = jax.random.split(key, len(graphs) + 1)[schedule.graph]  # one more for the padding
    of_graph = np.asarray(cavs.run(function, {}, schedule, {"x": x, "key": of_graph}))
    n, graph = graphs.num_vertices, np.asarray(schedule.graph[: graphs.num_vertices])
    assert len(np.unique(of_vertex[:n], axis=0)) == n and abs(of_vertex[:n].mean() - 0.6) < 0.1
    assert len(np.unique(of_graph[:n], axis=0)) == len(graphs)
    assert all(len(np.unique(of_graph[:n][graph == g], axis=0)) == 1 for g in range(len(graphs)))


def half_cell(params: Any, v: cavs.Vertex) -> None:
    """States and weights in bfloat16, products accumulated and cells kept in float32 (or all in float64)."""
    h, c = v.gather(0)["h"] + v.gather(1)["h"], v.gather(0)["c"]
    z = jnp.dot(h, params["u"], preferred_element_type=c.dtype) + jnp.dot(v.pull(), params["w"], preferred_element_type=c.dtype)
    c = 0.5 * c + jnp.tanh(z)
    h = jnp.tanh(c).astype(h.dtype)
    v.scatter({"c": c, "h": h})
    v.push(h.astype(c.dtype))


def test_half_precision_states_with_wide_accumulation() -> None:
    graphs = BATCHES["binary"]
    rows, rng = graphs.num_vertices, np.random.default_rng(0)
    params = {"u": 0.3 * rng.standard_normal((H, H)), "w": 0.3 * rng.standard_normal((E, H))}
    # Numbers that bfloat16 holds, so that only the arithmetic differs.
    params, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (params, rng.standard_normal((rows, E))))

    def function(half: Any, wide: Any) -> cavs.VertexFunction:
        state = {"c": jax.ShapeDtypeStruct((H,), wide), "h": jax.ShapeDtypeStruct((H,), half)}
        return cavs.VertexFunction(half_cell, state=state, arity=2)

    F = function(jnp.bfloat16, jnp.float32)
    got, pushes = gradients(jax.jit(lambda p, x: cavs.run(F, p, cavs.schedule(BATCHES["binary"]), x)), params, x, rows)
    same, loop = gradients(lambda p, x: cavs.interpret(F, p, graphs, x), params, x, rows)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), (params, x))
    exact, truth = gradients(lambda p, x: cavs.interpret(function(jnp.float64, jnp.float64), p, graphs, x), *wide, rows)
    assert pushes.dtype == np.float32 and {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    # As close to the loop in float64 as the loop of the same dtypes is: bfloat16 has 8 bits.
    np.testing.assert_allclose(pushes, truth, rtol=0, atol=2**-7)
    for a, b, c in zip(*map(jax.tree.leaves, (got, same, exact)), strict=True):
        a, b, c = (np.asarray(t, np.float64) for t in (a, b, c))
        scale = np.abs(c).max()
        assert np.abs(a - c).max() < 2**-5 * scale and np.abs(a - c).max() < 2 * np.abs(b - c).max() + 2**-8 * scale


def test_side_effects_are_refused() -> None:
    def prints(params: Any, v: cavs.Vertex) -> None:
        jax.debug.print("h {}", v.pull())
        v.scatter(v.pull())
        v.push(v.pull())

    function = cavs.VertexFunction(prints, state=(E,), arity=2)
    with pytest.raises(TypeError, match="F has side effects .*debug_print.*cavs.interpret"):
        cavs.run(function, {}, cavs.schedule(BATCHES["binary"]), np.zeros((BATCHES["binary"].num_vertices, E)))


def test_keys_of_vertices_need_no_padding_by_hand() -> None:
    function, params, inputs, batch = case("regularised")
    schedule, rows = cavs.schedule(BATCHES[batch]), BATCHES[batch].num_vertices
    want = cavs.interpret(function, params, BATCHES[batch], inputs)
    assert_close(cavs.run(function, params, schedule, inputs), want, 1e-12)
    padded = jax.tree.map(schedule.pad, inputs)
    got = jax.jit(lambda p, s, x: cavs.run(function, p, s, x))(params, schedule, padded)
    assert_close(got[:rows], want, 1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8])
@pytest.mark.parametrize("reduce", ["sum", "mean", "softmax"])
def test_narrow_states_of_many_children_add_up(dtype: Any, reduce: str) -> None:
    graphs = cavs.from_parents([[600] * 600 + [-1]])

    def fn(params: Any, v: Any) -> None:
        of = (lambda h: (jnp.float16(0), h)) if reduce == "softmax" else (lambda h: h)
        v.push(v.gather_all(of, reduce=reduce).astype(jnp.float32))
        v.scatter(v.pull().astype(dtype))

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), dtype))
    x = np.where(np.arange(601) < 300, 0, 4).astype(np.float32)  # the last children count as much as the first ones
    want = {"sum": 1200 if dtype != jnp.int8 else np.int64(1200).astype(np.int8), "mean": 2, "softmax": 2}[reduce]
    np.testing.assert_allclose(cavs.run(F, {}, cavs.schedule(graphs), x)[-1], want, rtol=0.01)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_gradients_of_narrow_values_that_many_children_read_add_up(reduce: str, levels: int) -> None:
    """bfloat16 cannot count to 257: neither the children that read a value of their parent, nor those that share a maximum."""
    graphs = cavs.from_parents([[600] * 600 + [*range(601, 600 + levels), -1]])

    def fn(params: Any, v: Any) -> None:
        x = v.pull()
        found = v.gather_all(lambda h: h * x if reduce == "sum" else h, reduce=reduce)
        v.scatter(x + 0 * found)
        v.push(found.astype(jnp.float32))

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), jnp.bfloat16))
    x = jnp.ones(graphs.num_vertices, jnp.bfloat16)
    got = jax.grad(lambda x: cavs.run(F, {}, cavs.schedule(graphs), x)[600])(x)
    np.testing.assert_allclose(np.float32(got)[[0, 600]], [1, 600] if reduce == "sum" else [1 / 600, 0], rtol=0.01)


@pytest.mark.parametrize("pushes_state", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_states_that_many_read_add_up(dtype: Any, pushes_state: bool) -> None:
    """Many parents, in one level and in several, or copies of one vertex in `select`."""

    def fn(params: Any, v: Any) -> None:
        h = v.pull() + v.gather(0) + 0 * v.gather(1)
        v.scatter(h)
        v.push(h if pushes_state else h + v.gather(0) - v.gather(0))

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), dtype), arity=2)
    wide = cavs.from_edges(601, [(i, 0) for i in range(1, 601)])
    deep = cavs.from_edges(601, [(1, 0), *((i, j) for i in range(2, 601) for j in (0, i - 1))])
    for graphs, select in (
        (wide, None),
        (deep, None),
        (wide, np.zeros(600, int)),
        (cavs.from_lengths([1]), np.zeros(600, int)),
    ):
        sched, x = cavs.schedule(graphs), jnp.ones(graphs.num_vertices, dtype)
        got = jax.grad(lambda x: cavs.run(F, {}, sched, x, select=select).astype(jnp.float32).sum())(x)  # noqa: B023
        np.testing.assert_allclose(np.float32(got)[0], 600, rtol=0.01)


@pytest.mark.parametrize("lazy", [True, False])
def test_gradients_of_narrow_parameters_add_up_over_many_levels(lazy: bool) -> None:
    def fn(params: Any, v: Any) -> None:
        h = v.gather(0) * 0 + params
        v.scatter(h)
        v.push(h)

    state, optimizations = jax.ShapeDtypeStruct((), jnp.bfloat16), cavs.Optimizations(lazy=lazy)
    F, sched = (
        cavs.VertexFunction(fn, state=state, arity=1, optimizations=optimizations),
        cavs.schedule(cavs.from_lengths([600])),
    )
    got = jax.grad(lambda p: cavs.run(F, p, sched).astype(jnp.float32).sum())(jnp.bfloat16(1))
    np.testing.assert_allclose(np.float32(got), 600, rtol=0.01)


def test_values_of_a_pad_have_gradients() -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(jax.lax.pad(v.pull() + v.gather(0), p, [(-1, 2, 0)])[1:])
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(fn, state=(3,), arity=1), cavs.from_lengths([4, 1])
    sched, x = cavs.schedule(graphs), jnp.sin(jnp.arange(15.0)).reshape(5, 3)
    got = jax.grad(lambda p, x: (cavs.run(F, p, sched, x) ** 2).sum(), (0, 1))(jnp.asarray(0.5), x)
    want = jax.grad(lambda p, x: (cavs.interpret(F, p, graphs, x) ** 2).sum(), (0, 1))(jnp.asarray(0.5), x)
    assert_close(got, want, 1e-12)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, bool])
def test_scores_of_a_softmax_may_be_integers(dtype: Any) -> None:
    def fn(params: Any, v: Any) -> None:
        v.push(v.gather_all(lambda h: (h[1].astype(dtype), h * params), reduce="softmax"))
        v.scatter(v.pull())

    F, graphs = cavs.VertexFunction(fn, state=(2,)), cavs.from_parents([[3, 3, 3, -1], [1, -1]])
    x = np.stack([np.arange(6.0), [2, 0, 1, 0, 3, 0]], 1)
    weights = np.exp(np.asarray(x[:3, 1].astype(dtype), float))
    want = np.zeros((6, 2))
    want[3], want[5] = weights @ x[:3] / weights.sum(), x[4]
    assert_close(cavs.run(F, jnp.ones(2), cavs.schedule(graphs), x), want, 1e-6)
    assert_close(cavs.interpret(F, jnp.ones(2), graphs, x), want, 1e-6)


def _drawn(draw: Any, impl: str) -> Any:
    """The sum of what F draws at three vertices, with keys of a generator in params and inputs; and the same by interpret."""

    def fn(params: Any, v: cavs.Vertex) -> None:
        h = draw(params, v, v.gather(0) + 1.0)
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), jnp.float32), arity=1), cavs.from_lengths([3])
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    args = {"key": jax.random.key(1, impl=impl)}, {"key": keys, "number": np.arange(3), "data": jax.random.key_data(keys)}
    return cavs.run(F, args[0], cavs.schedule(graphs), args[1]).sum(), cavs.interpret(F, args[0], graphs, args[1]).sum()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_that_jax_does_not_batch_are_refused(impl: str) -> None:
    """JAX draws the numbers of a batch of keys of these generators from the first key, so gradients were wrong."""
    draws = {
        "pulled": lambda p, v, h: h * jax.random.uniform(v.pull("key"), (), jnp.float32),
        "folded": lambda p, v, h: h * jax.random.uniform(jax.random.fold_in(p["key"], v.pull("number")), (), jnp.float32),
        "wrapped": lambda p, v, h: h * jax.random.normal(jax.random.wrap_key_data(v.pull("data"), impl=impl), (), h.dtype),
        "in a loop": lambda p, v, h: jax.lax.fori_loop(
            0, 2, lambda i, h: h * jax.random.uniform(jax.random.fold_in(v.pull("key"), i), (), jnp.float32), h
        ),
    }
    for draw in draws.values():
        if impl == "threefry2x32":
            assert_close(*_drawn(draw, impl), 1e-6)
        else:
            with pytest.raises(
                ValueError, match=rf"from keys of the generator '{impl}' \(.*test_inside_f.py.*impl='threefry2x32'"
            ):
                _drawn(draw, impl)
    # The same numbers for all vertices, also in loops over values of a vertex.
    assert_close(*_drawn(lambda p, v, h: h * jax.random.uniform(p["key"], (), jnp.float32), impl), 1e-6)

    def step(key: Any, h: Any) -> Any:
        key, now = jax.random.split(key)
        return key, h * jax.random.uniform(now, (), jnp.float32)

    assert_close(*_drawn(lambda p, v, h: jax.lax.fori_loop(0, 2, lambda _, of: step(*of), (p["key"], h))[1], impl), 1e-6)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_vertices_choose_whether_to_draw_from_a_shared_key(impl: str) -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        x = v.pull()
        h = jax.lax.cond(x > 0, lambda a: a * jax.random.uniform(p["key"], (), jnp.float32), jnp.sin, v.gather(0) + x)
        v.scatter(h)
        v.push(h)

    F, graphs = cavs.VertexFunction(fn, state=(), arity=1), cavs.from_lengths([4])
    params, sched = {"key": jax.random.key(1, impl=impl)}, cavs.schedule(graphs)
    x = np.array([[1, -1, 2, 3], [-1, 2, -3, 1]], np.float32)
    want = np.stack([jax.grad(lambda x: cavs.interpret(F, params, graphs, x).sum())(of) for of in x])
    found = jax.vmap(jax.grad(lambda x: cavs.run(F, params, sched, x).sum()))(x)
    assert_close(found, want, 1e-6)
    keyed = cavs.VertexFunction(lambda p, v: fn({"key": jax.random.fold_in(p["key"], v.num_children())}, v), state=(), arity=1)
    if impl != "threefry2x32":
        with pytest.raises(ValueError, match=f"from keys of the generator '{impl}'"):
            cavs.run(keyed, params, sched, x[0])


def test_a_jitted_part_of_f_may_close_over_a_key() -> None:
    key = jax.random.key(3)

    def fn(params: Any, v: cavs.Vertex) -> None:
        drop = jax.jit(lambda s: dropout(key, s, 0.5))
        h = jnp.tanh(v.pull("x") @ params["w"] + v.gather_all(lambda s: drop(s) @ params["u"]))
        v.scatter(h)
        v.push(h)

    _, params, inputs, _ = case("regularised")
    function, graphs = cavs.VertexFunction(fn, state=(H,)), BATCHES["binary"]
    got = cavs.run(function, params, cavs.schedule(graphs), inputs)
    assert_close(got, cavs.interpret(function, params, graphs, inputs), 1e-12)


@pytest.mark.parametrize("in_loop", [False, True])
def test_equations_that_jax_does_not_batch(in_loop: bool) -> None:
    """Within a loop, they run row by row."""
    sizes = jnp.array([1, 1], jnp.int32)

    def fn(params: Any, v: cavs.Vertex) -> None:
        def product(x: jax.Array) -> jax.Array:
            def once(x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
                return jax.lax.ragged_dot(x, params, sizes), None

            x = x.reshape(2, 2)
            y = (jax.lax.scan(once, x, None, 1) if in_loop else once(x))[0]
            return (y if in_loop else y + jax.grad(lambda x: (once(x)[0] ** 2).sum())(x)).reshape(4)

        h = jnp.tanh(product(v.gather(0) + v.pull()) + v.gather_all(product))
        v.scatter(h)
        v.push(h)

    function, graphs = cavs.VertexFunction(fn, state=(4,), arity=2), BATCHES["binary"]
    params, x = (RNG.standard_normal(shape) for shape in ((2, 2, 2), (graphs.num_vertices, 4)))
    with pytest.raises(NotImplementedError, match="ragged_dot"):
        jax.vmap(lambda x: jax.lax.ragged_dot(x, params, sizes))(x.reshape(-1, 2, 2))

    def loss(run: Any) -> Any:
        return jax.value_and_grad(lambda params, x: (run(params, x) ** 2).sum(), (0, 1))

    got = loss(lambda params, x: cavs.run(function, params, cavs.schedule(graphs), x))
    want = loss(lambda params, x: cavs.interpret(function, params, graphs, x))
    assert_close(got(params, x), want(params, x), 1e-10)
    if not in_loop:
        both = jax.vmap(got, (None, 0))(params, jnp.stack([x, -x]))
        assert_close(both, jax.tree.map(lambda *of: jnp.stack(of), want(params, x), want(params, -x)), 1e-10)
