"""Random functions of plain JAX, whose gradients with `cavs.memory.recompute` must be those of `jax.grad`.

`python -m tests.random_jax --count 100`; `--seed 7` runs one case again and prints its jaxpr.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cavs.memory import recompute

ROWS, WIDTH = 4, 3

Array = jax.Array
Step = Callable[["Inputs", Array], Array]  # from the inputs and a value of ROWS x WIDTH to another


class Inputs(NamedTuple):
    """The arguments of a function: floats, which it is differentiated by, then integers and a key."""

    ws: Array
    x: Array
    bias: Array
    indices: Array
    key: Array


@jax.custom_vjp
def squeezed(x: Array, scale: Array) -> Array:
    return jnp.tanh(x * scale)


squeezed.defvjp(
    lambda x, scale: (jnp.tanh(x * scale), (x, scale)),
    lambda saved, g: (g * (1 - jnp.tanh(saved[0] * saved[1]) ** 2) * saved[1], 0.5 * jnp.sum(g)),  # not the true derivative
)


@jax.custom_jvp
def bent(x: Array) -> Array:
    return jnp.where(x > 0, x, 0.1 * x)


bent.defjvps(lambda t, out, x: t * jnp.where(x > 0, 0.9, 0.2))  # not the true derivative

MAPS: list[Callable[[Array], Array]] = [
    jnp.tanh, jnp.sin, jax.nn.softmax, jax.nn.relu, jax.nn.gelu, bent, lambda x: x / (1 + x * x), jnp.cumsum,
    lambda x: squeezed(x, 0.7 + 0 * x[0, 0]), lambda x: lax.sort(x, dimension=0), lambda x: x - x.mean(0), jax.jit(jnp.cos),
    lambda x: x + lax.stop_gradient(jnp.exp(-x * x)), lambda x: checkpoint_name(jnp.tanh(x), "named"),
]  # fmt: skip


class Maker:
    """Draws a function: a list of steps, some of which are loops or branches with steps of their own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def steps(self, depth: int, count: int) -> Step:
        chosen = [self.step(depth) for _ in range(count)]
        back = [int(self.rng.integers(i + 1)) for i in range(count)]
        joined = [self.rng.random() < 0.3 for _ in range(count)]

        def run(given: Inputs, x: Array) -> Array:
            values = [x]
            for step, at, add in zip(chosen, back, joined, strict=True):
                out = step(given, values[-1])
                values.append(0.5 * (out + values[at]) if add else out)
            return values[-1]

        return run

    def step(self, depth: int) -> Step:
        makers = [self.map, self.product, self.mask, self.rows]
        if depth:
            makers += [self.scan, self.cond, self.while_loop, self.checkpoint, self.stacked]
        return makers[self.rng.integers(len(makers))](depth)

    def map(self, _: int) -> Step:
        fn = MAPS[self.rng.integers(len(MAPS))]
        return lambda given, x: fn(x).reshape(ROWS, WIDTH)

    def product(self, _: int) -> Step:
        k = int(self.rng.integers(3))
        return lambda given, x: x @ given.ws[k] + given.bias

    def mask(self, _: int) -> Step:
        n = int(self.rng.integers(1 << 20))
        return lambda given, x: jnp.where(jax.random.bernoulli(jax.random.fold_in(given.key, n), 0.7, x.shape), x / 0.7, 0.0)

    def rows(self, _: int) -> Step:
        if self.rng.random() < 0.5:
            return lambda given, x: x[given.indices]
        return lambda given, x: jnp.zeros_like(x).at[given.indices].add(x)

    def scan(self, depth: int) -> Step:
        """A loop with a float, an integer and a key in its carry, over rows of several types."""
        body, length = self.steps(depth - 1, int(self.rng.integers(1, 3))), int(self.rng.choice([1, 3, 16, 17]))
        reverse, unroll, ys_of_carry, keyed = (bool(b) for b in self.rng.random(4) < 0.4)
        last_alone = self.rng.random() < 0.3

        def run(given: Inputs, x: Array) -> Array:
            def one(state: Any, row: Any) -> tuple[Any, Any]:
                h, total, n, key = state
                scale, i = row
                inside = given._replace(
                    key=key if keyed else jax.random.fold_in(given.key, i), indices=(given.indices + n) % ROWS
                )
                new = body(inside, jnp.tanh(h * scale + given.bias))
                return (new, total + new.sum(), (n + 1) % 3, jax.random.fold_in(key, i)), (h if ys_of_carry else new[0], i)

            scales = 0.5 + jnp.resize(given.x, (length,)) * 0.1
            state = x, 0.0 * x[0, 0], jnp.int32(0), given.key
            (h, total, n, _), (ys, count) = lax.scan(
                one, state, (scales, jnp.arange(length)), reverse=reverse, unroll=2 if unroll else 1
            )
            if last_alone:
                return h
            return h + 0.1 * ys.mean() + 0.01 * jnp.tanh(total) + 0.01 * (n + count.sum())

        return run

    def twins(self, depth: int) -> Step:
        """Two loops from one line, whose bodies differ in the sign of a zero, or in which of two weights they read."""
        body, by_sign = self.steps(depth - 1, 1), self.rng.random() < 0.6

        def run(given: Inputs, x: Array) -> Array:
            for zero, k in ((0.0, 0), (-0.0, 1)):

                def one(h: Array, _: None, zero: float = zero, k: int = k) -> tuple[Array, None]:
                    angle = lax.atan2(jnp.full_like(h, zero if by_sign else 0.0), h - 0.25)
                    return jnp.tanh(body(given, h) @ given.ws[0 if by_sign else k] + 0.1 * angle), None

                x = lax.scan(one, x, None, length=3)[0]
            return x

        return run

    def cond(self, depth: int) -> Step:
        first, second = self.steps(depth - 1, 2), self.steps(depth - 1, 1)
        by_value = self.rng.random() < 0.5
        return lambda given, x: lax.cond(
            (x.sum() > 0) if by_value else given.indices[0] > 1, lambda x: first(given, x), lambda x: second(given, x), x
        )

    def while_loop(self, depth: int) -> Step:
        """A loop of an unknown number of steps cannot be differentiated: its result is a constant."""
        del depth
        return lambda given, x: (
            x
            * lax.stop_gradient(
                lax.while_loop(
                    lambda s: s[1] > 0.1, lambda s: (s[0] + 1, s[1] * 0.5), (1.0, 1 + jnp.abs(lax.stop_gradient(x)).max())
                )[0]
                / 8
            )
        )

    def checkpoint(self, depth: int) -> Step:
        body = self.steps(depth - 1, 2)
        return lambda given, x: jax.checkpoint(lambda ws, x: body(given._replace(ws=ws), x))(given.ws, x)

    def stacked(self, depth: int) -> Step:
        body = self.steps(depth - 1, 2)
        return lambda given, x: jax.vmap(lambda s: body(given, s * x))(jnp.array([0.5, 1.0, 1.5])).mean(0)


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(np.abs(b).max(initial=0))))


