"""Derivative rules of users that are not linear (`jax.custom_vjp` that clips) act on the cotangent of ONE vertex, or ONE child.

What F computes once for all vertices, or once for two calls, would give them a sum. The truth is the loop over vertices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._function.unroll import trace
from cavs._function.user_rules import may_sum_first
from cavs._jaxpr.linear import is_linear
from cavs._run.plans import plan_of
from cavs.kernels import native_unavailable
from tests.odd_graphs import chain, children_of, from_children, joined, star
from tests.per_vertex import PerVertex, Steps, with_edges
from tests.persistent_programs import INTERPRETED, INTERPRETER
from tests.slow import few

H = 16
LIMIT = 0.2
GRAPHS = joined([from_children([[], [], [0, 1], [2, 2, 0], [3, 1]]), star(3), chain(4), chain(1), chain(1)])
LISTS = [children_of(GRAPHS, g) for g in range(len(GRAPHS))]


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct * jnp.cos(x), -LIMIT, LIMIT),))


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, ct: (jnp.clip(saved[1] @ ct, -LIMIT, LIMIT), jnp.clip(jnp.outer(saved[0], ct), -LIMIT, LIMIT)),
)


@jax.custom_vjp
def two(x: Any, w: Any) -> Any:
    """One result depends on x, the other does not."""
    return jnp.tanh(x), jnp.tanh(w)


def _of_two(saved: Any, cts: Any) -> Any:
    return tuple(jnp.clip(ct * (1 - y * y), -LIMIT, LIMIT) for y, ct in zip(saved, cts, strict=True))


two.defvjp(lambda x, w: (two(x, w), two(x, w)), _of_two)


@jax.custom_vjp
def straight(x: Any) -> Any:
    """Rounds; its rule is linear."""
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


def _bent_tangents(primals: Any, tangents: Any) -> Any:
    return clipped(*primals), jax.jvp(clipped, primals, tangents)[1]


bent = jax.custom_jvp(jnp.sin)
bent.defjvp(_bent_tangents)
called = jax.jit(lambda x: jnp.tanh(clipped(x)))  # two calls are the same equations


def done(v: Any, h: Any) -> None:
    v.scatter(h)
    v.push(h)


def of_constant(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() + product(jax.nn.softmax(v.gather(0)), p["w"])))


def of_zeros(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() + clipped(v.gather_all(lambda s: s @ p["w"]) + p["b"])))


def of_parameters(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() @ clipped(p["w"]) + v.gather(0) @ clipped(p["w"]) + clipped(p["b"])))


def of_two_results(p: Any, v: Any) -> None:
    a, b = two(v.pull(), p["b"])
    c, d = two(v.gather(0), p["b"])
    done(v, jnp.tanh(a + b + c * d))


def written_twice(p: Any, v: Any) -> None:
    x = v.gather(0) + v.pull()
    done(v, called(x) + called(x) * v.pull() + called(p["b"]) + called(p["b"]) * p["b"])


def of_vertex_for_each_child(p: Any, v: Any) -> None:
    x = v.pull()
    done(v, jnp.tanh(x + v.gather_all(lambda s: clipped(x) * s)))


def of_parameters_for_each_child(p: Any, v: Any) -> None:
    a = v.gather_all(lambda s: jnp.tanh(s @ clipped(p["w"])) + called(p["b"]), reduce="mean")
    done(v, jnp.tanh(v.pull() + a + v.gather_all(lambda s: (s @ clipped(p["b"]), s), reduce="softmax")))


def of_child(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() + v.gather_all(lambda s: product(clipped(s), p["w"]))))


def of_pairs(p: Any, v: Any) -> None:
    x = v.pull()
    pairs = v.gather_all(lambda a: v.gather_all(lambda b: clipped(a) * b + clipped(x) * a + clipped(p["b"]) * b))
    done(v, jnp.tanh(x + pairs))


def in_loop(p: Any, v: Any) -> None:
    step = lambda h, x: (jnp.tanh(clipped(p["b"]) * h + called(x)), clipped(p["b"]))  # noqa: E731
    h, rows = jax.lax.scan(step, v.pull(), p["w"])
    _, own = jax.lax.scan(lambda h, x: (product(h, p["w"]) + x, h), p["b"], p["w"])
    done(v, jnp.tanh(h + v.gather(0) * rows.sum(0) + own.sum(0)))


def in_loop_over_child(p: Any, v: Any) -> None:
    x = v.pull()
    loop = lambda s: jax.lax.scan(lambda h, w: (jnp.tanh(clipped(x) * h + clipped(p["b"])), clipped(w)), s, p["w"])  # noqa: E731
    done(v, jnp.tanh(x + v.gather_all(lambda s: loop(s)[0] + loop(s)[1].sum(0))))


@jax.custom_vjp
def root(x: Any) -> Any:
    """The root of y = cos(y) / 2 + x, by iterations until it does not change."""
    step = lambda y: (jnp.cos(y[0]) / 2 + x, y[0])  # noqa: E731
    return jax.lax.while_loop(lambda y: jnp.abs(y[0] - y[1]).max() > 9 * jnp.finfo(x.dtype).eps, step, (x, x + 1))[0]


root.defvjp(lambda x: (y := root(x), y), lambda y, ct: (jnp.clip(ct / (1 + jnp.sin(y) / 2), -LIMIT, LIMIT),))


def of_root(p: Any, v: Any) -> None:
    done(v, jnp.tanh(root(p["b"]) * v.pull() + v.gather_all(lambda s: root(p["b"]) * s) + root(v.gather(0))))


INNER = cavs.VertexFunction(
    lambda p, v: done(v, jnp.tanh(v.pull() @ p["w"] + clipped(v.gather(0)) + clipped(p["b"]))), state=(H,), arity=1
)

CHAIN = cavs.schedule(cavs.from_lengths([3]))
CHAIN = cavs.Schedule(jnp.asarray(CHAIN.data), CHAIN.shape)


def of_inner_net(p: Any, v: Any) -> None:
    """Calls `cavs.run`, of values that are the same for all vertices and of others."""
    same = cavs.run(INNER, p, CHAIN, jnp.stack([p["b"], p["w"][0], p["b"]]), engine="scan")
    mine = cavs.run(INNER, p, CHAIN, jnp.stack([v.pull()] * 3), engine="scan")
    done(v, jnp.tanh(v.pull() * same.sum(0) + mine.sum(0) + v.gather(0)))


def in_condition(p: Any, v: Any) -> None:
    x = v.pull()
    a = jax.lax.cond(x[0] > 0, lambda: clipped(p["b"]) * x, lambda: product(p["b"], p["w"]))
    b = jax.lax.cond(p["b"][0] < 9, lambda: called(p["b"]) * x, lambda: x)
    done(v, jnp.tanh(a + b + v.gather(0)))


def of_condition(p: Any, v: Any) -> None:
    h = v.gather(0)
    done(v, jnp.tanh(v.pull() + jax.lax.cond(h.sum() > 0, lambda: clipped(p["b"]) * h, lambda: product(p["b"], p["w"]))))


def in_checkpoint(p: Any, v: Any) -> None:
    mine = jax.checkpoint(lambda b: clipped(b) * v.gather_all(lambda s: called(b) * s + s))
    done(v, jnp.tanh(v.pull() + mine(p["b"])))


def in_derivative(p: Any, v: Any) -> None:
    """F differentiates itself."""
    energy = lambda b: (clipped(b) * v.gather_all(lambda s: clipped(b) * s) * v.pull()).sum()  # noqa: E731
    done(v, jnp.tanh(v.pull() + jax.grad(energy)(p["b"]) + jax.grad(energy)(v.pull())))


def pushed(p: Any, v: Any) -> None:
    """Lazily, and of the eager part."""
    v.scatter(jnp.tanh(v.pull() + clipped(v.gather(0))))
    v.push({"a": clipped(p["b"]) * 2 + v.gather(0), "b": product(v.pull(), p["w"]), "c": called(p["w"])})


@jax.custom_vjp
def passed(x: Any, y: Any) -> Any:
    """Returns an argument, another one twice, and a constant."""
    return x, y, y, jnp.ones(H, x.dtype)


passed.defvjp(
    lambda x, y: (passed(x, y), None),
    lambda _, cts: (jnp.clip(cts[0], -LIMIT, LIMIT), jnp.clip(cts[1], -LIMIT, LIMIT) + cts[2]),
)


def of_arguments(p: Any, v: Any) -> None:
    outs = passed(v.gather(0), v.gather_all(lambda s: passed(s, s * p["b"])[1]))
    done(v, jnp.tanh(v.pull() + sum(x * p["w"][i] for i, x in enumerate(outs))))


def of_edges(p: Any, v: Any) -> None:
    done(v, jnp.tanh(v.pull() + v.gather_all(lambda s, e: clipped(e) * s + clipped(p["b"]) * e, edges=True)))


FUNCTIONS: dict[str, Any] = {
    fn.__name__: fn
    for fn in (
        *(of_constant, of_zeros, of_parameters, of_two_results, written_twice, of_vertex_for_each_child),
        *(of_parameters_for_each_child, of_child, of_pairs, in_loop, in_loop_over_child, in_condition),
        of_condition,
        *(of_root, of_inner_net),
        *(in_checkpoint, in_derivative, pushed, of_edges, of_arguments),
    )
}
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.standard_normal((H, H)) / 4, "b": RNG.standard_normal(H)}
ROWS, EDGES = RNG.standard_normal((GRAPHS.num_vertices, H)), RNG.standard_normal((GRAPHS.num_edges, H))


def loss(pushes: Any) -> Any:
    """A sum of all pushes with random weights, large enough that rules clip."""
    rng = np.random.default_rng(1)
    return sum((x * rng.standard_normal(x.shape).astype(x.dtype)).sum() for x in jax.tree.leaves(pushes))


@functools.cache
def truth(name: str) -> Any:
    """The gradients by the loop over vertices."""
    net = PerVertex(Steps({None: FUNCTIONS[name]}, np.zeros(H)), LISTS, [None] * GRAPHS.num_vertices)

    def run(p: Any, x: Any, e: Any) -> Any:
        return loss(net(p, with_edges(x, e, LISTS) if name == "of_edges" else x))

    return jax.grad(run, (0, 1, 2))(PARAMS, ROWS, EDGES)


def found(name: str, dtype: Any, engine: Any, **optimizations: bool) -> Any:
    """The gradients by `cavs.run`."""
    how = cavs.Optimizations(**optimizations)
    F = cavs.VertexFunction(FUNCTIONS[name], state=(H,), arity=5, optimizations=how)
    given = jax.tree.map(lambda x: jnp.asarray(x, dtype), (PARAMS, ROWS, EDGES))
    sched = cavs.schedule(GRAPHS, scripts=engine is INTERPRETED)

    def run(p: Any, x: Any, e: Any) -> Any:
        return loss(cavs.run(F, p, sched, x, edges=e if name == "of_edges" else None, engine=engine))

    return jax.jit(jax.grad(run, (0, 1, 2)))(*given)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("name", few(FUNCTIONS, 6))
def test_rules_act_per_vertex(name: str) -> None:
    assert_same(found(name, jnp.float64, "scan"), truth(name), 1e-10)


@pytest.mark.parametrize(
    ("name", "off"), [("of_parameters", "fusion"), ("of_vertex_for_each_child", "eager"), ("pushed", "lazy")]
)
def test_rules_act_per_vertex_without_an_optimization(name: str, off: str) -> None:
    assert_same(found(name, jnp.float64, "scan", **{off: False}), truth(name), 1e-10)


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
@pytest.mark.parametrize("name", few([name for name in FUNCTIONS if not name.startswith("in_")][::2], 3))
def test_rules_act_per_vertex_on_the_default_engine(name: str) -> None:
    assert_same(found(name, jnp.float32, None), truth(name), 1e-4)


@pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
def test_a_rule_may_return_its_arguments() -> None:
    """As one that changes cotangents alone: it clips them, or reverses them."""
    assert_same(found("of_arguments", jnp.float32, "native"), truth("of_arguments"), 1e-4)


@INTERPRETER
@pytest.mark.parametrize("name", few(["of_arguments", "of_vertex_for_each_child", "written_twice"], 2))
def test_rules_act_per_vertex_in_kernels(name: str) -> None:
    assert_same(found(name, jnp.float32, INTERPRETED), truth(name), 1e-5)


def _looped(ct: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + 2 * x, x @ PARAMS["w"]), jnp.zeros(H), jnp.stack([ct, jnp.zeros(H)]))


LINEAR: dict[str, Callable[[Any], Any]] = {
    "the same": lambda ct: ct,
    "scaled": lambda ct: -0.5 * ct / ROWS[0],
    "masked": lambda ct: jnp.where(ROWS[0] > 0, ct, 0),
    "product": lambda ct: jnp.outer(ROWS[0], PARAMS["w"] @ ct),
    "sum": lambda ct: jnp.broadcast_to(ct.sum(), (H,)) + jnp.cumsum(ct)[::-1],
    "permuted": lambda ct: ct[np.argsort(ROWS[0])].at[:2].set(0).reshape(2, -1),
    "scattered": lambda ct: jnp.zeros(9).at[np.arange(H) % 9].add(ct),
    "relu's": lambda ct: jax.vjp(jax.nn.relu, ROWS[0])[1](ct),
    "softmax's": lambda ct: jax.vjp(jax.nn.softmax, ROWS[0])[1](ct),
    "loop": _looped,
    "loop's": lambda ct: jax.vjp(lambda b: jax.lax.scan(lambda h, w: (jnp.tanh(h * w), None), b, PARAMS["w"])[0], ROWS[0])[1](
        ct
    ),
    "condition": lambda ct: jax.lax.cond(ROWS[0, 0] > 0, lambda: 2 * ct, lambda: ct),
    "zero": lambda ct: jnp.zeros_like(ct),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "clipped": lambda ct: jnp.clip(ct, -1, 1),
    "normed": lambda ct: ct / (1 + jnp.linalg.norm(ct)),
    "sign": jnp.sign,
    "squared": lambda ct: ct * ct,
    "shifted": lambda ct: ct + 1,
    "constant": lambda ct: jnp.ones_like(ct),
    "positive": lambda ct: jnp.where(ct > 0, ct, 0),
    "rounded": lambda ct: ct.astype(jnp.int32).astype(float),
    "padded": lambda ct: jnp.pad(ct, 1, constant_values=1.0),
    "one place": lambda ct: jnp.asarray(ROWS[0])[jnp.argmax(ct)] * ct,
    "product": lambda ct: jnp.outer(ct, ct),
    "denominator": lambda ct: 1 / ct,
    "loop": lambda ct: jax.lax.scan(lambda h, w: (jnp.cos(h * w), None), ct, PARAMS["w"])[0],
    "power": lambda ct: jax.lax.scan(lambda h, _: (h * ct, None), jnp.ones(H), None, length=2)[0],
    "condition": lambda ct: jax.lax.cond(ct[0] > 0, lambda: 2 * ct, lambda: ct),
}


@pytest.mark.parametrize("name", [*LINEAR, *(f"not {name}" for name in OTHERS)])
def test_what_is_linear(name: str) -> None:
    rule = LINEAR[name] if name in LINEAR else OTHERS[name.removeprefix("not ")]
    a, b = (jnp.asarray(x) for x in ROWS[1:3])
    program, _, _ = trace(rule, jax.ShapeDtypeStruct(a.shape, a.dtype))
    sums = [np.allclose(x + y, z) for x, y, z in zip(*(jax.tree.leaves(rule(x)) for x in (a, b, a + b)), strict=True)]
    assert is_linear(program.eqns, program.invars, program.outs) == all(sums) == (name in LINEAR)


def test_linear_rules_run_once_for_all_vertices() -> None:
    def rounded_weights(p: Any, v: Any) -> None:
        done(v, jnp.tanh(v.pull() @ straight(p["w"]) + v.gather(0) @ straight(p["w"]) + jax.nn.relu(p["b"])))

    F = cavs.VertexFunction(rounded_weights, state=(H,), arity=5)
    plan = plan_of(F, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS), jax.ShapeDtypeStruct((H,), float))
    part = plan.inner[None]
    assert {e.primitive.name for e in part.static_eqns} >= {"custom_vjp_call", "custom_jvp_call"}
    assert all(not e.primitive.name.startswith("custom") for e in (*part.eager.eqns, *part.recurrent.eqns, *part.lazy_eqns))


def test_a_rule_within_a_rule_of_tangents_is_found() -> None:
    for fn, linear in ((bent, False), (jax.nn.relu, True), (straight, True), (clipped, False)):
        (eqn,) = trace(fn, jax.ShapeDtypeStruct((H,), float))[0].eqns
        assert may_sum_first(eqn) == linear


def invariant_in_loop(w: Any, x: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        return jnp.tanh(h @ clipped(w) + called(w[0]) * row + called(w[0])), clipped(h).sum()

    h, ys = jax.lax.scan(step, x, jnp.tile(w, (3, 1)))
    return jnp.sum(h**2) + ys.sum()


def loops_in_loop(w: Any, x: Any) -> Any:
    def outer(h: Any, row: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h * clipped(row) + clipped(w[0])), None), h, None, length=3)
        return jax.lax.cond(h.sum() > 0, lambda: product(h[0], w) + h, lambda: called(h)), None

    return jnp.sum(jax.lax.scan(outer, x, w)[0] ** 2) + jnp.sum(called(w) * called(w))


def same_line_other_rule(w: Any, x: Any) -> Any:
    """Loops whose bodies differ in the limit of a rule alone."""
    for limit in (0.01, 0.1, 1.0):
        sine = jax.custom_vjp(jnp.sin)
        sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct, limit=limit: (jnp.clip(ct * jnp.cos(x), -limit, limit),))
        x, _ = jax.lax.scan(lambda h, w, sine=sine: (jnp.tanh(h @ sine(w) + h), None), x, jnp.stack([w, 2 * w]))
    return jnp.sum(x**2)


@pytest.mark.parametrize("budget", few(["min", None], 1))
@pytest.mark.parametrize("fn", [invariant_in_loop, loops_in_loop, same_line_other_rule])
def test_rules_act_as_in_jax_under_recompute(fn: Any, budget: Any) -> None:
    want = jax.grad(fn, (0, 1))(PARAMS["w"], ROWS[:3])
    got = jax.jit(jax.grad(cavs.memory.recompute(fn, budget), (0, 1)))(PARAMS["w"], ROWS[:3])
    assert_same(got, want, 1e-10)


@jax.custom_jvp
def by_itself(x: jax.Array) -> jax.Array:
    return x * x


by_itself.defjvp(lambda args, tangents: (args[0] * args[0], 3 * tangents[0]))  # it does not call the function


@pytest.mark.parametrize("engine", ["scan", "native", pytest.param(INTERPRETED, id="persistent", marks=INTERPRETER)])
def test_forward_mode_follows_rules(engine: Any) -> None:
    """Of functions that compute a state from those of children; `jax.custom_vjp` has no forward mode."""

    def tangent(rule: Any, run: Any) -> Any:
        def f(w: Any, v: cavs.Vertex) -> None:
            h = jnp.tanh(rule(v.gather(0) * w) + v.pull() * w)
            v.scatter(h)
            v.push(h)

        F = cavs.VertexFunction(f, state=(8,), arity=1)
        return jax.jvp(
            lambda w: (run(F, w) ** 2).sum(), (jnp.linspace(-2, 1.5, 8, dtype=jnp.float32),), (jnp.ones(8, jnp.float32),)
        )[1]

    chains = cavs.from_lengths([4, 2])
    x, sched = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32), cavs.schedule(chains, scripts=True)
    here = lambda F, w: cavs.run(F, w, sched, x, engine=engine)[: len(x)]  # noqa: E731
    loop = lambda F, w: cavs.interpret(F, w, chains, x)  # noqa: E731
    np.testing.assert_allclose(tangent(by_itself, here), tangent(by_itself, loop), rtol=1e-5)
    for run in (here, loop):
        with pytest.raises(TypeError, match="forward-mode"):
            tangent(clipped, run)
