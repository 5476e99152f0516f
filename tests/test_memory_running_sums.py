"""Results of a jaxpr that are added to running sums, term by term: `cavs._jaxpr.running_sums`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cavs._jaxpr.ruled import replaceable
from cavs._jaxpr.running_sums import run_and_add
from tests.truth import assert_close

N = 130  # N x N float64 are above the bytes from which terms are added one by one


def one(a, b):
    """Three terms, two of them inside of what has rules of its own; a result with one term; a small one; and an input."""

    def inside(a, b):
        return a @ b + jnp.sin(a) @ a.T, b @ a

    twice, once = replaceable(inside, inside)(a, b)
    return twice + jnp.cos(b), once, jnp.sum(a) + 1.0, b, a * b


@pytest.fixture(scope="module")
def args():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((N, N)) for _ in range(2)]


def added(*args):
    closed = jax.make_jaxpr(one)(*args)
    return run_and_add(closed, args, [jnp.full(x.shape, 2.0) for x in closed.out_avals[:4]])


def wanted(*args):
    *own, other = one(*args)
    return [x + 2.0 for x in own], [other]


def test_sums(args):
    assert_close(jax.jit(added)(*args), wanted(*args), 1e-12)


def test_a_term_is_added_before_the_next_one(args):
    text = str(jax.make_jaxpr(added)(*args))
    assert text.count("optimization_barrier") == 2  # three terms of the first result


def test_derivatives(args):
    total = lambda fn: lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fn(*args)))  # noqa: E731
    assert_close(jax.grad(total(added), (0, 1))(*args), jax.grad(total(wanted), (0, 1))(*args), 1e-12)


def test_batches(args):
    a, b = args
    many = jnp.stack([a, 2 * a])
    assert_close(jax.vmap(added, (0, None))(many, b), jax.vmap(wanted, (0, None))(many, b), 1e-12)


def test_effects_stay(args):
    seen = []

    def told(a):
        jax.debug.callback(lambda x: seen.append(float(x)), a[0, 0])
        return a @ a + a.T @ a

    closed = jax.make_jaxpr(told)(args[0])
    jax.block_until_ready(jax.jit(lambda a, t: run_and_add(closed, [a], [t]))(args[0], jnp.zeros((N, N))))
    jax.effects_barrier()
    assert seen == [args[0][0, 0]]


def test_a_result_that_is_read_elsewhere_is_computed(args):
    closed = jax.make_jaxpr(lambda a: ((s := a @ a + a.T @ a), s * 2.0))(args[0])
    (got,), (other,) = run_and_add(closed, args[:1], [jnp.ones((N, N))])
    want = args[0] @ args[0] + args[0].T @ args[0]
    assert_close((got, other), (want + 1, 2 * want), 1e-12)


def test_inside_a_loop(args):
    closed = jax.make_jaxpr(one)(*args)

    def step(totals, x):
        return run_and_add(closed, [args[0], x], totals)

    xs = jnp.stack([args[1], args[0]])
    sums, others = lax.scan(step, [jnp.zeros(x.shape) for x in closed.out_avals[:4]], xs)
    each = [one(args[0], x) for x in xs]
    assert_close(sums, [sum(of) for of in list(zip(*each, strict=True))[:4]], 1e-12)
    assert_close(others[0], jnp.stack([of[4] for of in each]), 1e-12)
