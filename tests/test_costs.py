"""Prices of equations: what memory plans store rather than compute twice."""

import sys

import jax
import jax.experimental.custom_partitioning
import jax.experimental.pallas
import jax.extend.core.primitives
import jax.numpy as jnp
import jax.scipy.linalg
from jax.extend import core as jex

import cavs
import cavs._convolution.primitives
import cavs._function.children
from cavs._jaxpr import costs


def test_all_names_are_of_primitives() -> None:
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(("jax", "cavs"))]
    known = {x.name for module in modules for x in [*vars(module).values()] if isinstance(x, jex.Primitive)}
    tables = [x for x in vars(costs).values() if isinstance(x, set)]
    assert sum(map(len, tables)) > 50
    assert set[str]().union(*tables) <= known


def test_random_numbers_are_drawn_once() -> None:
    def loss(x: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.gamma(key, jax.lax.stop_gradient(x) + 1)
        return jnp.sum(jnp.sin(jnp.sin(x) * noise) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(cavs.memory.recompute(loss)))(jnp.ones(1000), jax.random.key(0))
    assert str(jaxpr).count("random_gamma[") == 1
