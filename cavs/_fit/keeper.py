"""`Keeper`: the best and the last checkpoint of a training loop, early stopping, interrupts, and exact resuming."""

import contextlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np

from cavs._feed.loader import Loader
from cavs._fit.evaluate import IN_FLIGHT, PendingSums, Sums
from cavs._fit.kept import (
    BEFORE,
    BEST,
    FACTS,
    HISTORY,
    LAST,
    DamagedError,
    Evaluated,
    KeeperError,
    NextEpoch,
    checked_facts,
    fingerprint,
    in_step,
    locked,
    rank,
    read_checkpoint,
    read_run,
    restore_best,
    signals_to,
    told,
    versions,
    write_facts,
    writes,
)
from cavs._fit.report import json_of
from cavs._function.arrays import is_real
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_type
from cavs._graphs.files import check_path, write_whole
from cavs._graphs.pytree import PyTree
from cavs._interop.checkpoint import save_checkpoint

SAVE_EVERY = 300.0  # seconds between saves within an epoch


class Keeper:
    """Keeps the best and the last checkpoint of a training loop in a folder, and continues the loop bit for bit.

    ```python
    accuracy = lambda sums: sums["right"] / sums["count"]
    with cavs.data.Keeper("runs/a", loader, accuracy, epochs=20, patience=5) as keeper:
        state = keeper.restore(state)                                 # the state of the last save, if there is one
        for batches in keeper:                                        # the rest of all epochs
            state, sums = step(state, batches)
            if keeper.add(state, sums):                               # at the end of an epoch
                keeper.score(state, cavs.data.evaluate(metrics, state[0], held_out), best=state[0])
    params = keeper.restore_best(params)
    ```

    The folder contains

    - `last.npz`: the state, the position of the loader and the history ([`cavs.io.save_checkpoint`][]), saved at the end of
      each epoch, every five minutes, and when the loop is stopped; `last-before.npz`, the save before, for the case that it
      is damaged;
    - `best.npz`: what had the best score;
    - `history.json`: the metrics of each evaluation, with null for NaN and infinity;
    - `model.json`: the `facts`, and the identifier of the run, which its checkpoints also have.

    Within the `with` block, outside of which a keeper writes nothing, no other process can train in the folder, and Ctrl-C or
    SIGTERM stops the loop after the current step and saves. A second one interrupts at once. If there are several processes,
    all of them call everything, and the first one writes.

    Args:
        folder: the folder of the run, which is created.
        loader: the loader of the training batches.
        score: maps the held-out metrics to a number. The evaluation with the highest is kept; NaN is the lowest.
        epochs: how often the data is passed over.
        steps: the most training steps in all; 0 for no limit. The loader needs `steps=1`.
        patience: stops if the score has not become better for this many epochs; 0 never stops early.
        every: training steps of an epoch after which `add` returns `True` within the epoch as well; 0 for never. The loader
            needs `steps=1`.
        facts: anything about the run as JSON, such as its configuration and vocabulary, for [`cavs.data.read_run`][].
        files: the files of the data. A run is not resumed if one of them has changed.

    Raises:
        TypeError, ValueError: an argument is something else.
        KeeperError: another process trains in the folder, when the block begins.
        OSError: the folder cannot be written, when the block begins.

    Attributes:
        FILES: the names of all files that keepers write.
        folder: the folder.
        history: all evaluations so far, dicts of `epoch`, `step`, `seconds`, `train`, `held_out` and `score`.
        best: the evaluation with the highest score, the earliest of equal ones; `None` before the first.
        stopped: the number of the signal that stopped the loop, else `None`.
        notes: what `restore` has to tell, such as that a damaged file was not read, or a list among the `facts` is another.
    """

    FILES: ClassVar[tuple[str, ...]] = (LAST, BEFORE, BEST, HISTORY, FACTS)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loader: Loader,
        score: Callable[[Sums], float],
        *,
        epochs: int,
        steps: int = 0,
        patience: int = 0,
        every: int = 0,
        facts: Mapping[str, Any] | None = None,
        files: Iterable[str | os.PathLike[str]] = (),
    ):
        check_path("Keeper", folder, argument="folder", what="a folder")
        write = "Write Keeper(folder, loader, score, epochs=20)"
        check_type("Keeper: loader", loader, Loader, f"the cavs.data.Loader of the loop. {write}")
        if not loader._sampler.known:
            raise TypeError(
                "Keeper: loader: got one whose batches come from an iterator; expected one that knows where an epoch ends. "
                "Write Loader(graphs, 64), or a list of batches."
            )
        if not len(loader):
            raise ValueError("Keeper: loader: got a loader without batches; expected at least one. Write Loader(graphs, 64).")
        check_takes("Keeper: score", score, "sums")
        if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable):
            raise TypeError(f"Keeper: files: got {files!r}; expected a list of paths. Write files=[path].")
        self._files = [*files]
        for path in self._files:
            check_path("Keeper", path, argument="files")
        limits = {"epochs": epochs, "steps": steps, "patience": patience, "every": every}
        limits = {name: int(x) if isinstance(x, np.integer) else x for name, x in limits.items()}
        for name, got in limits.items():
            if isinstance(got, bool) or not isinstance(got, int) or got < 0:
                raise ValueError(f"Keeper: {name}: got {got!r}; expected an int >= 0.")
            if got and name in ("steps", "every") and loader.steps > 1:
                raise ValueError(
                    f"Keeper: {name}: got {got} with a loader of {loader.steps} steps in a dispatch, after which the loop can "
                    "stop; expected one of single steps. Write Loader(graphs, n, steps=1)."
                )
        self.folder, self._loader, self._score = Path(folder), loader, score
        self._epochs, self._limit, self._patience, self._every = limits.values()
        self._facts = checked_facts({} if facts is None else facts)
        self.history: list[Evaluated] = []
        self.notes: list[str] = []
        self.stopped: int | None = None
        self._sums: Sums = {}
        self._pending = PendingSums()
        # The seconds of this epoch until `begun`, which is `None` while the held-out data is evaluated.
        self._seconds, self._saved = 0.0, 0.0
        self._begun: float | None = None
        self._run = ""
        self._damaged = self._locked = False
        self._due = False  # whether `add` has asked for an evaluation
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Keeper":
        with contextlib.ExitStack() as stack:
            if writes():
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.folder))
            stack.enter_context(signals_to(self._stop))
            self._context = stack.pop_all()
        self._locked = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._locked = False
        self._context.close()

    def restore(self, state: PyTree) -> PyTree:
        """Returns the state of the last save, and moves the loader to its position.

        If nothing was saved, returns `state` itself, and moves a loader that loops have read back to its beginning.

        Args:
            state: the initial state.

        Raises:
            KeeperError: the files are damaged, of another run or of none, or of another state or other batches.
            RuntimeError: the `with` block has not begun, or has ended.
        """
        self._check_locked("restore")
        # As in a new process.
        self.history, self.notes, self._sums, self._seconds, self._begun, self._due = [], [], {}, 0.0, None, False
        self._pending.clear()
        exists = (self.folder / FACTS).exists()
        if not exists and (others := [x for x in self.FILES if (self.folder / x).exists()]):
            raise KeeperError(f"{self.folder}: got {others[0]} without {FACTS}; expected a new folder, or that of a run.")
        facts: dict[str, Any] = read_run(self.folder) if exists else {"run": uuid.uuid4().hex}
        prints = {os.fspath(path): fingerprint(path) for path in self._files}
        before: dict[str, str] = facts.get("files", {})
        before = before | {os.path.realpath(path): x for path, x in before.items()}
        changed = [path for path, x in prints.items() if {before.get(path, x), before.get(os.path.realpath(path), x)} != {x}]
        if changed:
            raise KeeperError(f"{changed[0]} has changed since {self.folder} was trained on it; expected the same file.")
        self._run = told(facts["run"])  # once all processes have read
        if writes():  # paths as they are written hold if all is moved to another folder, absolute ones from any folder
            prints |= {os.path.abspath(path): x for path, x in prints.items()}
            write_facts(self.folder / FACTS, {"run": self._run, **self._facts, "files": prints})
        damaged: list[DamagedError] = []
        for path in filter(Path.exists, (self.folder / LAST, self.folder / BEFORE)):
            try:
                (state, _), about = read_checkpoint(path, state, self._run, self._loader)
                break
            except DamagedError as error:
                damaged.append(error)
        else:
            if damaged:
                raise damaged[0]
            if self._loader.seen and not self._loader._restored:  # as `next(iter(loader))` has used up an epoch
                self._loader.restore(self._loader.state() | dict.fromkeys(("epoch", "batch", "seen"), 0))
            return state
        self.history, self._sums, self._seconds = about["history"], about["sums"], about["seconds"]
        self.notes += [f"{error} Resuming from the save before it, {path.name}." for error in damaged]
        others = [name for name, x in self._facts.items() if isinstance(x, list) and facts.get(name, x) != x]
        self.notes += [f"facts: {name}: another list, such as of words, than the run was trained with." for name in others]
        self._damaged = path.name == BEFORE
        if about["versions"] != (current := versions()):
            saved, now = (", ".join(f"{k} {v}" for k, v in of.items()) for of in (about["versions"], current))
            self.notes.append(f"saved with {saved}, resumed with {now}: results may not be bitwise equal.")
        return state

    def __iter__(self) -> Iterator[PyTree]:
        """Yields the batches of the rest of all epochs, until the run is done or stopped.

        Raises:
            RuntimeError: `restore` was not called, without which the run could not be continued; or before the end of the run
                `add` returned `True`, and neither `score` nor `save` was called, without which nothing is kept.
        """
        if not self._run:
            raise RuntimeError(
                "Keeper: got a loop before restore; expected it first, to name the run. Write state = keeper.restore(state)."
            )
        self._begun = self._saved = time.monotonic()
        while not (self.done or self.stopped):
            if not (self._loader.batch and self._loader._restored):  # a new epoch, also if the loop before was left early
                self._sums, self._seconds, self._begun = {}, 0.0, time.monotonic()
            for batches in self._loader:
                yield batches
                if self._due and not self.done:  # after the last epoch, the evaluation may follow the loop
                    raise RuntimeError(
                        "Keeper: got no evaluation after add had returned True; expected one, which also saves. Write "
                        "if keeper.add(state, sums): keeper.score(state, cavs.data.evaluate(metrics, params, held_out)); "
                        "or keeper.save(state), to go on without one."
                    )
                self._begun = self._begun or time.monotonic()  # an evaluation, or a restore, has ended
                if self.stopped or self.done:
                    break

    @property
    def done(self) -> bool:
        """Whether all epochs or steps are done, or the score has not become better for too long."""
        best, (epochs, _) = self.best, self._place()
        waited = 0 if best is None else epochs - best["epoch"]
        limited = bool(self._limit) and self._loader.seen >= self._limit
        return limited or epochs >= self._epochs or bool(self._patience) and waited >= self._patience

    @property
    def best(self) -> Evaluated | None:
        """The evaluation with the highest score, the earliest of equal ones; `None` before the first."""
        return max(self.history, key=rank, default=None)

    @property
    def sums(self) -> Sums:
        """The summed metrics of this epoch so far; those of the last few steps may be missing."""
        return self._sums

    @property
    def seconds(self) -> float:
        """The time spent in this epoch, without evaluations."""
        return self._seconds + (0.0 if self._begun is None else time.monotonic() - self._begun)

    def add(self, state: PyTree, sums: Mapping[str, Any]) -> bool:
        """Adds the metrics of a dispatch, and saves if it is time or the loop was stopped.

        Args:
            state: the state after the dispatch.
            sums: a dict of metrics that add up: scalars, or arrays with an axis of steps.

        Returns:
            Whether to call `score` now: at the end of an epoch or of the run, and after every `every` steps.

        Raises:
            TypeError: `sums` is no dict of real numbers.
            FloatingPointError: a metric is not finite.
        """
        if not isinstance(sums, Mapping) or not all(map(is_real, sums.values())):
            raise TypeError(f"Keeper.add: sums: got {sums!r:.80}; expected a dict of real numbers. Write {{'loss': values}}.")
        self._pending.put(dict(sums))
        self._collect(IN_FLIGHT)
        loader = self._loader
        due = bool(self._every) and loader.batch % self._every == 0 or bool(self._limit) and loader.seen >= self._limit
        if due or loader.batch >= len(loader):
            self._collect()
            self._seconds, self._begun, self._due = self.seconds, None, True
            return True
        if self.stopped or time.monotonic() - self._saved > SAVE_EVERY:
            self.save(state)
        return False

    def score(self, state: PyTree, held_out: Sums, best: PyTree | None = None) -> bool:
        """Adds an evaluation to the history, and saves.

        Args:
            state: the state of the loop.
            held_out: the summed metrics of the held-out data, for the `score` of the keeper.
            best: what is kept if the score is the highest so far, such as the parameters. `None`: the state.

        Returns:
            Whether the score is the highest so far.

        Raises:
            RuntimeError: the `with` block has not begun, or has ended.
            TypeError: `held_out` is no dict of real numbers, or the `score` of the keeper returns none.
        """
        self._check_locked("score")
        check_type("Keeper.score: held_out", held_out, Mapping, "a dict of sums. Write cavs.data.evaluate(...)")
        if not_numbers := [name for name, x in held_out.items() if not is_real(x) or np.size(x) != 1]:
            got = f"{not_numbers[0]} = {held_out[not_numbers[0]]!r:.60}"
            raise TypeError(f"Keeper.score: held_out: got {got}; expected real numbers. Write cavs.data.evaluate(...).")
        if not is_real(found := self._score(held_out)) or np.size(found) != 1:
            raise TypeError(f"Keeper: score: returned {found!r:.80}; expected a real number. Write return sums['right'].")
        self._collect()
        record: Evaluated = {
            "epoch": self._place()[0],
            "step": self._loader.seen,
            "seconds": self.seconds,
            "train": dict(self._sums),
            "held_out": {name: float(np.asarray(x).item()) for name, x in held_out.items()},
            "score": float(np.asarray(found).item()),
        }
        self.history.append(record)
        if is_best := self.best is record:
            self._write(BEST, state if best is None else best)
        if writes():  # before the save: a run that is killed between the two evaluates again, and writes both
            write_whole(self.folder / HISTORY, json.dumps(json_of(self.history), indent=1).encode())
        self.save(state)
        return is_best

    def save(self, state: PyTree) -> None:
        """Saves the state and all that `restore` needs. Raises a `RuntimeError` outside of the `with` block."""
        self._check_locked("save")
        self._collect()
        path, before = self.folder / LAST, self.folder / BEFORE
        if writes() and path.exists() and not self._damaged:
            before.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a file system without links keeps one save
                os.link(path, before)
        self._write(LAST, state, self._loader)
        self._damaged, self._due, self._saved = False, False, time.monotonic()

    def restore_best(self, like: PyTree) -> PyTree:
        """Reads what had the best score.

        Args:
            like: a pytree of arrays, or of their shapes, with the structure of what `score` got as `best`.
        """
        in_step("best")
        return restore_best(self.folder, like)

    def _check_locked(self, method: str) -> None:
        if not self._locked:
            raise RuntimeError(
                f"Keeper.{method}: got a call outside of the keeper's `with` block, in which no other process trains in "
                f"{self.folder}; expected it inside. Write with cavs.data.Keeper(...) as keeper: around the loop."
            )

    def _write(self, name: str, tree: PyTree, *loaders: Loader) -> None:
        about = {"run": self._run, "versions": versions()}
        about |= {"seconds": self.seconds, "sums": self._sums, "history": self.history}
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        # At the end of an epoch a run may go on with other batches, such as on more devices.
        positions: Any = [NextEpoch(x) if self._place()[1] else x for x in loaders]
        save_checkpoint((tree, text), self.folder / name, *positions)

    def _collect(self, left: int = 0) -> None:
        self._sums = self._pending.added_to(self._sums, left)
        for name, x in self._sums.items():
            if not math.isfinite(x):
                epoch, step = self._loader.epoch + 1, self._loader.batch
                raise FloatingPointError(f"{name}: got {x} in epoch {epoch}, step {step}; expected a finite value.")

    def _place(self) -> tuple[float, bool]:
        """The epochs that are done, a fraction within an epoch; and whether an epoch has just ended."""
        loader = self._loader
        if loader.batch >= len(loader):
            return loader.epoch + 1, True
        return (round(loader.epoch + loader.batch / len(loader), 6), False) if loader.batch else (loader.epoch, False)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self.stopped is not None:
            raise KeyboardInterrupt
        self.stopped = signum
        # Not `print`: a handler may run in the middle of a `print`.
        os.write(2, b"\nStopping after this step. Press Ctrl-C again to stop at once, without saving.\n")
