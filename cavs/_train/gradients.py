"""The gradient of a batch: whole, in parts one after another (`--memory`), or on several devices (`--devices`).

All three are the same up to rounding.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._graphs.pytree import PyTree
from cavs._memory.sub_batches import sub_batched
from cavs._run.manual_axes import unchecked, untyped
from cavs._step.rows import added, gathered, union
from cavs._train.model import Weights, read_rows

if TYPE_CHECKING:
    from cavs._train.task import Metrics, Model


class Gradient(NamedTuple):
    """The gradient of the mean loss of a batch.

    Attributes:
        words: (U,) the distinct rows of the table that the batch reads; out of range in padding.
        rows: (U, size) these rows.
        metrics: the metrics of the batch.
        by_params: the gradient with respect to the dense parameters.
        by_rows: (U, size) that with respect to the rows.
    """

    words: jax.Array
    rows: jax.Array
    metrics: "Metrics"
    by_params: PyTree
    by_rows: jax.Array


def of_batch(model: "Model", weights: Weights, batch: PyTree, key: jax.Array | None) -> Gradient:
    """The gradient of a whole batch."""
    rows = read_rows(weights.table, batch.words)
    value_and_grad = jax.value_and_grad(model.objective, argnums=(0, 1), has_aux=True)
    (_, metrics), gradients = value_and_grad(weights.params, rows, batch, key)
    return Gradient(batch.words, rows, metrics, *gradients)


def of_parts(model: "Model", weights: Weights, parts: PyTree, key: jax.Array | None) -> Gradient:
    """The gradient of a batch whose arrays have a leading axis of parts.

    The loss of a part is a mean over its labels. Times their number it is a sum, and sums add up over the parts.
    """
    words, place = union(parts.words, len(weights.table))
    rows = read_rows(weights.table, words)

    def loss(weights: Weights, part: PyTree) -> tuple[jax.Array, "Metrics"]:
        mine = place.at[part.words].get(mode="fill", fill_value=len(words))
        value, metrics = model.objective(weights.params, read_rows(weights.table, mine), part, key)
        return value * lax.stop_gradient(metrics.count), metrics

    total = jax.value_and_grad(sub_batched(loss, has_aux=True), has_aux=True)
    (_, metrics), gradient = total(Weights(weights.params, rows), [parts])
    mean = jax.tree.map(lambda g: g / jnp.maximum(metrics.count, 1).astype(g.dtype), gradient)
    return Gradient(words, rows, metrics, mean.params, mean.table)


def of_devices(model: "Model", weights: Weights, batch: PyTree, key: jax.Array | None, axes: tuple[str, ...]) -> Gradient:
    """The gradient of a batch that is divided over devices: this runs on each of them, with its part (`jax.shard_map`).

    As in `of_parts`, sums add up. JAX does not check the types here: only the last lines communicate. They exchange the
    gradients of the rows that the devices read, not those of the table.
    """
    with unchecked():
        weights, batch, key = untyped((weights, batch, key))
        rows = read_rows(weights.table, batch.words)

        def loss(params: PyTree, rows: jax.Array) -> tuple[jax.Array, "Metrics"]:
            value, metrics = model.objective(params, rows, batch, key)
            return value * lax.stop_gradient(metrics.count), metrics

        (_, metrics), (by_params, by_rows) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights.params, rows)
        metrics, by_params = lax.psum((metrics, by_params), axes)
        every, found = gathered(batch.words, by_rows, axes)
        words, place = union(every, len(weights.table))
        at = place.at[every].get(mode="fill", fill_value=len(words))
        by_rows = added(jnp.zeros((len(words), *rows.shape[1:]), rows.dtype), at, found)
        mean = jax.tree.map(lambda g: g / jnp.maximum(metrics.count, 1).astype(g.dtype), (by_params, by_rows))
        return Gradient(words, read_rows(weights.table, words), metrics, *mean)
