"""What random functions found once, each by name; the loop over vertices (`cavs.interpret`) is the truth."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import chain, from_children, joined, star
from tests.slow import few
from tests.truth import assert_close, gradients

H = 5
KEY = jax.random.key(0)
DAG = from_children([[], [], [0, 1], [2, 2, 0], [3, 1]])  # a child occurs twice under one parent
GRAPHS = {"odd": joined([DAG, star(4), chain(1)]), "leaves": cavs.from_lengths([1, 1])}


def done(v: cavs.Vertex, h: Any, push: Any = None) -> None:
    v.scatter(h)
    v.push(h if push is None else push)


def maximum(p: Any, v: cavs.Vertex) -> None:
    m = v.gather_all(lambda s: jax.nn.relu(s @ p["w"] - 0.4), reduce="max")
    done(v, jnp.tanh(m @ p["q"] + v.pull()))


def normed_maximum(p: Any, v: cavs.Vertex) -> None:
    m = v.gather_all(reduce="max")
    done(v, jnp.tanh((m - m.mean()) / jnp.sqrt(m.var() + 1e-3) * p["b"] + p["b"]) + v.pull())


def infinite_children(p: Any, v: cavs.Vertex) -> None:
    m = v.gather_all(lambda s: jnp.where(s[0] > 0, s * p["b"], -jnp.inf), reduce="max")
    done(v, jnp.tanh(v.pull() + jnp.where(jnp.isfinite(m), m, 0)))


def softmax_by_hand(p: Any, v: cavs.Vertex) -> None:
    top = v.gather_all(lambda s: s @ p["b"], reduce="max")
    total = v.gather_all(lambda s: jnp.exp(s @ p["b"] - top)) if not v.is_leaf() else 1.0
    done(v, jnp.tanh(v.gather_all(lambda s: jnp.exp(s @ p["b"] - top) * s) / total + v.pull()))


def reciprocals(p: Any, v: cavs.Vertex) -> None:
    """Not finite wherever padding holds zeros."""
    y = 2 + jnp.tanh(v.pull())
    h = y if v.is_leaf() else 1 / v.gather_all() + jnp.log(v.gather_all(lambda s: jnp.abs(s) @ p["w"] ** 2))
    done(v, 2 + jnp.tanh(h), p["b"] / (y if v.is_leaf() else v.gather_all(lambda s: 1 / s, reduce="mean")))


def fourier(p: Any, v: cavs.Vertex) -> None:
    s = v.gather_all(lambda s: jnp.exp(s - 1))
    done(v, jnp.tanh(jnp.fft.ifft(jnp.fft.fft(s + v.pull()) * 2).real @ p["w"]))


def self_attention(p: Any, v: cavs.Vertex) -> None:
    def one(child: Any) -> Any:
        return jnp.tanh(v.gather_all(lambda other: ((child @ p["w"]) @ other, other * child), reduce="softmax")) @ p["q"]

    done(v, jnp.tanh(v.gather_all(one) + v.pull()))


def pairs(p: Any, v: cavs.Vertex) -> None:
    pair = lambda a: v.gather_all(lambda b: jnp.tanh(a @ p["w"] - b), reduce="max")  # noqa: E731
    done(v, jnp.tanh(v.gather_all(pair, reduce="mean") + v.pull()))


def triples(p: Any, v: cavs.Vertex) -> None:
    inner = lambda a, b: v.gather_all(lambda c: jnp.tanh(a - b * c))  # noqa: E731
    done(v, jnp.tanh(v.gather_all(lambda a: v.gather_all(lambda b: inner(a, b), reduce="mean")) + v.pull()))


def heads(p: Any, v: cavs.Vertex) -> None:
    query = v.pull() @ p["w"]
    each = jax.vmap(lambda w: v.gather_all(lambda s: (jnp.tanh(s @ w) @ query, s @ w + query), reduce="softmax"))
    done(v, jnp.tanh(each(jnp.stack([p["w"], p["q"]])).sum(0)))


def inside_scan(p: Any, v: cavs.Vertex) -> None:
    def body(carry: Any, w: Any) -> Any:
        mean = v.gather_all(lambda s: jnp.tanh(s * w + carry), reduce="mean")
        return carry + mean, v.gather_all(lambda s: s * carry, reduce="max")

    carry, ys = jax.lax.scan(body, v.pull(), p["w"])
    done(v, jnp.tanh(carry + ys.sum(0)))


def inside_cond(p: Any, v: cavs.Vertex) -> None:
    h = jax.lax.cond(v.num_children() > 1, lambda: v.gather_all(lambda s: s @ p["w"]), lambda: v.pull())
    done(v, jnp.tanh(h + jax.lax.switch(v.num_children() % 3, [lambda: v.gather_all(), lambda: v.pull(), lambda: p["b"]])))


def inside_checkpoint(p: Any, v: cavs.Vertex) -> None:
    kept = jax.checkpoint(lambda x: v.gather_all(lambda s: jnp.tanh(s @ p["w"] + x), reduce="max"))
    done(v, jnp.tanh(kept(v.pull()) + v.pull()))


def inside_grad(p: Any, v: cavs.Vertex) -> None:
    def energy(x: Any, w: Any) -> Any:
        mine = jax.jit(lambda w: v.gather_all(lambda s: jnp.tanh(s * x) @ (w @ p["b"]), reduce="max"))(w)
        return mine + v.gather_all(lambda s: (s @ x, jnp.sin(s * x).sum()), reduce="softmax")

    by_x, by_w = jax.grad(energy, (0, 1))(v.pull(), p["w"])
    done(v, jnp.tanh(by_x + by_w.sum(0) + v.pull()))


def counted(p: Any, v: cavs.Vertex) -> None:
    """Sums, means and maxima of booleans and integers."""
    n, m = v.gather_all(lambda s: s[0] > 0), v.gather_all(lambda s: s[1] > 0, reduce="mean")
    top = v.gather_all(lambda s: s[2] > 0, reduce="max")
    mean = v.gather_all(lambda s: jnp.int32(9 * s[0]), reduce="mean")
    assert n.dtype == jnp.int32 and top.dtype == bool and jnp.issubdtype(mean.dtype, jnp.floating)
    done(v, jnp.tanh(v.pull() * (m + top + mean) + n + p["b"]))


def keys_as_state(p: Any, v: cavs.Vertex) -> None:
    noise = v.gather_all(lambda s: jax.random.normal(s["key"], (H,)) * (s["h"] @ p["w"]))
    key = KEY if v.is_leaf() else v.gather(0)["key"]
    key = jax.random.fold_in(key, v.num_children())
    v.scatter({"h": jnp.tanh(noise + v.pull()), "key": key})
    v.push({"h": noise, "key": jax.random.key_data(key)})


def no_width(p: Any, v: cavs.Vertex) -> None:
    v.scatter({"h": jnp.tanh(v.pull()), "z": jnp.zeros((0,))})
    v.push(v.gather_all(lambda s: s["h"] @ p["w"]))


def childs_state(p: Any, v: cavs.Vertex) -> None:
    done(v, jnp.tanh(v.pull() @ p["w"]), v.gather(0) * 2)


def unread_reduction(p: Any, v: cavs.Vertex) -> None:
    """Any number of children is allowed, although nothing reads what `gather_all` returns."""
    v.gather_all(lambda s: s @ p["w"])
    done(v, jnp.tanh(v.gather(0) + v.pull()))


def weights_crossed(p: Any, v: cavs.Vertex) -> None:
    """Two weights, applied in different orders, with biases."""
    a, b = v.gather(0), v.gather(1)
    left, right = jnp.tanh(a @ p["w"] + p["b"]), jnp.tanh(b @ p["q"] + p["b"])
    done(v, jnp.tanh(left @ p["q"] + right @ p["w"] + v.pull()))


KEYED = {"h": (H,), "key": jax.ShapeDtypeStruct((), KEY.dtype)}
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    fn.__name__: (fn, {"state": (H,), "arity": 5} | how)
    for fn, how in [
        *((f, {}) for f in (maximum, normed_maximum, infinite_children, softmax_by_hand, reciprocals, fourier)),
        *((f, {}) for f in (self_attention, pairs, triples, heads, inside_scan, inside_cond, inside_checkpoint)),
        *((f, {}) for f in (inside_grad, counted, childs_state, weights_crossed)),
        (unread_reduction, {"arity": 1}),
        (keys_as_state, {"state": KEYED}),
        (no_width, {"state": {"h": (H,), "z": (0,)}}),
    ]
}


def params_and_inputs(graphs: cavs.Graphs) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {name: 0.5 * rng.standard_normal(shape) for name, shape in {"w": (H, H), "q": (H, H), "b": (H,)}.items()}
    return params, rng.standard_normal((graphs.num_vertices, H))


PLAIN = cavs.Optimizations(fusion=False, eager=False, lazy=False)
CASES = [
    *((name, "odd", None) for name in FUNCTIONS),
    *((name, "odd", PLAIN) for name in ("infinite_children", "softmax_by_hand", "weights_crossed")),
    *((name, "leaves", None) for name in ("maximum", "softmax_by_hand", "childs_state")),
]


@pytest.mark.parametrize(("name", "batch", "optimizations"), few(CASES, 7))
def test_values_and_gradients_are_those_of_the_loop(name: str, batch: str, optimizations: cavs.Optimizations | None) -> None:
    (fn, how), graphs = FUNCTIONS[name], GRAPHS[batch]
    F, sched = cavs.VertexFunction(fn, optimizations=optimizations, **how), cavs.schedule(graphs)
    params, x = params_and_inputs(graphs)
    runs = [lambda p, x: cavs.run(F, p, sched, x), lambda p, x: cavs.interpret(F, p, graphs, x)]
    got, want = (jax.jit(lambda p, x, run=run: gradients(run, p, x, graphs.num_vertices))(params, x) for run in runs)
    assert_close(got, want, 1e-6 if name == "counted" else 1e-10)  # means of integers are float32


def test_means_of_large_integers_do_not_overflow() -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        nested = v.gather_all(lambda s: v.gather_all(lambda t: t - s % 2, reduce="mean"), reduce="mean")
        v.scatter(2_000_000_000 + v.num_children())
        v.push([v.gather_all(reduce="mean"), nested])

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), jnp.int32))
    got = cavs.run(F, None, cavs.schedule(GRAPHS["odd"]))
    assert_close(got, cavs.interpret(F, None, GRAPHS["odd"]), 1e-6)


def loop(p: Any, v: cavs.Vertex) -> None:
    """As many turns as there are children."""
    h = jax.lax.fori_loop(0, v.num_children(), lambda i, h: jnp.tanh(h + p["b"]), v.pull() + v.gather_all())
    done(v, h)


def test_loops_of_any_length_run_forward() -> None:
    graphs = GRAPHS["odd"]
    params, x = params_and_inputs(graphs)
    F, sched = cavs.VertexFunction(loop, state=(H,)), cavs.schedule(graphs)
    assert_close(cavs.run(F, params, sched, x), cavs.interpret(F, params, graphs, x), 1e-12)
    with pytest.raises(
        TypeError, match=r"number of iterations depends on values \(.*test_any_function.py, line .* in loop.*lax.scan"
    ):
        jax.grad(lambda p: cavs.run(F, p, sched, x).sum())(params)


def turns(v: cavs.Vertex, x: Any) -> Any:
    return jax.lax.fori_loop(0, v.num_children(), lambda i, h: h / 2, x)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda p, v: turns(v, jax.lax.stop_gradient(v.pull() * p["b"])),
        lambda p, v: turns(v, v.pull()),
        lambda p, v: jax.lax.stop_gradient(turns(v, v.pull() * p["b"])),
    ],
    ids=["of a constant", "of fixed inputs", "behind stop_gradient"],
)
def test_the_loop_that_refuses_gradients_is_named(harmless: Any) -> None:
    """And not one before it, which is not differentiated."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        x = harmless(p, v)
        done(v, x + jax.lax.fori_loop(0, v.num_children(), lambda i, h: jnp.tanh(h + p["b"]), v.gather_all()))

    graphs = GRAPHS["odd"]
    params, x = params_and_inputs(graphs)
    with pytest.raises(TypeError, match=r"number of iterations depends on values \(.*test_any_function.py, line .*fn: done"):
        jax.grad(lambda p: cavs.run(cavs.VertexFunction(fn, state=(H,)), p, cavs.schedule(graphs), x).sum())(params)


