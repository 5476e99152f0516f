"""The loop over epochs and batches: evaluation, the best checkpoint, stopping and resuming."""

import contextlib
import dataclasses
import functools
import math
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

import jax

from cavs._feed.loader import Loader
from cavs._graphs.counted import counted
from cavs._train import checkpoint
from cavs._train.config import Config, TrainError
from cavs._train.data import Data, Samples
from cavs._train.devices import mesh_of, replicated, shaped, told, writes
from cavs._train.log import RunLog
from cavs._train.memory import part_feed, plan_memory, total_steps, train_loader
from cavs._train.model import Weights
from cavs._train.step import State, build_evaluation, build_step
from cavs._train.stop import Stop
from cavs._train.sums import IN_FLIGHT, PendingMetrics, sums_of
from cavs._train.task import Model, Sums, find_task

EVALUATION = "evaluation"  # the name of this program
# Seconds between saves within a long epoch.
SAVE_EVERY = 300.0


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
            raise checkpoint.DamagedError(
                f"progress: got a value that does not fit {counted(count, 'step')}, {counted(steps, 'step')} per epoch."
            )
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
        self.run = run or told(uuid.uuid4().hex)
        self.notes: list[str] = []
        self.task = find_task(config.task)
        self.mesh = mesh_of(config)
        self.memory = plan_memory(config, model, self.task, data)
        choice = self.memory.choice
        feed = part_feed(self.task, model, data.train, config.batch, choice)
        self.loader = train_loader(feed, config, choice, self.mesh)
        self._evaluated: dict[int, Loader] = {}
        self.log = None if config.log == "none" or not writes() else RunLog(config.log, folder, self.loader)
        self.step = build_step(model, config, self.total, choice, self.memory.compiler_options)
        self.evaluation = build_evaluation(model)

    def fit(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        """Trains from `state` and `progress`, which is updated in place. Saves after each epoch and when stopped."""
        with contextlib.nullcontext() if self.log is None else self.log.steps(int(state.count)):
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
        if self.log is not None:
            score = self.task.score(record["dev"], self.config)
            self.log.evaluated(int(state.count), record["epoch"], record["dev"], score)
        self.save(state, progress)

    def _place(self, progress: Progress) -> float:
        """The place in the run, in epochs."""
        return round(progress.epoch + progress.step / self.steps, 6)

    @property
    def total(self) -> int:
        """The number of batches of the whole run."""
        return total_steps(self.config, self.loader)

    @property
    def steps(self) -> int:
        """The number of batches per epoch."""
        return len(self.loader)

    def is_done(self, progress: Progress) -> bool:
        """Whether all epochs are done, or the score has not improved for `patience` epochs."""
        best = progress.best(self.config)
        waited = 0 if best is None else progress.epoch - best["epoch"]
        if progress.epoch * self.steps + progress.step >= self.total:
            return True
        return progress.epoch >= self.config.epochs or bool(self.config.patience) and waited >= self.config.patience

    def _epoch(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        last = self.total - progress.epoch * self.steps
        self._place_loader(progress)
        before, spent = time.monotonic(), progress.seconds
        saved, pending = before, PendingMetrics()

        def add(left: int = 0) -> None:
            progress.sums = pending.added_to(progress.sums, left)
            if not math.isfinite(progress.sums.get("nll", 0)):
                raise TrainError(
                    f"loss: got {progress.sums['nll']} in epoch {progress.epoch + 1}, step {progress.step}; expected a finite "
                    "value. Try a smaller --lr or --clip."
                )

        for batches in self.loader:
            state, metrics = self.step(state, batches)
            pending.copy_to_host(metrics)
            if self.log is not None:
                self.log.add(metrics, self.loader.batch - progress.step)
            progress.step = self.loader.batch
            add(IN_FLIGHT)
            now = time.monotonic()
            progress.seconds = spent + now - before
            watcher.step(progress, self.steps, progress.sums)
            every = self.config.save_every
            due = bool(every) and progress.step % every == 0 and progress.step < self.steps
            if stop or due or now - saved > SAVE_EVERY:
                add()
                if due:
                    self._evaluate(state, progress, watcher)
                elif not stop:
                    self.save(state, progress)
                saved = time.monotonic()
                before += saved - now
            if stop or progress.step >= last:
                break
        add()
        progress.seconds = spent + time.monotonic() - before
        return state

    def _place_loader(self, progress: Progress, saved: dict[str, int] | None = None) -> None:
        """Lets the next loop over the loader begin at a place, that of the position `saved` if it is given."""
        if progress.step or self.loader.batch or self.loader.epoch != progress.epoch:
            position = self.loader.state() if saved is None else saved
            self.loader.restore(position | {"epoch": progress.epoch, "batch": progress.step})

    def compile_ahead(self, like: State) -> None:
        """Compiles the steps and the evaluation of the held-out data on a thread, unless there are several processes.

        On CPUs several processes may do so, too, but gain nothing if they share the cores. On GPUs they exchange the times of
        kernels while they compile, each with its GPU to itself, and it has not been tried whether sums over the GPUs may wait
        for one another meanwhile.

        Args:
            like: the state as `jax.ShapeDtypeStruct`s.
        """
        if jax.process_count() == 1:
            like = shaped(like, self.mesh)
            evaluation = functools.partial(self._lower_evaluation, like.weights)
            self.step.compile_ahead(like, self.loader.examples(), {EVALUATION: evaluation})

    def _lower_evaluation(self, weights: Weights) -> Any:
        return self.evaluation.lower(weights, self._batches(self.data.dev).examples()[0])

    def _batches(self, part: Samples) -> Loader:
        if id(part) not in self._evaluated:
            batch = self.memory.evaluation
            self._evaluated[id(part)] = self.task.feed(self.model, part, batch).loader(batch, mesh=self.mesh)
        return self._evaluated[id(part)]

    def evaluate(self, weights: Weights, part: Samples) -> Sums:
        """The summed metrics of a part of the data, without dropout."""
        self.step.background.wait(EVALUATION)
        return sums_of(self.evaluation, replicated(weights, self.mesh), self._batches(part))

    def save(self, state: State, progress: Progress) -> None:
        """Saves what `resume` needs. The previous save is kept, too."""
        done, position = dataclasses.asdict(progress), self.loader.state()
        about = {"run": self.run, "versions": checkpoint.versions(), "progress": done, "loader": position}
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
        try:
            self._place_loader(progress, about["loader"])
        except (ValueError, KeyError, TypeError) as error:
            raise TrainError(f"--resume: {self.folder} stopped within an epoch of other batches. {error}") from error
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
        return self.step.compilations, getattr(self.evaluation, "_cache_size", lambda: 0)()


def _shown(versions: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "other versions"
