"""Dropout on the inputs of a layer."""

import jax
import jax.numpy as jnp

from cavs.vertex_programs._types import Array


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """Applies dropout (Srivastava et al., 2014) with a mask that is a function of `key`.

    Args:
        x: The values.
        rate: The probability with which an entry becomes zero. The other entries are scaled by 1 / (1 - rate).
        key: A key of `jax.random`, or None for no dropout.

    Returns:
        An array of the shape of `x`, or `x` itself without dropout.
    """
    if key is None or not rate:
        return x
    # 16 random bits an entry instead of the 32 of jax.random.bernoulli.
    below = jnp.uint16(min(round((1 - rate) * 2**16), 2**16 - 1))
    return jnp.where(jax.random.bits(key, x.shape, "uint16") < below, x / (1 - rate), 0)