@pytest.mark.parametrize("arg", [0, 1], ids=["of inputs, for parameters", "of parameters, for inputs"])
def test_a_loop_of_what_has_no_gradient_has_none(arg: int) -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        done(v, jnp.tanh(v.gather_all() * p["b"] + turns(v, p["b"] if arg else v.pull()) + (v.pull() if arg else 0)))

    graphs = cavs.from_lengths([3, 2])
    args, sched = params_and_inputs(graphs), cavs.schedule(graphs)
    F = cavs.VertexFunction(fn, state=(H,))
    got = jax.grad(lambda *args: cavs.run(F, args[0], sched, args[1]).sum(), arg)(*args)
    assert_close(got, jax.grad(lambda *args: cavs.interpret(F, args[0], graphs, args[1]).sum(), arg)(*args), 1e-12)


def test_a_loop_of_what_has_no_gradient_is_named_if_jax_differentiates_it() -> None:
    def fn(p: Any, v: cavs.Vertex) -> None:
        done(v, jnp.tanh(v.gather_all() * p["b"] + turns(v, v.pull())))

    graphs = cavs.from_lengths([3, 2])
    params, x = params_and_inputs(graphs)
    F = cavs.VertexFunction(fn, state=(H,), optimizations=cavs.Optimizations(eager=False))
    with pytest.raises(
        TypeError, match=r"number of iterations depends on values \(.*test_any_function.py, line .*turns: return"
    ):
        jax.grad(lambda p: cavs.run(F, p, cavs.schedule(graphs), x).sum())(params)


