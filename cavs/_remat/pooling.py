"""The gradient of a maximum over windows, from comparisons of elements: bits in place of all that was pooled.

XLA looks for maxima again in what was pooled, and adds to an array of zeros. On a GPU, these may exist from the start.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._jaxpr.equations import bind
from cavs._jaxpr.jaxprs import Eqn

_MOST = 16  # elements of a window: its gradient has a term for each


def is_pooling(eqn: Eqn) -> bool:
    """Returns whether an equation takes maxima over windows of few elements."""
    params = eqn.params
    if eqn.primitive.name != "reduce_window_max" or {*params["base_dilation"], *params["window_dilation"]} != {1}:
        return False
    return math.prod(params["window_dimensions"]) <= _MOST


def pooled(eqn: Eqn, x: jax.Array) -> jax.Array:
    """Runs such an equation. Its gradient goes to the first of the largest elements, as XLA's does."""
    window, strides, padding = (eqn.params[name] for name in ("window_dimensions", "window_strides", "padding"))
    shape = eqn.outvars[0].aval.shape

    def elements(x: jax.Array, outside: float) -> list[jax.Array]:
        """Returns an array for each place in a window: its elements of all windows."""
        x = lax.pad(x, x.dtype.type(outside), [(*p, 0) for p in padding])
        each = itertools.product(*map(range, window))
        return [
            lax.slice(x, at, [i + (n - 1) * s + 1 for i, n, s in zip(at, shape, strides, strict=True)], strides) for at in each
        ]

    @jax.custom_jvp
    def maximum(x: jax.Array) -> jax.Array:
        return bind(eqn, [x])[0]

    @maximum.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        best, *others = elements(primals[0], -np.inf)  # as JAX does
        tangent, *tangents = elements(tangents[0], 0)
        for new, of_new in zip(others, tangents, strict=True):
            smaller = ~(best >= new)
            best, tangent = jnp.where(smaller, new, best), jnp.where(smaller, of_new, tangent)
        return maximum(primals[0]), tangent

    return maximum(x)
