"""A convolution of 3 x 3 and its gradient with respect to the filters, as primitives: linear in each of their two operands.

Each is the other's transpose, so all derivatives of any order, forward and reverse, run by Winograd's algorithm.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from cavs._convolution import layouts
from cavs._convolution.choice import ConvolutionChoice, Operation, choose
from cavs._jaxpr.mesh_types import unchecked, untyped, vary, varying
from cavs._jaxpr.settings import always_compiled
from cavs.kernels import ConvolutionSizes, Target, convolve, filters_gradient

Pads: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
Shape: TypeAlias = tuple[int, ...]
DIMENSIONS = ("NHWC", "HWIO", "NHWC")

conv_p = jex.Primitive("cavs_conv")  # x and w, to y
filters_p = jex.Primitive("cavs_conv_filters")  # x and dy, to dw


def conv(x: jax.Array, w: jax.Array, pads: Pads, forced: bool) -> jax.Array:
    """Convolves images with filters. If it is `forced`, Winograd's algorithm runs without being measured."""
    return _bind(conv_p, x, w, pads, forced)


def conv_filters(x: jax.Array, dy: jax.Array, pads: Pads, forced: bool) -> jax.Array:
    """Returns the gradient with respect to the filters."""
    return _bind(filters_p, x, dy, pads, forced)


def by_xla(x: jax.Array, w: jax.Array, pads: Pads, precision: Any = lax.Precision.HIGHEST) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), pads, dimension_numbers=DIMENSIONS, precision=precision)


def filters_by_xla(x: jax.Array, dy: jax.Array, pads: Pads) -> jax.Array:
    """Returns the gradient with respect to the filters, by XLA."""
    return _transposed(lambda w: by_xla(x, w, pads), (3, 3, x.shape[3], dy.shape[3]), dy)


def _transposed(fn: Callable[[jax.Array], jax.Array], shape: Shape, ct: jax.Array) -> jax.Array:
    """The transpose of a linear function whose operand varies along the same mesh axes as its result."""
    return jax.vjp(fn, vary(jnp.zeros(shape, ct.dtype), tuple(varying(ct))))[1](ct)[0]


def _bind(primitive: Any, x: jax.Array, other: jax.Array, pads: Pads, forced: bool) -> jax.Array:
    axes = tuple(varying(x) | varying(other))
    return primitive.bind(vary(x, axes), vary(other, axes), pads=pads, forced=forced)


# --- Shapes.
def _conv_shape(x: Any, w: Any, pads: Pads) -> Shape:
    return (x.shape[0], x.shape[1] + sum(pads[0]) - 2, x.shape[2] + sum(pads[1]) - 2, w.shape[3])


def _filters_shape(x: Any, dy: Any, pads: Pads) -> Shape:
    return (3, 3, x.shape[3], dy.shape[3])


def _typed(shape_of: Callable[[Any, Any, Pads], Shape]) -> Callable[..., Any]:
    def type_of(x: Any, other: Any, *, pads: Pads, forced: bool) -> Any:
        replicated = NamedSharding(x.sharding.mesh, PartitionSpec(*[None] * 4))
        return x.update(shape=shape_of(x, other, pads), weak_type=False, sharding=replicated)

    return type_of


# --- Derivatives.
def _to_images(dy: jax.Array, x: Any, w: jax.Array, *, pads: Pads, forced: bool) -> jax.Array:
    """The transpose with respect to x: a convolution with the filters turned round, as wide as x."""
    (top, bottom), (left, right) = pads
    back = ((2 - top, 2 - bottom), (2 - left, 2 - right))
    if min(map(min, back)) < 0:
        return _transposed(lambda x: by_xla(x, w, pads), x.aval.shape, dy)
    return conv(dy, jnp.flip(w, (0, 1)).swapaxes(2, 3), back, forced)