def called_back(p: Any, v: cavs.Vertex) -> None:
    x = jnp.tanh(v.pull() + v.gather_all() + p["b"])
    done(v, jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"))


def stopped(p: Any, v: cavs.Vertex) -> None:
    x = jax.lax.stop_gradient(v.pull() + v.gather_all())
    done(v, jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims") * p["b"])


def root(p: Any, v: cavs.Vertex) -> None:
    """JAX 0.11 has a primitive for this that it lowers in two stages."""
    x = v.pull() + v.gather_all(lambda s: s * p["b"])
    turn = lambda f, h: jax.lax.fori_loop(0, 40, lambda _, h: h - f(h), h)  # noqa: E731
    done(v, jax.lax.custom_root(lambda h: h + jnp.sin(h) / 8 - x, x, turn, lambda f, y: y / f(jnp.ones_like(y))))


@jax.custom_vjp
def weighed(x: Any, table: Any) -> Any:
    return x * table.sum()


def _weighed_back(saved: Any, ct: Any) -> Any:
    x, table = saved
    total = jax.lax.fori_loop(0, len(table), lambda i, total: total + ct * table[i], jnp.zeros_like(ct))
    return total, jnp.full_like(table, (ct * x).sum())


weighed.defvjp(lambda x, table: (weighed(x, table), (x, table)), _weighed_back)


def of_constants(p: Any, v: cavs.Vertex) -> None:
    """A rule that reads a constant of F by a traced index, as that of `jax.experimental.ode.odeint` does."""
    done(v, jnp.tanh(v.pull() + weighed(v.gather_all(lambda s: s * p["b"]), jnp.array([0.5, 2.0, -1.0]))))


def stopped_loops(p: Any, v: cavs.Vertex) -> None:
    """Loops without a derivative, before, in and after the levels. They read what has no gradient, also of parameters."""
    b, count = jax.lax.stop_gradient(p["b"]), v.num_children() + 1

    def looped(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda i, c: jnp.tanh(c * b), jax.lax.stop_gradient(x))

    x = v.pull() * p["b"]
    h = jnp.tanh(x + looped(x) + v.gather_all(lambda s: s * p["b"] + looped(s)))
    h = h + looped(h * p["b"])
    v.scatter(h)
    v.push(h + looped(h) * p["b"])


def test_operations_without_a_derivative_run_forward() -> None:
    graphs = GRAPHS["odd"]
    params, x = params_and_inputs(graphs)
    F, sched = cavs.VertexFunction(called_back, state=(H,)), cavs.schedule(graphs)
    assert_close(cavs.run(F, params, sched, x), cavs.interpret(F, params, graphs, x), 1e-12)
    with pytest.raises(TypeError, match=r"got pure_callback \(.*test_any_function.py, line .* in called_back"):
        jax.grad(lambda p: cavs.run(F, p, sched, x).sum())(params)


@pytest.mark.parametrize("fn", [stopped, stopped_loops, root, of_constants])
def test_gradients_around_and_by_rules_of_jax(fn: Any) -> None:
    graphs = GRAPHS["odd"]
    params, x = params_and_inputs(graphs)
    F, sched = cavs.VertexFunction(fn, state=(H,)), cavs.schedule(graphs)
    run = lambda p: (cavs.run(F, p, sched, x) ** 2).sum()  # noqa: E731
    found, same = (jax.value_and_grad(f)(params) for f in (run, lambda p: (cavs.interpret(F, p, graphs, x) ** 2).sum()))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-9), found, same)


