"""Maxima over windows in `recompute`: the gradient follows from the place of each maximum (`cavs._remat.loops.pooled`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cavs.memory import recompute
from tests.truth import assert_close

WINDOWS = [
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    ((1, 3, 2, 1), (1, 1, 3, 1), "SAME"),
    ((2, 2, 1, 2), (1, 3, 1, 2), ((0, 1), (2, 0), (0, 0), (1, 1))),
    ((1, 5, 5, 1), (1, 1, 1, 1), "SAME"),  # too many terms: as JAX does
    ((1, 13, 1, 1), (1, 1, 1, 1), "VALID"),  # wider than the image: no windows
]


def pool(x: Any, window: Any = (1, 2, 2, 1), strides: Any = (1, 2, 2, 1), padding: Any = "VALID") -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def pixels() -> Any:
    """Many maxima are equal, infinite or not numbers."""
    x = jnp.asarray(np.round(np.random.default_rng(0).normal(size=(3, 9, 10, 4)), 1))
    return x.at[0, :4, :4].set(-jnp.inf).at[1, 2, 2].set(jnp.nan).at[1, 5].set(jnp.inf)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_gradients_go_to_the_first_of_equal_maxima(window):
    y, want = jax.vjp(lambda x: pool(x, *window), pixels())
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=y.shape))
    same, ours = jax.vjp(recompute(lambda x: pool(x, *window)), pixels())
    np.testing.assert_array_equal(same, y)
    assert_close(ours(cotangent), want(cotangent), 1e-14)


def test_derivatives_of_derivatives_and_vmap():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3, 2, 4)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 8, 2)))

    def loss(w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(pool(jnp.sin(y)) ** 3)

    ours = recompute(loss)
    product = lambda fn: jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w), jnp.ones_like(w)))(w)  # noqa: E731
    assert_close(product(ours), product(loss), 1e-12)
    several = jnp.stack([w, 2 * w, -w])
    assert_close(jax.vmap(jax.grad(ours))(several), jax.vmap(jax.grad(loss))(several), 1e-12)
    assert_close(jax.jvp(ours, (w,), (w,)), jax.jvp(loss, (w,), (w,)), 1e-12)


def test_a_layer_of_vgg_keeps_bits_and_places():
    """Four bytes an element after the convolution without them: one bit of ReLU, and a byte and a value for four elements."""
    w = [jax.ShapeDtypeStruct((3, 3, n, 16), jnp.float32) for n in (3, 16)]
    x = jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.float32)

    def loss(w: Any, x: Any) -> Any:
        for filters in w:
            x = lax.conv_general_dilated(x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = pool(jax.nn.relu(x))
        return jnp.sum(x**2)

    elements = 4 * 16 * (32 * 32 + 16 * 16)
    assert recompute(loss).plan(w, x).bytes <= elements * (1 / 8 + 1 / 4 + 4 / 4) * 1.02
