"""Engine `persistent` under `jax.vmap` and second derivatives: engine `scan` replaces it.

A launch runs one batch, and has no derivative of its own. When `run` is traced, it is not known whether the function will be
batched or differentiated again: `jax.vmap` and `jax.jvp` may be applied after `jax.jit` and `jax.grad`. Both passes of a sweep
therefore have a batching rule and a tangent rule. The backward pass then runs the forward pass again, because the forward pass
of the other engine saved nothing for it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._function.custom_rules import axes, batching, reverse_differentiable, with_rule, with_tangents
from cavs._function.equations import is_float
from cavs._function.jaxprs import PyTreeDef
from cavs._function.stored import from_stored, key_impl, stored_aval
from cavs._graphs.pytree import PyTree
from cavs._stages.cotangents import Cotangent, instantiated

Arrays: TypeAlias = list[jax.Array]
Cotangents: TypeAlias = list[Cotangent]
Select: TypeAlias = jax.Array | None
Fixed: TypeAlias = tuple[tuple[bool, ...], tuple[bool, ...]]


class Sweep(NamedTuple):
    """The passes of one plan over schedules of one shape, by one engine; all arguments and results are flat.

    `inputs` are the leaves of the inputs, then those of the edges. `fixed` says for each leaf of `params`, and for each of
    `inputs`, whether nobody asks for its cotangent.

    Attributes:
        primal: `primal(params, data, inputs, select) -> pushes`.
        forward: `forward(fixed, params, data, inputs, select) -> (pushes, saved)`.
        backward: `backward(fixed, saved, data, select, cotangents of pushes) -> (cotangents of params, of inputs)`. Those of
            fixed leaves may be anything.
    """

    primal: Callable[..., PyTree]
    forward: Callable[..., PyTree]
    backward: Callable[..., PyTree]


def differentiable(sweep: Sweep, kernels: bool = False) -> Callable[..., PyTree]:
    """Returns `sweep.primal`, which may launch `kernels`, with the derivative that the other two passes compute."""

    def forward(varied: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        fixed = tuple(tuple(not x for x in own) for own in varied[::2])
        outs, saved = sweep.forward(fixed, params, data, inputs, select)
        back = jax.tree_util.Partial(functools.partial(sweep.backward, fixed), saved, data, select)
        return outs, back

    def backward(back: Callable[[Cotangents], PyTree], cts: PyTree) -> PyTree:
        ct_params, ct_inputs = back(instantiated(cts))
        return ct_params, None, ct_inputs, None

    return reverse_differentiable(sweep.primal, forward, backward, "run", kernels)


def transformed_by(sweep: Sweep, by: Sweep) -> Sweep:
    """Returns `sweep`, with passes that are replaced by those of `by` if they are batched or differentiated."""
    other = differentiable(by)
    primal = with_rule(sweep.primal, other)
    return Sweep(primal, _forward(sweep, by, other), _backward(sweep, other))


def _forward(sweep: Sweep, by: Sweep, other: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def forward(fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        tree: list[PyTreeDef] = []

        def leaves_of(*args: PyTree) -> tuple[PyTree, Arrays]:
            outs, saved = sweep.forward(fixed, *args)
            leaves, found = jax.tree.flatten(saved)
            tree[:] = [found]
            return outs, leaves

        def rule(size: int, which: PyTree, *args: PyTree) -> PyTree:
            shapes = jax.eval_shape(leaves_of, *jax.tree.map(_element, args, which))[1]
            outs = jax.vmap(other, in_axes=axes(which), axis_size=size)(*args)
            saved = [from_stored(jnp.zeros(a.shape, a.dtype), key_impl(x)) for x in shapes for a in (stored_aval(x),)]
            return (outs, saved), (jax.tree.map(lambda _: True, outs), [False] * len(saved))

        def tangents_of(args: PyTree, tangents: PyTree) -> PyTree:
            _, data, _, select = args
            return jax.jvp(lambda params, inputs: by.primal(params, data, inputs, select), args[::2], tangents[::2])[1]

        args = (params, data, inputs, select)
        outs, leaves = batching(leaves_of, rule)(*lax.stop_gradient(args))
        outs = with_tangents(outs, args, tangents_of)
        return outs, (jax.tree.unflatten(tree[0], leaves), params, inputs)

    return forward


def _backward(sweep: Sweep, other: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def backward(fixed: Fixed, residuals: PyTree, data: jax.Array, select: Select, cts: Cotangents) -> PyTree:
        saved, params, inputs = residuals
        leaves, tree = jax.tree.flatten(saved)
        which = [i for i, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0]

        def all_cts(some: Cotangents, like: Callable[[int], tuple[int, ...]]) -> Cotangents:
            given = dict(zip(which, some, strict=True))
            return [given[i] if i in given else np.zeros(like(i), jax.dtypes.float0) for i in range(len(cts))]

        def floats(found: PyTree) -> PyTree:
            return [
                [ct for ct, x in zip(own, of, strict=True) if is_float(x)]
                for own, of in zip(found, (params, inputs), strict=True)
            ]

        def one(leaves: Arrays, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, some: Cotangents) -> PyTree:
            del params, inputs  # `saved` holds what the backward reads
            saved = jax.tree.unflatten(tree, leaves)
            return floats(sweep.backward(fixed, saved, data, select, all_cts(some, lambda i: cts[i].shape)))

        def again(params: Arrays, data: jax.Array, inputs: Arrays, select: Select, some: Cotangents) -> PyTree:
            outs, pull = jax.vjp(lambda p, x: other(p, data, x, select), params, inputs)
            return floats(pull(all_cts(some, lambda i: outs[i].shape)))

        def rule(size: int, which: PyTree, *args: PyTree) -> PyTree:
            found = jax.vmap(again, in_axes=axes(which[1:]), axis_size=size)(*args[1:])
            return found, jax.tree.map(lambda _: True, found)

        def tangents_of(args: PyTree, tangents: PyTree) -> PyTree:
            _, data, _, select, _ = args
            found = lambda params, inputs, some: again(params, data, inputs, select, some)  # noqa: E731
            return jax.jvp(found, args[::2], tangents[::2])[1]

        args = (params, data, inputs, select, [cts[i] for i in which])
        found = batching(one, rule)(*lax.stop_gradient((leaves, *args)))
        found = with_tangents(found, args, tangents_of)
        out = []
        for own, of in zip(found, (params, inputs), strict=True):
            left = iter(own)
            out.append([next(left) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in of])
        return tuple(out)

    return backward


def _element(x: jax.Array, batched: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:] if batched else x.shape, x.dtype)