def escapes(p: Any, v: cavs.Vertex) -> None:
    kept = []
    v.gather_all(lambda s: kept.append(s) or s)
    done(v, v.pull() if v.is_leaf() else kept[0])


def escapes_into_another(p: Any, v: cavs.Vertex) -> None:
    kept = []
    v.gather_all(lambda s: kept.append(s) or s)
    done(v, v.gather_all(lambda s: s * (1 if v.is_leaf() else kept[0])))


def python_loop(p: Any, v: cavs.Vertex) -> None:
    done(v, sum((v.gather(k) for k in range(v.num_children())), v.pull()))


def numpy_function(p: Any, v: cavs.Vertex) -> None:
    done(v, np.tanh(v.gather(0) + v.pull()))


def boolean_index(p: Any, v: cavs.Vertex) -> None:
    done(v, v.gather(0)[v.gather(0) > 0].sum() + v.pull())


def inside_while(p: Any, v: cavs.Vertex) -> None:
    done(v, jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1 + v.gather_all() ** 2, v.pull()))


def two_scores(p: Any, v: cavs.Vertex) -> None:
    done(v, v.gather_all(lambda s: (s, s), reduce="softmax"))


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (escapes, (TypeError, ValueError), "value .*of one child leaves|closes over a traced value"),
        (escapes_into_another, (TypeError, ValueError), "value of one child leaves|closes over a traced value"),
        (python_loop, TypeError, "uses a traced value as a Python integer .*line .* in python_loop.*v.gather_all"),
        (numpy_function, TypeError, "passes a traced value to NumPy .*line .* in numpy_function.*jnp.tanh"),
        (boolean_index, TypeError, "selects with booleans .*line .* in boolean_index.*jnp.where"),
        (inside_while, TypeError, "gather_all is called inside while .*line .* in inside_while.*use the result inside"),
        (two_scores, ValueError, "score a scalar; got shapes .*jax.vmap around gather_all"),
    ],
)
def test_what_is_refused_says_where_and_what_to_write(fn: Any, error: Any, text: str) -> None:
    graphs = GRAPHS["odd"]
    params, x = params_and_inputs(graphs)
    with pytest.raises(error, match=text):
        cavs.run(cavs.VertexFunction(fn, state=(H,), arity=5), params, cavs.schedule(graphs), x)


