"""One traced function, differentiated with respect to different arguments, keeps the residuals of each apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs.kernels import native_unavailable
from tests.truth import assert_close

GRAPHS = cavs.from_parents([[2, 2, 4, 4, -1], [2, 2, -1], [-1]] * 4)
H = E = 8
TREE = vp.TreeFC(H)
ARGUMENTS = {"params": 0, "inputs": 1}


def batch(**how: Any) -> Callable[[Any, Any], jax.Array]:
    engine = how.pop("engine", "scan")
    sched, function = cavs.schedule(GRAPHS, **how), TREE.vertex_function()
    return lambda p, x: jnp.sum(jnp.sin(cavs.run(function, p, sched, x, engine=engine)[: GRAPHS.num_vertices]))


def parts() -> Callable[[Any, Any], jax.Array]:
    total = cavs.memory.sub_batched(lambda p, rows: jnp.sum(jnp.tanh(rows @ p["rows"]) ** 2))
    return lambda p, x: total(p, [x.reshape(2, -1, E)])


def matrices(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p["rows"]) @ p["rows"].T) * x)


FUNCTIONS = {
    "scan": batch,
    "persistent": lambda: batch(engine="persistent", scripts=True),
    "native": lambda: batch(engine="native"),
    "segments": lambda: batch(segments=3),
    "recompute": lambda: cavs.memory.recompute(matrices),
    "parts": parts,
}


def again(fn: Callable[[Any, Any], jax.Array], p: Any, x: jax.Array) -> jax.Array:
    """`fn`, inside of a loop and of `jax.checkpoint`: JAX differentiates it in another way."""
    return jax.lax.scan(lambda total, _: (total + jax.checkpoint(fn)(p, x), None), jnp.float32(0), None, length=1)[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.gpu) if n == "persistent" else n for n in FUNCTIONS])
def test_gradients_do_not_depend_on_those_before(name: str) -> None:
    if name == "native" and (reason := native_unavailable()):
        pytest.skip(reason)
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(GRAPHS.num_vertices, E)), jnp.float32)
        p = TREE.init(jax.random.key(0)) if name not in ("recompute", "parts") else {"rows": jnp.ones((E, H)) / 3}
        make = FUNCTIONS[name]
        want = {which: jax.jit(jax.grad(make(), of))(p, x) for which, of in ARGUMENTS.items()}
        one = jax.jit(make())
        for fn in (one, lambda p, x: again(one, p, x)):
            for which, of in ARGUMENTS.items():
                assert_close(jax.grad(fn, of)(p, x), want[which], 1e-5)


def test_what_a_derivative_is_told() -> None:
    seen: list[Any] = []

    def forward(varied: Any, p: Any, n: Any, x: Any) -> Any:
        seen.append(varied)
        return (p["a"] * x, n), jax.tree_util.Partial(backward, p["a"], x)

    def backward(a: Any, x: Any, cts: Any) -> Any:
        return {"a": cts[0] * x}, None, cts[0] * a

    fn = reverse_differentiable(lambda p, n, x: (p["a"] * x, n), forward, "scaled")
    p, n, x = {"a": jnp.array([2.0, 3.0])}, jnp.arange(2), jnp.array([5.0, 7.0])
    assert_close(jax.grad(lambda p: fn(p, n, x)[0].sum())(p), {"a": x}, 1e-6)
    assert_close(jax.grad(lambda x: fn(p, n, x)[0].sum())(x), p["a"], 1e-6)
    assert seen == [({"a": True}, False, False), ({"a": False}, False, True)]
    batched = jax.vmap(jax.grad(lambda x: fn(p, n, x)[0].sum()))(jnp.stack([x, 2 * x]))
    assert_close(batched, jnp.stack([p["a"]] * 2), 1e-6)
    pushed = jax.jit(lambda x: jax.jvp(lambda x: fn(p, n, x)[0], (x,), (2 * x,)))(x)
    assert_close(pushed, (p["a"] * x, 2 * p["a"] * x), 1e-6)
