"""x @ W for all rows at once, and its gradients: of these what is eager or lazy (Cavs 3.5) is made, a step's largest products.

Where JAX computes them in tf32, float16 has as many bits (eleven) and is twice as fast; three times for x^T dY, as tensor
cores read tf32 along what is summed, here the rows, which neither x nor dY has side by side. But float16's range is small.
So an operand is multiplied by a power of two that brings its largest number just under 2^15: all that are 2^-29 of the largest
or more keep eleven bits, smaller ones err by 2^-40 of it at most. Sums are float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BIAS, BITS = 127, 23  # of float32: its exponent's bias, and the bits of its mantissa
LARGEST = 14  # the exponent of the largest number; float16's go from -14 to 15


def rows_times_matrix(x: Any, w: Any, axis: int, precision: Any, dtype: Any) -> Any:
    """x (rows, K) times W, whose `axis` of K entries is summed over; `precision` and `dtype` as in `lax.dot_general`."""
    return _plain(x, w, (1, axis), precision, dtype)


def large_product(x: Any, w: Any, axis: int, precision: Any, dtype: Any) -> Any:
    """`rows_times_matrix` of all rows of a batch, which is done once in a pass and differentiated: perhaps in float16."""
    rows, k = x.shape
    if _tf32(precision, x.dtype, w.dtype, dtype) and _faster(rows, k, w.shape[1 - axis]):
        return _large_product(x, w, axis, precision)
    return rows_times_matrix(x, w, axis, precision, dtype)


def weight_gradient(x: Any, ct: Any, w: Any, axis: int, precision: Any) -> Any:
    """The cotangent of W from that of `rows_times_matrix(x, w, axis, ...)`: perhaps in float16."""
    rows, k = x.shape
    if _tf32(precision, x.dtype, ct.dtype, w.dtype) and _faster_gradient(rows, k, ct.shape[1]):
        return _product(*_in_order(x, ct, axis), (0, 0), precision)
    return _plain(*_in_order(x, ct, axis), (0, 0), precision, w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _large_product(x: Any, w: Any, axis: int, precision: Any) -> Any:
    return _product(x, w, (1, axis), precision)


def _forward(x: Any, w: Any, axis: int, precision: Any) -> tuple[Any, Any]:
    return _product(x, w, (1, axis), precision), (x, w)


def _backward(axis: int, precision: Any, saved: Any, ct: Any) -> tuple[Any, Any]:
    x, w = saved  # XLA converts each once, though here it is done where it is read
    return _product(ct, w, (1, 1 - axis), precision), _product(*_in_order(x, ct, axis), (0, 0), precision)


_large_product.defvjp(_forward, _backward)


def _in_order(x: Any, ct: Any, axis: int) -> tuple[Any, Any]:
    return (x, ct) if axis == 0 else (ct, x)


def _product(a: Any, b: Any, axes: tuple[int, int], precision: Any) -> Any:
    """The product of two float32 matrices, with one axis of each summed over: on a GPU in float16."""
    plain = functools.partial(_plain, axes=axes, precision=precision, dtype=jnp.float32)
    return lax.platform_dependent(a, b, cuda=functools.partial(in_float16, axes=axes), default=plain)


def _plain(a: Any, b: Any, axes: tuple[int, int], precision: Any, dtype: Any) -> Any:
    dims = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def in_float16(a: Any, b: Any, axes: tuple[int, int]) -> Any:
    """The same by a product of float16. Numbers that are not finite stay so."""
    a_power, b_power = power_of(a), power_of(b)
    out = _plain(_scaled(a, a_power), _scaled(b, b_power), axes, lax.Precision.DEFAULT, jnp.float32)
    back = -(a_power + b_power)  # in two steps: 2^back may be no float32 where the result is one
    return out * two_to(back >> 1) * two_to(back - (back >> 1))


def power_of(x: Any) -> Any:
    """The n that brings the largest finite |x| into [2^14, 2^15), as far as 2^n and 2^-n are float32."""
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> BITS) - BIAS
    return jnp.clip(LARGEST - exponent, 1 - BIAS, BIAS - 1)


def _scaled(x: Any, power: Any) -> Any:
    return (x * two_to(power)).astype(jnp.float16)


def two_to(power: Any) -> Any:
    """2^power, from -126 to 126, by its bits: XLA puts it into the loop over what is multiplied."""
    return lax.bitcast_convert_type((power + BIAS) << BITS, jnp.float32)


def of_tf32_bits(precision: Any) -> bool:
    """Whether a product of float32 is asked to be as exact as tf32, and no more. Where an algorithm is named, that is done."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT, lax.Precision.HIGH) for p in asked)


def _tf32(precision: Any, *dtypes: Any) -> bool:
    """Whether JAX computes such a product in tf32 here, and may as well in float16."""
    return of_tf32_bits(precision) and all(d in (None, jnp.float32) for d in dtypes) and _hopper()


def _hopper() -> bool:
    """Other GPUs have not been measured."""
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


# Models of one H200 (2026-11-22): what float16 saves, and what it takes to look for the largest numbers and convert all.


def _faster(rows: int, k: int, n: int) -> bool:
    """For x @ W and both gradients."""
    return 2 * rows * k * n / 100e12 > 9e-6 + 2.6e-12 * k * n + rows * (0.9e-12 * k + 2.6e-12 * n)


def _faster_gradient(rows: int, k: int, n: int) -> bool:
    """For the weight's gradient. Half of what dY takes: where x and h have weights of their own, it counts for both."""
    return 2 * rows * k * n / 270e12 > 6e-6 + rows * (0.6e-12 * k + 1.3e-12 * n)
