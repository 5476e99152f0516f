"""Values of F as engines store them: keys of `jax.random` as their integers, all others as they are."""

from typing import Any

import jax
import jax.numpy as jnp


def to_stored(x: Any) -> Any:
    """A value as it is stored: keys of `jax.random` as their integers."""
    return jax.random.key_data(x) if is_key(x) else x


def from_stored(x: Any, impl: Any) -> Any:
    """The other way; `impl` is that of keys, `None` for other values."""
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def is_key(x: Any) -> bool:
    """Whether an array or shape holds keys of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_impl(x: Any) -> str | None:
    """The name of the generator of keys, `None` for other values."""
    return x.dtype._impl.name if is_key(x) else None  # `jax.random.key_impl` takes arrays alone


def stored_aval(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `to_stored(x)`."""
    return jax.eval_shape(to_stored, jax.ShapeDtypeStruct(x.shape, x.dtype))
