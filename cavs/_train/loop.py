"""The loop over epochs and batches: prefetching, evaluation, the best checkpoint, stopping and going on."""

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
from cavs._train import checkpoint
from cavs._train.batches import Prepare, epoch_batches, strata
from cavs._train.config import Config, TrainError
from cavs._train.data import Data
from cavs._train.model import Weights
from cavs._train.step import State, Sums, make_evaluate, make_step
from cavs._train.stop import Stop
from cavs._train.task import Model, find

# Seconds between saves within a long epoch.
SAVE_EVERY = 300.0
# Steps whose metrics are not waited for, so that the device has work while the host looks.
IN_FLIGHT = 8
PREFETCH = 4
EVALUATION_BATCHES = 4  # an evaluation batch is this many training batches


class Watcher(Protocol):
    """Whoever shows the progress."""

    def step(self, done: "Progress", steps: int, sums: dict[str, float]) -> None:
        """A step ended."""

    def epoch(self, record: dict[str, Any], best: bool) -> None:
        """An epoch ended."""


@dataclasses.dataclass
class Progress:
    """Where a run stands, as JSON beside the saved state.

    `step` batches of epoch `epoch` (from 0) are done, `sums` their metrics; `history` one record an epoch.
    """

    epoch: int = 0
    step: int = 0
    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @staticmethod
    def from_json(value: Any, count: int, steps: int) -> "Progress":
        """What was saved beside a state after `count` steps, of an epoch of `steps`.

        **Raises:** `TrainError` where it cannot be that.
        """
        try:
            progress = Progress(**value)
            records = [progress.sums, *(record[part] for record in progress.history for part in ("train", "dev"))]
            numbers = [progress.seconds, *(x for record in records for x in record.values())]
            right = (
                all(type(x) is int for x in (progress.epoch, progress.step))
                and 0 <= progress.step <= steps
                and progress.epoch * steps + progress.step == count
                and [record["epoch"] for record in progress.history] == [*range(1, progress.epoch + 1)]
                and all(isinstance(x, (int, float)) for x in (*numbers, *(r["seconds"] for r in progress.history)))
            )
        except (TypeError, KeyError, AttributeError):
            right = False
        if not right:
            raise checkpoint.DamagedError(f"the progress is not that of a run after {count} steps, {steps} an epoch.")
        return progress

    def best(self, config: Config) -> dict[str, Any] | None:
        """The record of the best epoch so far, the earliest of equals."""
        return max(self.history, key=lambda record: find(config.task).score(record["dev"], config), default=None)


