"""`Loader`: the batches of an epoch, shuffled, scheduled, padded to a few shapes, and sent to the device ahead of time."""

import contextlib
import inspect
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, SupportsIndex, TypeAlias, TypedDict, TypeVar, Unpack, overload

import numpy as np
from jax.sharding import Mesh

from cavs._feed.batches import Batch, Batches
from cavs._feed.delivery import Delivery
from cavs._feed.plan import MSG_OTHER_BATCHES, MSG_TWO_LOOPS, Epoch, EpochPlans, Planned, position_of
from cavs._feed.sampler import Sampler
from cavs._feed.settings import Sample, Settings, Source, checked, members_of, refuse_others, steps_on_cpu, steps_on_gpu
from cavs._feed.shapes import Shapes, choose_shapes
from cavs._feed.thread import Stream, closed_at_exit, until_end
from cavs._graphs.checks import Index, check_bool
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.batches import compiled
from cavs._schedule.schedule import Schedule
from cavs.kernels import Target

Given: TypeAlias = int | Iterable[Index]
Sources: TypeAlias = Sequence[Source]
Schedules: TypeAlias = tuple[Schedule, ...]
One: TypeAlias = Callable[[Sample[Graphs, Schedule]], Batch]
Many: TypeAlias = Callable[[Sample[tuple[Graphs, ...], Schedules]], Batch]
Yielded = TypeVar("Yielded")  # what a loop over a loader gets


class LoaderOptions(TypedDict, total=False):
    """The arguments of `Loader` on which the type of what it yields does not depend."""

    seed: int | None
    fields: Sequence[str] | None
    group: str | None
    last: str
    shapes: "int | Loader"
    ahead: int | None
    parts: int | None
    policy: str
    kinds: bool | str | None
    shuffle: bool


class StackedOptions(LoaderOptions, total=False):
    """The arguments of a `Loader` that yields `Batches`."""

    steps: int | None
    mesh: Mesh | None


