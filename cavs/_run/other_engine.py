"""Engine `persistent` under `jax.vmap` and second derivatives: engine `scan` replaces it.

A launch runs one batch, and has no derivative of its own. When `run` is traced, it is not known whether the function will be
batched or differentiated again: `jax.vmap` and `jax.jvp` may be applied after `jax.jit` and `jax.grad`. Both passes of a sweep
therefore have a batching rule and a tangent rule. The backward pass then runs the forward pass again, because the forward pass
of the other engine saved nothing for it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._function.raw_keys import from_stored, key_impl, stored_aval
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.ruled import replaceable
from cavs._stages.cotangents import Cotangent, differentiated, instantiated, with_differentiated

Arrays: TypeAlias = list[jax.Array]
Cotangents: TypeAlias = list[Cotangent]
Select: TypeAlias = jax.Array | None
Fixed: TypeAlias = tuple[tuple[bool, ...], tuple[bool, ...]]


class Sweep(NamedTuple):
    """The passes of one plan over schedules of one shape, by one engine; all arguments and results are flat.

    `inputs` are the leaves of the inputs, then the leaves of the edges. `fixed` says for each leaf of `params`, and for each
    of `inputs`, whether nobody asks for its cotangent.
    """

    primal: Callable[..., PyTree]  # `primal(params, data, inputs, select) -> pushes`
    forward: Callable[..., PyTree]  # `forward(fixed, params, data, inputs, select) -> (pushes, saved)`
    # `backward(fixed, saved, data, select, cotangents of pushes) -> (cotangents of params, of inputs)`. Those of fixed
    # leaves may be anything.
    backward: Callable[..., PyTree]


def differentiable(sweep: Sweep) -> Callable[..., PyTree]:
    """Returns `sweep.primal`, with the derivative that the other two passes compute."""

    def forward(varied: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        fixed = tuple(tuple(not x for x in own) for own in varied[::2])
        outs, saved = sweep.forward(fixed, params, data, inputs, select)
        back = jax.tree_util.Partial(functools.partial(sweep.backward, fixed), saved, data, select)
        return outs, back

    def backward(back: Callable[[Cotangents], PyTree], cts: PyTree) -> PyTree:
        ct_params, ct_inputs = back(instantiated(cts))
        return ct_params, None, ct_inputs, None

    return reverse_differentiable(sweep.primal, forward, backward, "run", once=True)


def transformed_by(sweep: Sweep, by: Sweep) -> Sweep:
    """Returns `sweep`, whose passes the passes of `by` replace where they are batched or differentiated."""
    return Sweep(replaceable(sweep.primal, by.primal), _forward(sweep, by), _backward(sweep, differentiable(by)))


def _forward(sweep: Sweep, by: Sweep) -> Callable[..., PyTree]:
    def forward(fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        def one(*args: PyTree) -> PyTree:
            outs, saved = sweep.forward(fixed, *args)
            return outs, jax.tree.map(_as_bits, saved)

        def other(*args: PyTree) -> PyTree:
            return by.primal(*args), jax.tree.map(_zeros, jax.eval_shape(one, *args)[1])

        outs, saved = replaceable(one, other)(params, data, inputs, select)
        return outs, (saved, params, inputs)

    return forward


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Bits:
    """The bits of floats that a launch saved.

    Rows that nothing has written may be NaN, for which `jax_debug_nans` would blame F if it saw floats.
    """

    bits: jax.Array
    dtype: np.dtype


def _as_bits(x: jax.Array) -> jax.Array | _Bits:
    if not is_float(x) or not x.size:
        return x
    return _Bits(lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), x.dtype)


def _from_bits(x: jax.Array | _Bits) -> jax.Array:
    return lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, _Bits) else x


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    stored = stored_aval(x)
    return from_stored(jnp.zeros(stored.shape, stored.dtype), key_impl(x))


def _backward(sweep: Sweep, other: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def backward(fixed: Fixed, residuals: PyTree, data: jax.Array, select: Select, cts: Cotangents) -> PyTree:
        saved, params, inputs = residuals
        all_cts = functools.partial(with_differentiated, [np.zeros(ct.shape, jax.dtypes.float0) for ct in cts])
        are_floats = jax.tree.map(is_float, (params, inputs))

        def one(saved: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, some: PyTree) -> PyTree:
            saved = jax.tree.map(_from_bits, saved, is_leaf=lambda x: isinstance(x, _Bits))
            return differentiated(tuple(sweep.backward(fixed, saved, data, select, all_cts(some))), are_floats)

        def again(saved: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, some: PyTree) -> PyTree:
            del saved  # zeros, if the forward ran on the other engine, too
            _, pull = jax.vjp(lambda p, x: other(p, data, x, select), params, inputs)
            return differentiated(pull(all_cts(some)), are_floats)

        some = differentiated(cts, [ct.dtype != jax.dtypes.float0 for ct in cts])
        found = replaceable(one, again)(saved, params, data, inputs, select, some)
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (params, inputs))
        return with_differentiated(nothing, found)

    return backward
