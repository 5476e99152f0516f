"""Keeps XLA from computing a value too early, which would occupy memory, or from computing it twice.

XLA orders, merges and fuses equations as it likes. A barrier keeps equations apart until XLA has merged and fused; XLA then
removes it, before it orders what remains. An operand that is only known late orders it, too.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from cavs._jaxpr.mesh_types import is_checked, varying

T = TypeVar("T")


def barrier(values: T) -> T:
    """Returns a pytree of arrays, none of which is read before all are computed.

    XLA neither fuses nor merges equations across it. If nothing reads an array of the result, it does not wait for that one.

    In JAX 0.10, inside a `shard_map` that checks types, all results would differ between devices if one array does. Arrays that
    differ in this have barriers of their own there.
    """
    arrays, tree = jax.tree.flatten(values)
    results = lax.optimization_barrier(arrays)
    kinds = [varying(x) for x in arrays] if is_checked() else []
    if [varying(x) for x, _ in zip(results, kinds, strict=False)] != kinds:
        for kind in dict.fromkeys(kinds):
            places = [i for i, k in enumerate(kinds) if k == kind]
            for i, x in zip(places, lax.optimization_barrier([arrays[i] for i in places]), strict=True):
                results[i] = x
    return jax.tree.unflatten(tree, results)


def late_zero(numbers: Sequence[jax.Array]) -> jax.Array:
    """Returns an int32 that is 0 whatever the `numbers` are, which XLA does not know before it has computed them.

    `numbers`: scalars: real or complex numbers, or integers of 32 bits.
    """
    return functools.reduce(jnp.minimum, map(_not_negative, numbers), jnp.int32(0))


def hold_back(values: Sequence[Any], until: Sequence[jax.Array], dtype: DTypeLike) -> list[Any]:
    """Returns arrays that XLA does not read before it has computed one of `until`, whose values are the same.

    `until`: arrays, of which the first one that is not empty counts. `dtype`: the arrays that are held back: `jnp.integer`,
    such as indices of a gather, or `jnp.inexact`.
    """
    first = next((x[(0,) * x.ndim] for x in until if x.size), None)
    if first is None:
        return list(values)
    zero = late_zero([first])

    def held(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, dtype) or not x.ndim:
            return x
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(held(x.real), held(x.imag))  # a complex product turns infinities into NaN
        # A product keeps the sign of zeros.
        return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x * (1 + zero).astype(x.dtype)

    return [held(x) for x in values]


def _not_negative(x: jax.Array) -> jax.Array:
    return jnp.isnan(x).astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.inexact) else x & jnp.int32(0x7FFFFFFF)
