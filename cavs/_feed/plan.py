"""Plans the batches of a loader: the graphs of each on each device, its shape, the order, and the position in it."""

import operator
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._schedule.shape_choice import Options

POSITION = ("epoch", "batch", "seen", "steps", "order")  # the keys of a saved position
MSG_OTHER_BATCHES = (
    "Loader.restore: state: got the position of a loader with other batches; expected one of the same graphs, batch size, "
    "seed, group, shapes and steps. At the end of an epoch (batch 0) these may change."
)
MSG_TWO_LOOPS = (
    "Loader: got another loop over this loader before this one ended; expected one at a time, as they share its position. "
    "Create a second loader; with shapes=loader it has the same shapes."
)

Pick: TypeAlias = Callable[[np.ndarray], np.ndarray]


class Member(NamedTuple):
    """One data set of a batch."""

    graphs: Graphs  # the data set
    # Maps the samples of a batch, (B,) ints, to a fixed number of graphs of this data set; `None` if sample i is graph i.
    pick: Pick | None
    options: Options  # the options of its schedules

    def picked(self, samples: np.ndarray) -> np.ndarray:
        """Returns the graphs of a batch."""
        return samples if self.pick is None else self.pick(samples)


class Planned(NamedTuple):
    """K batches on D devices."""

    samples: list[np.ndarray]  # of each batch and device, the samples
    # Of batches and devices with stand-ins, by their place in `samples`, which samples are not stand-ins, (B,) bool.
    present: dict[int, np.ndarray]
    graphs: list[list[np.ndarray]]  # of each member, the graphs of each batch and device, K * D arrays, batch by batch
    shape: np.ndarray  # (K,) the number of the shape of each batch, the same on all devices


class Epoch(NamedTuple):
    """The batches of an epoch, or of a part of it, and the order in which they run."""

    number: int  # the number of the epoch
    planned: Planned  # all its batches
    order: list[np.ndarray]  # the batches of each dispatch, indices into `planned.shape`
    length: int | None  # the length of each stack, if it may have fewer batches; else `None`

    @staticmethod
    def of(number: int, planned: Planned, steps: int, partial: bool) -> "Epoch":
        """Joins batches of equal shapes, `steps` in each dispatch; if `partial`, fewer in the last one of a shape."""
        return Epoch(number, planned, dispatches(planned.shape, steps, partial), steps if partial and steps > 1 else None)

    def after(self, batches: int) -> "Epoch":
        """Returns the rest of the epoch, after `batches` batches."""
        ends = np.cumsum([len(dispatch) for dispatch in self.order])
        first = int(np.searchsorted(ends, batches, side="right"))
        remaining = self.order[first:]
        if remaining and (begun := batches - int(ends[first]) + len(remaining[0])):
            remaining[0] = remaining[0][begun:]  # on several devices, batches of a stack that is not full run one by one
        return self._replace(order=remaining)

    @property
    def checksum(self) -> int:
        """A checksum of all batches in the order in which they run, on any number of devices."""
        samples = self.planned.samples
        units = len(samples) // max(len(self.planned.shape), 1)
        batches = [np.sort(np.concatenate(samples[i : i + units])) for i in range(0, len(samples), max(units, 1))]
        return zlib.crc32(np.concatenate([np.zeros(0, int), *self.order, *batches]).astype(np.int64).tobytes())


class EpochPlans:
    """Plans by the number of their epoch. Planning may add shapes, so one thread at a time plans."""

    def __init__(self) -> None:
        self._plans: dict[int, Epoch] = {}
        self._lock, self._made_in = threading.Lock(), os.getpid()

    def of(self, number: int, now: int, make: Callable[[], Epoch]) -> Epoch:
        """Returns the plan of an epoch, which `make` creates if there is none. Epochs before `now` are forgotten."""
        if self._made_in != os.getpid():  # a fork does not have the thread that may have held the lock
            self._lock, self._made_in = threading.Lock(), os.getpid()
        with self._lock:
            plan = self._plans.get(number)
            if plan is None:
                plan = make()
                self._plans = {n: p for n, p in self._plans.items() if n >= now} | {number: plan}
            return plan

    def latest(self, number: int) -> Epoch | None:
        """Returns the plan of an epoch; if there is none, the plan of the epoch before, or `None`."""
        plans = self._plans
        return plans.get(number, next(iter(plans.values()), None))


def dealt(sizes: np.ndarray, devices: int) -> np.ndarray:
    """Deals the samples of a batch, of `sizes` (B,), to devices: the same number, at about the same cost, for each.

    Returns (devices, B / devices) indices into the batch.
    """
    by_size = np.argsort(-sizes, kind="stable").reshape(-1, devices)
    by_size[1::2] = by_size[1::2, ::-1].copy()  # in alternating directions, so that no device always gets the largest
    return np.ascontiguousarray(by_size.T)


def plan_samples(
    batches: Sequence[np.ndarray], sizes: np.ndarray, devices: int
) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Deals batches to devices.

    Returns `samples` and `present` of `Planned`. `batches`: the samples of each batch. A row may end with -1: the smallest
    sample stands in for it. `sizes`: the cost of each sample. `devices`: the number of devices, or of parts. Raises
    `ValueError` if a batch cannot be dealt equally.
    """
    smallest = int(sizes.argmin())
    samples: list[np.ndarray] = []
    present: dict[int, np.ndarray] = {}
    for batch in batches:
        if len(batch) % devices:
            raise ValueError(
                f"Loader: batches: got a batch of {counted(len(batch), 'graph')} for {devices} devices or parts; expected a "
                "multiple of their number."
            )
        mask = None
        if batch[-1] < 0:
            mask = batch >= 0
            batch = np.where(mask, batch, smallest)
        for part in dealt(sizes[batch], devices) if devices > 1 else (slice(None),):
            if mask is not None:
                present[len(samples)] = mask[part]
            samples.append(batch[part])
    return samples, present


def position_of(state: Any) -> dict[str, int]:
    """Returns a saved position as a dict of ints. Raises `ValueError` if `state` is not a position."""
    try:
        position = {name: operator.index(state[name]) for name in POSITION} if isinstance(state, Mapping) else {}
    except (KeyError, TypeError):
        position = {}
    if not position or min(position["epoch"], position["batch"], position["seen"]) < 0 or position["steps"] < 1:
        raise ValueError(
            f"Loader.restore: state: got {state!r:.200}; expected what Loader.state() returned, a dict of the integers "
            f"{', '.join(POSITION)}."
        )
    return position


def dispatches(shape: Sequence[int] | np.ndarray, steps: int, partial: bool = False) -> list[np.ndarray]:
    """Returns the order in which batches run: consecutive batches of one shape together, `steps` at a time, and then the rest.

    Returns:
        The numbers of the batches of each dispatch. Batches of one shape keep their order. The order of all batches does not
        depend on `partial`, so that a position saved on one device is valid on several.

    `shape`: the number of the shape of each batch. `steps`: batches of a dispatch. `partial`: whether the rest of a shape runs
    in one dispatch; otherwise one by one.
    """
    shapes = np.asarray(shape)
    whole: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for number in np.unique(shapes):
        of_shape = np.flatnonzero(shapes == number)
        end = len(of_shape) // steps * steps
        whole += [*of_shape[:end].reshape(-1, steps)]
        rest += [of_shape[end:]] if end < len(of_shape) else []
    whole, rest = sorted(whole, key=lambda dispatch: dispatch[-1]), sorted(rest, key=lambda dispatch: dispatch[0])
    return whole + (rest if partial else [dispatch[i : i + 1] for dispatch in rest for i in range(len(dispatch))])
