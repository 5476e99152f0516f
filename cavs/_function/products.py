"""x @ W for all rows at once, and its gradients. The eager and lazy parts consist of such products (Cavs 3.5), the largest of
a training step.

Where JAX would compute a product in tf32, it may be computed in float16: both have eleven significant bits, and float16 is
twice as fast. For x^T dY it is three times as fast, because tensor cores read tf32 along the axis that is summed over, here
the rows, which are contiguous neither in x nor in dY. The range of float16 is small, so each operand is first multiplied by an
even power of two that brings its largest number to between 2^13 and 2^15. Numbers of at least 2^-27 of the largest keep eleven
bits; the error of smaller ones is at most 2^-38 of the largest. Sums are float32.
"""

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.ruled import replaceable
from cavs.kernels import Target, of_tf32_bits

BIAS, BITS = 127, 23  # of float32: the bias of the exponent, and the bits of the mantissa
Exponents: TypeAlias = tuple[jax.Array | None, jax.Array | None]  # what `exponent_of` returns of two operands, where known
LARGEST = 14  # the largest exponent after scaling; those of float16 go from -14 to 15
BLOCKS, ROWS_OF_BLOCK = 16, 4096  # of `sum_of_rows`; XLA itself divides sums of more rows
UNSCALED = BIAS + LARGEST - 1  # the exponent, as in the bits of a float32, of numbers that need no scale


def rows_times_matrix(x: jax.Array, w: jax.Array, axis: int, precision: PrecisionLike, dtype: DTypeLike | None) -> jax.Array:
    """Returns x @ W, (rows, N).

    Args:
        x: (rows, K).
        w: (K, N) or (N, K).
        axis: the axis of `w` that is summed over.
        precision: as in `lax.dot_general`.
        dtype: `preferred_element_type` of `lax.dot_general`.
    """
    return _plain(x, w, (1, axis), precision, dtype)


def large_product(x: jax.Array, w: jax.Array, axis: int, precision: PrecisionLike, dtype: DTypeLike | None) -> jax.Array:
    """Returns `rows_times_matrix(...)` for all rows of a batch. It uses float16 if that is faster."""
    rows, k = x.shape
    if _tf32(precision, x.dtype, w.dtype, dtype) and _faster(rows, k, w.shape[1 - axis]):
        return _large_product(x, w, axis, precision)
    return rows_times_matrix(x, w, axis, precision, dtype)


def weight_gradient(
    x: jax.Array,
    ct: jax.Array,
    w: jax.Array,
    axis: int,
    precision: PrecisionLike,
    exponent: jax.Array | None = None,
) -> jax.Array:
    """Returns the cotangent of W, given `ct` of `rows_times_matrix(x, w, axis, ...)`. It uses float16 if that is faster.

    If the `exponent` of x is given, as by `exponent_of`, its largest number need not be found.
    """
    rows, k = x.shape
    if _tf32(precision, x.dtype, ct.dtype, w.dtype) and _faster_gradient(rows, k, ct.shape[1]):
        return _product(*_in_order(x, ct, axis), (0, 0), precision, (exponent, None) if axis == 0 else (None, exponent))
    return _plain(*_in_order(x, ct, axis), (0, 0), precision, w.dtype)