@pytest.mark.parametrize(("arity", "children"), [(3, 4), (5, 9)])
def test_too_many_children_are_refused_under_jit(arity: int, children: int) -> None:
    graphs = star(children)
    params, x = params_and_inputs(graphs)
    sched = cavs.schedule(graphs)
    F = cavs.VertexFunction(lambda p, v: done(v, jnp.tanh(v.gather(arity - 1) + v.pull())), state=(H,), arity=arity)
    # Of five and more children the number is known when the compiled code runs; the error then comes from there.
    with pytest.raises(Exception, match=f"got a vertex with .*; expected at most {arity}, as arity is {arity}"):
        jax.block_until_ready(jax.jit(lambda s, x: cavs.run(F, params, s, x))(sched, sched.pad(x)))
        jax.effects_barrier()


def test_as_many_children_as_arity_run_under_jit() -> None:
    graphs = joined([star(5), star(2)])
    params, x = params_and_inputs(graphs)
    sched = cavs.schedule(graphs)
    F = cavs.VertexFunction(lambda p, v: done(v, jnp.tanh(v.gather(4) + v.pull())), state=(H,), arity=5)
    got = jax.jit(lambda s, x: cavs.run(F, params, s, x))(sched, sched.pad(x))
    assert_close(got[: graphs.num_vertices], cavs.interpret(F, params, graphs, x), 1e-12)


