"""Plans the batches of a loader: the graphs and the shape of each, for each device, before any is scheduled."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._schedule.buckets import Options
from cavs._schedule.few import WORTH_A_SHAPE, Counts, bound, counts_of, few_shapes, fits, sums
from cavs._schedule.shape import Shape

Pick: TypeAlias = Callable[[np.ndarray], np.ndarray]


class Member(NamedTuple):
    """One data set of a batch.

    Attributes:
        graphs: the data set.
        pick: maps the samples of a batch, (B,) ints, to a fixed number of graphs of this data set;
            `None` if sample i is graph i.
        options: the options of its schedules, without `fixed`.
    """

    graphs: Graphs
    pick: Pick | None
    options: Options

    def picked(self, samples: np.ndarray) -> np.ndarray:
        """The graphs of a batch."""
        return samples if self.pick is None else self.pick(samples)


class Planned(NamedTuple):
    """K batches on D devices.

    Attributes:
        samples: of each batch and device, the samples.
        present: of each batch and device, which samples are not stand-ins, (B,) bool.
        graphs: of each member, the graphs of each batch and device, K * D arrays, batch by batch.
        shape: (K,) the number of the shape of each batch, the same on all devices.
    """

    samples: list[np.ndarray]
    present: list[np.ndarray]
    graphs: list[list[np.ndarray]]
    shape: np.ndarray


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
        """A copy, for another loader.

        Raises:
            ValueError: it has other data sets, or schedules them in another way.
        """
        if len(members) != len(self._members) or any(
            a.graphs is not b.graphs or a.options != b.options for a, b in zip(members, self._members, strict=False)
        ):
            raise ValueError(
                "Loader: shapes: got a loader of other graphs, or with other fields, policy, kinds or window; expected one of "
                "the same. Write an int, the most shapes."
            )
        copy = Shapes.__new__(Shapes)
        copy._members, copy._counts = members, self._counts
        copy._of, copy.all = {sizes: list(mine) for sizes, mine in self._of.items()}, list(self.all)
        return copy

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
        graphs = [[m.picked(some) for some in batches] for m in self._members]
        bounds = None
        if not closed and any(m.pick is not None for m in self._members):  # other batches may be larger
            found = [sums(counts, some) for counts, some in zip(self._counts, graphs, strict=True)]
            bounds = [np.ceil(of.max(0) + of.std(0)).astype(int) for of in found]
        elif not closed:
            by_stratum, edges = (slice(None), None) if strata is None else strata
            bounds = [bound(Counts(*(of[by_stratum] for of in counts)), len(batches[0]), edges) for counts in self._counts]
        self._add(graphs, most, bounds, worth)

    def _add(
        self, graphs: list[list[np.ndarray]], most: int, bounds: list[np.ndarray] | None, worth: float = WORTH_A_SHAPE
    ) -> None:
        mine = self._of.setdefault(tuple(len(some[0]) for some in graphs), [])
        for shape in few_shapes([(m.graphs, m.options) for m in self._members], graphs, most, bounds, worth):
            mine.append(len(self.all))
            self.all.append(shape)
        mine.sort(key=lambda i: sum(s.vertices for s in self.all[i]))

    def fixed(self, member: int) -> tuple[Shape, ...]:
        """The shapes of one member, by number."""
        return tuple(shape[member] for shape in self.all)

    def of(self, graphs: list[list[np.ndarray]], devices: int) -> np.ndarray:
        """The shape of each batch: the smallest one into which the batch fits on all devices. New shapes are added if needed.

        Args:
            graphs: for each member, the graphs of each batch and device.
            devices: D.

        Returns:
            (K,) numbers of shapes.
        """
        lengths = np.array([[len(some) for some in of[::devices]] for of in graphs]).T  # (K, members)
        number = np.full(len(lengths), -1)
        for sizes in map(tuple, np.unique(lengths, axis=0).tolist()):
            mine = np.flatnonzero((lengths == sizes).all(1))
            all_mine = (mine[:, None] * devices + np.arange(devices)).ravel()
            found = [sums(counts, [of[i] for i in all_mine]) for counts, of in zip(self._counts, graphs, strict=True)]
            inside = self._inside(sizes, found, devices)
            if not inside.any(1).all():  # such as batches with the same graph twice
                beyond = all_mine[~inside.any(1).repeat(devices)]
                self._add([[of[i] for i in beyond] for of in graphs], 1, None)
                inside = self._inside(sizes, found, devices)
            number[mine] = np.array(self._of[sizes])[inside.argmax(1)]
        return number

    def _inside(self, sizes: tuple[int, ...], found: list[np.ndarray], devices: int) -> np.ndarray:
        """(batches, shapes) bool: whether each batch fits into each shape for its number of graphs, on every device."""
        known = [self.all[i] for i in self._of.get(sizes, [])]
        inside = np.ones((len(found[0]), len(known)), bool)
        for m, of in enumerate(found if known else []):
            inside &= fits([shape[m] for shape in known], of)
        return np.all(inside.reshape(len(inside) // devices, devices, len(known)), 1)


def dealt(sizes: np.ndarray, devices: int) -> np.ndarray:
    """Deals the samples of a batch, of `sizes` (B,), to devices: the same number, at about the same cost, for each.

    Returns:
        (devices, B / devices) indices into the batch.
    """
    by_size = np.argsort(-sizes, kind="stable").reshape(-1, devices)
    by_size[1::2] = by_size[1::2, ::-1].copy()  # in alternating directions, so that no device always gets the largest
    return np.ascontiguousarray(by_size.T)


def plan_samples(batches: Sequence[np.ndarray], sizes: np.ndarray, devices: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Deals batches to devices. Returns `samples` and `present` of `Planned`; the arguments are those of `plan`."""
    smallest = int(sizes.argmin())
    samples, present = [], []
    for some in batches:
        if len(some) % devices:
            raise ValueError(
                f"Loader: batches: got a batch of {counted(len(some), 'graph')} for {devices} devices or parts; expected a "
                "multiple of their number."
            )
        there = some >= 0
        if not there.all():
            some = np.where(there, some, smallest)
        for part in dealt(sizes[some], devices) if devices > 1 else (slice(None),):
            samples.append(some[part])
            present.append(there[part])
    return samples, present


def plan(members: Sequence[Member], shapes: Shapes, batches: Sequence[np.ndarray], sizes: np.ndarray, devices: int) -> Planned:
    """Plans batches.

    Args:
        members: the data sets.
        shapes: the shapes, which may grow.
        batches: the samples of each batch. A row may contain -1: the smallest sample stands in for it.
        sizes: the cost of each sample.
        devices: the number of devices, or of parts.

    Raises:
        ValueError: a batch cannot be dealt equally.
    """
    samples, present = plan_samples(batches, sizes, devices)
    graphs = [samples if m.pick is None else [m.pick(some) for some in samples] for m in members]
    return Planned(samples, present, graphs, shapes.of(graphs, devices) if samples else np.zeros(0, int))
