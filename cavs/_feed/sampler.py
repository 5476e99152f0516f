"""`Sampler`: which graphs form the batches of each epoch, drawn from a seed or given by the user."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

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
        batches = settings.batches
        self.size = batches if isinstance(batches, int) else None
        self._source: Iterable[Index] = batches if isinstance(batches, Iterable) else ()
        is_sized = isinstance(batches, Sized)  # not an iterator
        self._list = [samples_of(index, len(sizes)) for index in self._source] if is_sized else None
        self._chunk: list[np.ndarray] = []  # the last batches of the source that were taken
        self._taken = 0  # all batches that were taken
        self.known = self.size is not None or self._list is not None

    def __len__(self) -> int:
        """Returns the number of batches of an epoch. Raises `TypeError` if the batches come from an iterator."""
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
        are among the results, because their shapes determine the shapes of later ones.

        `received`: the batches of this epoch that loops have received. `seen`: the batches of all epochs. Raises `ValueError`
        if the iterator is ahead of this place.
        """
        source: Iterator[Any] = iter(self._source)
        done = seen
        if source is not self._source:
            self._chunk, self._taken, done = [], 0, received
        if done < self._taken - len(self._chunk):
            raise ValueError(MSG_PASSED.format(seen, self._taken - len(self._chunk)))
        while True:
            if done >= self._taken:
                chunk = [samples_of(index, len(self.sizes)) for index in itertools.islice(source, CHUNK)]
                if not chunk:
                    return
                self._chunk, self._taken = chunk, self._taken + len(chunk)
            yield self._chunk, min(done - self._taken, 0) + len(self._chunk)
            done = max(done, self._taken)

    def __repr__(self) -> str:
        size = "given" if self.size is None else str(self.size)
        return f"{size}, {len(self)} per epoch" if self.known else size


def samples_of(index: Index, count: int) -> np.ndarray:
    """Returns the numbers of the graphs that an index into `count` graphs selects for a batch.

    Raises:
        IndexError: a number is out of range, or the index is of another type or shape.
        ValueError: it selects no graph, or is no array, such as one number.
    """
    if not isinstance(index, slice) and np.ndim(index) == 0:
        raise ValueError(
            f"Loader: batches: got {index!r} in place of a batch; expected an integer array, the graphs of each batch. Write "
            "[[0, 1, 2], ...], or batches=[numbers] for one batch of these graphs."
        )
    try:
        selected = checked_index(index, count)
    except IndexError as error:
        raise IndexError(f"Loader: batches: {error}") from None
    samples = np.arange(selected.start, selected.stop) if isinstance(selected, slice) else selected
    if not len(samples):
        raise ValueError(f"Loader: batches: got {index!r}, which selects no graph; expected at least one in each batch.")
    return samples


def epoch_batches(sizes: np.ndarray, batch: int, group: str, seed: int | None, epoch: int) -> np.ndarray:
    """Returns the batches of one epoch. They depend only on the arguments, so a resumed run gets the same ones.

    Returns:
        (batches, batch) numbers of graphs. The last batch may have fewer: its row ends with -1.

    Args:
        group: "balanced" (see `strata`), "similar" (a batch has graphs of similar sizes) or "random".
        seed: the source of randomness; `None` for the same batches in every epoch, "random" then being the order of the graphs.
        epoch: the number of the epoch.
    """
    total = len(sizes)
    rng = None if seed is None else np.random.default_rng([seed, 2, epoch])
    whole, left = divmod(total, batch)
    order = np.arange(total) if rng is None else rng.permutation(total)
    if group == "balanced" and left:
        order = np.concatenate([*_one_of_each_stratum(sizes, left, rng)])
    if group == "similar":
        order = order[np.argsort(sizes[order], kind="stable")]
        # The batch that is left over is one of any size, not of the largest graphs.
        begin = batch * ((whole + 1) // 2 if rng is None else int(rng.integers(whole + 1)))
        order = np.concatenate([order[:begin], order[begin + left :], order[begin : begin + left]])
    full, rest = order[: whole * batch], order[whole * batch :]
    grid = full.reshape(whole, batch)
    if group == "balanced" and whole:
        grid = full[strata(sizes[full], batch, rng)]
    elif group == "similar" and rng is not None:
        grid = grid[rng.permutation(whole)]
    if left:
        grid = np.concatenate([grid, np.append(rest, np.full(batch - left, -1))[None]])
    return grid


def _one_of_each_stratum(sizes: np.ndarray, count: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` graphs, one of each of as many strata of equal sizes. Returns the graphs that remain, and those drawn."""
    by_size = np.argsort(sizes, kind="stable")
    edges = np.linspace(0, len(sizes), count + 1).astype(int)
    drawn = (edges[:-1] + edges[1:]) // 2 if rng is None else rng.integers(edges[:-1], edges[1:])
    remaining = np.ones(len(sizes), bool)
    remaining[drawn] = False
    return by_size[remaining], by_size[drawn]


def strata_of_batches(sizes: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the strata of graphs from which the "balanced" batches of all epochs are drawn.

    Returns:
        The graphs by size; (batch, 2), in that order, the begin and end of the stratum of each place of a batch; and
        (G % batch, 2) the same for the last batch.
    """
    total = len(sizes)
    whole, left = divmod(total, batch)
    begin = np.arange(batch) * whole
    edges = np.linspace(0, total, left + 1).astype(int)
    # The graphs of the last batch are taken out first, so that the others move down by up to `left` places.
    full = np.stack([begin, np.minimum(begin + whole + left, total)], 1)
    return np.argsort(sizes, kind="stable"), full, np.stack([edges[:-1], edges[1:]], 1)


def dealt_strata(sizes: np.ndarray, edges: np.ndarray, parts: int) -> np.ndarray:
    """Returns the strata of a part's places if batches with one graph of each stratum are dealt by size to `parts` parts.

    Returns:
        (batch / parts, 2) the begin and end of the stratum of each place of a part.

    `sizes`: (G,) the sizes of the graphs, ascending. `edges`: (batch, 2) the begin and end of the stratum of each place of a
    batch, ascending. `parts`: the number of parts, which divides the length of `edges`.
    """
    if parts == 1:
        return edges
    begin, end = edges[::parts, 0], edges[parts - 1 :: parts, 1]
    # Graphs of equal sizes may change places.
    return np.stack([np.searchsorted(sizes, sizes[begin], "left"), np.searchsorted(sizes, sizes[end - 1], "right")], 1)


def strata(sizes: np.ndarray, batch: int, rng: np.random.Generator | None) -> np.ndarray:
    """Groups a multiple of `batch` graphs into batches of nearly equal total size, so that few shapes are compiled.

    The graphs are sorted by size, equal sizes in random order, and cut into as many strata as a batch has places. A batch takes
    one graph from each stratum. The strata of large graphs are assigned at random. In the strata of small graphs, the batch
    that is smallest so far takes the largest graph.

    Returns (batches, batch) numbers of graphs. `rng`: the source of randomness; `None` for the same batches every time.
    """
    tie = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    grid = np.lexsort((tie, sizes)).reshape(batch, -1)
    size, count = sizes[grid], grid.shape[1]
    sums = np.zeros(count, np.int64)
    for i in reversed(range(batch)):
        if rng is not None and i >= batch // 2:
            take = rng.permutation(count)
        else:
            take = np.empty(count, np.int64)
            take[np.argsort(sums, kind="stable")] = np.arange(count)[::-1]
        grid[i] = grid[i, take]
        sums += size[i, take]
    out = np.ascontiguousarray(grid.T)
    return out if rng is None else out[rng.permutation(count)]
