"""Types of values inside `jax.shard_map` with `check_vma=True`: along which mesh axes they may differ between devices."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Private: JAX switches the check only for a whole `shard_map`.
from jax._src import config as _config
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from cavs._graphs.pytree import PyTree


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array, or a value of a type, may differ between devices, inside `jax.shard_map`."""
    aval = x if isinstance(x, ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(aval, "mat", None) or getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or () if manual is None else manual.varying)


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, typed as one that may differ along `axes`."""
    if x.dtype == jax.dtypes.float0:
        return x
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def unsharded(x: jax.Array) -> jax.Array:
    """Returns `x` without the sharding of its type: an array that is divided over mesh axes of type `Explicit` is gathered.

    Equations that were traced without such a type cannot read the array. The transpose divides the cotangent again.
    """
    sharding = jax.typeof(x).sharding
    if all(axes is None for axes in sharding.spec):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def zeros(of: Any) -> jax.Array:
    """Returns zeros of the type of a variable, a literal or an abstract value."""
    of = getattr(of, "aval", of)
    return vary(jnp.zeros(of.shape, of.dtype), tuple(varying(of)))


def is_checked() -> bool:
    """Returns whether JAX checks types where this is called, if that is inside a `shard_map`."""
    return bool(_config._check_vma.value)


def unchecked() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX does not check types inside a `shard_map`. Values that enter it must be `untyped`."""
    return _config._check_vma(False)


def untyped(tree: PyTree) -> PyTree:
    """Returns the same values with types that say nothing about devices, where JAX is `unchecked`. XLA removes the reshapes."""

    def without(x: jax.Array) -> jax.Array:
        return lax.squeeze(lax.expand_dims(x, (0,)), (0,)) if x.dtype != jax.dtypes.float0 and varying(x) else x

    return jax.tree.map(without, tree)