def function(seed: int) -> Callable[..., Any]:
    """A random function with an auxiliary result."""
    maker = Maker(seed)
    body = maker.steps(2, int(maker.rng.integers(2, 6)))
    last = maker.twins(1) if maker.rng.random() < 0.4 else None

    def loss(*args: Any) -> tuple[Array, Any]:
        given = Inputs(*args)
        x = body(given, given.x)
        x = last(given, x) if last else x
        return (jnp.sin(x) ** 2).mean() + 0.1 * (x * given.x).sum(), {"x": x, "n": given.indices.sum()}

    return loss


def inputs(seed: int) -> Inputs:
    rng = np.random.default_rng([seed, 1])
    ws, x, bias = (jnp.asarray(rng.normal(size=shape) * 0.6) for shape in ((3, WIDTH, WIDTH), (ROWS, WIDTH), (WIDTH,)))
    return Inputs(ws, x, bias, jnp.asarray(rng.integers(0, ROWS, ROWS), jnp.int32), jax.random.key(seed))


def check(seed: int) -> None:
    """Compares the gradients of a case under several budgets with those of `jax.grad`. Raises an error if they differ."""
    fn, args = function(seed), inputs(seed)
    rng = np.random.default_rng([seed, 2])
    by = tuple(sorted(rng.choice(3, size=int(rng.integers(1, 4)), replace=False).tolist()))
    want = jax.jit(jax.value_and_grad(fn, by, has_aux=True))(*args)
    plan = recompute(fn).plan(*args, argnums=by)
    for budget in (None, "min", max(plan.floor, (plan.peak + plan.floor) // 2)):
        assert_close(jax.jit(jax.value_and_grad(recompute(fn, budget), by, has_aux=True))(*args), want)
    if seed % 4 == 0:
        grads = jax.vmap(jax.grad(recompute(fn, "min"), by, has_aux=True), (None, 0, None, None, None))
        plain = jax.vmap(jax.grad(fn, by, has_aux=True), (None, 0, None, None, None))
        xs = jnp.stack([args.x, 0.5 * args.x])
        assert_close(jax.jit(grads)(*args._replace(x=xs)), jax.jit(plain)(*args._replace(x=xs)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this case alone, printed")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    seeds = range(args.first_seed, args.first_seed + args.count) if args.seed is None else [args.seed]
    wrong, start = [], time.time()
    for seed in seeds:
        if args.seed is not None:
            print(jax.make_jaxpr(function(seed))(*inputs(seed)))
        try:
            check(seed)
        except Exception as error:
            wrong.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        jax.clear_caches()
    print(f"{len(seeds)} functions in {time.time() - start:.0f} s, wrong or refused: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
