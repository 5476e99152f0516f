"""`Loader`: the batches of an epoch, shuffled, scheduled, padded to a few shapes, and sent to the device ahead of time."""

import contextlib
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
from jax.sharding import Mesh

from cavs._feed.at_exit import closed_at_exit
from cavs._feed.batches import Batches
from cavs._feed.choose_shapes import choose_shapes
from cavs._feed.delivery import Delivery, Epoch
from cavs._feed.epoch_plans import EpochPlans
from cavs._feed.given import MSG_OTHER_BATCHES, MSG_TWO_LOOPS, position_of
from cavs._feed.plan import Shapes, plan
from cavs._feed.sampler import Sampler
from cavs._feed.settings import (
    Sample,
    Settings,
    Source,
    background_of,
    checked,
    members_of,
    most_workers,
    partial_stacks,
    steps_for,
)
from cavs._feed.stream import Stream
from cavs._graphs.checks import Index
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._schedule.tasks import LAZY_WINDOW

LONG_WAIT = 0.05  # more processes are started if the loop waited for longer than this fraction of an epoch


class Loader:
    """Yields the batches of one epoch after another.

    ```python
    loader = cavs.data.Loader(graphs, 64)
    for epoch in range(loader.epoch, 10):
        for batches in loader:
            state, metrics = step(state, batches)             # a function decorated with @cavs.data.step
    ```

    Each `for` loop is one epoch. A batch is a [`cavs.Schedule`][] that includes words and labels (`fields`), or a tuple of
    schedules for several data sets, or what `collate` returns.

    All batches are padded to at most three shapes (`shapes`), which are chosen before the first batch is scheduled: most take
    the first one, and a smaller last batch has one of its own. Larger shapes are for batches that may never come.

    The order of an epoch depends on `seed` and the number of the epoch alone. `state` returns the position and `restore`
    continues from it, with the same batches bit for bit, also in another process.

    After a `break` or an exception, the next loop starts the next epoch. Processes and threads that worked for the abandoned
    loop are used again by the next one, and end with the graphs. A loader runs one loop at a time.

    Args:
        graphs: the data set; or a sequence of data sets of equal lengths, such as sentences and reversed sentences. For a pair
            `(graphs, pick)` in it, `pick(samples)` returns the graphs of a batch, the same number for each batch.
        batches: the number of graphs of a batch; or an iterable of integer arrays, the graphs of each batch. An iterator may
            be infinite: each loop continues it where the loop before was left.
        seed: shuffles every epoch. `None`: all epochs are alike, in the order of the data unless `group` says otherwise.
        fields: the fields of the graphs that the schedules include; by default `input_id` and `label`, if there are such.
        collate: `collate(sample)` returns the pytree of NumPy arrays of a batch, from a `Sample` with the attributes `numbers`,
            `present`, `graphs` and `sched`. By default `sample.sched`.
        group: "balanced" draws batches of nearly equal numbers of vertices, which need the fewest shapes and the least
            padding; "similar" puts graphs of similar sizes into a batch; "random" draws them independently of their sizes.
            `None`: "balanced", or without a seed the order of the data.
        last: what to do if the graphs do not fill the last batch: "short" yields a smaller one, "drop" leaves them out, and
            "pad" fills up with copies of the smallest graph. Their labels are -1 and must not count in the loss; `collate`
            sees them in `sample.present`.
        shapes: the most padded shapes, each compiled when it first occurs; or a loader of the same graphs, to use its shapes.
        steps: training steps in one dispatch. `None`: about 16 on a GPU, up to 8 on a CPU if batches are small, and 1 for a
            mesh of CPU devices. With `steps=1` the loader yields single batches without the class `Batches`, also for functions
            under plain `jax.jit`.
        workers: processes that schedule. `None`: by the device, and more of them if the training loop waits for batches.
        ahead: dispatches that a thread prepares and sends ahead of the loop, also of the next epoch; 0 for no thread. `None`: 2
            on a GPU, else 0.
        mesh: a mesh of one axis. Each batch is dealt to its devices, with equal numbers of graphs and about equal costs.
        parts: each batch is dealt to this many parts of one shape, in the same way. Its arrays have a leading axis of parts,
            for [`cavs.memory.sub_batched`][], and `collate` gets one part at a time. `None`: no such axis.
        policy: as in [`cavs.schedule`][].
        kinds: as in [`cavs.schedule`][].
        window: as in [`cavs.schedule`][].

    Raises:
        TypeError, ValueError: an argument is invalid.

    Attributes:
        epoch: the number of the epoch that the next loop runs; within a loop, that of this loop.
        batch: the number of batches of this epoch that the loop has received.
        seen: the number of batches that all loops have received, with those before the position that `restore` was given.
        waited: seconds that loops waited for batches in this epoch.
    """

    def __init__(
        self,
        graphs: Source | Sequence[Source],
        batches: int | Iterable[Index],
        *,
        seed: int | None = 0,
        fields: Sequence[str] | None = None,
        collate: Callable[[Sample], PyTree] | None = None,
        group: str | None = None,
        last: str = "short",
        shapes: "int | Loader" = 3,
        steps: int | None = None,
        workers: int | None = None,
        ahead: int | None = None,
        mesh: Mesh | None = None,
        parts: int | None = None,
        policy: str = "batching",
        kinds: bool = True,
        window: int = LAZY_WINDOW,
    ):
        self._members, several = members_of(graphs, fields, policy, kinds, window)
        of_samples = [m.graphs for m in self._members if m.pick is None]
        sizes = np.sum([np.diff(g.vertex_offsets) for g in of_samples], 0)
        known, most = (shapes, 1) if isinstance(shapes, Loader) else (None, shapes)
        group = group or ("random" if seed is None else "balanced")  # "random" without a seed is the order of the data
        given = Settings(batches, seed, collate, group, last, most, steps, workers, ahead, mesh, parts)
        self._settings = checked(given, self._members, len(sizes))
        self._sampler = Sampler(self._settings, sizes)
        self._shapes = Shapes(self._members) if known is None else known._shapes.shared(self._members)
        self._delivery = Delivery(self._members, several, self._shapes, self._settings)
        self._delivery.workers, self._delivery.ahead = background_of(self._settings)
        self._steps = self._settings.steps or 1
        if self._sampler.known and len(self):
            if known is None:
                choose_shapes(self._shapes, self._sampler, self._settings, self._delivery.units)
            if self._settings.steps is None:
                first = len(self._sampler.batches(0)[0])
                self._steps = steps_for(self._settings, first * float(sizes.mean()), first, len(self))
        self.epoch, self.batch, self.seen, self.waited = 0, 0, 0, 0.0
        self._seconds, self._restored = 0.0, False
        self._running: object = None  # the loop that began last, if no position was restored since
        self._stream: Stream | None = None
        self._plans = EpochPlans()

    def __len__(self) -> int:
        """The number of batches of an epoch.

        Raises:
            TypeError: the batches come from an iterator.
        """
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return closed_at_exit(self._loop())

    def state(self) -> dict[str, int]:
        """The position: how many batches loops have received so far, as a dict of ints that JSON can store."""
        order = self._planned(self.epoch).checksum if self._sampler.known else 0
        return {"epoch": self.epoch, "batch": self.batch, "seen": self.seen, "steps": self._steps, "order": order}

    def restore(self, state: Mapping[str, SupportsIndex]) -> None:
        """Continues at a position: the next loop yields the rest of its epoch. A loop that is running ends.

        Args:
            state: what `state` returned, here or in another process. If the batches come from an iterator, this loader was
                created with a new one.

        Raises:
            ValueError: `state` is not a position; or it is within an epoch, and this loader yields other batches than the one
                that was saved.
        """
        position = position_of(state)
        before, self._stream, self._plans = self._steps, None, EpochPlans()
        if self._settings.steps is None and position["batch"]:
            self._steps = position["steps"]
        planned = self._planned(position["epoch"]) if position["batch"] and self._sampler.known else None
        if planned and (position["order"] != planned.checksum or position["batch"] > len(self)):
            self._steps, self._plans = before, EpochPlans()
            raise ValueError(MSG_OTHER_BATCHES)
        self.epoch, self.batch, self.seen = (position[name] for name in ("epoch", "batch", "seen"))
        self._restored, self._running = True, None

    def examples(self) -> list[PyTree]:
        """The batches of this epoch as `jax.ShapeDtypeStruct`s: one of each shape, in the order in which they occur."""
        plan = self._plans.latest(self.epoch)
        if plan is None and self._sampler.known:
            plan = self._planned(self.epoch)
        return [] if plan is None else self._delivery.examples(plan)

    @property
    def steps(self) -> int:
        """The training steps of one dispatch."""
        return self._steps

    @property
    def on_device(self) -> int:
        """The most batches that are on the device at the same time."""
        return self._steps * (1 + self._delivery.ahead)

    def largest(self) -> PyTree:
        """A batch padded to the largest shape, as NumPy arrays. Raises a `TypeError` if the batches come from an iterator."""
        len(self)
        return self._delivery.largest(self._planned(self.epoch)).tree

    def _planned(self, epoch: int) -> Epoch:
        return self._plans.of(epoch, self.epoch, lambda: self._plan(epoch, self._sampler.batches(epoch)))

    def _plan(self, epoch: int, batches: list[np.ndarray]) -> Epoch:
        planned = plan(self._members, self._shapes, batches, self._sampler.sizes, self._delivery.units)
        return Epoch.of(epoch, planned, self._steps, partial_stacks(self._settings.mesh))

    def _epochs(self) -> Iterator[Epoch]:
        """The rest of this epoch, in parts that are planned together."""
        if self._sampler.known:
            yield self._planned(self.epoch).after(self.batch)
            return
        for some, received in self._sampler.chunks(self.batch, self.seen):
            if (planned := self._plan(self.epoch, some).after(received)).order:
                yield planned

    def _batches_of_epoch(self) -> Iterator[Batches]:
        """The rest of this epoch, on the device. Closing the iterator ends a thread that prepares it."""
        if not (self._delivery.ahead and self._sampler.known and len(self)):
            for epoch in self._epochs():
                with contextlib.closing(self._delivery.of(epoch)) as found:  # type: ignore[type-var]
                    yield from found
            return
        stream, self._stream = self._stream, None
        if stream is None or self.batch or not stream.begins(self.epoch):
            stream = closed_at_exit(Stream(self._delivery, self._planned(self.epoch).after(self.batch), _planning(self)))
        try:
            yield from stream.epoch()
        except BaseException:
            stream.close()
            raise
        self._stream = stream

    def _loop(self) -> Generator[Any, None, None]:
        if self.batch and not self._restored:  # the loop before was left early
            self.epoch, self.batch = self.epoch + 1, 0
        self._restored, self._running = False, (this := object())
        begun, self.waited = time.perf_counter(), 0.0
        with contextlib.closing(self._batches_of_epoch()) as found:  # type: ignore[type-var]
            while True:
                asked = time.perf_counter()
                batches = next(found, None)
                self.waited += time.perf_counter() - asked
                if batches is None:
                    break
                self.batch, self.seen = self.batch + len(batches), self.seen + len(batches)
                batches._loader = weakref.ref(self)
                yield self._delivery.yielded(batches)
                del batches  # not kept while waiting for the next one
                if self._running is None:  # the next loop begins at the position that was restored
                    return
                if self._running is not this:
                    raise RuntimeError(MSG_TWO_LOOPS)
                self._seconds = time.perf_counter() - begun
        self.epoch, self.batch = self.epoch + 1, 0
        if self._settings.workers is None and self.waited > LONG_WAIT * self._seconds:
            self._delivery.workers = max(self._delivery.workers, min(2 * self._delivery.workers or 1, most_workers()))

    def __repr__(self) -> str:
        s, delivery = self._settings, self._delivery
        graphs = counted(len(self._sampler.sizes), "graph")
        lines = [f"Loader of {graphs}, batches of {self._sampler}, {s.group}, seed {s.seed}"]
        units = counted(delivery.units, "device" if s.parts is None else "part")
        waits = f"{counted(delivery.workers, 'process')}, {counted(self._steps, 'step')} per dispatch, "
        waits += f"{counted(delivery.ahead, 'dispatch')} sent ahead; {units}"
        share = f"waited {self.waited:.2f} s of {self._seconds:.2f} s" if self._seconds else "no loop yet"
        lines += [f"  {waits}", f"  epoch {self.epoch}, batch {self.batch}; {share}"]
        return "\n".join([*lines, *delivery.describe_shapes(self._plans.latest(self.epoch))])


def _planning(loader: Loader) -> Callable[[int], Epoch | None]:
    """Returns a function that plans an epoch of the loader, or returns `None` if the loader no longer exists."""
    this = weakref.ref(loader)  # the thread of a stream must not keep the loader

    def planned(number: int) -> Epoch | None:
        loader = this()
        return None if loader is None else loader._planned(number)

    return planned
