"""`Stream`: epochs one after another on one thread, which prepares the first batches of an epoch while the one before ends."""

import itertools
import os
from collections.abc import Callable, Iterator

from cavs._feed.batches import Batches
from cavs._feed.delivery import Delivery, Epoch


class Stream:
    """The batches of a loader, from some epoch on. Its thread ends if it is closed or nothing refers to it.

    Args:
        delivery: turns plans into batches.
        first: the epoch that is delivered first, or the rest of it.
        planned: returns the epoch of a number, at least one batch; runs on the thread. `None` ends the stream.
    """

    def __init__(self, delivery: Delivery, first: Epoch, planned: Callable[[int], Epoch | None]):
        def epochs() -> Iterator[Epoch]:
            yield first
            for number in itertools.count(first.number + 1):
                epoch = planned(number)
                if epoch is None:
                    return
                yield epoch

        self._items = delivery.across(epochs())
        self._number, self._left = first.number, len(first.order)
        self._made_in = os.getpid()

    def begins(self, number: int) -> bool:
        """Whether the next batch is the first one of the epoch `number`, in this process."""
        return self._number == number and self._left < 0 and self._made_in == os.getpid()

    def epoch(self) -> Iterator[tuple[Epoch, Batches]]:
        """Yields the batches of the next epoch, or the rest of the first one."""
        while self._left:
            epoch, batches = next(self._items)
            self._left = (len(epoch.order) if self._left < 0 else self._left) - 1
            yield epoch, batches
            del batches  # not kept while waiting for the next one
        self._number, self._left = self._number + 1, -1

    def close(self) -> None:
        """Ends the thread. In a fork of the process there is none."""
        if self._made_in == os.getpid():
            self._items.close()