def sum_of_rows(x: jax.Array) -> jax.Array:
    """Returns `x.sum(0)`, such as the gradient of a bias.

    XLA for GPUs adds up to 4,096 rows of 32 columns in one thread block, so most multiprocessors are idle. Here 16 thread
    blocks share them.
    """
    rows = x.shape[0]
    if rows % BLOCKS or rows > ROWS_OF_BLOCK or x.dtype != jnp.float32 or not Target.here().is_gpu:
        return x.sum(0)  # in 32 bits, also of float16, which `lax.reduce_sum` adds up in 16
    return barrier(x.reshape(BLOCKS, rows // BLOCKS, *x.shape[1:]).sum(1)).sum(0)


def _large_product(x: jax.Array, w: jax.Array, axis: int, precision: PrecisionLike) -> jax.Array:
    """Returns `_product(x, w)`, whose transposes are such products, too."""

    def primal(x: jax.Array, w: jax.Array) -> jax.Array:
        return _product(x, w, (1, axis), precision)

    def forward(varied: tuple[bool, bool], x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.tree_util.Partial]:
        del varied
        return primal(x, w), jax.tree_util.Partial(backward, x, w)

    def backward(x: jax.Array, w: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA converts each operand once, although it is converted here for each product.
        return _product(ct, w, (1, 1 - axis), precision), _product(*_in_order(x, ct, axis), (0, 0), precision)

    return reverse_differentiable(primal, forward, "run")(x, w)


def _in_order(x: jax.Array, ct: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    return (x, ct) if axis == 0 else (ct, x)


def _product(
    a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: PrecisionLike, exponents: Exponents = (None, None)
) -> jax.Array:
    """Returns the product of two float32 matrices over one axis of each. On a GPU it is computed in float16.

    Its derivatives are plain products, because tangents may have another range than the values.
    """

    def plain(a: jax.Array, b: jax.Array, exponents: Exponents) -> jax.Array:
        return _plain(a, b, axes, precision, jnp.float32)

    def scaled(a: jax.Array, b: jax.Array, exponents: Exponents) -> jax.Array:
        return in_float16(a, b, axes, exponents)

    def product(a: jax.Array, b: jax.Array, exponents: Exponents) -> jax.Array:
        return lax.platform_dependent(a, b, exponents, cuda=scaled, default=plain)

    return replaceable(product, plain, batched=True)(a, b, exponents)


def _plain(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: PrecisionLike, dtype: DTypeLike | None) -> jax.Array:
    dims = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def in_float16(a: jax.Array, b: jax.Array, axes: tuple[int, int], exponents: Exponents = (None, None)) -> jax.Array:
    """Returns `_product(a, b, axes)` by a product in float16. Numbers that are not finite stay so."""
    a_exponent, b_exponent = (exponent_of(x) if e is None else e for x, e in zip((a, b), exponents, strict=True))
    a, b = (a * scale(a_exponent)).astype(jnp.float16), (b * scale(b_exponent)).astype(jnp.float16)
    # The root of 1 / (scale * scale), twice: its square may overflow although the result does not.
    unscale = _number((a_exponent >> 1) + (b_exponent >> 1) - _bits(UNSCALED - BIAS))
    return _plain(a, b, axes, lax.Precision.DEFAULT, jnp.float32) * unscale * unscale


def exponent_of(x: jax.Array, least: float = 0.0) -> jax.Array:
    """Returns the exponent of the largest finite |x|, or of `least`, as the bits of a float32 in a uint32.

    It is rounded down to an even number.
    """
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=least)
    bits = lax.bitcast_convert_type(largest, jnp.uint32)
    return jnp.maximum(bits, _bits(BIAS - 112)) & _bits(254)  # below 2^-112, 1 / scale would be no float32


def exponent_of_power(power: int) -> jax.Array:
    """Returns the exponent of numbers that are multiplied by 2^power, for an even power from -114 to 126."""
    return _bits(UNSCALED - power)


def scale(exponent: jax.Array) -> jax.Array:
    """Returns the power of two that brings numbers of this exponent, or the next, to [2^13, 2^15).

    It is made of bits by one subtraction: XLA computes it in the kernel that scales, where a longer formula is a kernel.
    """
    return _number(_bits(UNSCALED + BIAS) - exponent)


def inverse_scale(exponent: jax.Array) -> jax.Array:
    """Returns 1 / `scale(exponent)`."""
    return _number(exponent - _bits(UNSCALED - BIAS))


def scale_to(exponent: jax.Array, largest: float) -> jax.Array:
    """Returns the largest even power of two, at most 1, by which numbers of this exponent, or the next, are at most `largest`.

    `largest`: an odd power of two, at least 2.
    """
    return _number(jnp.minimum(_bits(BIAS), _bits(2 * BIAS + math.frexp(largest)[1] - 3) - exponent))


def root_of_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the root of a * b, which itself may overflow. `a`, `b`: even powers of two."""
    return _number(lax.bitcast_convert_type(a, jnp.uint32) + lax.bitcast_convert_type(b, jnp.uint32) >> 1)


def _bits(exponent: int) -> jax.Array:
    return jnp.uint32(exponent << BITS)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _tf32(precision: PrecisionLike, *dtypes: DTypeLike | None) -> bool:
    """Returns whether JAX would compute such a product in tf32 on this device. Only Hopper GPUs have been measured."""
    return of_tf32_bits(precision) and all(d in (None, jnp.float32) for d in dtypes) and Target.here().is_hopper


# Models of seconds: the time that float16 saves, and the time to find the largest numbers and to convert. Measured on one H200
# (2026-11-22), the gradient in whole steps on one H100 (2026-11-27): Tree-LSTM h512, batch 16 and 64, 2 % less.


def _faster(rows: int, k: int, n: int) -> bool:
    """Returns whether float16 is faster for x @ W and both gradients."""
    return 2 * rows * k * n / 100e12 > 9e-6 + 2.6e-12 * k * n + rows * (0.9e-12 * k + 2.6e-12 * n)


def _faster_gradient(rows: int, k: int, n: int) -> bool:
    """Returns whether float16 is faster for the gradient of the weight.

    Half of the time to convert dY counts: if x and h have weights of their own, both gradients read it.
    """
    return 2 * rows * k * n / 270e12 > 0.5e-6 + rows * (0.6e-12 * k + 1.3e-12 * n)
