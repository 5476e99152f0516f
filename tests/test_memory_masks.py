"""Masks that `recompute` keeps: one bit an element, and none where they follow from what is kept anyway."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cavs._jaxpr.equations import run_equations
from cavs._memory.fit import compiled_step
from cavs._remat.forms import bits_of, compared_by_result, kept_bytes
from cavs._remat.graph import with_derivative
from cavs._remat.pareto import ParetoSearch
from cavs.memory import recompute
from tests.slow import few

RNG = np.random.default_rng(0)
X, W = RNG.integers(-2, 3, (9, 12)).astype(float), RNG.integers(-1, 2, (12, 12)).astype(float)
KEYS = [jax.random.key(i) for i in range(3)]


def relus(w, x):
    """Three layers. The mean of four lets no product read the result of a ReLU itself, so that masks are kept."""
    for _ in range(3):
        y = jax.nn.relu(x @ w)
        x = y.reshape(len(x), 3, 4).sum(2) @ w[:3]
    return (x * 0.5).sum()


def dropout(w, x):
    for key in KEYS:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), (x @ w) * 2, 0)
    return (x**2).sum()


def leaky(w, x):
    return sum(jnp.where((h := x @ w) > c, 3 * h, h * -2).sum() for c in (-1.0, 0.0, 2.0))


def loop(w, x):
    """Each step keeps masks, carries one and passes one on."""

    def step(carry, row):
        h, on = carry
        now = (h @ w > row) & ~on
        h = jnp.where(now, h @ w, row)
        return (h, now), (jnp.where(on, 2 * h, h), now)

    (h, on), (ys, masks) = lax.scan(step, (x[0], x[0] > 0), x)
    return (ys * jnp.where(masks, 1.0, 0.5)).sum() + jnp.where(on, h, 0).sum()


def odd(w, x):
    """No axis of a mask is a multiple of eight, and some are short or empty."""
    h = x @ w
    masks = [(h[:, :5] > 0, h[:, :5]), (h[:1, :1] > 0, h[:1, :1]), (h[:0] > 0, h[:0]), (h.sum() > 0, h.sum())]
    return sum(jnp.where(mask, y * 2, 0).sum() for mask, y in masks)


FUNCTIONS = {f.__name__: f for f in (relus, dropout, leaky, loop, odd)}


@pytest.mark.parametrize(("name", "budget"), few(itertools.product(FUNCTIONS, [None, "min"]), 3))
def test_gradients_are_exactly_those_of_the_function(name, budget):
    """All numbers are small integers and halves of them, so no order of sums rounds."""
    fn = FUNCTIONS[name]
    ours = recompute(fn, budget)
    batched = jnp.stack([X, -X, X + 1])
    for by in ((0,), (0, 1)):
        for g, f in ((ours, fn), (jax.jit(ours), jax.jit(fn))):
            for got, want in zip(jax.value_and_grad(g, by)(W, X), jax.value_and_grad(f, by)(W, X), strict=True):
                jax.tree.map(np.testing.assert_array_equal, got, want)
        got, want = (jax.jit(jax.vmap(jax.grad(f, by), (None, 0)))(W, batched) for f in (ours, fn))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (9,), (3, 1), (17, 3), (2, 0, 5), (2, 12, 9)])
def test_bits_hold_each_mask(shape):
    mask: Any = jax.make_jaxpr(lambda x: x)(jnp.zeros(shape, bool)).jaxpr.invars[0]
    want, bits = RNG.random(shape) < 0.5, bits_of(mask)
    if bits is None:
        assert want.size <= 1 and kept_bytes(mask) == want.size
        return
    env: Any = {mask: want}
    run_equations(bits.pack, env)
    packed = env[bits.var]
    assert packed.dtype == np.uint8 and packed.nbytes == kept_bytes(mask) < want.size
    assert packed.nbytes == min(want.size // n * -(-n // 8) for n in shape)
    env = {bits.var: packed}
    run_equations(bits.unpack, env)
    np.testing.assert_array_equal(env[mask], want)


@pytest.mark.parametrize("relu", [jax.nn.relu, lambda x: jnp.maximum(x, 0), lambda x: lax.max(jnp.zeros((), x.dtype), x)])
def test_the_mask_of_a_relu_follows_from_its_result(relu):
    """The product after it keeps the result in any case."""

    def fn(w, x):
        for _ in range(3):
            x = jnp.where((h := x @ w) > 0, relu(h), 0.0)
        return (x @ w).sum()

    kept = ParetoSearch(jax.make_jaxpr(fn)(W, X), [0]).cheap().kept
    assert not [v for e in kept.graph.forward if e.primitive.name == "gt" for v in e.outvars if v in kept.keep]
    odd = jnp.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-310, -1.0, 2.0])
    eqns: Any = jax.make_jaxpr(lambda x: (x > 0, relu(x), lax.max(2.0, 0.0), lax.gt(2.0, 0.0)))(odd)
    moved, env = compared_by_result(eqns.jaxpr.eqns), dict(zip(eqns.jaxpr.invars, [odd], strict=True))
    run_equations(moved, env)
    gt = next(e for e in moved if e.primitive.name == "gt")
    assert gt.invars[0] is not eqns.jaxpr.invars[0]
    np.testing.assert_array_equal(env[gt.outvars[0]], odd > 0)


def blocks(w, x):
    """Dropout after sums of four neighbours: the backward needs the masks, and a fourth of what they mask."""
    for key in [jax.random.key(i) for i in range(12)]:
        y = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
        x = jnp.tile(jnp.tanh(y.reshape(len(x), -1, 4).sum(2) @ w), 4)
    return (x**2).sum()


BLOCKS = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.float32)


def test_kept_masks_take_an_eighth_of_their_bytes_and_so_does_the_compiled_step():
    search = ParetoSearch(jax.make_jaxpr(blocks)(*BLOCKS), [0])
    in_bits = search.cheap().kept
    in_bytes = in_bits.graph.keeping(in_bits.keep, False)
    masks = [v for v in in_bits.keep if v.aval.dtype == bool]
    saved = len(masks) * 256 * 128 * 7 // 8
    assert len(masks) >= 11 and in_bytes.bytes() - in_bits.bytes() == saved

    def temp(kept):
        step = jax.value_and_grad(lambda *args: with_derivative(search.closed, lambda _: kept)(*args)[0])
        return compiled_step(jax.jit(step), BLOCKS, {})[1]

    assert temp(in_bytes) - temp(in_bits) > 0.9 * saved


def test_a_saved_plan_keeps_the_same_bits(tmp_path):
    plan = recompute(blocks).plan(*BLOCKS)
    plan.save(tmp_path / "plan.json")
    again = recompute(blocks, plan=tmp_path / "plan.json").plan(*BLOCKS)
    assert again.rows() == plan.rows() and again.bytes == plan.bytes < plan.plain_bytes
    assert "bool[256,128] in bits" in str(again)
