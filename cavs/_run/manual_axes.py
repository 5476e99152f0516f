"""`run` inside `jax.shard_map` with `check_vma=True`: a call whose inside JAX does not check.

With the check, the type of every value says along which mesh axes it may differ between devices, and an operation refuses
operands that differ in this. The sweeps bind equations of F that were traced before, and create constants, which are the same
on all devices. Inside a sweep nothing communicates, so the types are no help there. They matter at the border: all arguments
are made to vary first, and so are all results. The transpose of that is the sum over devices that the gradients of common
parameters need.
"""

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import jax
from jax import lax

# Private: JAX switches the check only for a whole `shard_map`.
from jax._src import config as _config

from cavs._graphs.pytree import PyTree

Call: TypeAlias = Callable[..., list[jax.Array]]  # (params, data, inputs, select) -> pushes


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which `x` may differ between devices, inside `jax.shard_map`."""
    of = jax.typeof(x)
    return frozenset(of.mat.varying if hasattr(of, "mat") else getattr(of, "vma", ()))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, typed as one that may differ along `axes`."""
    if x.dtype == jax.dtypes.float0:
        return x
    more = tuple(axis for axis in axes if axis not in varying(x))
    return lax.pcast(x, more, to="varying") if more else x


def checked_axes() -> tuple[str, ...]:
    """The mesh axes of the `shard_map` that is being traced, if it checks types; else none."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes) if _config._check_vma.value else ()


def across_axes(call: Call) -> Call:
    """Returns `call` for use inside a `shard_map` that checks types. Elsewhere it is `call` itself."""
    axes = checked_axes()
    if not axes:
        return call

    def common(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: vary(x, axes), tree)

    @jax.custom_vjp
    def sealed(params: PyTree, data: jax.Array, inputs: PyTree, select: PyTree) -> PyTree:
        with unchecked():
            outs = call(*map(untyped, (params, data, inputs, select)))
        return common(outs)

    def forward(params: PyTree, data: jax.Array, inputs: PyTree, select: PyTree) -> PyTree:
        with unchecked():
            params, data, inputs, select = map(untyped, (params, data, inputs, select))
            outs, pull = jax.vjp(lambda params, inputs: call(params, data, inputs, select), params, inputs)
        return common(outs), common(pull)

    def backward(pull: Callable[[PyTree], PyTree], cts: PyTree) -> PyTree:
        with unchecked():
            by_params, by_inputs = untyped(pull)(untyped(cts))
        return common(by_params), None, common(by_inputs), None

    sealed.defvjp(forward, backward)
    return lambda *args: sealed(*common(args))


def unchecked() -> contextlib.AbstractContextManager[object]:
    """A context in which JAX does not check types inside a `shard_map`. Values that enter it must be `untyped`."""
    return _config._check_vma(False)


def untyped(tree: PyTree) -> PyTree:
    """The same values, whose types say nothing about devices. Only in `_unchecked`; XLA removes the reshapes."""

    def without(x: jax.Array) -> jax.Array:
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,)) if x.dtype != jax.dtypes.float0 and varying(x) else x

    return jax.tree.map(without, tree)
