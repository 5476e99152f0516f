"""`conv`: convolutions with filters of 3 x 3, by Winograd's algorithm as tasks of one launch where that is fastest."""

from collections.abc import Sequence
from operator import index
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp

from cavs._convolution import primitives
from cavs._convolution.choice import ConvolutionChoice
from cavs._convolution.primitives import Pads
from cavs.kernels import ConvolutionSizes, Target, persistent, too_large

Padding: TypeAlias = Literal["SAME", "VALID"] | Sequence[tuple[int, int]]
Algorithm: TypeAlias = Literal["xla", "winograd"] | None


def conv(
    x: jax.Array,
    w: jax.Array,
    padding: Padding = "SAME",
    *,
    precision: Any = None,
    algorithm: Algorithm = None,
) -> jax.Array:
    """Convolves images with filters of 3 x 3, stride 1.

    It replaces `jax.lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))`, and does the
    same. On a Hopper GPU, float32 products (`precision="highest"`, or `jax.default_matmul_precision("highest")`) run by
    Winograd's algorithm, all stages as tasks of one launch, where that is faster than XLA's convolution: the first time that a
    size is compiled, both are timed on the GPU, within some seconds, and the result is kept in `~/.cache/cavs`. Everything else
    runs by XLA. `explain_conv` says what runs.

    Winograd's algorithm subtracts neighbouring pixels from each other: pixels near an infinity are NaN.

    Composes with `jax.jit`, `jax.grad`, `jax.jvp`, `jax.vmap`, `jax.shard_map` and `jax.checkpoint`. Derivatives run by
    Winograd's algorithm, too, each where it is faster.

    Args:
        x: float[N, H, W, C], the images.
        w: float[3, 3, C, K], the filters.
        padding: "SAME", "VALID", or zeros ((above, below), (left, right)).
        precision: as in `jax.lax.conv_general_dilated`. In float32, errors are about those of a direct convolution, or smaller.
        algorithm: "xla" or "winograd" instead of what is fastest. "winograd" takes the first candidate, without measuring.

    Returns:
        float[N, H', W', K], where H' is H plus the padding minus 2.

    Raises:
        TypeError: `x` and `w` are not arrays of floats of one dtype.
        ValueError: a shape, `padding` or `algorithm` is not as above; or `algorithm="winograd"` cannot run here.

    Source: MegaKernels (Jia et al., 2020), sections 3 to 6; Lavin and Gray, 2016.
    """
    x, w = _checked(x, w)
    pads = _pads(padding)
    if algorithm not in (None, "xla", "winograd"):
        raise ValueError(f'conv: algorithm: got {algorithm!r}; expected None, "xla" or "winograd".')
    why = _unfit(x, w, pads, precision)
    if algorithm == "winograd" and why:
        raise ValueError(f'conv: algorithm: got "winograd", but {why}. Write algorithm=None.')
    if algorithm == "xla" or why:
        return primitives.by_xla(x, w, pads, precision)
    return primitives.conv(x, w, pads, algorithm == "winograd")


def explain_conv(x: Any, w: Any, padding: Padding = "SAME", *, precision: Any = None) -> str:
    """Returns which algorithm runs `conv` for arrays of these shapes, and its gradient with respect to the filters, and why.

    Args:
        x: float[N, H, W, C], the images: an array or a `jax.ShapeDtypeStruct`.
        w: float[3, 3, C, K], the filters: the same.
        padding: as in `conv`.
        precision: as in `conv`.
    """
    x, w = (jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)) for a in (x, w))
    _check_shapes(x, w)
    pads = _pads(padding)
    why = _unfit(x, w, pads, precision)
    if why:
        return f"XLA's convolution: {why}."
    operations = (("", primitives.CONVOLUTION), ("\nGradient with respect to w: ", primitives.FILTERS))
    return "".join(text + _explained(primitives.chosen(operation, x.shape, w.shape[3], pads)) for text, operation in operations)


def _explained(choice: ConvolutionChoice) -> str:
    if not choice.times:
        return "XLA's convolution: the candidates could not be timed, as they did not fit in the free memory."
    measured = ", ".join(f"{name} {us:.0f} us" for name, us in sorted(choice.times.items(), key=lambda pair: pair[1]))
    if choice.layout is None:
        return f"XLA's convolution, which was fastest: {measured}."
    m = choice.layout.m
    return f"Winograd's algorithm F({m}x{m},3x3), its stages as tasks of one launch. Measured: {measured}."


def _unfit(x: Any, w: Any, pads: Pads, precision: Any) -> str | None:
    """Why Winograd's algorithm does not run a convolution, or `None`."""
    if why := persistent.unsupported(Target.here()):
        return why
    if not x.dtype == w.dtype == jnp.float32:
        return f"the arrays are {x.dtype} and {w.dtype}, and the launch takes float32"
    if not _asks_float32(precision):
        return (
            'products are not asked to be float32, and tensor cores run a direct convolution faster; write precision="highest"'
        )
    out = [side + sum(pad) - 2 for side, pad in zip(x.shape[1:3], pads, strict=True)]
    if min(map(min, pads)) < 0 or min(*out, *x.shape, *w.shape) < 1:
        return "there is nothing to compute, or a padding is negative"
    return too_large(ConvolutionSizes.of(x.shape, w.shape[3], pads, 4))


def _asks_float32(precision: Any) -> bool:
    if isinstance(precision, tuple | list):
        return all(map(_asks_float32, precision))
    requested = jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore
    return str(requested).lower().rsplit(".", 1)[-1] in ("highest", "float32", "f32_f32_f32")


def _checked(x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
    for name, value in (("x", x), ("w", w)):
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
            got = getattr(value, "dtype", type(value).__name__)
            raise TypeError(f"conv: {name}: got {got}; expected an array of floats. Write jnp.asarray({name}, jnp.float32).")
    _check_shapes(x, w)
    if x.dtype != w.dtype:
        raise TypeError(f"conv: w: got {w.dtype}, and x has {x.dtype}; expected one dtype. Write w.astype(x.dtype).")
    return jnp.asarray(x), jnp.asarray(w)


def _check_shapes(x: Any, w: Any) -> None:
    if len(x.shape) != 4:
        raise ValueError(f"conv: x: got shape {x.shape}; expected (N, H, W, C). For one image, write x[None].")
    if len(w.shape) != 4 or w.shape[:2] != (3, 3) or w.shape[2] != x.shape[3]:
        raise ValueError(
            f"conv: w: got shape {w.shape}; expected (3, 3, {x.shape[3]}, K), as x has {x.shape[3]} channels. "
            "For filters of other sizes, write jax.lax.conv_general_dilated."
        )


def _pads(padding: Any) -> Pads:
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        side = 1 if padding.upper() == "SAME" else 0
        return ((side, side), (side, side))
    try:
        (top, bottom), (left, right) = cast(Any, padding)
        return ((index(top), index(bottom)), (index(left), index(right)))
    except (TypeError, ValueError):
        raise ValueError(
            f'conv: padding: got {padding!r}; expected "SAME", "VALID" or ((above, below), (left, right)).'
        ) from None
