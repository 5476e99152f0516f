"""The loop over epochs and batches: prefetching, evaluation, the best checkpoint, stopping and resuming."""

import collections
import contextlib
import dataclasses
import math
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from cavs._feed.packed import Packed, pack
from cavs._feed.prefetch import prefetch
from cavs._graphs.pytree import PyTree
from cavs._train import checkpoint
from cavs._train.batches import Prepare, epoch_batches, strata
from cavs._train.config import Config, TrainError
from cavs._train.data import Data, Samples
from cavs._train.model import Weights
from cavs._train.step import DeviceMetrics, State, build_evaluation, build_step
from cavs._train.stop import Stop
from cavs._train.task import Model, Sums, find_task

# Seconds between saves within a long epoch.
SAVE_EVERY = 300.0
# The host waits for the metrics of a step only this many steps later, so that the device never idles.
IN_FLIGHT = 8
PREFETCH = 4
EVALUATION_BATCHES = 4  # an evaluation batch has the size of this many training batches


class Watcher(Protocol):
    """An object that shows the progress of training."""

    def step(self, done: "Progress", steps: int, sums: Sums) -> None:
        """Called after each step."""

    def epoch(self, record: dict[str, Any], best: bool) -> None:
        """Called after each epoch."""


@dataclasses.dataclass
class Progress:
    """The progress of a run, saved as JSON beside the state.

    Attributes:
        epoch: the current epoch, from 0.
        step: the number of finished batches of this epoch.
        sums: the summed metrics of these batches.
        seconds: the time spent in this epoch.
        history: one record per finished epoch.
        within: the records of evaluations within epochs; their `epoch` is a fraction.
    """

    epoch: int = 0
    step: int = 0
    sums: Sums = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    within: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records, in the order of time."""
        return sorted((*self.history, *self.within), key=lambda record: record["epoch"])

    @staticmethod
    def from_json(value: Any, count: int, steps: int) -> "Progress":
        """Restores the progress of a run after `count` steps, with `steps` steps per epoch.

        Raises:
            DamagedError: the value is not the progress of such a run.
        """
        try:
            progress = Progress(**value)
            records = [progress.sums, *(record[part] for record in progress.records for part in ("train", "dev"))]
            numbers = [progress.seconds, *(x for record in records for x in record.values())]
            right = (
                all(type(x) is int for x in (progress.epoch, progress.step))
                and 0 <= progress.step <= steps
                and progress.epoch * steps + progress.step == count
                and [record["epoch"] for record in progress.history] == [*range(1, progress.epoch + 1)]
                and all(isinstance(x, (int, float)) for x in (*numbers, *(r["seconds"] for r in progress.records)))
            )
        except (TypeError, KeyError, AttributeError):
            right = False
        if not right:
            raise checkpoint.DamagedError(f"progress: got a value that does not fit {count} steps, {steps} steps per epoch.")
        return progress

    def best(self, config: Config) -> dict[str, Any] | None:
        """The record of the best epoch so far; of equal scores the earliest."""
        return max(self.records, key=lambda record: find_task(config.task).score(record["dev"], config), default=None)


class Trainer:
    """A run: the model, its data and its folder. `fit` trains until done or stopped.

    Attributes:
        run: the identifier of the run, stored in every file that it writes.
        notes: messages of `resume` for the user.
    """

    def __init__(self, config: Config, data: Data, model: Model, folder: Path, run: str | None = None):
        self.config, self.data, self.model, self.folder = config, data, model, folder
        self.run = run or uuid.uuid4().hex
        self.notes: list[str] = []
        self.task = find_task(config.task)
        self._preparers: dict[int, Prepare] = {}
        self.step, self.evaluation = build_step(model, config, self.total), build_evaluation(model)

    def fit(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        """Trains from `state` and `progress`, which is updated in place. Saves after each epoch and when stopped."""
        while not stop and not self.is_done(progress):
            state = self._epoch(state, progress, stop, watcher)
            if progress.step < self.steps:
                break
            self._evaluate(state, progress, watcher)
        if not stop and progress.step and not (progress.within and progress.within[-1]["epoch"] == self._place(progress)):
            self._evaluate(state, progress, watcher)  # --max-steps ends within an epoch
        if stop:
            self.save(state, progress)
        return state

    def _evaluate(self, state: State, progress: Progress, watcher: Watcher) -> None:
        """Evaluates at the end of an epoch or within it, keeps the best weights, and saves."""
        whole = progress.step == self.steps
        record = {
            "epoch": progress.epoch + 1 if whole else self._place(progress),
            "seconds": progress.seconds,
            "train": progress.sums,
            "dev": self.evaluate(state.weights, self.data.dev),
        }
        (progress.history if whole else progress.within).append(record)
        if whole:
            progress.epoch, progress.step, progress.sums, progress.seconds = progress.epoch + 1, 0, {}, 0.0
        best = progress.best(self.config) is record
        if best:
            about = {"run": self.run, "epoch": record["epoch"], "dev": record["dev"]}
            checkpoint.save(self.folder, "best", state.weights, about, int(state.count))
        watcher.epoch(record, best)
        self.save(state, progress)

    def _place(self, progress: Progress) -> float:
        """The place in the run, in epochs."""
        return round(progress.epoch + progress.step / self.steps, 6)

    @property
    def total(self) -> int:
        """The number of batches of the whole run."""
        total = self.config.epochs * self.steps
        return min(total, self.config.max_steps or total)

    @property
    def steps(self) -> int:
        """The number of batches per epoch."""
        return -(-len(self.data.train) // min(self.config.batch, len(self.data.train)))

    def is_done(self, progress: Progress) -> bool:
        """Whether all epochs are done, or the score has not improved for `patience` epochs."""
        best = progress.best(self.config)
        waited = 0 if best is None else progress.epoch - best["epoch"]
        if progress.epoch * self.steps + progress.step >= self.total:
            return True
        return progress.epoch >= self.config.epochs or bool(self.config.patience) and waited >= self.config.patience

    def _epoch(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        last = self.total - progress.epoch * self.steps
        grid, prepare = self._batches(progress.epoch)[progress.step : last], self._preparer(self.data.train, self._batches(0))
        host_batches = prepare(grid, workers=int(jax.default_backend() == "gpu"))
        before, spent = time.monotonic(), progress.seconds
        saved, pending = before, _PendingMetrics()

        def add_oldest() -> None:
            progress.sums = pending.add_oldest_to(progress.sums)
            if not math.isfinite(progress.sums["nll"]):
                raise TrainError(
                    f"loss: got {progress.sums['nll']} in epoch {progress.epoch + 1}, step {progress.step}; expected a finite "
                    "value. Try a smaller --lr or --clip."
                )

        with contextlib.closing(prefetch(host_batches, _send, PREFETCH)) as batches:
            for batch in batches:
                state, metrics = self.step(state, batch)
                pending.copy_to_host(metrics)
                progress.step += 1
                if len(pending) > IN_FLIGHT:
                    add_oldest()
                now = time.monotonic()
                progress.seconds = spent + now - before
                watcher.step(progress, self.steps, progress.sums)
                every = self.config.save_every
                due = bool(every) and progress.step % every == 0 and progress.step < self.steps
                if stop or due or now - saved > SAVE_EVERY:
                    while pending:
                        add_oldest()
                    if due:
                        self._evaluate(state, progress, watcher)
                    if stop:
                        break
                    if not due:
                        self.save(state, progress)
                    saved = time.monotonic()
                    before += saved - now
        while pending:
            add_oldest()
        progress.seconds = spent + time.monotonic() - before
        return state

    def _preparer(self, part: Samples, grid: np.ndarray) -> Prepare:
        # Created once per part from the batches of the first epoch, even if a resumed run starts in a later epoch.
        if id(part) not in self._preparers:
            self._preparers[id(part)] = self.task.preparer(self.model, part, grid)
        return self._preparers[id(part)]

    def _batches(self, epoch: int) -> np.ndarray:
        return epoch_batches(self.task.sizes(self.data.train), self.config.batch, self.config.seed, epoch)

    def evaluate(self, weights: Weights, part: Samples) -> Sums:
        """The summed metrics of a part of the data, without dropout."""
        grid = strata(self.task.sizes(part), EVALUATION_BATCHES * self.config.batch, None)
        sums: Sums = {}
        pending = _PendingMetrics()
        with contextlib.closing(prefetch(self._preparer(part, grid)(grid), _send, PREFETCH)) as batches:
            for batch in batches:
                pending.copy_to_host(self.evaluation(weights, batch))
                if len(pending) > IN_FLIGHT:
                    sums = pending.add_oldest_to(sums)
        while pending:
            sums = pending.add_oldest_to(sums)
        return sums

    def save(self, state: State, progress: Progress) -> None:
        """Saves what `resume` needs. The previous save is kept, too."""
        about = {"run": self.run, "versions": checkpoint.versions(), "progress": dataclasses.asdict(progress)}
        checkpoint.save(self.folder, "last", state, about, int(state.count), keep=True)

    def resume(self, like: State) -> tuple[State, Progress]:
        """Loads the last save, or the save before it if the last one is damaged."""
        try:
            state, progress, about = self._saved("last", like)
        except checkpoint.DamagedError as error:
            try:
                state, progress, about = self._saved(f"last{checkpoint.BEFORE}", like)
            except TrainError:
                raise error from None
            self.notes.append(f"{error} Resuming from the save before it, last{checkpoint.BEFORE}.json.")
            # Save again, so that the next save does not keep the damaged one.
            checkpoint.save(self.folder, "last", state, about, int(state.count))
        saved, here = about.get("versions"), checkpoint.versions()
        if saved != here:
            self.notes.append(f"saved with {_shown(saved)}, resumed with {_shown(here)}: results may not be bitwise equal.")
        return state, progress

    def _saved(self, name: str, like: State) -> tuple[State, Progress, dict[str, Any]]:
        state, about = checkpoint.load(self.folder, name, like, self.run)
        state = State(*state)
        try:
            return state, Progress.from_json(about.get("progress"), int(state.count), self.steps), about
        except checkpoint.DamagedError as error:
            raise checkpoint.DamagedError(f"{self.folder}/{name}.json: {error}") from None

    @property
    def compilations(self) -> tuple[int, int]:
        """How often the step and the evaluation were compiled: once per schedule shape."""
        step, evaluation = (getattr(f, "_cache_size", lambda: 0)() for f in (self.step, self.evaluation))
        return step, evaluation


class _PendingMetrics(collections.deque[DeviceMetrics]):
    """A queue of metrics that are being copied to the host."""

    def copy_to_host(self, metrics: DeviceMetrics) -> None:
        """Starts an asynchronous copy."""
        metrics.values.copy_to_host_async()
        self.append(metrics)

    def add_oldest_to(self, total: Sums) -> Sums:
        """Removes the oldest metrics, waits for them, and adds them to `total`."""
        return self.popleft().added_to(total)


def _send(batch: PyTree) -> Packed:
    return jax.device_put(pack(batch))


def _shown(versions: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "other versions"