class Loader(Generic[Yielded]):
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
    continues from it, with the same batches bit for bit, also in another process. So does a copy, or a pickle, of a loader.

    After a `break` or an exception, the next loop starts the next epoch. A loader runs one loop at a time.

    Args:
        graphs: the data set; or a sequence of data sets of equal lengths, such as sentences and reversed sentences. For a pair
            `(graphs, pick)` in it, `pick(samples)` returns the graphs of a batch, the same number for each batch.
        batches: the number of graphs of a batch; or an iterable of integer arrays, the graphs of each batch. An iterator may
            be infinite: each loop continues it where the loop before was left.
        seed: shuffles every epoch. `None`: all epochs are alike, in the order of the data unless `group` says otherwise.
        shuffle: `False` is `seed=None`.
        fields: the fields of the graphs that the schedules include; by default `input_id` and `label`, if there are such. If
            vertices have labels, but no root has one, write the fields, to confirm that the loss is not of roots.
        collate: `collate(sample)` returns the pytree of NumPy arrays of a batch, from a `Sample` with the attributes `numbers`,
            `present`, `graphs`, `sched` and `rows`. By default `sample.sched`; if the graphs have features `x`,
            `(sample.sched, sample.rows)`.
        group: "balanced" draws batches of nearly equal numbers of vertices, which need the fewest shapes and the least
            padding; "similar" puts graphs of similar sizes into a batch; "random" draws them independently of their sizes.
            `None`: "balanced", or without a seed the order of the data.
        last: what to do if the graphs do not fill the last batch: "short" yields a smaller one, "drop" leaves them out, and
            "pad" fills up with copies of the smallest graph. Their labels are -1 and must not count in the loss; `collate`
            sees them in `sample.present`.
        shapes: the most padded shapes, each compiled when it first occurs; or a loader of the same graphs, to use its shapes.
        steps: training steps in one dispatch. `None`: about 16 to 64 on a GPU (with `collate` 16; twice as many if a batch has
            few graphs), up to 8 on a CPU if batches are small, and 1 for a mesh of CPU devices. With `steps=1` the loader
            yields single batches without the class `Batches`, also for functions under plain `jax.jit`.
        ahead: dispatches that a thread prepares ahead of the loop, also of the next epoch; 0 for no thread. `None`: 2
            on a GPU, else 0. What `collate` raises on the thread, the loop raises, after all batches before it.
        mesh: a mesh of one axis. Each batch is dealt to its devices, with equal numbers of graphs and about equal costs.
        parts: each batch is dealt to this many parts of one shape, in the same way. Its arrays have a leading axis of parts,
            for [`cavs.memory.sub_batched`][], and `collate` gets one part at a time. `None`: no such axis.
        policy: as in [`cavs.schedule`][].
        kinds: as in [`cavs.schedule`][].

    For a type checker, a loop yields `Batches[Schedule]`, with `steps=1` a `Schedule`, or in its place what `collate` returns.
    A checker cannot see that graphs have features: write
    `cavs.data.Loader[tuple[cavs.Schedule, jax.Array]](graphs, 64, steps=1)`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Attributes:
        epoch: the number of the epoch that the next loop runs; within a loop, that of this loop.
        batch: the number of batches of this epoch that the loop has received.
        seen: the number of batches that all loops have received, with those before the position that `restore` was given.
        waited: seconds that loops waited for batches in this epoch.
    """

    @overload
    def __init__(
        self: "Loader[Schedule]", graphs: Source, batches: Given, *, steps: Literal[1], **how: Unpack[LoaderOptions]
    ): ...
    @overload
    def __init__(self: "Loader[Batches[Schedule]]", graphs: Source, batches: Given, **how: Unpack[StackedOptions]): ...
    @overload
    def __init__(
        self: "Loader[Schedules]", graphs: Sources, batches: Given, *, steps: Literal[1], **how: Unpack[LoaderOptions]
    ): ...
    @overload
    def __init__(self: "Loader[Batches[Schedules]]", graphs: Sources, batches: Given, **how: Unpack[StackedOptions]): ...
    @overload
    def __init__(
        self: "Loader[Batch]",
        graphs: Source,
        batches: Given,
        *,
        collate: One[Batch],
        steps: Literal[1],
        **how: Unpack[LoaderOptions],
    ): ...
    @overload
    def __init__(
        self: "Loader[Batches[Batch]]", graphs: Source, batches: Given, *, collate: One[Batch], **how: Unpack[StackedOptions]
    ): ...
    @overload
    def __init__(
        self: "Loader[Batch]",
        graphs: Sources,
        batches: Given,
        *,
        collate: Many[Batch],
        steps: Literal[1],
        **how: Unpack[LoaderOptions],
    ): ...
    @overload
    def __init__(
        self: "Loader[Batches[Batch]]", graphs: Sources, batches: Given, *, collate: Many[Batch], **how: Unpack[StackedOptions]
    ): ...
    @overload
    def __init__(self, graphs: Source | Sources, batches: Given, *, collate: Any = None, **how: Unpack[StackedOptions]): ...
    def __init__(
        self,
        graphs: Source | Sources,
        batches: Given | None = None,
        *,
        seed: int | None = 0,
        fields: Sequence[str] | None = None,
        collate: Callable[[Any], PyTree] | None = None,
        group: str | None = None,
        last: str = "short",
        shapes: "int | Loader" = 3,
        steps: int | None = None,
        ahead: int | None = None,
        mesh: Mesh | None = None,
        parts: int | None = None,
        policy: str = "batching",
        kinds: bool | str | None = None,
        shuffle: bool = True,
        **others: Any,
    ):
        of_subclass = {*vars(self)}  # what a subclass has set already
        fields = tuple(fields) if isinstance(fields, Iterator) else fields  # read for each data set, and by copies
        self._arguments = {name: x for name, x in locals().items() if name not in ("self", "others", "of_subclass")}
        refuse_others(others, inspect.signature(type(self)).parameters)
        check_bool("Loader: shuffle", shuffle)
        seed = seed if shuffle else None
        self._members, several = members_of(graphs, batches, fields, policy, kinds, collate is not None)
        of_samples = [m.graphs for m in self._members if m.pick is None]
        sizes = np.sum([np.diff(g.vertex_offsets) for g in of_samples], 0)
        like, most = (shapes, 1) if isinstance(shapes, Loader) else (None, shapes)
        if group is None:
            group = "random" if seed is None else "balanced"  # "random" without a seed is the order of the data
        settings = Settings(batches, seed, collate, group, last, most, steps, ahead, mesh, parts, Target.here())
        self._settings = checked(settings, self._members, len(sizes))
        self._sampler = Sampler(self._settings, sizes)
        self._shapes = Shapes(self._members) if like is None else like._shapes.shared(self._members)
        self._delivery = Delivery(self._members, several, self._shapes, self._settings)
        self._ahead = self._settings.ahead or 0
        self._steps = self._settings.steps or 1
        self._plans = EpochPlans()
        if self._sampler.known and len(self):
            if like is None:
                choose_shapes(self._shapes, self._sampler, self._settings)
            if self._settings.steps is None:
                self._choose_steps(float(sizes.mean()))
        self.epoch, self.batch, self.seen, self.waited = 0, 0, 0, 0.0
        self._seconds, self._restored = 0.0, False
        self._received = 0  # the batches that loops over this loader have received; `seen` also counts those before a restore
        self._running: object = None  # the loop that began last, if no position was restored since
        self._stream: Stream | None = None
        self._programs: set[tuple[int, int, bool]] | None = None  # of the epochs so far
        self._told = False
        self._own = {*vars(self)} - of_subclass

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, such as those for another process, are created anew and continue at the position.

        They have the attributes of a subclass, whose `__init__` does not run again.

        Raises:
            TypeError: the batches come from an iterator, of which both would get a part; or a pickle would hold a mesh.
        """
        if isinstance(self._settings.batches, Iterator):
            raise TypeError(
                "Loader: got a copy or a pickle of a loader whose batches come from an iterator; expected batches that can be "
                "read again. Write Loader(graphs, [*batches]), or create a second loader with a new iterator."
            )
        arguments = self._arguments | {"mesh": _MeshOfCopies(self._settings.mesh)}
        state: Any = object.__getstate__(self)  # a pair if the class of a subclass has slots
        attributes, in_slots = state if isinstance(state, tuple) else (state, {})
        others = {name: x for name, x in attributes.items() if name not in self._own and not name.startswith("__")} | in_slots
        return _copied, (type(self), arguments, others, self.state())

    def __len__(self) -> int:
        """Returns the number of batches of an epoch.

        Raises:
            TypeError: the batches come from an iterator.
        """
        return len(self._sampler)

    def __iter__(self) -> Iterator[Yielded]:
        return closed_at_exit(self._loop())

    def state(self) -> dict[str, int]:
        """Returns the position: how many batches loops have received so far, as a dict of ints that JSON can store."""
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
        old_steps, self._stream, self._plans = self._steps, None, EpochPlans()
        if self._settings.steps is None and position["batch"]:
            self._steps = position["steps"]
        planned = self._planned(position["epoch"]) if position["batch"] and self._sampler.known else None
        if planned and (position["order"] != planned.checksum or position["batch"] > len(self)):
            self._steps, self._plans = old_steps, EpochPlans()
            raise ValueError(MSG_OTHER_BATCHES)
        self.epoch, self.batch, self.seen = (position[name] for name in ("epoch", "batch", "seen"))
        self._restored, self._running = True, None

    def examples(self) -> list[PyTree]:
        """Returns the batches of this epoch as `jax.ShapeDtypeStruct`s: one of each shape, in the order in which they occur."""
        return self._delivery.examples(self._planned(self.epoch)) if self._sampler.known else []

    @property
    def steps(self) -> int:
        """The training steps of one dispatch."""
        return self._steps

    @property
    def on_device(self) -> int:
        """The most batches that are on the device at the same time: of this dispatch, of the next, and of the one before."""
        return self._steps * (3 if self._ahead else 1)

    def largest(self) -> PyTree:
        """Returns a batch in the largest shape, as NumPy arrays. Raises a `TypeError` if the batches come from an iterator."""
        len(self)
        return self._delivery.largest(self._planned(self.epoch)).stack

    def _choose_steps(self, vertices: float) -> None:
        """Chooses the training steps of a dispatch. `vertices`: the mean number of vertices of a sample."""
        batches = self._sampler.batches(0)
        size = len(batches[0])
        if not self._settings.target.is_gpu:
            self._steps = steps_on_cpu(self._settings, size * vertices, len(batches))
            return
        planned = self._shapes.plan(batches, self._sampler.sizes, self._delivery.units)
        self._steps = steps_on_gpu(self._settings, size * vertices, size, np.bincount(planned.shape))
        self._plans.of(0, 0, lambda: self._epoch(0, planned))

    def _planned(self, epoch: int) -> Epoch:
        return self._plans.of(epoch, self.epoch, lambda: self._plan(epoch, self._sampler.batches(epoch)))

    def _plan(self, epoch: int, batches: list[np.ndarray]) -> Epoch:
        return self._epoch(epoch, self._shapes.plan(batches, self._sampler.sizes, self._delivery.units))

    def _epoch(self, number: int, planned: Planned) -> Epoch:
        # In a mesh the batches that are left over run one by one.
        return Epoch.of(number, planned, self._steps, partial=self._settings.mesh is None)

    def _epochs(self) -> Iterator[Epoch]:
        """Yields the rest of this epoch, in parts that are planned together."""
        if self._sampler.known:
            yield self._planned(self.epoch).after(self.batch)
            return
        for batches, received in self._sampler.chunks(self.batch, self.seen):
            if (planned := self._plan(self.epoch, batches).after(received)).order:
                self._tell_late_shapes(planned)
                yield planned

    def _batches_of_epoch(self) -> Generator[Batches, None, None]:
        """Yields the rest of this epoch. Closing the iterator ends a thread that prepares it."""
        if self._sampler.known:
            self._tell_late_shapes(self._planned(self.epoch))
        if not self._ahead:
            for epoch in self._epochs():
                yield from self._delivery.of(epoch)
        elif self._sampler.known and len(self):
            yield from self._from_stream()
        else:
            for epoch in self._epochs():
                with contextlib.closing(closed_at_exit(self._delivery.ahead(iter([epoch]), self._ahead))) as batches:
                    yield from until_end(batches)

    def _tell_late_shapes(self, epoch: Epoch) -> None:
        """Logs a line, once, if an epoch after the first has batches of a new shape, which compile: training seems to hang."""
        programs = {*self._delivery.programs(epoch)}
        new = programs - (programs if self._programs is None else self._programs)
        self._programs = programs | (self._programs or set())
        if new and not self._told:
            self._told = True
            logging.getLogger("cavs").warning(
                "Loader: epoch %d has the first batches of %s, which a training step compiles when it gets them. To compile "
                "in the first epoch only, write Loader(..., shapes=1): one shape, with more padding.",
                epoch.number,
                self._delivery.describe_programs(new),
            )

    def _from_stream(self) -> Generator[Batches, None, None]:
        """Yields the rest of this epoch, from a thread that then prepares the next one."""
        stream, self._stream = self._stream, None
        if stream is None or (stream.epoch, 0, stream.process) != (self.epoch, self.batch, os.getpid()):
            epochs = itertools.chain(
                [self._planned(self.epoch).after(self.batch)], _planned_after(self.epoch, weakref.ref(self))
            )
            stream = Stream(self.epoch, closed_at_exit(self._delivery.ahead(epochs, self._ahead)), os.getpid())
        try:
            yield from until_end(stream.items)
        except BaseException:
            stream.items.close()
            raise
        self._stream = stream._replace(epoch=stream.epoch + 1)

    def _loop(self) -> Generator[Any, None, None]:
        if self.batch and not self._restored:  # the loop before was left early
            self.epoch, self.batch = self.epoch + 1, 0
        self._restored, self._running = False, (this := object())
        begun, self.waited = time.perf_counter(), 0.0
        with contextlib.closing(self._batches_of_epoch()) as of_epoch:
            while True:
                start = time.perf_counter()
                batches = next(of_epoch, None)
                self.waited += time.perf_counter() - start
                if batches is None:
                    break
                self.batch, self.seen = self.batch + len(batches), self.seen + len(batches)
                self._received += len(batches)
                batches._loader = weakref.ref(self)
                yield self._delivery.yielded(batches)
                del batches  # not kept while waiting for the next one
                if self._running is None:  # the next loop begins at the position that was restored
                    return
                if self._running is not this:
                    raise RuntimeError(MSG_TWO_LOOPS)
                self._seconds = time.perf_counter() - begun
        self.epoch, self.batch = self.epoch + 1, 0

    def __repr__(self) -> str:
        s, delivery = self._settings, self._delivery
        graphs = counted(len(self._sampler.sizes), "graph")
        in_numpy = ", scheduled in NumPy, as kernels/_cpu was not compiled" * (not compiled())
        order = "in the order of the data" if s.seed is None and s.group == "random" else f"{s.group}, seed {s.seed}"
        lines = [f"Loader of {graphs}, batches of {self._sampler}, {order}"]
        units = counted(delivery.units, "device" if s.parts is None else "part")
        ahead = f"{counted(self._ahead, 'dispatch')} prepared ahead{in_numpy}"
        share = f"waited {self.waited:.2f} s of {self._seconds:.2f} s" if self._seconds else "no loop yet"
        lines += [
            f"  {counted(self._steps, 'step')} per dispatch, {ahead}; {units}",
            f"  epoch {self.epoch}, batch {self.batch}; {share}",
        ]
        return "\n".join([*lines, *delivery.describe_shapes(self._plans.latest(self.epoch))])


class _MeshOfCopies:
    """The mesh of a loader that is copied, but not pickled: its devices exist in this process."""

    def __init__(self, mesh: Mesh | None):
        self.mesh = mesh

    def __deepcopy__(self, memo: Any) -> "_MeshOfCopies":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mesh is None:
            return _MeshOfCopies, (None,)
        raise TypeError(
            "Loader: mesh: got a pickle of a loader with a mesh, whose devices are those of this process; expected none. "
            "Pickle loader.state(), and write Loader(..., mesh=mesh) and restore(state) in the other process."
        )


def _copied(kind: type[Loader], arguments: dict[str, Any], others: dict[str, Any], position: dict[str, int]) -> Loader:
    loader = kind.__new__(kind)
    for name, x in others.items():
        object.__setattr__(loader, name, x)
    Loader.__init__(loader, **arguments | {"mesh": arguments["mesh"].mesh})
    loader.restore(position)
    return loader


def _planned_after(number: int, loader: "weakref.ref[Loader]") -> Iterator[Epoch]:
    """Yields the epochs after the one with this number, while the loader exists: the thread that runs this must not keep it."""
    for later in itertools.count(number + 1):
        this = loader()
        if this is None:
            return
        epoch = this._planned(later)
        del this
        yield epoch