class Trainer:
    """A run: the model, its data and its folder. `fit` trains until done or stopped.

    `run` names the run in every file that it writes; `notes` are what `resume` has to say.
    """

    def __init__(self, config: Config, data: Data, model: Model, folder: Path, run: str | None = None):
        self.config, self.data, self.model, self.folder = config, data, model, folder
        self.run = run or uuid.uuid4().hex
        self.notes: list[str] = []
        self.task = find(config.task)
        self._preparers: dict[int, Any] = {}
        self.step, self.evaluation = make_step(model, config), make_evaluate(model)

    def fit(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        """Trains on from `state` and `progress`, which is updated; saves at each epoch's end and when stopped."""
        config = self.config
        while not stop and not self.is_done(progress):
            state = self._epoch(state, progress, stop, watcher)
            if stop and progress.step < self.steps:
                break
            record = {
                "epoch": progress.epoch + 1,
                "seconds": progress.seconds,
                "train": progress.sums,
                "dev": self.evaluate(state.weights, self.data.dev),
            }
            progress.history.append(record)
            progress.epoch, progress.step, progress.sums, progress.seconds = progress.epoch + 1, 0, {}, 0.0
            best = progress.best(config) is record
            if best:
                about = {"run": self.run, "epoch": record["epoch"], "dev": record["dev"]}
                checkpoint.save(self.folder, "best", state.weights, about, int(state.count))
            watcher.epoch(record, best)
            self.save(state, progress)
        if stop:
            self.save(state, progress)
        return state

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        return -(-len(self.data.train) // min(self.config.batch, len(self.data.train)))

    def is_done(self, progress: Progress) -> bool:
        """All epochs done, or no better score for `patience` epochs."""
        best = progress.best(self.config)
        waited = 0 if best is None else progress.epoch - best["epoch"]
        return progress.epoch >= self.config.epochs or bool(self.config.patience) and waited >= self.config.patience

    def _epoch(self, state: State, progress: Progress, stop: Stop, watcher: Watcher) -> State:
        grid, prepare = self._batches(progress.epoch)[progress.step :], self._preparer(self.data.train, self._batches(0))
        made = prepare(grid, workers=int(jax.default_backend() == "gpu"))
        before, spent = time.monotonic(), progress.seconds
        saved, flying = before, _Flying()

        def land() -> None:
            progress.sums = flying.land(progress.sums)
            if not math.isfinite(progress.sums["nll"]):
                raise TrainError(
                    f"the loss became {progress.sums['nll']} in epoch {progress.epoch + 1}, step {progress.step}; wanted a "
                    "finite one: try a smaller --lr or --clip."
                )

        with contextlib.closing(prefetch(made, _sent, PREFETCH)) as batches:
            for batch in batches:
                state, metrics = self.step(state, batch)
                flying.start(metrics)
                progress.step += 1
                if len(flying) > IN_FLIGHT:
                    land()
                now = time.monotonic()
                progress.seconds = spent + now - before
                watcher.step(progress, self.steps, progress.sums)
                if stop or now - saved > SAVE_EVERY:
                    while flying:
                        land()
                    if stop:
                        break
                    self.save(state, progress)
                    saved = time.monotonic()
        while flying:
            land()
        progress.seconds = spent + time.monotonic() - before
        return state

    def _preparer(self, part: Any, grid: np.ndarray) -> Prepare:
        # Made once a part: of the batches of its first epoch, whichever epoch a resumed run begins with.
        if id(part) not in self._preparers:
            self._preparers[id(part)] = self.task.preparer(self.model, part, grid)
        return self._preparers[id(part)]

    def _batches(self, epoch: int) -> np.ndarray:
        return epoch_batches(self.task.sizes(self.data.train), self.config.batch, self.config.seed, epoch)

    def evaluate(self, weights: Weights, part: Any) -> dict[str, float]:
        """Sums of metrics over samples, without dropout."""
        grid = strata(self.task.sizes(part), EVALUATION_BATCHES * self.config.batch, None)
        sums: dict[str, float] = {}
        flying = _Flying()
        with contextlib.closing(prefetch(self._preparer(part, grid)(grid), _sent, PREFETCH)) as batches:
            for batch in batches:
                flying.start(self.evaluation(weights, batch))
                if len(flying) > IN_FLIGHT:
                    sums = flying.land(sums)
        while flying:
            sums = flying.land(sums)
        return sums

    def save(self, state: State, progress: Progress) -> None:
        """Saves what `resume` needs; what was saved before is kept too."""
        about = {"run": self.run, "versions": checkpoint.versions(), "progress": dataclasses.asdict(progress)}
        checkpoint.save(self.folder, "last", state, about, int(state.count), keep=True)

    def resume(self, like: State) -> tuple[State, Progress]:
        """The state and progress last saved; where these are damaged, those saved before them."""
        try:
            state, progress, about = self._saved("last", like)
        except checkpoint.DamagedError as error:
            try:
                state, progress, about = self._saved(f"last{checkpoint.BEFORE}", like)
            except TrainError:
                raise error from None
            self.notes.append(f"{error} Going on with what was saved before it, last{checkpoint.BEFORE}.json.")
            # Saved again, so that the next save does not keep the damaged one.
            checkpoint.save(self.folder, "last", state, about, int(state.count))
        saved, here = about.get("versions"), checkpoint.versions()
        if saved != here:
            self.notes.append(f"saved with {_shown(saved)}, gone on with by {_shown(here)}: bits may differ.")
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
        """How often step and evaluation were compiled: once for each shape of schedule."""
        step, evaluation = (getattr(f, "_cache_size", lambda: 0)() for f in (self.step, self.evaluation))
        return step, evaluation


class _Flying(collections.deque[Sums]):
    """Metrics on their way to the host, in order."""

    def start(self, metrics: Sums) -> None:
        metrics.values.copy_to_host_async()
        self.append(metrics)

    def land(self, total: dict[str, float]) -> dict[str, float]:
        """`total` with the first of them."""
        return self.popleft().added_to(total)


def _sent(batch: Any) -> Packed:
    return jax.device_put(pack(batch))


def _shown(versions: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else "others"
