"""Widths of values in memory, in blocks of one unit vector, and the dtypes in which they are stored."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.core import ShapedArray

from cavs.kernels._program.jaxprs import Atom, aval

# What a launch's tensors hold before it writes them, if products poll them (`LaunchConfig.dataflow`): the bits of a NaN that no
# computation yields (GPUs yield 0x7FFFFFFF and its negative), and of two that none yields in 16 bits (0x7FFF and its negative).
UNWRITTEN = np.uint32(0xFFE5FFE5).astype(np.int32)


def unit_width(values: Sequence[Atom]) -> int:
    """The greatest common divisor of the last axes of all values that are vectors."""
    widths = [aval(v).shape[-1] for v in values if aval(v).shape and int(np.prod(aval(v).shape)) > 1]
    return int(np.gcd.reduce(widths)) if widths else 1


def padded_unit(valid: int, multiple: int = 16) -> int:
    """The width in memory of a unit vector of `valid` elements: a multiple of 16, as `mma.sync` needs.

    A unit that must be padded is padded to a multiple of 32, so that more than one warp shares a sum over it.
    """
    if valid % multiple == 0:
        return valid
    step = max(multiple, 16 if valid < 16 else 32)
    return -(-valid // step) * step


def blocks(shape: ShapedArray, unit: int) -> tuple[int, ...]:
    """A value's shape in blocks of one unit vector; () for a scalar of a row."""
    if int(np.prod(shape.shape)) == 1:
        return ()
    return (*shape.shape[:-1], shape.shape[-1] // unit)


def num_blocks(shape: ShapedArray, unit: int) -> int:
    """The number of unit vectors in a value; 0 for a scalar of a row."""
    counts = blocks(shape, unit)
    return int(np.prod(counts)) if counts else 0


def stored_dtype(shape: ShapedArray | jax.ShapeDtypeStruct) -> np.dtype:
    """The dtype of a value in memory; bools are stored as int32."""
    return np.dtype(np.int32) if shape.dtype == np.bool_ else np.dtype(shape.dtype)
