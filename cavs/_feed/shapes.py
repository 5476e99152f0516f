"""The few padded shapes of a loader: chosen from batches of its first epochs, or when batches of a size are first seen."""

import copy
from collections.abc import Sequence

import numpy as np

from cavs._feed.plan import Member, Planned, plan_samples
from cavs._feed.sampler import Sampler, dealt_strata, strata_of_batches
from cavs._feed.settings import Settings
from cavs._schedule.shape import Shape
from cavs._schedule.shape_choice import WORTH_A_SHAPE, bound, counts_of, few_shapes, fits, sums
from cavs.kernels import native_unavailable

SAMPLE_BATCHES, SAMPLE_EPOCHS = 512, 8  # shapes are chosen from at least so many batches, or from so many epochs
# On a CPU, a program that is compiled while the first one trains takes the cores from it. On EWT (184,000 vertices), the first
# epoch of `cavs train` takes 3.7 s with two programs, and 2.6 s with one, whose batches have a fifth more rows. Engine `native`
# computes no padding in levels: a later epoch, of 1.7 s, takes 2 % longer (two cores, 2026-11-26).
SHORT_EPOCH, WORTH_IN_SHORT_EPOCHS = 500_000, 0.2  # vertices; the fraction of the rows that one more shape must then save


class Shapes:
    """The few shapes of a loader, chosen when batches of a size are first seen.

    Attributes:
        all: the shapes so far, one `Shape` per member each. A number is an index into this list.
    """

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self._counts = [counts_of(m.graphs, m.options.kinds)[1] for m in members]
        self._of: dict[tuple[int, ...], list[int]] = {}  # number of graphs -> numbers of the shapes, ascending
        self.all: list[tuple[Shape, ...]] = []

    def shared(self, members: Sequence[Member]) -> "Shapes":
        """Returns a copy, for another loader.

        Raises `ValueError` if it has other data sets, or schedules them in another way.
        """
        if len(members) != len(self._members) or any(
            a.graphs is not b.graphs or a.options != b.options for a, b in zip(members, self._members, strict=False)
        ):
            raise ValueError(
                "Loader: shapes: got a loader of other graphs, or with other fields, policy or kinds; expected one of "
                "the same. Write an int, the most shapes."
            )
        other = copy.copy(self)
        other._members, other.all = members, list(self.all)
        other._of = {sizes: list(numbers) for sizes, numbers in self._of.items()}
        return other

    def rows(self, number: int) -> int:
        """Returns the vertices of a shape, padded, in all data sets together."""
        return sum(shape.vertices for shape in self.all[number])

    def add(
        self,
        batches: Sequence[np.ndarray],
        most: int,
        closed: bool,
        strata: tuple[np.ndarray, np.ndarray] | None = None,
        worth: float = WORTH_A_SHAPE,
    ) -> None:
        """Chooses at most `most` shapes.

        Args:
            batches: the samples of sample batches, all of the same length.
            most: the most shapes.
            closed: whether these are all batches that will ever occur.
            strata: if a batch has one graph of each stratum, the graphs by stratum, and the strata; see `bound`.
            worth: the fraction of the rows that one more shape must save.
        """
        graphs = [[m.picked(numbers) for numbers in batches] for m in self._members]
        bounds = None
        if not closed and any(m.pick is not None for m in self._members):  # other batches may be larger
            totals = [sums(counts, numbers) for counts, numbers in zip(self._counts, graphs, strict=True)]
            bounds = [np.ceil(total.max(0) + total.std(0)).astype(int) for total in totals]
        elif not closed:
            by_stratum, edges = (slice(None), None) if strata is None else strata
            bounds = [bound(counts[:, by_stratum], len(batches[0]), edges) for counts in self._counts]
        self._add(graphs, most, bounds, worth)

    def _add(
        self, graphs: list[list[np.ndarray]], most: int, bounds: list[np.ndarray] | None, worth: float = WORTH_A_SHAPE
    ) -> None:
        numbers = self._of.setdefault(tuple(len(batches[0]) for batches in graphs), [])
        for shape in few_shapes([(m.graphs, m.options) for m in self._members], graphs, most, bounds, worth):
            numbers.append(len(self.all))
            self.all.append(shape)
        numbers.sort(key=self.rows)

    def plan(self, batches: Sequence[np.ndarray], sizes: np.ndarray, devices: int) -> Planned:
        """Deals batches to devices, and chooses their shapes. The arguments are the same as for `plan_samples`."""
        samples, present = plan_samples(batches, sizes, devices)
        graphs = [samples if m.pick is None else [m.pick(numbers) for numbers in samples] for m in self._members]
        return Planned(samples, present, graphs, self._chosen(graphs, devices) if samples else np.zeros(0, int))

    def _chosen(self, graphs: list[list[np.ndarray]], devices: int) -> np.ndarray:
        """Chooses the smallest shape into which each batch fits on all devices. Adds shapes if needed.

        Returns (K,) numbers of shapes. `graphs`: for each member, the graphs of each batch and device.
        """
        lengths = np.array([[len(part) for part in parts[::devices]] for parts in graphs]).T  # (K, members)
        number = np.full(len(lengths), -1)
        for sizes in sorted(set(map(tuple, lengths.tolist()))):
            batches = np.flatnonzero((lengths == sizes).all(1))
            indices = (batches[:, None] * devices + np.arange(devices)).ravel()
            totals = [sums(counts, [parts[i] for i in indices]) for counts, parts in zip(self._counts, graphs, strict=True)]
            fitting = self._inside(sizes, totals, devices)
            if not fitting.any(1).all():  # such as batches with the same graph twice
                beyond = indices[~fitting.any(1).repeat(devices)]
                self._add([[parts[i] for i in beyond] for parts in graphs], 1, None)
                fitting = self._inside(sizes, totals, devices)
            number[batches] = np.array(self._of[sizes])[fitting.argmax(1)]
        return number

    def fitting(self, number: int, graphs: list[list[np.ndarray]], devices: int) -> np.ndarray:
        """Returns (K,) bool: whether each batch fits a shape on all devices. The arguments are the same as for `_chosen`."""
        totals = [sums(counts, parts) for counts, parts in zip(self._counts, graphs, strict=True)]
        alike = [[len(part) == shape.graphs for part in parts] for shape, parts in zip(self.all[number], graphs, strict=True)]
        fitting = _fit([self.all[number]], totals, devices)[:, 0]
        return fitting & np.all(alike, 0).reshape(-1, devices).all(1)

    def _inside(self, sizes: tuple[int, ...], totals: list[np.ndarray], devices: int) -> np.ndarray:
        """Returns (batches, shapes) bool: whether each batch fits into each shape for its number of graphs, on every device."""
        return _fit([self.all[i] for i in self._of.get(sizes, [])], totals, devices)


