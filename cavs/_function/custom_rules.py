"""Rules for JAX's transformations: batches and tangents that other functions compute, and what is differentiated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

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


def reverse_differentiable(
    primal: Callable[..., PyTree],
    forward: Callable[..., tuple[PyTree, PyTree]],
    backward: Callable[..., tuple[PyTree, ...]],
    kernels: bool = False,
) -> Callable[..., PyTree]:
    """Returns `primal` with a reverse derivative that depends on which arguments are differentiated.

    `jax.custom_vjp` with `symbolic_zeros=True` says which they are, too. But once such a function is part of a traced one, JAX
    remembers its forward for each set of differentiated arguments, and the structure of the residuals of the latest set alone
    (JAX 0.10, 0.11). A gradient would then read the residuals of another one. So here a tangent rule finds out what is
    differentiated, and differentiates a function of these arguments.

    Args:
        primal: the function of positional arguments, pytrees of arrays.
        forward: `forward(varied, *args) -> (results, residuals)`; `varied` are the arguments with bools as leaves.
        backward: `backward(residuals, cotangents) -> cotangents of args`, with `None` for what is not differentiated. The
            cotangents of results are leaves of their structure, arrays or `SymbolicZero`.
        kernels: whether `primal` launches kernels, whose effects JAX cannot lower inside of what has a tangent rule. Only under
            `jax.jit`, which removes the call of `primal` where `forward` is called.
    """

    def tangents_of(args: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(args)
        directions = tree.flatten_up_to(tangents)
        flags = [not isinstance(t, SymbolicZero) and is_float(x) for x, t in zip(leaves, directions, strict=True)]

        def args_of(chosen: Sequence[Any]) -> tuple[PyTree, ...]:
            left = iter(chosen)
            return tree.unflatten([next(left) if is_varied else x for x, is_varied in zip(leaves, flags, strict=True)])

        def saving(*chosen: Any) -> tuple[PyTree, PyTree]:
            return forward(tree.unflatten(flags), *args_of([x.value for x in chosen]))

        def pull_back(residuals: PyTree, cotangents: PyTree) -> tuple[Any, ...]:
            found = backward(residuals, cotangents)
            each = zip(found, map(jax.tree.structure, args), strict=True)
            grads = [g for ct, like in each for g in ([None] * like.num_leaves if ct is None else like.flatten_up_to(ct))]
            return tuple(g for g, is_varied in zip(grads, flags, strict=True) if is_varied)

        of_chosen = jax.custom_vjp(lambda *chosen: primal(*args_of(chosen)))
        of_chosen.defvjp(saving, pull_back, symbolic_zeros=True)  # only then cotangents of zero are known to be zero
        chosen = [x for x, is_varied in zip(leaves, flags, strict=True) if is_varied]
        return jax.jvp(of_chosen, chosen, [t for t, is_varied in zip(directions, flags, strict=True) if is_varied])

    function = jax.custom_jvp(primal)
    function.defjvp(tangents_of, symbolic_zeros=True)
    if not kernels:
        return function
    same = jax.custom_jvp(lambda outs, args: outs)
    same.defjvp(lambda primals, tangents: tangents_of(primals[1], tangents[1]), symbolic_zeros=True)
    return lambda *args: same(primal(*lax.stop_gradient(args)), args)


def axes(which: PyTree) -> PyTree:
    """Returns `in_axes` of `jax.vmap` for batched arguments."""
    return jax.tree.map(lambda batched: 0 if batched else None, which)
