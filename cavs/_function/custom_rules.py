"""Rules for JAX's transformations: batches and tangents that other functions compute, and what is differentiated."""

from collections.abc import Callable

import jax

from cavs._function.equations import is_float
from cavs._graphs.pytree import PyTree


def with_rule(fn: Callable[..., PyTree], other: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fn`, which is `other` under `jax.vmap`."""

    def rule(size: int, which: PyTree, *args: PyTree) -> PyTree:
        outs = jax.vmap(other, in_axes=axes(which), axis_size=size)(*args)
        return outs, jax.tree.map(lambda _: True, outs)

    return batching(fn, rule)


def batching(fn: Callable[..., PyTree], rule: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fn` with a rule for `jax.vmap`: `rule(size, which arguments are batched, *args) -> (results, which are)`."""
    with_rule = jax.custom_batching.custom_vmap(fn)
    with_rule.def_vmap(lambda size, which, *args: rule(size, tuple(which), *args))
    return with_rule


def with_tangents(outs: PyTree, args: PyTree, tangents_of: Callable[..., PyTree]) -> PyTree:
    """Returns `outs` with the tangents `tangents_of(args, their tangents)`. Its own are not read.

    Kernels that compute `outs` are not inside of what has the rule, because JAX cannot lower their effects there.
    """

    @jax.custom_jvp
    def same(outs: PyTree, args: PyTree) -> PyTree:
        return outs

    @same.defjvp
    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        return primals[0], tangents_of(primals[1], tangents[1])

    return same(outs, args)


def perturbed(args: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what the forward of a `jax.custom_vjp` with `symbolic_zeros=True` gets: values, and which are differentiated."""
    return jax.tree.map(lambda x: x.value, args), jax.tree.map(lambda x: x.perturbed and is_float(x.value), args)


def axes(which: PyTree) -> PyTree:
    """Returns `in_axes` of `jax.vmap` for batched arguments."""
    return jax.tree.map(lambda batched: 0 if batched else None, which)
