"""JAX's transformations of functions that take parameters and inputs. See `random_compositions`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

Function = Callable[[Any, Any], Any]


# --- helpers of transformations
def floats(found: Any) -> list[Any]:
    return [a for a in jax.tree.leaves(found) if jnp.issubdtype(a.dtype, jnp.inexact)]


def scalar(found: Any) -> Any:
    """A number about 1 that depends on all floats."""
    each = [
        jnp.sin(a + i) * (1 + jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) / a.size) for i, a in enumerate(floats(found))
    ]
    return sum(map(jnp.mean, each))


def vector(found: Any) -> Any:
    return jnp.stack([scalar(found), jnp.cos(scalar(found)), scalar([a * a for a in floats(found)])])


def like(tree: Any, start: int = 0) -> Any:
    """Directions, or cotangents."""
    leaves, of = jax.tree.flatten(tree)
    return of.unflatten([direction(a, start + i) for i, a in enumerate(leaves)])


def direction(a: Any, i: int) -> Any:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.zeros(a.shape, jax.dtypes.float0)
    return a - a + jnp.cos(jnp.arange(a.size, dtype=a.dtype).reshape(a.shape) * 0.7 + i)  # of the type of `a` in a shard_map


def scaled(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda a: a * by, tree)


def stacked(tree: Any, size: int) -> Any:
    return jax.tree.map(lambda a: jnp.stack([a * (1 - 0.3 * i) for i in range(size)]), tree)


# --- transformations. A name says how they count for derivatives: `reverse`, `forward` or none.
def grad(of: str) -> Callable[[Function], Function]:
    def transform(f: Function) -> Function:
        def one(p: Any, x: Any) -> Any:
            some = {name: a for name, a in p.items() if of == "params" or name == "u"}
            if of == "inputs":
                return jax.grad(lambda x: scalar(f(p, x)))(x)
            if of == "both":
                return jax.value_and_grad(lambda *args: scalar(f(*args)), (0, 1))(p, x)
            return jax.grad(lambda some: scalar(f(p | some, x)))(some)

        return one

    return transform


def vjp(f: Function) -> Function:
    def one(p: Any, x: Any) -> Any:
        outs, pull = jax.vjp(f, p, x)
        return outs, pull(like(outs))

    return one


def linearize(f: Function) -> Function:
    def one(p: Any, x: Any) -> Any:
        out, push = jax.linearize(lambda *args: scalar(f(*args)), p, x)
        return jax.linear_transpose(push, p, x)(jnp.ones_like(out))

    return one


def jvp(f: Function) -> Function:
    def one(p: Any, x: Any) -> Any:
        outs, found = jax.jvp(f, (p, x), like((p, x)))
        return outs, floats(found)

    return one


def mixed(f: Function) -> Function:
    """The derivative with respect to the parameters of a gradient with respect to the inputs."""
    return lambda p, x: jax.jvp(lambda p: grad("inputs")(f)(p, x), (p,), like((p,)))


def jacfwd(f: Function) -> Function:
    return lambda p, x: jax.jacfwd(lambda c: floats(f(scaled(p, c[0]), x * c[1])))(jnp.ones(2, x.dtype))


def vmap(params: Any, inputs: Any, **how: Any) -> Callable[[Function], Function]:
    def transform(f: Function) -> Function:
        def one(p: Any, x: Any) -> Any:
            p = {k: stacked(a, 2) if params is True or k == params else a for k, a in p.items()}
            axes = {k: 0 if params is True or k == params else None for k in p}
            x = jnp.moveaxis(stacked(x, 2), 0, inputs) if inputs is not None else x
            body = f if not how else lambda p, x: jax.tree.map(lambda a: lax.psum(a, "many"), f(p, x))
            return jax.vmap(body, (axes, inputs), **how)(p, x)

        return one

    return transform


def scan(f: Function) -> Function:
    def one(p: Any, x: Any) -> Any:
        return lax.scan(
            lambda total, by: (total + scalar(f(p, x * by)), f(scaled(p, by), x)),
            jnp.zeros((), x.dtype),
            jnp.array([1, 0.5], x.dtype),
        )

    return one


def scan_carry(f: Function) -> Function:
    def one(p: Any, x: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            p, x = carry
            s = jnp.tanh(scalar(f(p, x)))
            return (p | {"b": p["b"] * (1 + 0.1 * s)}, x + 0.1 * s), s

        return lax.scan(step, (p, x), None, length=2, reverse=True)

    return one


def lax_map(size: int | None) -> Callable[[Function], Function]:
    return lambda f: lambda p, x: lax.map(lambda by: f(p, x * by), jnp.array([1, 0.5, -1], x.dtype), batch_size=size)


def cond(f: Function) -> Function:
    return lambda p, x: lax.cond(jnp.sum(x) > 0.3, f, lambda p, x: f(scaled(p, 0.5), x), p, x)


def fori(f: Function) -> Function:
    return lambda p, x: lax.fori_loop(0, 2, lambda i, s: s + jnp.tanh(scalar(f(p, x + 0.1 * s))), jnp.sum(x - x))


def shard_map(check: bool) -> Callable[[Function], Function]:
    def transform(f: Function) -> Function:
        mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))

        def local(p: Any, x: Any) -> Any:
            return jax.tree.map(lambda a: lax.psum(a, "devices"), f(p, x))

        return jax.shard_map(
            local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("devices")), out_specs=PartitionSpec(), check_vma=check
        )

    return transform


REVERSE: dict[str, Callable[[Function], Function]] = {
    "grad params": grad("params"),
    "grad one weight": grad("one"),
    "grad inputs": grad("inputs"),
    "value_and_grad": grad("both"),
    "vjp": vjp,
    "linearize": linearize,
    "jacrev": lambda f: lambda p, x: jax.jacrev(lambda p: vector(f(p, x)))(p),
    "hvp": lambda f: jvp(grad("both")(f)),
    "mixed": mixed,
}
FORWARD = {"jvp": jvp, "jacfwd": jacfwd}
OTHERS: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    "vmap params": vmap(True, None),
    "vmap one weight": vmap("u", None),
    "vmap inputs": vmap(False, 0),
    "vmap both": vmap(True, 1),
    "vmap named": vmap("w", 0, axis_name="many"),
    "checkpoint": jax.checkpoint,
    "checkpoint dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "scan": scan,
    "scan carry": scan_carry,
    "map": lax_map(None),
    "map batch_size": lax_map(2),
    "cond": cond,
    "fori_loop": fori,
    "shard_map": shard_map(False),
    "shard_map checked": shard_map(True),
}
ALL = REVERSE | FORWARD | OTHERS