def _fit(shapes: Sequence[tuple[Shape, ...]], totals: list[np.ndarray], devices: int) -> np.ndarray:
    """Returns (batches, shapes) bool: whether each batch fits into each shape, on every device; `totals`: `sums` by member."""
    fitting = np.all([fits([shape[m] for shape in shapes], total) for m, total in enumerate(totals)], 0)
    return np.all(fitting.reshape(len(fitting) // devices, devices, len(shapes)), 1)


def choose_shapes(shapes: Shapes, sampler: Sampler, settings: Settings) -> None:
    """Adds the shapes for the batches of all epochs, at most `settings.shapes`. The batches must be known."""
    if sampler.size is not None:
        _for_drawn(shapes, sampler, sampler.size, settings)
        return
    batches = sampler.batches(0)  # the same in all epochs
    sizes = sorted({len(batch) for batch in batches})
    for size in sizes:
        samples, _ = plan_samples([batch for batch in batches if len(batch) == size], sampler.sizes, settings.units)
        shapes.add(samples, max(1, settings.shapes // len(sizes)), closed=True)


def _for_drawn(shapes: Shapes, sampler: Sampler, size: int, settings: Settings) -> None:
    """Adds the shapes for drawn batches: most are for whole batches, and one is for a smaller last batch."""
    all_alike = settings.seed is None
    epochs = 1 if all_alike else min(SAMPLE_EPOCHS, -(-SAMPLE_BATCHES // len(sampler)))
    sample = [batch for epoch in range(epochs) for batch in sampler.batches(epoch)]
    whole, rest = ([batch for batch in sample if (len(batch) == size) == full] for full in (True, False))
    by_size, *edges = strata_of_batches(sampler.sizes, size)
    native = settings.target.is_cpu and native_unavailable() is None
    worth = WORTH_IN_SHORT_EPOCHS if native and sampler.sizes.sum() < SHORT_EPOCH else WORTH_A_SHAPE
    for batches, most, bounds in zip((whole, rest), (settings.shapes - bool(rest), 1), edges, strict=True):
        if batches:
            samples, _ = plan_samples(batches, sampler.sizes, settings.units)
            strata = None
            if settings.group == "balanced":
                strata = by_size, dealt_strata(sampler.sizes[by_size], bounds, settings.units)
            shapes.add(samples, max(1, most), closed=all_alike, strata=strata, worth=worth)
