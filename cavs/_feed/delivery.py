"""From the plan of an epoch to batches on the device: schedules, `collate`, stacks, transfers."""

import functools
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cavs._feed.batches import Batches, joined, send, struct_of
from cavs._feed.plan import Epoch, Member, Planned
from cavs._feed.settings import Sample, Settings, threads_of
from cavs._feed.shapes import Shapes
from cavs._feed.thread import prefetch
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._schedule.batches import StackScheduler
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape


def _unshared(x: Any, stacks: Sequence[np.ndarray]) -> Any:
    """Returns a copy of an array of `collate`, which may fill the same one again while this batch waits on the thread.

    `stacks`: the integers of the schedules of a dispatch, which are new.
    """
    is_new = not isinstance(x, np.ndarray) or any(np.may_share_memory(x, stack) for stack in stacks)
    return x if is_new else x.copy()


class Delivery:
    """How a loader turns plans into batches.

    Attributes:
        units: the devices to which a batch is dealt, or its parts.
    """

    def __init__(self, members: Sequence[Member], several: bool, shapes: Shapes, settings: Settings):
        self._members, self._several, self._shapes, self._settings = members, several, shapes, settings
        how = threads_of(settings), settings.target.is_gpu
        self._schedulers = [StackScheduler(m.graphs, m.options, *how) for m in members]
        mesh = settings.mesh
        self.units = settings.units
        me = jax.process_index()
        processes = [me] * self.units if mesh is None else [d.process_index for d in mesh.devices.flat]
        self._here = [i for i, process in enumerate(processes) if process == me]
        self._axis = None if mesh is None and settings.parts is None else len(self._here)

    def of(self, epoch: Epoch) -> Iterator[Batches]:
        """Yields the batches of an epoch, in order. Those of a mesh are on its devices."""
        batches = self._on_host(epoch)
        return batches if self._settings.mesh is None else map(send, batches)

    def ahead(self, epochs: Iterator[Epoch], depth: int) -> Generator[Batches | None, None, None]:
        """Yields the batches of several epochs, on the device, and `None` after each epoch. A thread schedules them.

        Closing the iterator ends the thread.

        `epochs`: the epochs; runs on the thread. `depth`: the most batches that wait.
        """

        def on_host() -> Generator[Batches | None, None, None]:
            for epoch in epochs:
                yield from self._on_host(epoch)
                yield None

        return prefetch(on_host(), lambda batches: None if batches is None else send(batches), depth)

    def _on_host(self, epoch: Epoch) -> Iterator[Batches]:
        return (self._dispatch(epoch, batches.tolist()) for batches in epoch.order)

    def _dispatch(self, epoch: Epoch, batches: list[int]) -> Batches:
        """Schedules `batches` of an epoch, which have one shape, and collates them, in host memory."""
        planned, count = epoch.planned, epoch.length or (None if len(batches) == 1 else len(batches))
        axes = tuple(n for n in (count, self._axis) if n is not None)
        parts = [batch * self.units + unit for batch in batches for unit in self._here]
        graphs = [[numbers[part] for part in parts] for numbers in planned.graphs]
        shapes, room = self._shapes.all[int(planned.shape[batches[0]])], math.prod(axes)
        stacks = [s.stack(numbers, shape, room) for s, numbers, shape in zip(self._schedulers, graphs, shapes, strict=True)]
        for i, part in enumerate(parts):
            if part in planned.present:
                self._remove_labels([stack[i] for stack in stacks], shapes, planned.present[part])
        if self._settings.collate is None:
            of_members = zip(stacks, shapes, strict=True)
            tree = self._one_or_several([Schedule(stack.reshape(*axes, -1), shape) for stack, shape in of_members])
        else:
            tree = joined((self._collated(planned, part, [s[i] for s in stacks], shapes) for i, part in enumerate(parts)), axes)
            tree = tree if axes else jax.tree.map(functools.partial(_unshared, stacks=stacks), tree)  # a stack is a copy
        return Batches(tree, count, self._settings.mesh, np.int32(len(batches)) if self._counts(epoch, len(batches)) else None)

    def _counts(self, epoch: Epoch, batches: int) -> bool:
        """Returns whether the program of a stack runs as many batches as a value says.

        One program then runs any number of them. On a GPU the host waits for that value at each step, and a CUDA graph cannot
        contain several steps, so full stacks have a program of their own.
        """
        return epoch.length is not None and not (self._settings.target.is_gpu and batches == epoch.length)

    def _collated(self, planned: Planned, part: int, data: Sequence[np.ndarray], shapes: Sequence[Shape]) -> PyTree:
        """Calls `collate` for one batch, or one of its parts; `data` are the integers of its schedules."""
        numbers, scheds = planned.samples[part], list(map(Schedule, data, shapes))
        picked = [(m.graphs, by_part[part]) for m, by_part in zip(self._members, planned.graphs, strict=True)]

        def select() -> Any:
            return self._one_or_several([graphs[indices] for graphs, indices in picked])

        assert self._settings.collate is not None
        present = planned.present.get(part, np.ones(len(numbers), bool))
        return self._settings.collate(Sample(numbers, present, select, self._one_or_several(scheds)))

    def _one_or_several(self, of_members: Sequence[Any]) -> Any:
        return tuple(of_members) if self._several else of_members[0]

    def _remove_labels(self, batch: Sequence[np.ndarray], shapes: Sequence[Shape], present: np.ndarray) -> None:
        """Sets the labels of stand-ins to -1, in the integers of a batch's schedules."""
        for member, data, shape in zip(self._members, batch, shapes, strict=True):
            if member.pick is None and "label" in shape.fields:
                sched = Schedule(data, shape)
                sizes = np.diff(sched.graph_end, prepend=0)
                sched.label[: sizes.sum()][~present.repeat(sizes)] = -1

    def yielded(self, batches: Batches) -> PyTree:
        """Returns what a loop over the loader gets."""
        return batches.stack if self._settings.steps == 1 and self._settings.mesh is None else batches

    def programs(self, epoch: Epoch) -> list[tuple[int, int, bool]]:
        """Returns what XLA compiles for each dispatch of an epoch: shape number, length of the stack, and `_counts`."""
        pairs = ((int(epoch.planned.shape[numbers[0]]), len(numbers)) for numbers in epoch.order)
        return [(shape, epoch.length or batches, self._counts(epoch, batches)) for shape, batches in pairs]

    def describe_programs(self, programs: Iterable[tuple[int, int, bool]]) -> str:
        """Returns a text such as "64 graphs of 1728 vertices, 8 in a dispatch"."""
        sizes = sorted({(number, length) for number, length, _ in programs})
        entries = ((counted(self._shapes.all[i][0].graphs, "graph"), self._shapes.rows(i), length) for i, length in sizes)
        return " and ".join(f"{graphs} of {rows} vertices, {length} in a dispatch" for graphs, rows, length in entries)

    def examples(self, epoch: Epoch) -> list[PyTree]:
        """Returns what a loop over an epoch gets, as `jax.ShapeDtypeStruct`s: one of each shape, in the order of the epoch."""
        kinds = self.programs(epoch)
        firsts = [epoch.order[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
        delivered = self.of(epoch._replace(order=firsts))
        return [jax.tree.map(struct_of, self.yielded(batches)) for batches in delivered]

    def largest(self, epoch: Epoch) -> Batches:
        """Returns a batch of an epoch, padded to the largest shape that one of its batches fits, in host memory.

        Raises `ValueError` if the epoch has no batches.
        """
        planned = epoch.planned
        if not len(planned.shape):
            raise ValueError("Loader.largest: got a loader without batches; expected at least one.")
        for number in sorted(range(len(self._shapes.all)), key=self._shapes.rows, reverse=True):
            # Others may have another number of graphs, or more vertices in one of several data sets.
            if (fitting := np.flatnonzero(self._shapes.fitting(number, planned.graphs, self.units))).size:
                break
        planned = planned._replace(shape=np.full_like(planned.shape, number))
        return self._dispatch(Epoch(epoch.number, planned, [], None), [int(fitting[0])])

    def describe_shapes(self, epoch: Epoch | None) -> list[str]:
        """Returns a line for each shape: its size, and if there is an epoch, its batches and their padding."""
        lines = []
        for number, shape in enumerate(self._shapes.all):
            rows, padding = self._shapes.rows(number), ""
            parts = [] if epoch is None else np.flatnonzero((epoch.planned.shape == number).repeat(self.units))
            if epoch is not None and len(parts):
                pairs = zip(self._members, epoch.planned.graphs, strict=True)
                used = sum(m.graphs._facts.sizes[np.concatenate([numbers[i] for i in parts])].sum() for m, numbers in pairs)
                padding = f", {100 * (1 - used / (len(parts) * rows)):.0f} % padding"
            size = f"{counted(shape[0].graphs, 'graph')}, {counted(rows, 'vertex')}"
            lines.append(f"  shape of {size}: {counted(len(parts) // self.units, 'batch')} of this epoch{padding}")
        return lines
