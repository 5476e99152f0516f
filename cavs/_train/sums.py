"""The summed metrics of samples with fixed weights."""

import jax

from cavs._train.batches import in_order_grid
from cavs._train.data import Samples
from cavs._train.model import Weights
from cavs._train.step import DeviceMetrics
from cavs._train.task import Model, Sums, Task


def sums_of(task: Task, model: Model, weights: Weights, part: Samples) -> Sums:
    """The summed metrics of samples, as in the evaluation after an epoch."""
    grid = in_order_grid(task.sizes(part))
    metrics = jax.jit(lambda weights, batch: DeviceMetrics.of(model.metrics(weights, batch)))
    sums: Sums = {}
    for batch in task.preparer(model, part, grid)(grid):
        sums = metrics(weights, batch).added_to(sums)
    return sums
