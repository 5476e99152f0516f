"""The gradient of a maximum over windows, from the place of each maximum: one byte a window in place of all that was pooled.

XLA looks for maxima again in what was pooled, and adds to an array of zeros. On a GPU, these may exist from the start.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, Eqn, opened

_MOST = 16  # elements of a window: its gradient has a term for each


def by_places(forward: Sequence[Eqn], backward: Sequence[Eqn]) -> tuple[list[Eqn], list[Eqn]]:
    """Returns equations of a function and its derivative, with the places of maxima as values of the function."""
    later = {v for e in backward for v in e.outvars}
    places, gradients = list(forward), list[Eqn]()
    for e in backward:
        params = e.params
        if e.primitive.name != "select_and_scatter_add" or e.invars[1] in later or not _is_maximum(params):
            gradients.append(e)
            continue
        source, pooled = e.invars
        how = params["window_dimensions"], params["window_strides"], params["padding"]
        (place,) = _traced(lambda x, how=how: _places(x, *how), [pooled], places)
        shape = e.outvars[0].aval.shape
        _traced(lambda x, i, how=how, shape=shape: _spread(x, i, shape, *how), [source, place], gradients)
        gradients[-1] = gradients[-1].replace(outvars=e.outvars)
    return places, gradients


def _is_maximum(params: dict[str, Any]) -> bool:
    return params["select_prim"].name == "ge" and math.prod(params["window_dimensions"]) <= _MOST


def _traced(fn: Any, args: Sequence[Atom], eqns: list[Eqn]) -> list[Atom]:
    """Adds the equations of a function to `eqns`, and returns its results."""
    traced: Any = jax.make_jaxpr(fn)(*map(type_of, args))
    jaxpr, _ = opened(traced)
    return inlined(jaxpr, dict(zip(jaxpr.invars, args, strict=True)), eqns)


def _offsets(window: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, window)))


def _places(x: jax.Array, window: Sequence[int], strides: Sequence[int], padding: Any) -> jax.Array:
    """Returns for each window the number of its first largest element, as XLA finds it."""
    shape = [(n + sum(p) - w) // s + 1 for n, w, s, p in zip(x.shape, window, strides, padding, strict=True)]

    def elements(x: jax.Array, offset: Sequence[int]) -> jax.Array:
        return lax.slice(x, offset, [o + (n - 1) * s + 1 for o, n, s in zip(offset, shape, strides, strict=True)], strides)

    x = lax.pad(x, x.dtype.type(-np.inf), [(*p, 0) for p in padding])  # as JAX does
    first, *others = _offsets(window)
    best, place = elements(x, first), jnp.zeros(shape, jnp.uint8)
    for k, offset in enumerate(others, 1):
        new = elements(x, offset)
        smaller = ~(best >= new)
        best, place = jnp.where(smaller, new, best), jnp.where(smaller, jnp.uint8(k), place)
    return place


def _spread(
    source: jax.Array, place: jax.Array, shape: Sequence[int], window: Sequence[int], strides: Sequence[int], padding: Any
) -> jax.Array:
    """Adds the element of each window to its place in an array of a shape."""
    zero, total = source.dtype.type(0), None
    for k, offset in enumerate(_offsets(window)):
        starts = [o - p[0] for o, p in zip(offset, padding, strict=True)]
        counts = zip(starts, shape, source.shape, strides, strict=True)
        around = [(low, n - low - (m - 1) * s - 1, s - 1) for low, n, m, s in counts]
        term = lax.pad(jnp.where(place == k, source, zero), zero, around)
        total = term if total is None else total + term
    assert total is not None
    return total
