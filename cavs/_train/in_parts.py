"""The gradient of a batch in parts, one part at a time (`--memory`): the same as that of the whole batch, up to rounding."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._graphs.pytree import PyTree
from cavs._memory.sub_batches import sub_batched
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


def union(words: jax.Array, num_words: int) -> tuple[jax.Array, jax.Array]:
    """The distinct words of all parts.

    Args:
        words: (P, U) the rows of the table that each part reads; out of range in padding.
        num_words: the rows of the table.

    Returns:
        (min(P * U, num_words),) distinct rows, ascending, `num_words` in padding; and (num_words,) the place of each row
        among them.
    """
    read = jnp.zeros(num_words, bool).at[words.ravel()].set(True, mode="drop")
    distinct = jnp.nonzero(read, size=min(words.size, num_words), fill_value=num_words)[0]
    return distinct.astype(jnp.int32), jnp.cumsum(read, dtype=jnp.int32) - 1
