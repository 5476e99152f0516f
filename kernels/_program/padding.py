"""The layout of values in memory: rows of blocks of one unit vector, each followed by zeros up to the unit's width."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from cavs.kernels._program.operations import LevelProgram


def rows_in_memory(x: jax.Array, program: LevelProgram, written: bool = False) -> jax.Array:
    """Returns (N, ...) values as (N, blocks * unit); bools as int32.

    Scalars become (N, 1). If a launch writes them, they are a unit wide: each thread block has a copy of its own.
    """
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    flat = flat.astype(jnp.int32) if flat.dtype == jnp.bool_ else flat
    if flat.shape[1] == 1:
        return jnp.broadcast_to(flat, (x.shape[0], program.unit)) if written else flat
    return _padded(flat, program)


def rows_from_memory(x: jax.Array, program: LevelProgram, aval: ShapedArray | jax.ShapeDtypeStruct) -> jax.Array:
    """The inverse of `rows_in_memory`: returns (N, *shape) for values like `aval`."""
    if int(np.prod(aval.shape)) == 1:
        x = x[:, :1]
    elif program.unit != program.valid:
        x = x.reshape(x.shape[0], x.shape[1] // program.unit, program.unit)[:, :, : program.valid]
    return x.reshape(x.shape[0], *aval.shape).astype(aval.dtype)


def constant_in_memory(x: jax.Array, program: LevelProgram) -> jax.Array:
    """Returns a value that is the same for all rows as a flat vector of float32, which holds the bits of other types."""
    if x.dtype != jnp.float32:
        x = lax.bitcast_convert_type(x.astype(jnp.int32), jnp.float32)
    return jnp.reshape(x, -1) if jnp.size(x) == 1 else _padded(jnp.reshape(x, (1, -1)), program).reshape(-1)


def weight_in_memory(w: jax.Array, program: LevelProgram) -> jax.Array:
    """Returns a matrix padded with zeros in both axes."""
    return w if program.unit == program.valid else _padded(_padded(w, program).T, program).T


def _padded(x: jax.Array, program: LevelProgram) -> jax.Array:
    """(N, blocks * valid) to (N, blocks * unit)."""
    if program.unit == program.valid:
        return x
    blocks = x.reshape(x.shape[0], x.shape[1] // program.valid, program.valid)
    padded = jnp.pad(blocks, ((0, 0), (0, 0), (0, program.unit - program.valid)))
    return padded.reshape(x.shape[0], padded.shape[1] * program.unit)
