"""Dropout on the inputs of a layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cavs.vertex_programs._types import Array


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Applies dropout (Srivastava et al., 2014) with a mask that is a function of `key`.

    Args:
        x: The values.
        rate: The probability with which an entry becomes zero. The other entries are scaled by 1 / (1 - rate).
        key: A key of `jax.random`; or keys (N,), one for each row of `x`; or None for no dropout.

    Returns:
        An array of the shape of `x`, or `x` itself without dropout.
    """
    if key is None or not rate:
        return x
    # 16 random bits an entry instead of the 32 of jax.random.bernoulli.
    below = jnp.uint16(min(round((1 - rate) * 2**16), 2**16 - 1))
    if is_per_row(key):
        bits = jax.vmap(lambda one: jax.random.bits(one, x.shape[1:], "uint16"))(key)
    else:
        bits = jax.random.bits(key, x.shape, "uint16")
    return jnp.where(bits < below, x / (1 - rate), 0)


def split_key(key: jax.Array | None, count: int) -> Sequence[jax.Array | None]:
    """Returns `count` keys made from a key, or from the key of each row; `count` times None for None."""
    if key is None:
        return (None,) * count
    if is_per_row(key):
        return [*jax.vmap(lambda one: jax.random.split(one, count), out_axes=1)(key)]
    return [*jax.random.split(key, count)]


def is_per_row(key: jax.Array) -> bool:
    """Whether `key` holds a key for each row."""
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 1
