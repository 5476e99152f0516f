"""`total` and `mean`: sums and means over the whole batch, if it is divided over several devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from cavs._run.manual_axes import checked_axes, devices, vary


def _across(x: jax.Array) -> jax.Array:
    """The sum of `x` over the devices of the `shard_map` that is being traced; `x` itself outside of one."""
    axes, _ = devices()
    if not axes:
        return x
    return lax.psum(vary(x, axes) if checked_axes() else x, axes)


def total(x: ArrayLike) -> jax.Array:
    """Sums an array over all its elements and, inside a step on several devices, over the devices.

    Use it in the loss, so that the loss is that of the whole batch:

    ```python
    has = sched.label >= 0
    loss = cavs.data.total(jnp.where(has, losses, 0)) / cavs.data.total(has)
    ```

    Args:
        x: an array of numbers or booleans.

    Returns:
        A scalar, the same on all devices.
    """
    return _across(jnp.sum(jnp.asarray(x)))


def mean(x: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """The mean of an array, as `jnp.mean`; inside a step on several devices, that over the whole batch.

    ```python
    loss = cavs.data.mean(losses)                                     # (G,) losses of the graphs
    loss = cavs.data.mean(losses, where=sched.label >= 0)             # (Vp,) losses of the vertices that have a label
    ```

    Take the gradient of this mean: `jax.grad` of it is the gradient over all devices. A mean over the graphs of one device, and
    an average of its gradients afterwards, would be wrong.

    Args:
        x: an array of floats.
        where: bools of the same shape, the elements that count. The mean of no elements is 0.

    Returns:
        A scalar, the same on all devices.
    """
    x = jnp.asarray(x)
    if where is None:
        return total(x) / jnp.asarray(x.size * devices()[1], x.dtype)  # every device has the same number
    where = jnp.asarray(where)
    return total(jnp.where(where, x, 0)) / jnp.maximum(total(where.astype(x.dtype)), 1)
