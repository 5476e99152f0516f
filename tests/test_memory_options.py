"""What a memory plan asks of the calls of `run` in a loss reaches them, wherever they are, and changes no result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import cavs
from cavs._function.keep_options import MemoryOptions
from cavs._jaxpr.jaxprs import Jaxpr, bodies_in
from cavs._jaxpr.ruled import rules_in
from cavs._jaxpr.tunable import TunableRules, tuned, with_options
from tests.slow import few
from tests.test_memory_names import GRAPHS, PARAMS
from tests.truth import assert_close


def cell(w: Any, v: cavs.Vertex) -> None:
    gate = checkpoint_name(jnp.tanh((v.gather(0) + v.gather(1)) @ w["u"]), "gate")
    out = jnp.tanh(gate @ w["v"] + v.pull() @ w["x"])
    v.scatter(out)
    v.push(out)


F = cavs.VertexFunction(cell, state=jax.ShapeDtypeStruct((8,), jnp.float64), arity=2)
SCHED = cavs.schedule(GRAPHS)
X = np.sin(np.arange(SCHED.shape.vertices * 8.0)).reshape(-1, 8)
COUNT = len(GRAPHS)
AGAIN = MemoryOptions(names=(("gate", "recompute"),))  # a product runs again for it


def roots(params: Any, x: Any = X) -> jax.Array:
    return cavs.run(F, params, SCHED, jnp.asarray(x), select=SCHED.roots)


def in_scan(params: Any) -> jax.Array:
    return lax.scan(lambda total, scale: (total + roots(params, X * scale), None), jnp.zeros((COUNT, 8)), jnp.arange(3.0))[0]


def in_cond(params: Any) -> jax.Array:
    return lax.cond(jnp.sum(params["u"]) > 1e9, lambda: jnp.zeros((COUNT, 8)), lambda: roots(params))


def in_vmap(params: Any) -> jax.Array:
    return jax.vmap(lambda scale: roots(params, X * scale))(jnp.arange(3.0)).sum(0)


WAYS = {
    "plain": roots,
    "jit": jax.jit(roots),
    "checkpoint": jax.checkpoint(roots),
    "scan": in_scan,
    "cond": in_cond,
    "vmap": in_vmap,
}


def products(jaxpr: Jaxpr) -> int:
    """The products of a jaxpr, and of those inside it."""
    inside = sum(products(body) for eqn in jaxpr.eqns for body in bodies_in(eqn))
    return inside + sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)


@pytest.mark.parametrize("way", few(WAYS, 2))
def test_options_reach_calls_wherever_they_are(way: str) -> None:
    def loss(params: Any) -> jax.Array:
        return jnp.sum(WAYS[way](params) ** 2)

    plain, again = (jax.make_jaxpr(jax.grad(fn))(PARAMS) for fn in (loss, tuned(loss, AGAIN)))
    assert products(again.jaxpr) > products(plain.jaxpr)
    assert_close(jax.jit(jax.grad(tuned(loss, AGAIN)))(PARAMS), jax.jit(jax.grad(loss))(PARAMS), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_the_other_equations_stay(way: str) -> None:
    closed = jax.make_jaxpr(WAYS[way])(PARAMS)
    changed = with_options(closed, AGAIN)
    assert [e.primitive for e in changed.jaxpr.eqns] == [e.primitive for e in closed.jaxpr.eqns]
    before, after = (list(rules_in(x.jaxpr, TunableRules)) for x in (closed, changed))
    assert before and len(before) == len(after) and not {*map(id, before)} & {*map(id, after)}
    empty = jax.make_jaxpr(jnp.sin)(1.0)
    assert with_options(empty, AGAIN) is empty


def test_a_loss_that_was_traced_before_gets_the_options_of_a_plan() -> None:
    """JAX keeps what `jax.jit` has traced: what a plan asks for must not depend on when that was."""

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return jnp.sum(roots(params) ** 2)

    want = jax.grad(loss)(PARAMS)
    changed = cavs.memory.recompute(loss, names={"gate": "recompute"})
    plain, again = (products(jax.make_jaxpr(jax.grad(fn))(PARAMS).jaxpr) for fn in (loss, changed))
    assert again > plain
    assert_close(jax.jit(jax.grad(changed))(PARAMS), want, 1e-12)
