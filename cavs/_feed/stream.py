"""`Stream`: epochs one after another on one thread, which prepares the first batches of an epoch while the one before ends."""

import itertools
import os
from collections.abc import Callable, Iterator

from cavs._feed.batches import Batches
from cavs._feed.delivery import Delivery, Epoch


class Stream:
    """The batches of a loader, from some epoch on. The thread ends when the stream is closed, or when nothing refers to it.

    Args:
        delivery: turns plans into batches.
        first: the epoch that is delivered first, or the rest of it.
        planned: returns the plan of an epoch, from its number; runs on the thread. `None` ends the stream.
    """

    def __init__(self, delivery: Delivery, first: Epoch, planned: Callable[[int], Epoch | None]):
        # The thread appends the number of dispatches of each epoch before it prepares the first one.
        lengths = [len(first.order)]

        def epochs() -> Iterator[Epoch]:
            yield first
            for number in itertools.count(first.number + 1):
                epoch = planned(number)
                if epoch is None:
                    return
                lengths.append(len(epoch.order))
                yield epoch

        self._items, self._lengths = delivery.across(epochs()), lengths
        self._first, self._done = first.number, 0
        self._made_in = os.getpid()

    def begins(self, number: int) -> bool:
        """Whether the next batch is the first one of the epoch `number`, in this process."""
        return self._done > 0 and self._first + self._done == number and self._made_in == os.getpid()

    def epoch(self) -> Iterator[Batches]:
        """Yields the batches of the next epoch, or the rest of the first one."""
        received = 0
        while self._done == len(self._lengths) or received < self._lengths[self._done]:
            batches = next(self._items)
            received += 1
            yield batches
            del batches  # not kept while waiting for the next one
        self._done += 1

    def close(self) -> None:
        """Ends the thread. In a fork of the process there is none."""
        if self._made_in == os.getpid():
            self._items.close()
