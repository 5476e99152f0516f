"""From the plan of an epoch to batches on the device: schedules, `collate`, stacks, transfers."""

import contextlib
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cavs._feed.batches import Batches, grouped, send
from cavs._feed.epochs import dispatches
from cavs._feed.plan import Member, Planned, Shapes
from cavs._feed.prefetch import prefetch
from cavs._feed.schedules import planned_schedules
from cavs._feed.settings import Sample, Settings
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule


class Epoch(NamedTuple):
    """The batches of an epoch, or of a part of it, and the order in which they run.

    Attributes:
        number: the number of the epoch.
        planned: all its batches.
        order: the batches of each dispatch, indices into `planned.shape`.
        length: the length of each stack, if it may have fewer batches; else `None`.
    """

    number: int
    planned: Planned
    order: list[np.ndarray]
    length: int | None

    @staticmethod
    def of(number: int, planned: Planned, steps: int, partial: bool) -> "Epoch":
        """Joins batches of equal shapes, `steps` in each dispatch; if `partial`, fewer in the last one of a shape."""
        return Epoch(number, planned, dispatches(planned.shape, steps, partial), steps if partial and steps > 1 else None)

    def after(self, batches: int) -> "Epoch":
        """Returns the rest of the epoch, after `batches` batches."""
        ends = np.cumsum([len(some) for some in self.order])
        first = int(np.searchsorted(ends, batches, side="right"))
        left = self.order[first:]
        if left and (begun := batches - int(ends[first]) + len(left[0])):
            left[0] = left[0][begun:]  # on several devices, batches of a stack that is not full run one by one
        return self._replace(order=left)

    @property
    def checksum(self) -> int:
        """A checksum of all batches in the order in which they run, on any number of devices."""
        samples = self.planned.samples
        units = len(samples) // max(len(self.planned.shape), 1)
        batches = [np.sort(np.concatenate(samples[i : i + units])) for i in range(0, len(samples), max(units, 1))]
        return zlib.crc32(np.concatenate([np.zeros(0, int), *self.order, *batches]).astype(np.int64).tobytes())


