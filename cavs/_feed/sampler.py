"""`Sampler`: which graphs form the batches of each epoch, drawn from a seed or given by the user."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from cavs._feed.epochs import epoch_batches
from cavs._feed.given import samples_of
from cavs._feed.settings import Settings
from cavs._graphs.checks import Index

CHUNK = 256  # batches of an iterator, which may be infinite, that are planned together


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
        if not isinstance(given, int):
            if isinstance(given, Sized):
                self._list = [samples_of(some, len(sizes)) for some in given]
            else:
                self._source = given
        self.known = self.size is not None or self._list is not None

    def __len__(self) -> int:
        """The number of batches of an epoch.

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
        """The samples of each batch of an epoch; -1 for stand-ins. The batches must be `known`."""
        if self.size is None:
            assert self._list is not None
            return self._list
        s = self._settings
        rows = [*epoch_batches(self.sizes, self.size, s.group, s.seed, epoch)][: len(self)]
        if s.last == "short" and rows:
            rows[-1] = rows[-1][rows[-1] >= 0]
        return rows

    def chunks(self, skipped: int) -> Iterator[list[np.ndarray]]:
        """Yields the batches of an iterator, some at a time, after the first `skipped` of them."""
        source: Iterator[Any] = iter(self._source)
        for _ in itertools.islice(source, skipped):
            pass
        while some := [samples_of(index, len(self.sizes)) for index in itertools.islice(source, CHUNK)]:
            yield some

    def __repr__(self) -> str:
        of = "given" if self.size is None else str(self.size)
        return f"{of}, {len(self)} per epoch" if self.known else of