def test_tasks_add_only_their_own_rows() -> None:
    """A task reaches over rows of others, where F is evaluated without all of their children."""
    graphs = cavs.Graphs.build([300], [0, *(1 + (i % 4 == 0) for i in range(299))], [
        c for i in range(299) for c in ((i, max(0, i - 3)) if i % 4 == 0 else (i,))
    ])  # fmt: skip
    params, x = params_and_inputs(graphs)
    F = cavs.VertexFunction(reciprocals, state=(H,), optimizations=cavs.Optimizations(lazy=False))
    sched = cavs.schedule(graphs)

    def of(sched: cavs.Schedule) -> Any:
        return jax.jit(lambda p, x: gradients(lambda p, x: cavs.run(F, p, sched, x), p, x, 300))(params, x)

    got, want = of(sched), of(cavs.schedule(graphs, exact=True))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(got))
    assert_close(got, want, 1e-8)


def rotated(p: Any, v: cavs.Vertex) -> None:
    turned = v.gather_all() * jnp.exp(1j * (v.pull() @ p["w"]))
    done(v, jnp.tanh(turned.real + v.pull()) + 1j * turned.imag)


@pytest.mark.parametrize(("graphs", "segments"), [("odd", 2), ("leaves", 1)])
def test_complex_states(graphs: str, segments: int) -> None:
    F, batch = cavs.VertexFunction(rotated, state=jax.ShapeDtypeStruct((H,), jnp.complex128)), GRAPHS[graphs]
    rng = np.random.default_rng(0)
    params, x = {"w": jnp.asarray(rng.normal(size=(H, H)))}, jnp.asarray(rng.normal(size=(batch.num_vertices, H)))
    sched = cavs.schedule(batch, segments=segments)

    def of(run: Any) -> Any:
        loss = lambda p, x: (jnp.abs(run(p, x)) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)

    assert_close(of(lambda p, x: cavs.run(F, p, sched, x)), of(lambda p, x: cavs.interpret(F, p, batch, x)), 1e-10)


@pytest.mark.parametrize("optimizations", [None, cavs.Optimizations(lazy=False)])
def test_states_of_8_bits(optimizations: cavs.Optimizations | None) -> None:
    """Sums of a few small integers are exact in 8 bits, in any order."""
    low = jnp.float8_e4m3fn

    def fn(p: Any, v: cavs.Vertex) -> None:
        total = v.gather_all(lambda s: s.astype(jnp.float32)) * (p + p).astype(jnp.float32)
        done(v, (v.pull().astype(jnp.float32) + total).astype(low))

    F = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((), low), optimizations=optimizations or cavs.Optimizations())
    x, sched = jnp.ones(DAG.num_vertices, low), cavs.schedule(DAG)
    chosen = np.array([3, 2, 2])

    def of(run: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda p, x: run(p, x).astype(jnp.float32).sum(), (0, 1)))(jnp.asarray(0.5, low), x)

    got = of(lambda p, x: cavs.run(F, p, sched, x, select=chosen))
    assert_close(got, of(lambda p, x: cavs.interpret(F, p, DAG, x)[chosen]), 0)
