"""Dropout on the inputs of a layer."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

import cavs
from cavs.vertex_programs._types import Array


class RowKeys(NamedTuple):
    """A key for each of N rows: `key` together with two numbers that identify the row, such as its graph and its vertex.

    Attributes:
        key: A key of `jax.random`.
        first: int[N].
        second: int[N].
    """

    key: jax.Array
    first: jax.Array
    second: jax.Array

    def bits(self, columns: int) -> jax.Array:
        """Returns (N, columns) random uint16.

        One evaluation of Threefry (Salmon et al., 2011) makes four of them. Keys of `jax.random` for each row would hash more
        often, and XLA would compile several loops instead of one.
        """
        blocks = -(-columns // 4)
        first = jnp.broadcast_to(self.first[:, None], (len(self.first), blocks))
        second = self.second[:, None] * blocks + jnp.arange(blocks, dtype=self.second.dtype)[None]
        count = jnp.concatenate([x.ravel().astype(jnp.uint32) for x in (first, second)])
        words = jax.extend.random.threefry_2x32(jax.random.key_data(self.key)[:2], count)
        words = words.reshape(2, *first.shape).transpose(1, 2, 0)
        return lax.bitcast_convert_type(words, jnp.uint16).reshape(len(first), 4 * blocks)[:, :columns]


Key: TypeAlias = jax.Array | RowKeys
K = TypeVar("K", bound=Key)


def dropout(x: Array, rate: float, key: Key | None) -> Array:
    """Applies dropout (Srivastava et al., 2014) with a mask that is a function of `key`.

    Args:
        x: float[N, ...], the values.
        rate: The probability with which an entry becomes zero, rounded to a multiple of 2^-16. The other entries are scaled by
            1 / (1 - rate).
        key: A key of `jax.random`, or the `RowKeys` of the N rows, or None for no dropout.

    Returns:
        An array of the shape of `x`, or `x` itself without dropout.

    Raises:
        ValueError: `rate` is not between 0 and 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate: got {rate}; expected a probability, 0 to 1. Write 0.2 for 20 %.")
    if key is None or not rate:
        return x
    # 16 random bits an entry instead of the 32 of jax.random.bernoulli.
    below = jnp.uint16(min(round((1 - rate) * 2**16), 2**16 - 1))
    if isinstance(key, RowKeys):
        bits = key.bits(math.prod(x.shape[1:])).reshape(x.shape)
    else:
        bits = jax.random.bits(key, x.shape, "uint16")
    return jnp.where(bits < below, x / max(1 - rate, 2**-16), 0)  # a rate of 1 keeps nothing, and has gradients of 0


def split_key(key: K | None, count: int) -> Sequence[K | None]:
    """Splits a key, or the key of each row, into `count` keys. Returns `count` times None if `key` is None."""
    if key is None:
        return (None,) * count
    if isinstance(key, RowKeys):
        return [cast(K, key._replace(key=k)) for k in jax.random.split(key.key, count)]
    return [*cast(Sequence[K], jax.random.split(key, count))]


def vertex_keys(key: jax.Array | None, sched: "cavs.Schedule", numbers: Array) -> RowKeys | None:
    """Makes a key for each vertex of a batch, for `dropout` and for the `key` of the taggers.

    A key depends on `key`, the vertex, and the number of its graph in the data set. The dropout mask of a vertex is therefore
    the same in any batch, in any part of a batch, and on any device.

    Args:
        key: A key of `jax.random`; None for no dropout.
        sched: The schedule of the batch.
        numbers: The number of each graph in the data set, int[G]: `sample.numbers` of a `cavs.data.Sample`.

    Returns:
        The keys of all vertices of the padded batch, or None.
    """
    if key is None:
        return None
    graph = jnp.minimum(jnp.asarray(sched.graph), sched.shape.graphs - 1)
    ends = jnp.asarray(sched.graph_end)
    start = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return RowKeys(key, jnp.asarray(numbers)[graph], jnp.arange(sched.shape.vertices, dtype=jnp.int32) - start[graph])