class Delivery:
    """How a loader turns plans into batches.

    Attributes:
        units: the devices to which a batch is dealt, or its parts.
        workers: processes that schedule each data set.
        ahead: dispatches that a thread prepares and sends; 0 for no thread.
    """

    def __init__(self, members: Sequence[Member], several: bool, shapes: Shapes, settings: Settings):
        self._members, self._several, self._shapes, self._settings = members, several, shapes, settings
        self.workers, self.ahead = 0, 0
        mesh = settings.mesh
        self.units = (settings.parts or 1) if mesh is None else mesh.size
        me = jax.process_index()
        of = [me] * self.units if mesh is None else [d.process_index for d in mesh.devices.flat]
        self._here = [i for i, process in enumerate(of) if process == me]
        self._axis = None if mesh is None and settings.parts is None else len(self._here)

    def of(self, epoch: Epoch) -> Iterator[Batches]:
        """Yields the batches of an epoch, in order. Closing the iterator ends the thread, and frees the processes."""
        with contextlib.closing(self.across(iter([epoch])) if self.ahead else self._here_and_now(epoch)) as found:
            yield from found

    def _here_and_now(self, epoch: Epoch, workers: int | None = None) -> Generator[Batches, None, None]:
        with contextlib.closing(self._on_host(epoch, self.workers if workers is None else workers)) as groups:
            yield from map(send, groups) if self._settings.mesh is not None else groups

    def across(self, epochs: Iterator[Epoch]) -> Generator[Batches, None, None]:
        """Yields the batches of several epochs, which a thread prepares and sends. Closing the iterator ends the thread."""

        def on_host() -> Generator[Batches, None, None]:
            for epoch in epochs:
                with contextlib.closing(self._on_host(epoch, self.workers)) as groups:
                    yield from groups

        # The thread closes what it runs: the garbage collector may close this iterator from any thread, even from that one.
        items = on_host()
        return prefetch(items, send, self.ahead, items.close)

    def _on_host(self, epoch: Epoch, workers: int) -> Generator[Batches, None, None]:
        planned = epoch.planned
        parts = [batch * self.units + unit for some in epoch.order for batch in some.tolist() for unit in self._here]
        with contextlib.ExitStack() as stack:
            streams = []
            for m in range(len(self._members)):
                stream = self._schedules(planned, m, parts, workers)
                streams.append(stack.enter_context(contextlib.closing(stream)))  # type: ignore[type-var]
            trees = (
                self._collated(planned.samples[part], planned.present[part], found)
                for part, found in zip(parts, zip(*streams, strict=True), strict=True)
            )
            sizes = ((len(some), epoch.length) for some in epoch.order)
            yield from grouped(trees, sizes, self._axis, self._settings.mesh)

    def yielded(self, batches: Batches) -> PyTree:
        """What a loop over the loader gets."""
        return batches.tree if self._settings.steps == 1 and self._settings.mesh is None else batches

    def examples(self, epoch: Epoch) -> list[PyTree]:
        """What a loop over an epoch gets, as `jax.ShapeDtypeStruct`s: one of each shape, in the order in which they occur."""
        kinds = [(int(epoch.planned.shape[some[0]]), epoch.length or len(some)) for some in epoch.order]
        firsts = [epoch.order[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
        with contextlib.closing(self._here_and_now(epoch._replace(order=firsts), 0)) as found:
            return [jax.tree.map(_struct, self.yielded(batches)) for batches in found]

    def largest(self, epoch: Epoch) -> Batches:
        """The first batch of an epoch, padded to the largest shape, in host memory.

        Raises:
            ValueError: the epoch has no batches.
        """
        if not len(epoch.planned.shape):
            raise ValueError("Loader.largest: got a loader without batches; expected at least one.")
        number = max(range(len(self._shapes.all)), key=lambda i: sum(shape.vertices for shape in self._shapes.all[i]))
        planned = epoch.planned._replace(shape=np.full_like(epoch.planned.shape, number))
        first = Epoch(epoch.number, planned, [np.zeros(1, int)], None)
        with contextlib.closing(self._on_host(first, 0)) as found:
            return next(found)

    def describe_shapes(self, epoch: Epoch | None) -> list[str]:
        """A line for each shape: its size, and if there is an epoch, its batches and their padding."""
        lines = []
        for number, shape in enumerate(self._shapes.all):
            rows, times = sum(one.vertices for one in shape), 0 if epoch is None else int((epoch.planned.shape == number).sum())
            padding = f", {100 * self._padding(epoch, number):.0f} % padding" if epoch is not None and times else ""
            size = f"{counted(shape[0].graphs, 'graph')}, {counted(rows, 'vertex')}"
            lines.append(f"  shape of {size}: {counted(times, 'batch')} of this epoch{padding}")
        return lines

    def _padding(self, epoch: Epoch, number: int) -> float:
        """The fraction of padding of an epoch's batches of one shape."""
        mine = np.flatnonzero((epoch.planned.shape == number).repeat(self.units))
        used = sum(
            int(np.diff(m.graphs.vertex_offsets)[np.concatenate([graphs[i] for i in mine])].sum())
            for m, graphs in zip(self._members, epoch.planned.graphs, strict=True)
        )
        return 1 - used / (len(mine) * sum(one.vertices for one in self._shapes.all[number]))

    def _schedules(self, planned: Planned, m: int, parts: list[int], workers: int) -> Iterator[tuple[Graphs, Schedule]]:
        member = self._members[m]
        asked = ((planned.graphs[m][part], int(planned.shape[part // self.units])) for part in parts)
        return planned_schedules(member.graphs, asked, member.options._replace(fixed=self._shapes.fixed(m)), workers)

    def _collated(self, numbers: np.ndarray, present: np.ndarray, found: Sequence[tuple[Graphs, Schedule]]) -> PyTree:
        graphs, scheds = zip(*found, strict=True)
        several = self._several
        sample = Sample(numbers, present, graphs if several else graphs[0], scheds if several else scheds[0])
        if self._settings.collate is not None:
            return self._settings.collate(sample)
        if not present.all():
            for member, sched in zip(self._members, scheds, strict=True):
                if member.pick is None and "label" in sched.shape.fields:
                    sizes = np.diff(sched.graph_end, prepend=0)
                    sched.label[: sizes.sum()][~present.repeat(sizes)] = -1
        return sample.sched


def _struct(x: Any) -> Any:
    """The shape and dtype of an array; a Python number as it is."""
    if not isinstance(x, np.ndarray | np.generic | jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
