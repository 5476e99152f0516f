"""How values lie in the kernels' memory: rows of blocks of one unit vector, each with zeros after its valid numbers."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from cavs.kernels._program.specs import Level


def rows_in_memory(x: Any, level: Level, written: bool = False) -> Any:
    """(N, ...) values as (N, blocks * unit); bools as int32.

    Scalars are (N, 1), or, where a launch writes them, a unit wide: each CTA has a copy of its own.
    """
    flat = x.reshape(x.shape[0], -1)
    flat = flat.astype(jnp.int32) if flat.dtype == jnp.bool_ else flat
    if flat.shape[1] == 1:
        return jnp.broadcast_to(flat, (x.shape[0], level.unit)) if written else flat
    return _padded(flat, level)


def rows_from_memory(x: Any, level: Level, aval: Any) -> Any:
    """The other way: (N, *shape) for values like `aval`."""
    if int(np.prod(aval.shape)) == 1:
        x = x[:, :1]
    elif level.unit != level.valid:
        x = x.reshape(x.shape[0], -1, level.unit)[:, :, : level.valid]
    return x.reshape(-1, *aval.shape).astype(aval.dtype)


def constant_in_memory(x: Any, level: Level) -> Any:
    """A value that is the same for all rows, flat."""
    return jnp.reshape(x, -1) if jnp.size(x) == 1 else _padded(jnp.reshape(x, (1, -1)), level).reshape(-1)


def weight_in_memory(w: Any, level: Level) -> Any:
    """A matrix: zeros in both of its axes."""
    return w if level.unit == level.valid else _padded(_padded(w, level).T, level).T


def _padded(x: Any, level: Level) -> Any:
    """(N, blocks * valid) to (N, blocks * unit)."""
    if level.unit == level.valid:
        return x
    blocks = x.reshape(x.shape[0], -1, level.valid)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, level.unit - level.valid))).reshape(x.shape[0], -1)
