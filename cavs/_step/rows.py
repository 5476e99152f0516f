"""The few rows of an embedding table that a batch reads: devices exchange the gradients of these rows, not of the table.

D devices that each read U of N rows receive (D - 1) U rows of gradients. The sum over the devices of a gradient of the whole
table would move 2 (D - 1) / D times N rows. The rows are added device by device, in the same order everywhere: a scatter whose
indices repeat adds in any order on a GPU, and the copies of the table would drift apart.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from cavs._function.arrays import as_array, as_indices
from cavs._function.children import wide
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.mesh_types import unchecked, unsharded, untyped
from cavs._run.manual_axes import checked_axes, devices
from cavs._stages.cotangents import mask_rows


def rows(table: ArrayLike, ids: ArrayLike) -> jax.Array:
    """Reads the rows of a table, such as the word vectors of the vertices of a batch.

    ```python
    x = cavs.data.rows(params["words"], sched.input_id)               # (Vp, 64): zeros for vertices without a word
    ```

    The value and the gradient are the same as with indexing. Inside a [`cavs.data.step`][] on several devices, the gradient is
    the sum over all devices, as JAX computes it for any other parameter, but the devices exchange only the rows that they read.

    Args:
        table: float[N, ...], the same on all devices.
        ids: int[U] below N. -1 reads zeros, and has no gradient.

    Returns:
        (U, ...) the rows. Those of ids from N on, which the table does not have, are NaN: a data set that was read without
        `with_vocab` has ids of its own.

    Raises:
        TypeError: an argument is no array, such as a field that the graphs lack.
        ValueError: `table` has no rows, or `ids` are not ints with one axis.
    """
    table, ids = unsharded(as_array(table, "rows: table")), as_indices(unsharded(as_array(ids, "rows: ids")))
    if not table.shape[:1] > (0,):
        raise ValueError(f"rows: table: got shape {table.shape}; expected (N, ...), one row per id, and N of at least 1.")
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"rows: ids: got shape {ids.shape} and dtype {ids.dtype}; expected (U,) ints, such as sched.input_id.")
    axes = checked_axes()
    reads_few = axes and devices()[1] * len(ids) < 2 * len(table)
    if reads_few:
        return _exchanging(table, ids, axes)
    return (_read_once if is_float(table) and table.dtype.itemsize < 4 else _read)(table, ids)


def _read(table: jax.Array, ids: jax.Array) -> jax.Array:
    return mask_rows(table.at[jnp.maximum(ids, 0)].get(mode="fill"), ids >= 0)


def _read_once(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Reads rows of 16 bits. Equal ids share one in float32, where its gradients add up."""
    distinct, first = _distinct(ids, len(table))
    positions = jnp.where(ids < 0, -1, first)
    return _read(_read(table, distinct).astype(jnp.float32), positions).astype(table.dtype)


def _exchanging(table: jax.Array, ids: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Reads rows. The derivative sums over all devices, which exchange only the rows that each of them reads."""

    def forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _read(table, ids), ids

    def backward(ids: jax.Array, ct: jax.Array) -> tuple[jax.Array, None]:
        with unchecked():
            distinct, first = _distinct(untyped(ids), len(table))
            all_ids, all_sums = (lax.all_gather(x, axes) for x in (distinct, _sums(untyped(ct), first)))
            return added(jnp.zeros(table.shape, table.dtype), all_ids, all_sums), None

    read = jax.custom_vjp(_read)
    read.defvjp(forward, backward)
    return read(table, ids)


def _distinct(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns (U,) the ids, with `size` in place of ids below 0 and of all but the first of equal ones; and (U,) the place of
    the first id that equals each, U if it is out of range.
    """
    ids, place = jnp.where(ids < 0, size, ids), jnp.arange(len(ids), dtype=jnp.int32)
    first = jnp.full(size, len(ids), jnp.int32).at[ids].min(place, mode="drop").at[ids].get(mode="fill", fill_value=len(ids))
    return jnp.where(first == place, ids, size), first


def _sums(gradients: jax.Array, first: jax.Array) -> jax.Array:
    """Adds up the gradients of equal ids at the place of the first of them, in float32 at least."""
    terms = wide(gradients)
    return jnp.zeros_like(terms).at[first].add(terms, mode="drop").astype(gradients.dtype)


def added(table: jax.Array, ids: jax.Array, gradients: jax.Array) -> jax.Array:
    """Adds rows to a table, one device after another; ids out of range add nothing.

    `table`: (N, ...). `ids`: (D, U) rows of the table, distinct on each device. `gradients`: (D, U, ...) what is added.
    """

    def add(table: jax.Array, update: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return table.at[update[0]].add(update[1], mode="drop"), None

    return lax.scan(add, table, (ids, gradients), unroll=min(len(ids), 8))[0]
