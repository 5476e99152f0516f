"""Runs rows a block at a time, because each row reads far more bytes than it writes.

An example is attention inside F: a vertex that reads a matrix scatters a vector. A copy of all matrices would take more memory
than everything else.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._graphs.pytree import PyTree

# Bytes of gathered arrays from which the backward gathers them again: below, a further kernel takes longer than it is worth.
# A block reads at most so many bytes.
MANY_BYTES = 32 << 20
MANY_TIMES = 8  # as many bytes as the results have: rows that read less run at once


def block_of(read: int, written: int, size: int) -> int:
    """Returns how many of `size` rows run at a time, 0 for all: each reads `read` bytes, and writes `written` bytes."""
    if read * size <= MANY_BYTES or read < MANY_TIMES * written:
        return 0
    return -(-size // -(-read * size // MANY_BYTES))


def in_blocks(fn: Callable[[jax.Array], PyTree], index: jax.Array, size: int) -> Any:
    """Returns `fn(index)` for a function that computes a row for each element of `index`, `size` rows at a time."""
    outs = lax.map(fn, blocks_of(index, size))
    return jax.tree.map(lambda x: joined(x)[: index.shape[0]], outs)


def blocks_of(index: jax.Array, size: int) -> jax.Array:
    """Returns `index` as (blocks, size). Rows after the last repeat the first one, as padding does (`_stages.tensors`)."""
    padding = -index.shape[0] % size
    return jnp.concatenate([index, jnp.broadcast_to(index[:1], (padding,))]).reshape(-1, size)


def joined(x: jax.Array) -> jax.Array:
    """Returns the rows of all blocks."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
