"""Metrics of many batches, summed on the host while the device computes the next ones."""

import collections
from collections.abc import Callable, Iterable

from cavs._graphs.pytree import PyTree
from cavs._train.model import Weights
from cavs._train.step import DeviceMetrics
from cavs._train.task import Sums

# The host waits for the metrics of a step only this many steps later, so that the device never idles.
IN_FLIGHT = 8


class PendingMetrics(collections.deque[DeviceMetrics]):
    """A queue of metrics that are being copied to the host."""

    def copy_to_host(self, metrics: DeviceMetrics) -> None:
        """Starts an asynchronous copy."""
        metrics.values.copy_to_host_async()
        self.append(metrics)

    def added_to(self, sums: Sums, left: int = 0) -> Sums:
        """Removes the oldest metrics until `left` are left, waits for them, and adds them to `sums`."""
        while len(self) > left:
            sums = self.popleft().added_to(sums)
        return sums


def sums_of(evaluation: Callable[[Weights, PyTree], DeviceMetrics], weights: Weights, batches: Iterable[PyTree]) -> Sums:
    """The summed metrics of batches, with fixed weights."""
    sums: Sums = {}
    pending = PendingMetrics()
    for batch in batches:
        pending.copy_to_host(evaluation(weights, batch))
        sums = pending.added_to(sums, IN_FLIGHT)
    return pending.added_to(sums)