# --- Batches.
def _batch_conv(args: Sequence[jax.Array], dims: Sequence[Any], **how: Any) -> tuple[jax.Array, int]:
    (x, w), (x_dim, w_dim) = args, dims
    if w_dim is not None:  # filters of their own for each: one after another
        return _one_by_one(conv, args, dims, **how)
    x = jnp.moveaxis(x, x_dim, 0)
    y = conv(x.reshape(-1, *x.shape[2:]), w, **how)
    return y.reshape(*x.shape[:2], *y.shape[1:]), 0


def _one_by_one(
    run: Callable[..., jax.Array], args: Sequence[jax.Array], dims: Sequence[Any], **how: Any
) -> tuple[jax.Array, int]:
    mapped = {i: jnp.moveaxis(args[i], d, 0) for i, d in enumerate(dims) if d is not None}
    return lax.map(lambda slices: run(*(slices.get(i, a) for i, a in enumerate(args)), **how), mapped), 0


# --- What runs.
CONVOLUTION = Operation(
    "convolution",
    other=lambda s: (3, 3, s.inputs, s.outputs),
    by_xla=by_xla,
    launch=lambda x, w, pads, layout: convolve(x, w, pads, layout),
    layouts=layouts.of_convolution,
)
FILTERS = Operation(
    "filters",
    other=lambda s: (s.images, s.out_height, s.out_width, s.outputs),
    by_xla=filters_by_xla,
    launch=lambda x, dy, pads, layout: filters_gradient(x, dy, pads, layout),
    layouts=layouts.of_filters,
)


def chosen(operation: Operation, shape: Shape, outputs: int, pads: Pads, forced: bool = False) -> ConvolutionChoice:
    """Returns what runs an operation for images of a shape: the fastest, or the first launch if it is `forced`."""
    sizes, target = ConvolutionSizes.of(shape, outputs, pads, 4), Target.here()
    if not sizes.images:  # an empty batch
        return ConvolutionChoice(None)
    if forced:
        return ConvolutionChoice(next(iter(operation.layouts(sizes, target).values()), None))
    return choose(operation, sizes, target)


def _running(operation: Operation) -> Any:
    """Returns the function that runs an operation, compiled once for each size, also outside of `jax.jit`."""

    def run(x: jax.Array, other: jax.Array, pads: Pads, forced: bool) -> jax.Array:
        layout = chosen(operation, x.shape, other.shape[3], pads, forced).layout
        with unchecked():  # inside of a `shard_map`, kernels have no types that say how values vary between devices
            x, other = untyped((x, other))
            return operation.by_xla(x, other, pads) if layout is None else operation.launch(x, other, pads, layout)

    return jax.jit(run, static_argnames=("pads", "forced"))


def _lowering(operation: Operation) -> Callable[..., Any]:
    def lower(context: Any, x: Any, other: Any, *, pads: Pads, forced: bool) -> Any:
        # A launch is for the GPU of this process, and a program may be lowered for another device.
        is_local = not Target.here().is_gpu or tuple(context.module_context.platforms) == ("cuda",)
        run = functools.partial(RUNNING[operation.name], forced=forced) if is_local else operation.by_xla
        return mlir.lower_fun(functools.partial(run, pads=pads), multiple_results=False)(context, x, other)

    return lower


RUNNING = {operation.name: _running(operation) for operation in (CONVOLUTION, FILTERS)}
for _p, _shape, _operation in ((conv_p, _conv_shape, CONVOLUTION), (filters_p, _filters_shape, FILTERS)):
    _p.def_impl(always_compiled(jax.jit(_p.bind, static_argnames=("pads", "forced"))))
    _p.def_abstract_eval(_typed(_shape))
    mlir.register_lowering(_p, _lowering(_operation))
ad.defbilinear(conv_p, _to_images, lambda dy, x, w, **how: conv_filters(x, dy, **how))
ad.defbilinear(filters_p, lambda dw, x, dy, **how: _to_images(dy, x, dw, **how), lambda dw, x, dy, **how: conv(x, dw, **how))
batching.primitive_batchers[conv_p] = _batch_conv
batching.primitive_batchers[filters_p] = functools.partial(_one_by_one, conv_filters)
