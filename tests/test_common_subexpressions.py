"""What F writes twice is one value."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import cavs
from cavs._run.plans import plan_of

H = 4


def equations(fn: Any, leaf: bool = False) -> Counter[str]:
    """How often each primitive is in F."""
    function = cavs.VertexFunction(fn, state=(H,), arity=2)
    row = jax.ShapeDtypeStruct((H,), jnp.float32)
    plan = plan_of(function, jax.ShapeDtypeStruct((H, H), jnp.float32), row)
    role = plan.leaf[None] if leaf else plan.inner[None].role
    return Counter(e.primitive.name for e in role.program.eqns)


def scattered(value: Any) -> Any:
    def fn(w: Any, v: cavs.Vertex) -> None:
        h = value(w, v)
        v.scatter(h)
        v.push(h)

    return fn


def test_a_product_written_twice_is_one() -> None:
    def twice(w: Any, v: cavs.Vertex) -> Any:
        def one() -> Any:
            return jax.nn.sigmoid((v.gather(0) + v.gather(1)) @ w + v.pull())

        return one() * jnp.tanh(one())

    found = equations(scattered(twice))
    assert found["dot_general"] == found["logistic"] == 1 and found["add"] == 2


def test_values_that_differ_in_a_literal_or_a_parameter_stay() -> None:
    def different(w: Any, v: cavs.Vertex) -> Any:
        a, b = v.gather(0), v.gather(1)
        return (2.0 * a + 3.0 * a + a * b) * jnp.concatenate([a[:2], a[2:]]) + b.sum() + b.max() + jnp.cumsum(a)

    found = equations(scattered(different))
    assert found["mul"] >= 4 and found["slice"] == 2 and found["reduce_sum"] == found["reduce_max"] == 1


def test_names_stay() -> None:
    def named(w: Any, v: cavs.Vertex) -> Any:
        h = v.gather(0) @ w
        return checkpoint_name(h, "a") * checkpoint_name(h, "b") + checkpoint_name(h, "b")

    found = equations(scattered(named))
    assert found["name"] == 2


def test_nans_and_zeros_of_both_signs_are_different_values() -> None:
    def signs(w: Any, v: cavs.Vertex) -> Any:
        a = v.gather(0)
        return jnp.where(v.gather(1) > 0, jnp.arctan2(a, 0.0 * a + 0.0), jnp.arctan2(a, 0.0 * a + -0.0)) + a * jnp.nan * 0

    assert equations(scattered(signs))["atan2"] == 2
