"""Maths that Mosaic GPU lacks, or computes otherwise than JAX, in primitives that it has."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._jaxpr.jaxprs import Atom, Eqn, Literal, is_var
from cavs.kernels import Unfit


def written(e: Eqn) -> Callable[..., jax.Array] | None:
    """Returns a function that computes an equation in other primitives; `None` if it stays as it is.

    Raises `Unfit` if the kernels cannot compute it.
    """
    name, shape, dtype = e.primitive.name, e.invars[0].aval.shape, e.invars[0].aval.dtype
    of_floats = np.issubdtype(dtype, np.floating)
    match name:
        case "convert_element_type" if e.params["new_dtype"] == np.bool_ != dtype:
            return lambda x: x != 0
        case "select_n" if dtype != np.bool_:
            return _selected
        case "sign" if of_floats:
            return lambda x: jnp.where(x == x, jnp.sign(x), jnp.nan)
        case "rem" if of_floats:
            raise Unfit("rem of floats has no device code")
        case "div" | "rem" if not of_floats and not _literal(e.invars[1]) > 0:
            return functools.partial(_divided, name)
        case "pow":
            return functools.partial(_power, _literal(e.invars[1]))
        case "reduce_sum" | "reduce_max" | "reduce_min" if (axes := e.params["axes"]) and max(axes) < len(shape) - 1:
            if math.prod(shape[i] for i in axes) <= _MOST_REDUCED:
                return functools.partial(_reduced, _OF_TWO[name], sorted(axes, reverse=True))
    return _WRITTEN.get(name)


_MOST_REDUCED = 16  # vectors, of which a thread holds its elements
_OF_NUMBERS: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_OF_TWO = {"reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min}
_WRITTEN: dict[str, Callable[..., jax.Array]] = {
    "cbrt": lambda x: jnp.sign(x) * jnp.exp(jnp.log(jnp.abs(x)) / 3),
    "erfc": lambda x: jnp.where(x > 1.5, _tail_of_erfc(x), 1 - lax.erf(x)),
    "expm1": lambda x: jnp.where(jnp.abs(x) < 1e-2, x * (1 + x * (0.5 + x * (1 / 6 + x / 24))), jnp.exp(x) - 1),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": lambda x: jnp.where(jnp.abs(x) < 1e-2, x * (1 - x * (0.5 - x * (1 / 3 - x / 4))), jnp.log(1 + x)),
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
}


def literal_of(e: Eqn) -> Literal | None:
    """Returns the result of a sum, difference or product of literals, such as the exponent of a derivative; else `None`."""
    fn, numbers = _OF_NUMBERS.get(e.primitive.name), [x.val for x in e.invars if not is_var(x)]
    if fn is None or len(numbers) < 2:
        return None
    aval = e.outvars[0].aval
    return Literal(fn(*(np.asarray(x, aval.dtype) for x in numbers)), aval)


def _literal(x: Atom) -> float:
    """Returns the number of a literal, NaN for a variable."""
    return float("nan") if is_var(x) else float(x.val)


def _reduced(of_two: Callable[..., jax.Array], axes: Sequence[int], x: jax.Array) -> jax.Array:
    """Computes a sum or maximum of whole vectors."""
    for axis in axes:
        x = functools.reduce(of_two, (lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])))
    return x


def _selected(which: jax.Array, *cases: jax.Array) -> jax.Array:
    """Computes `lax.select_n` for integers: a number out of range selects the nearest case."""
    return functools.reduce(lambda out, n: jnp.where(which >= n, cases[n], out), range(1, len(cases)), cases[0])


def _divided(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `lax.div` or `lax.rem` of integers. What a GPU returns for divisors 0 and -1 is not always what JAX does."""
    divisor = jnp.where((y == 0) | (y == -1), 1, y)
    if name == "div":
        return jnp.where(y == 0, -1, jnp.where(y == -1, -x, lax.div(x, divisor)))
    return jnp.where(y == 0, x, jnp.where(y == -1, 0, lax.rem(x, divisor)))


def _power(exponent: float, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `lax.pow(x, y)`. `exponent`: the value of y, if it is a literal; else NaN."""
    if abs(exponent) <= 16 and exponent == round(exponent):
        return lax.integer_pow(x, round(exponent))
    y = y.astype(x.dtype)
    near = jnp.where(jnp.abs(y) < 2.0**24, y, 0.0).astype(jnp.int32)  # larger numbers are even
    is_whole = (near.astype(x.dtype) == y) | (jnp.abs(y) >= 2.0**24)
    size = jnp.where((y == 0) | (jnp.abs(x) == 1), 1.0, jnp.exp(y * jnp.log(jnp.abs(x))))
    is_negative = (x < 0) | ((x == 0) & (1 / x < 0))  # or -0.0
    is_root = (x < 0) & (x > -jnp.inf) & ~is_whole
    return jnp.where(is_root, jnp.nan, jnp.where(is_negative & ((near & 1) == 1) & is_whole, -size, size))


def _tail_of_erfc(x: jax.Array) -> jax.Array:
    """Computes `lax.erfc` from 1.5 on, by its continued fraction: 1 - erf(x) loses digits there, and all of them from 4 on."""
    fraction = functools.reduce(lambda below, n: x + n / 2 / below, range(12, 0, -1), x)
    return jnp.exp(-x * x) / (np.sqrt(np.pi).astype(np.float32) * fraction)
