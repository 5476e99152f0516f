"""Which part of F is eager, and which the levels compute."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cavs
from cavs._run.plans import plan_of


@pytest.mark.parametrize("pushed", [False, True])
def test_levels_add_the_bias_of_an_eager_product(pushed: bool) -> None:
    """Unless something else reads the sum, too, which then crosses over as it is."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        z = v.pull() @ p["w"] + p["b"]
        h = jnp.tanh(z + v.gather(0) @ p["u"])
        v.scatter(h)
        v.push(z if pushed else h)

    F = cavs.VertexFunction(fn, state=(4,), arity=1)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in {"w": (3, 4), "u": (4, 4), "b": (4,)}.items()}
    (part,) = plan_of(F, params, jax.ShapeDtypeStruct((3,), jnp.float32)).inner.values()
    assert [e.primitive.name for e in part.eager.eqns] == ["dot_general", *["add"] * pushed]
