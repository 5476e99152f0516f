"""Dropout that a layer of a net of nets applies to its inputs."""

from typing import Any

import jax
import jax.numpy as jnp


def dropout(x: Any, rate: float, key: Any) -> Any:
    """`x` with entries zeroed at `rate` and the others scaled by 1 / (1 - rate); `x` itself where `key` is `None`.

    Srivastava et al., 2014; the mask is a function of the key.
    """
    if key is None or not rate:
        return x
    # 16 bits an entry rather than the 32 of jax.random.bernoulli.
    below = jnp.uint16(min(round((1 - rate) * 2**16), 2**16 - 1))
    return jnp.where(jax.random.bits(key, x.shape, "uint16") < below, x / (1 - rate), 0)
