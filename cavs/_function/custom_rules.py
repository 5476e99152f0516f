"""Rules for JAX's transformations: batches and tangents that other functions compute, and what is differentiated."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from cavs._function.equations import is_float
from cavs._function.reverse_only import transposable
from cavs._graphs.pytree import PyTree

MSG_FORWARD = (
    "{name}: got a derivative in forward mode, as of jax.jvp, jax.jacfwd, or the function that jax.linearize returns; expected one "
    "in reverse mode. Write jax.grad, jax.vjp or jax.jacrev. For second derivatives, write jax.jvp or jax.jacfwd of jax.grad."
)


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
    name: str,
    kernels: bool = False,
) -> Callable[..., PyTree]:
    """Returns `primal` with a reverse derivative that depends on which arguments are differentiated.

    A tangent rule finds out which they are, calls `forward`, and returns tangents whose transpose is `backward`
    (`_function.reverse_only`). `jax.custom_vjp` with `symbolic_zeros=True` says which they are, too, but confuses the residuals
    of different sets of differentiated arguments if it is part of a traced function (JAX 0.10, 0.11).

    Args:
        primal: the function of positional arguments, pytrees of arrays.
        forward: `forward(varied, *args) -> (results, residuals)`; `varied` are the arguments with bools as leaves.
        backward: `backward(residuals, cotangents) -> cotangents of args`, with `None` for what is not differentiated. The
            cotangents of results are leaves of their structure, arrays or `SymbolicZero`.
        name: of the function, for the error that refuses forward mode.
        kernels: whether `primal` launches kernels, whose effects JAX cannot lower inside of what has a tangent rule. Only under
            `jax.jit`, which removes the call of `primal` where `forward` is called.
    """

    def tangents_of(args: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(args)
        directions = tree.flatten_up_to(tangents)
        varied = [not isinstance(t, SymbolicZero) and is_float(x) for x, t in zip(leaves, directions, strict=True)]
        outs, residuals = forward(tree.unflatten(varied), *args) if any(varied) else (primal(*args), ())
        values, out_tree = jax.tree.flatten(outs)
        saved, saved_tree = jax.tree.flatten(residuals)
        types = [jax.typeof(x).strip_weak_type().to_tangent_aval() for x in values]
        floats = [i for i, x in enumerate(values) if is_float(x)] if any(varied) else []
        structures = [jax.tree.structure(x) for x in args]

        def pull(saved: list[Any], some: list[Any]) -> list[Any]:
            cts: list[Any] = list(map(SymbolicZero, types))
            for i, ct in zip(floats, some, strict=True):
                cts[i] = cts[i] if ct is None else ct
            found = backward(saved_tree.unflatten(saved), out_tree.unflatten(cts))
            each = zip(found, structures, strict=True)
            grads = [g for ct, like in each for g in ([None] * like.num_leaves if ct is None else like.flatten_up_to(ct))]
            return [g for g, is_varied in zip(grads, varied, strict=True) if is_varied]

        given = [t for t, is_varied in zip(directions, varied, strict=True) if is_varied]
        found: list[Any] = list(map(SymbolicZero, types))
        if floats:
            results = transposable(pull, saved, given, [types[i] for i in floats], MSG_FORWARD.format(name=name))
            for i, t in zip(floats, results, strict=True):
                found[i] = t
        return outs, out_tree.unflatten(found)

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
