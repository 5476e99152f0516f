"""`total` and `mean`: sums and means over the whole batch, if it is divided over several devices or into parts."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from cavs._function.arrays import as_array
from cavs._function.children import wide
from cavs._jaxpr.mesh_types import vary
from cavs._jaxpr.names import WHOLE_BATCH
from cavs._jaxpr.settings import promoting
from cavs._run.manual_axes import checked_axes, devices


@promoting
def total(x: ArrayLike) -> jax.Array:
    """Sums an array over all its elements, and over the whole batch: all devices of a step, all parts of a memory plan.

    Use it in the loss, so that the loss covers the whole batch:

    ```python
    has = sched.label >= 0
    loss = cavs.data.total(jnp.where(has, losses, 0)) / cavs.data.total(has)
    ```

    Args:
        x: an array of numbers or booleans.

    Returns:
        A scalar, the same on all devices and in all parts.
    """
    summed, (axes, _) = jnp.sum(_numbers(x, "total: x")), devices()
    if axes:
        summed = lax.psum(vary(summed, axes) if checked_axes() else summed, axes)
    # An equation that does nothing. `cavs.memory.sub_batched` finds it in the traced loss, and adds up the parts.
    return checkpoint_name(summed, WHOLE_BATCH)


@promoting
def mean(x: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """The mean of an array, as `jnp.mean`, but over the whole batch: all devices of a step, all parts of a memory plan.

    ```python
    loss = cavs.data.mean(losses)                                     # (G,) losses of the graphs
    loss = cavs.data.mean(losses, where=sched.label >= 0)             # (Vp,) losses of the vertices that have a label
    ```

    Take the gradient of this mean: `jax.grad` of it is the gradient over all devices. A mean over the graphs of one device, and
    an average of its gradients afterwards, would be wrong.

    A graph or vertex without a label has the label -1, which loss functions take for the last class: write `where=labels >= 0`.

    Args:
        x: an array of numbers or booleans.
        where: bools of the same shape, the elements that count. The mean of no elements is 0.

    Returns:
        A scalar, the same on all devices and in all parts.

    Raises:
        ValueError: `where` has another shape than `x`, or other values than bools.
    """
    x = _numbers(x, "mean: x")
    kind = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32
    x = wide(x.astype(kind))
    if where is None:  # every device and every part has the same number
        return (total(x) / checkpoint_name(jnp.asarray(x.size * devices()[1], x.dtype), WHOLE_BATCH)).astype(kind)
    where = as_array(where, "mean: where")
    if where.dtype != bool or where.shape != x.shape:
        got = f"{where.dtype}{list(where.shape)}"
        raise ValueError(f"mean: where: got {got}; expected bool{list(x.shape)}, as x has. Write where=labels >= 0.")
    return (total(jnp.where(where, x, 0)) / jnp.maximum(total(where.astype(x.dtype)), 1)).astype(kind)


def _numbers(x: ArrayLike, where: str) -> jax.Array:
    """Returns an array of numbers. Raises a `TypeError`, which names the argument, for keys of `jax.random`."""
    x = as_array(x, where)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{where}: got an array of {x.dtype}; expected numbers.")
    return x
