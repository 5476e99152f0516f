"""`Sampler`: which graphs form the batches of each epoch, drawn from a seed or given by the user."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from cavs._feed.epochs import epoch_batches
from cavs._feed.settings import Settings
from cavs._graphs.checks import Index, checked_index

CHUNK = 256  # batches of an iterator, which may be infinite, that are planned together

MSG_PASSED = (
    "Loader.restore: state: got a position after {} batches; expected at least {}, as batches is an iterator that has gone on. "
    "Write Loader(graphs, batches) with a new iterator, and restore that."
)


class Sampler:
    """The batches of each epoch, as the numbers of their samples.

    Attributes:
        sizes: (G,) the vertices of each sample, in all data sets together.
        size: the number of graphs of a batch; `None` if the user gave the batches.
        known: whether the batches of an epoch are known before it begins. Those of an iterator are not.
    """

    def __init__(self, settings: Settings, sizes: np.ndarray):
        self._settings, self.sizes = settings, sizes
        given = settings.batches
        self.size = given if isinstance(given, int) else None
        self._list: list[np.ndarray] | None = None
        self._source: Iterable[Index] = ()
        self._chunk: list[np.ndarray] = []  # the last batches of the source that were taken
        self._taken = 0  # all batches that were taken
        if not isinstance(given, int):
            if isinstance(given, Sized):
                self._list = [samples_of(some, len(sizes)) for some in given]
            elif given is not None:
                self._source = given
        self.known = self.size is not None or self._list is not None

    def __len__(self) -> int:
        """Returns the number of batches of an epoch.

        Raises:
            TypeError: the batches come from an iterator.
        """
        if self._list is not None:
            return len(self._list)
        if self.size is None:
            raise TypeError("len(loader): the batches come from an iterator; expected a batch size, or a list of batches.")
        whole, left = divmod(len(self.sizes), self.size)
        return whole + (left > 0 and self._settings.last != "drop")

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Returns the samples of each batch of an epoch; -1 for stand-ins. The batches must be `known`."""
        if self.size is None:
            assert self._list is not None
            return self._list
        s = self._settings
        rows = [*epoch_batches(self.sizes, self.size, s.group, s.seed, epoch)][: len(self)]
        if s.last == "short" and rows:
            rows[-1] = rows[-1][rows[-1] >= 0]
        return rows

    def chunks(self, received: int, seen: int) -> Iterator[tuple[list[np.ndarray], int]]:
        """Yields the batches of an iterator, `CHUNK` at a time, and how many of them loops have received.

        An iterator continues where the last loop was left. Other iterables begin anew in each epoch. Chunks that were received
        are among the results, because their shapes determine those of later ones.

        Args:
            received: the batches of this epoch that loops have received.
            seen: those of all epochs.

        Raises:
            ValueError: the iterator is ahead of this place.
        """
        source: Iterator[Any] = iter(self._source)
        done = seen
        if source is not self._source:
            self._chunk, self._taken, done = [], 0, received
        if done < self._taken - len(self._chunk):
            raise ValueError(MSG_PASSED.format(seen, self._taken - len(self._chunk)))
        while True:
            if done >= self._taken:
                some = [samples_of(index, len(self.sizes)) for index in itertools.islice(source, CHUNK)]
                if not some:
                    return
                self._chunk, self._taken = some, self._taken + len(some)
            yield self._chunk, min(done - self._taken, 0) + len(self._chunk)
            done = max(done, self._taken)

    def __repr__(self) -> str:
        of = "given" if self.size is None else str(self.size)
        return f"{of}, {len(self)} per epoch" if self.known else of


def samples_of(index: Index, count: int) -> np.ndarray:
    """Returns the numbers of the graphs that an index into `count` graphs selects for a batch.

    Raises:
        IndexError: a number is out of range, or the index is of another type or shape.
        ValueError: it selects no graph.
    """
    try:
        found = checked_index(index, count)
    except IndexError as error:
        raise IndexError(f"Loader: batches: {error}") from None
    some = np.arange(found.start, found.stop) if isinstance(found, slice) else found
    if not len(some):
        raise ValueError(f"Loader: batches: got {index!r}, which selects no graph; expected at least one in each batch.")
    return some
