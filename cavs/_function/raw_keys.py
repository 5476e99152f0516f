"""How engines store values of F: random keys as the integers they consist of, all other values unchanged."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct | ShapedArray


def to_stored(x: jax.Array) -> jax.Array:
    """Returns a value as engines store it."""
    return jax.random.key_data(x) if is_key(x) else x


def from_stored(x: jax.Array, impl: str | None) -> jax.Array:
    """Returns the value that was stored as `x`. `impl` is the name of the generator of keys, `None` for other values."""
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def is_key(x: Shaped) -> bool:
    """Returns whether `x` holds keys of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impl(x: Shaped) -> str | None:
    """Returns the name of the generator of keys, `None` for other values."""
    # `jax.random.key_impl` takes only arrays.
    return x.dtype._impl.name if is_key(x) else None  # type: ignore[union-attr]


def stored_aval(x: Shaped) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of `to_stored(x)`."""
    return jax.eval_shape(to_stored, jax.ShapeDtypeStruct(x.shape, x.dtype))


def zeros(x: Shaped) -> jax.Array:
    """Returns zeros of a shape and dtype."""
    stored = stored_aval(x)
    return from_stored(jnp.zeros(stored.shape, stored.dtype), key_impl(x))
