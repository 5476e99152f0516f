"""`cavs.conv` and its gradients on a Hopper GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._convolution import choice, layouts, primitives
from cavs.kernels import ConvolutionSizes, Target, convolve, filters_gradient
from cavs.kernels._tasks.convolution import convolve_in_stages
from tests.test_convolution import ODD, SAME, direct, draw, in_float64, loss

pytestmark = pytest.mark.gpu


def exact(run: Any, operands: Any, plain: jax.Array, true: np.ndarray, m: int) -> jax.Array:
    """Runs F(m x m) twice, with the same bits, and an error that is at most some times that of a `plain` result in float32."""
    found = run(*operands)
    error, limit = (float(np.sqrt(np.mean((np.asarray(a, np.float64) - true) ** 2))) for a in (found, plain))
    assert error <= {2: 1.5, 4: 4}[m] * max(limit, 2e-7 * np.abs(true).max())
    np.testing.assert_array_equal(run(*operands), found)
    return found


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("m", [2, 4])
def test_the_launch_equals_a_direct_convolution_on_the_card(m: int, name: str) -> None:
    sizes, pads = ODD[name]
    x, w = draw(sizes)
    s = ConvolutionSizes.of(sizes[:4], sizes[4], pads, m)
    true = in_float64(x, w, pads)

    for share in (1, 4):
        layout = layouts.layout(s, min(share, s.groups), Target.here())
        run = jax.jit(functools.partial(convolve, padding=pads, layout=layout))
        y = exact(run, (x, w), direct(x, w, pads), true, m)
    apart = jax.jit(functools.partial(convolve_in_stages, padding=pads, layout=layout))(x, w)
    np.testing.assert_array_equal(apart, y)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("m", [2, 4])
def test_the_gradient_with_respect_to_filters_on_the_card(m: int, name: str) -> None:
    sizes, pads = ODD[name]
    x, w = draw(sizes)
    s = ConvolutionSizes.of(sizes[:4], sizes[4], pads, m)
    dy = np.random.default_rng(1).standard_normal((s.images, s.out_height, s.out_width, s.outputs)).astype(np.float32)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        true = np.asarray(primitives.filters_by_xla(jnp.asarray(x, float), jnp.asarray(dy, float), pads))

    plain = jax.jit(functools.partial(primitives.filters_by_xla, pads=pads))(x, dy)
    for found in layouts.of_filters(s, Target.here()).values():
        layout = dataclasses.replace(found, m=m)
        run = jax.jit(functools.partial(filters_gradient, padding=pads, layout=layout))
        exact(run, (x, dy), plain, true, m)


def test_gradients_of_conv_on_the_card() -> None:
    sizes, pads = ODD["channels"]
    x, w = map(jnp.asarray, draw(sizes))
    ours = functools.partial(cavs.conv, padding=pads, precision="highest", algorithm="winograd")
    expected = jax.jit(jax.grad(functools.partial(loss, functools.partial(direct, pads=pads)), (0, 1)))(x, w)
    for wrap in (lambda f: f, jax.checkpoint):
        gradient = jax.grad(functools.partial(loss, wrap(ours)), (0, 1))
        for got in (gradient(x, w), jax.jit(gradient)(x, w)):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-3), got, expected)
    xs = jnp.stack([x, x + 1])
    np.testing.assert_allclose(jax.vmap(ours, (0, None))(xs, w)[1], direct(x + 1, w, pads), rtol=1e-3, atol=1e-3)


def test_what_is_fastest_is_measured_on_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice._records.cache_clear()
    x, w = map(jnp.asarray, draw((8, 14, 14, 64, 64)))
    y = jax.jit(functools.partial(cavs.conv, precision="highest"))(x, w)
    np.testing.assert_allclose(y, direct(x, w, SAME), rtol=1e-3, atol=1e-3)
    said = cavs.explain_conv(x, w, precision="highest")
    assert "xla" in said and "F(4x4,3x3), M=4" in said
    choice._records.cache_clear()
