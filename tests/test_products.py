"""Products in float16 that are as exact as in tf32: errors, ranges, non-finite numbers; and which products use float16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cavs._function import products
from cavs.kernels import H200, Target
from tests.persistent_programs import CASES, assert_near, inputs_of, values
from tests.slow import few

AXES = [(1, 0), (1, 1), (0, 0)]
TF32 = 2.0**-10  # of |a| |b|: both operands are rounded to eleven bits


def operands(axes: tuple[int, int], scale: tuple[float, float], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Matrices whose product sums over 40 elements, with rows and columns whose sizes differ by up to 2^12."""
    rng = np.random.default_rng(seed)
    found = []
    for axis, s in zip(axes, scale, strict=True):
        x = rng.standard_normal((40, 9)) * np.exp2(rng.integers(-12, 1, 9))
        found.append((s * (x if axis == 0 else x.T)).astype(np.float32))
    return found[0], found[1]


def exact(a: np.ndarray, b: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    return np.tensordot(a.astype(np.float64), b.astype(np.float64), (axes[0], axes[1]))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    "scale", [(1, 1), (1e-6, 30), (1e-30, 1e4), (1e30, 1e-30), (1e25, 1e10), (1e-20, 1e-10), (1e37, 1e-32), (0, 1)]
)
def test_errors_are_those_of_tf32(axes: tuple[int, int], scale: tuple[float, float]) -> None:
    a, b = operands(axes, scale)
    got = np.asarray(jax.jit(products.in_float16, static_argnums=2)(a, b, axes), np.float64)
    bound = TF32 * exact(np.abs(a), np.abs(b), axes) + 1e-37
    assert (np.abs(got - exact(a, b, axes)) <= bound).all()


@pytest.mark.parametrize("largest", [1.0, 2.0])
def test_small_numbers_beside_large_ones(largest: float) -> None:
    """Eleven bits from 2^-27 of the largest on, and an error of at most 2^-38 of it below."""
    one = np.ones((1, 1), np.float32)
    for power in range(0, -45, -1):
        x = largest * np.array([[1, 1.2345 * 2.0**power / 2]], np.float32)
        got = np.asarray(products.in_float16(one, x, (0, 0)), np.float64)[0, 1]
        small = x[0, 1] / largest
        assert abs(got - x[0, 1]) <= largest * (2.0**-11 * small if small >= 2.0**-27 else 2.0**-38)


