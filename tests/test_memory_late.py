"""`recompute` around loops: their stacked results begin to exist when they run (`cavs._jaxpr.late_zeros`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cavs._jaxpr import late_zeros
from cavs._jaxpr.late_zeros import run_late
from cavs.memory import recompute
from tests.lower_for_hopper import compile_for_hopper
from tests.test_memory_echo import case
from tests.truth import assert_close


@pytest.fixture(autouse=True)
def every_loop_is_late(monkeypatch):
    monkeypatch.setattr(late_zeros, "_SMALL", 0)


def loss(w: Any, xs: Any, reverse: bool = False) -> Any:
    def step(state: Any, x: Any) -> Any:
        state, count = state
        state = jnp.tanh(state @ w + x["x"]) * (1 + x["i"] % 2)
        return (state, count + 1), {"y": jnp.sin(state), "count": count, "even": count % 2 == 0}

    (last, _), ys = lax.scan(step, (xs["x"][0], 0), xs, reverse=reverse)
    return jnp.sum(ys["y"] ** 2 * ys["even"][:, None, None]) + last.sum() + 0.1 * ys["count"].sum()


def inputs() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(4, 4)) / 2), {"x": jnp.asarray(rng.normal(size=(7, 2, 4))), "i": jnp.arange(7)}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("budget", [None, "min"])
def test_gradients_of_loops_with_results_of_several_types(budget, reverse):
    w, xs = inputs()
    want = jax.jit(jax.value_and_grad(loss), static_argnums=2)(w, xs, reverse)
    ours = recompute(lambda w, xs: loss(w, xs, reverse), budget)
    assert_close(jax.jit(jax.value_and_grad(ours))(w, xs), want, 1e-13)


@pytest.mark.slow
def test_gradients_of_a_model():
    fn, params, batch = case("deepspeech2")
    want = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert_close(jax.jit(jax.value_and_grad(recompute(fn)))(params, batch), want, 1e-12)


def test_second_derivatives_and_vmap():
    w, xs = inputs()
    planned = recompute(loss)
    direction = jnp.ones_like(w)
    product = lambda fn: jax.jit(jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w, xs), direction)))(w)  # noqa: E731
    assert_close(product(planned), product(loss), 1e-12)
    several = jnp.stack([w, 2 * w, -w])
    assert_close(jax.vmap(jax.grad(planned), (0, None))(several, xs), jax.vmap(jax.grad(loss), (0, None))(several, xs), 1e-12)


def with_sums(w: Any, x: Any) -> Any:
    """A step of training by several devices, whose statistics are those of the whole batch."""
    for _ in range(2):
        x = jax.nn.relu(x @ w)
        x = x - lax.pmean(x.mean(0), "x")
    return lax.pmean((jnp.tanh(lax.psum(jnp.tanh(x @ w), "x") @ w) ** 2).sum(), "x") + lax.psum((x**2).sum(), "x")


def with_a_loop(w: Any, xs: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        return (state := jnp.tanh(state @ w + x)), jnp.sin(state)

    last, ys = lax.scan(step, jnp.zeros_like(xs[0]), xs)
    return lax.psum((last**2).sum() + (ys**2).sum(), "x")


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("fn", [with_sums, with_a_loop])
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_inside_a_shard_map_that_checks_types(fn, budget, inside):
    w, xs = inputs()
    x, at = (xs["x"][:, 0], P("x")) if fn is with_sums else (xs["x"], P(None, "x"))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    results = []
    for one in (fn, recompute(fn, budget)):
        grad = jax.grad(one) if inside else one
        mapped = jax.shard_map(grad, mesh=mesh, in_specs=(P(), at), out_specs=P(), check_vma=True)
        results.append(jax.jit(mapped if inside else jax.grad(mapped))(w, x))
    assert_close(results[1], results[0], 1e-12)


def test_the_zeros_depend_on_the_operands_of_the_loop():
    w, xs = inputs()
    jaxpr = jax.make_jaxpr(loss)(w, xs).jaxpr

    def run(*args: Any) -> Any:
        env = dict(zip(jaxpr.invars, args, strict=True))
        run_late(jaxpr.eqns, env)
        return [env[v] for v in jaxpr.outvars]

    flat = jax.tree.leaves((w, xs))
    assert_close(run(*flat), [loss(w, xs)], 1e-13)
    text = str(jax.make_jaxpr(run)(*flat))
    assert text.count("optimization_barrier") == 1 and "optimization_barrier" in text.split("scan[")[0]


def test_the_gradient_of_a_table_begins_to_exist_with_what_is_added_to_it():
    table, ids = jnp.asarray(np.random.default_rng(0).normal(size=(50, 4))), jnp.asarray([3, 7, 3])
    ours = jax.grad(recompute(lambda table: jnp.sum(jnp.sin(table[ids]) ** 2)))
    assert_close(ours(table), jax.grad(lambda table: jnp.sum(jnp.sin(table[ids]) ** 2))(table), 1e-13)
    eqns = jax.make_jaxpr(ours)(table).jaxpr.eqns
    made = {v: e for e in eqns for v in e.outvars}
    (scatter,) = (e for e in eqns if e.primitive.name == "scatter-add")
    zeros = made[scatter.invars[0]]
    assert zeros.primitive.name == "broadcast_in_dim"
    # The scatter reads both results of the barrier, or XLA drops one and the dependence.
    assert made[zeros.invars[0]] is made[scatter.invars[2]]
    assert made[zeros.invars[0]].primitive.name == "optimization_barrier"


def test_programs_need_no_more_than_they_must_on_a_gpu():
    """If XLA filled the results of all loops at the program's start, they would need more.

    If it joined the products for the gradients of an LSTM's two weights, or added the one for the leaves to the one for the
    other vertices before it adds to the sums of all parts, two products would be there at once.

    A Tree-LSTM needs what its backward launch reads and writes, and nothing beside it.
    """
    found = compile_for_hopper("tests.memory_for_hopper")
    assert found["temp"] < 0.9 * found["at_once"]
    assert found["weight"] < found["lstm"] < 1.5 * found["weight"]
    assert found["attention"] < 2 * found["matrices"]
    assert found["rows"] < 7.8
