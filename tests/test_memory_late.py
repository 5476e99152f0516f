"""`recompute` around loops: their stacked results begin to exist when they run (`cavs._jaxpr.late_zeros`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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
    want = jax.value_and_grad(loss)(w, xs, reverse)
    ours = recompute(lambda w, xs: loss(w, xs, reverse), budget)
    assert_close(jax.jit(jax.value_and_grad(ours))(w, xs), want, 1e-13)


def test_gradients_of_a_model():
    fn, params, batch = case("deepspeech2")
    want = jax.jit(jax.value_and_grad(fn))(params, batch)
    assert_close(jax.jit(jax.value_and_grad(recompute(fn)))(params, batch), want, 1e-12)


def test_second_derivatives_and_vmap():
    w, xs = inputs()
    planned = recompute(loss)
    direction = jnp.ones_like(w)
    product = lambda fn: jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w, xs), direction))(w)  # noqa: E731
    assert_close(product(planned), product(loss), 1e-12)
    several = jnp.stack([w, 2 * w, -w])
    assert_close(jax.vmap(jax.grad(planned), (0, None))(several, xs), jax.vmap(jax.grad(loss), (0, None))(several, xs), 1e-12)


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