def test_what_is_not_finite_stays_so_and_spoils_nothing_else() -> None:
    a, b = operands((0, 0), (1, 1))
    a[3, 2], b[5, 1] = np.inf, np.nan
    got = np.asarray(products.in_float16(a, b, (0, 0)))
    assert not np.isfinite(got[2]).any() and not np.isfinite(got[:, 1]).any()
    rest = np.delete(np.delete(got, 2, 0), 1, 1)
    a[3, 2], b[5, 1] = 0, 0
    want = np.delete(np.delete(exact(a, b, (0, 0)), 2, 0), 1, 1)
    assert np.abs(rest - want).max() < 1e-2 and np.isfinite(rest).all()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a Hopper GPU on which float16 is faster at any size; programs for other devices then use float16, too."""
    monkeypatch.setattr(Target, "here", lambda: H200)
    monkeypatch.setattr(products, "_faster", lambda *_: True)
    monkeypatch.setattr(products, "_faster_gradient", lambda *_: True)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))


@pytest.mark.parametrize(
    ("rows", "dtype", "divided"), [(1248, "float32", True), (1250, "float32", False), (48, "float16", False)]
)
def test_sums_of_rows(rows: int, dtype: str, divided: bool, hopper: None) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 3, 5)).astype(dtype)
    got = products.sum_of_rows(jnp.asarray(x))
    assert got.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), x.astype(np.float64).sum(0), 1e-3 if dtype == "float16" else 1e-5, 1e-5
    )
    assert ("optimization_barrier" in str(jax.make_jaxpr(products.sum_of_rows)(x))) == divided


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_weights_whose_operands_have_a_bound(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of two of a bound is as good as that of the largest number, if the numbers are not tiny beside the bound."""
    monkeypatch.setattr(products, "_faster_gradient", lambda *_: True)
    monkeypatch.setattr(Target, "here", lambda: H200)
    monkeypatch.setattr(products.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    rng = np.random.default_rng(0)
    x, ct = np.tanh(rng.standard_normal((40, 9))).astype(np.float32), rng.standard_normal((40, 7)).astype(np.float32)
    w = np.zeros((9, 7) if axis == 0 else (7, 9), np.float32)
    for bounded in (x, x * np.float32(1e-4)):
        plain, given = (
            np.asarray(products.weight_gradient(jnp.asarray(bounded), jnp.asarray(ct), jnp.asarray(w), axis, None, known))
            for known in (None, products.exponent_of_power(14))
        )
        want = bounded.astype(np.float64).T @ ct
        assert given.shape == w.shape
        assert np.abs(given - (want if axis == 0 else want.T)).max() <= TF32 * (np.abs(bounded).T @ np.abs(ct)).max()
        assert np.array_equal(given, plain)  # both lose the same bits


@pytest.mark.parametrize("name", few(["BinaryTreeLSTM", "reset before the product", "layer norm"], 1))
def test_a_run_in_float16(name: str, hopper: None) -> None:
    """Values and every gradient, with the precision of tf32."""
    hidden = 28  # of no other test: compiled code is kept
    make, graphs = CASES[name]
    F, params = make(hidden)
    x = inputs_of(name, graphs, hidden)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    got = values(F, params, graphs, x, "scan")
    assert_near(got, want, 2e-3)
    same = [(np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)]
    assert not all(same)  # it was float16


@pytest.mark.parametrize(
    ("precision", "dtype", "float16"),
    [
        (None, jnp.float32, True),
        ("tensorfloat32", jnp.float32, True),
        ("highest", jnp.float32, False),
        ("BF16_BF16_F32", jnp.float32, False),
        ("TF32_TF32_F32", jnp.float32, False),
        (None, jnp.bfloat16, False),
    ],
)
def test_who_names_an_algorithm_gets_it(precision: str | None, dtype: Any, float16: bool, hopper: None) -> None:
    x, w = jnp.ones((8, 4), dtype), jnp.ones((4, 6), dtype)
    with jax.default_matmul_precision(precision):
        asked = jax.make_jaxpr(jnp.dot)(x, w).eqns[0].params["precision"]
    text = str(jax.make_jaxpr(lambda x, w: products.large_product(x, w, 0, asked, dtype))(x, w))
    assert (":f16[" in text) == float16


def test_elsewhere_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products and other machines do not use float16, nor does a program that is compiled for a CPU beside a GPU."""
    x, w = jnp.ones((20000, 512), jnp.float32), jnp.ones((512, 512), jnp.float32)

    def text(rows: int) -> str:
        product = jax.jit(lambda x: products.large_product(x, w, 0, None, None))
        return product.lower(x[:rows]).as_text()

    for target in (Target("cpu"), H200):
        monkeypatch.setattr(Target, "here", lambda target=target: target)
        assert ("f16" in text(20000)) == (target.is_hopper and jax.default_backend() == "gpu")
        assert "f16" not in text(20)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_derivatives_in_forward_mode(size: float, hopper: None) -> None:
    """Tangents may be far larger than values, and are computed as elsewhere."""
    rng = np.random.default_rng(0)
    x, w, dx, dw = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 9), (9, 7)) * 2)
    product = lambda x, w: products.large_product(x, w, 0, None, jnp.float32)  # noqa: E731
    push = lambda x, w: jax.jvp(product, (x, w), (size * dx, size * dw))  # noqa: E731
    got, tangent = jax.jit(push)(x, w)
    assert_near([got, tangent], [x @ w, size * (dx @ w + x @ dw)], 2e-3)
    of_batch = jax.vmap(push, (0, None))(jnp.stack([x, -x]), w)
    assert_near([y[0] for y in of_batch], [x @ w, size * (dx @ w + x @ dw)], 2e-3)
    second = jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin(product(x, w)))), (x,), (dx,))[1]
    assert_near([second], [-(np.sin(x @ w) * (dx @ w)) @ w.T], 5e-3)
