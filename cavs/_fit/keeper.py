"""`Keeper`: the best and the last checkpoint of a training loop, early stopping, interrupts, and exact resuming.

The folder of a run: who trains in it, its facts, its checkpoints, and the processes and signals of a run.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from cavs._feed.loader import Loader
from cavs._fit.evaluate import IN_FLIGHT, PendingSums, Sums
from cavs._graphs.arguments import check_takes
from cavs._graphs.pytree import PyTree
from cavs._interop.checkpoint import restore_checkpoint, save_checkpoint
from cavs._readers.files import check_path, open_regular, read_whole, write_whole
from cavs._readers.npz import stored_arrays

try:
    import fcntl
except ImportError:  # on Windows, where folders are not locked
    fcntl = None

FACTS, HISTORY, LAST, BEFORE, BEST = "model.json", "history.json", "last.npz", "last-before.npz", "best.npz"
ABOUT = "[1]"  # the array of a checkpoint with its JSON
FORMAT = 3  # of FACTS
SAVE_EVERY = 300.0  # seconds between saves within an epoch
# The errors of file systems without locks, where folders are not locked either.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class KeeperError(ValueError):
    """A folder of checkpoints is in use, damaged, or of another run. The message names the file."""


class DamagedError(KeeperError):
    """A file differs from what was saved."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process trains in `folder`. The operating system releases the lock if the process dies.

    Raises:
        KeeperError: another process trains in the folder.
        OSError: the folder is not writable.
    """
    with open(folder / ".lock", "a+", encoding="utf-8", errors="replace") as lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            who = lock.read(200) or "another process"
            raise KeeperError(f"{folder}: {who} is training in it. Wait until it ends, or choose another folder.") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        for left in folder.glob(".*.tmp"):  # from a process that was killed during a save
            left.unlink(missing_ok=True)
        yield


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Creates a folder that nobody has: `path`, or `path-2`, `path-3`, ...

    Raises:
        OSError: the folder cannot be created.
    """
    path = Path(path)
    for folder in itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))):
        # `mkdir` is atomic, so two runs that start together get different folders.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def fingerprint(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Writes facts as JSON, with the checksum that `read_run` verifies."""
    facts = {"format": FORMAT, **facts}
    text = json.dumps(facts | {"sha256": _checksum(facts)}, ensure_ascii=False, indent=1)
    write_whole(path, text.encode("utf-8", "backslashreplace"))  # words may contain half a surrogate pair: `\ud800` in JSON


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the `facts` that a [`cavs.data.Keeper`][] was given, and its identifier of the run, `run`.

    Raises:
        KeeperError: the folder does not contain them, they are damaged, or another version of cavs wrote them.
        OSError: the file cannot be read.
    """
    path = Path(folder) / FACTS
    try:
        facts = json.loads(read_whole(path))
    except (FileNotFoundError, NotADirectoryError):
        raise KeeperError(f"{folder}: there is no {FACTS} in it; expected a folder that training has written.") from None
    except (ValueError, RecursionError) as error:
        raise KeeperError(f"{path}: {error}; expected JSON as cavs writes it.") from error
    if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
        raise KeeperError(f"{path}: expected format {FORMAT}; another version of cavs wrote it, or it is damaged.")
    if facts.pop("sha256", None) != _checksum({"format": FORMAT, **facts}):
        raise KeeperError(f"{path} is damaged: its checksum is wrong.")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Evaluated(TypedDict):
    """One evaluation of a run: an entry of `Keeper.history`.

    Attributes:
        epoch: the epochs done, a fraction within an epoch.
        step: the training steps done.
        seconds: the time spent in this epoch.
        train: the summed metrics of the training steps of this epoch.
        held_out: those of the held-out data.
        score: the score of the latter.
    """

    epoch: float
    step: int
    seconds: float
    train: Sums
    held_out: Sums
    score: float


def rank(record: Evaluated) -> tuple[bool, float]:
    """The place of an evaluation among others: that of its score, where NaN is the lowest."""
    return not math.isnan(record["score"]), record["score"]


class NextEpoch:
    """The position of a loader at the end of an epoch, as the begin of the next one."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def state(self) -> dict[str, int]:
        return self._loader.state() | {"epoch": self._loader.epoch + 1, "batch": 0, "order": 0}


def restore_best(folder: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads what had the best score in the run of a [`cavs.data.Keeper`][].

    Args:
        folder: the folder of the run.
        like: a pytree of arrays, or of their shapes, with the structure of what [`cavs.data.Keeper.score`][] got as `best`.

    Raises:
        KeeperError: there is no such file; it is damaged, of another run, of another structure, or contains NaN or infinity.
        OSError: the file cannot be read.
    """
    folder = Path(folder)
    path, run = folder / BEST, read_run(folder)["run"]
    if not path.exists():
        raise KeeperError(f"{folder}: there is no {BEST} in it; expected a run that has finished an epoch.")
    (found, _), _ = read_checkpoint(path, like, run)
    for place, x in jax.tree_util.tree_leaves_with_path(found):
        if not np.isfinite(np.asarray(x, np.float64) if x.dtype.kind in "fV" else 0).all():
            raise KeeperError(f"{path}: got NaN or infinity at {jax.tree_util.keystr(place)}; expected finite numbers.")
    return found


def read_checkpoint(path: Path, like: PyTree, run: str, *loaders: Loader) -> tuple[tuple[PyTree, Any], dict[str, Any]]:
    """A checkpoint, and the JSON in it. Errors of the file are `KeeperError`s."""
    try:
        with open_regular(path) as file:
            text = stored_arrays(file)[ABOUT]
        about = json.loads(text.tobytes())
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror or error}).") from error
    except Exception as error:  # see stored_arrays
        raise DamagedError(f"{path} is damaged ({error!r:.200}).") from error
    if about.get("run") != run:
        raise KeeperError(f"{path} belongs to another run than {path.parent / FACTS}; expected files of one run.")
    try:
        return restore_checkpoint(path, (like, text), *loaders), about
    except ValueError as error:
        raise KeeperError(str(error)) from error


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def writes() -> bool:
    return jax.process_index() == 0


def in_step(what: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def told(text: str) -> str:
    """The text of the first process."""
    if jax.process_count() == 1:
        return text
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(text.encode(), np.uint8)), np.uint8)).decode()


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM call `handler`. Python allows handlers only in the main thread."""
    ours = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {s: signal.signal(s, handler) for s in ours}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


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
    - `history.json`: the metrics of each evaluation;
    - `model.json`: the `facts`, and the identifier of the run, which its checkpoints also have.

    Within the `with` block no other process can train in the folder, and Ctrl-C or SIGTERM stops the loop after the current
    step and saves. A second one interrupts at once. If there are several processes, all of them call everything, and the first
    one writes.

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
        folder: the folder.
        history: all evaluations so far, dicts of `epoch`, `step`, `seconds`, `train`, `held_out` and `score`.
        best: the evaluation with the highest score, the earliest of equal ones; `None` before the first.
        stopped: the number of the signal that stopped the loop, else `None`.
        notes: what `restore` has to tell, such as that a damaged file was not read.
    """

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
        files: Sequence[str] = (),
    ):
        check_path("Keeper", folder, argument="folder", what="a folder")
        if not isinstance(loader, Loader):
            raise TypeError(
                f"Keeper: loader: got a {type(loader).__name__}; expected the cavs.data.Loader of the loop. Write "
                "Keeper(folder, loader, score, epochs=20)."
            )
        check_takes("Keeper: score", score, "sums")
        for name, got in {"epochs": epochs, "steps": steps, "patience": patience, "every": every}.items():
            if isinstance(got, bool) or not isinstance(got, int) or got < 0:
                raise ValueError(f"Keeper: {name}: got {got!r}; expected an int >= 0.")
        self.folder, self._loader, self._score = Path(folder), loader, score
        self._epochs, self._limit, self._patience, self._every = epochs, steps, patience, every
        self._facts, self._files = dict(facts or {}), files
        self.history: list[Evaluated] = []
        self.notes: list[str] = []
        self.stopped: int | None = None
        self._sums: Sums = {}
        self._pending = PendingSums()
        # The seconds of this epoch until `begun`, which is `None` while the held-out data is evaluated.
        self._seconds, self._saved = 0.0, 0.0
        self._begun: float | None = None
        self._run = ""
        self._damaged = False
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Keeper":
        with contextlib.ExitStack() as stack:
            if writes():
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.folder))
            stack.enter_context(signals_to(self._stop))
            self._context = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()

    def restore(self, state: PyTree) -> PyTree:
        """Returns the state of the last save, and moves the loader to its position; `state` itself if nothing was saved.

        Args:
            state: the initial state.

        Raises:
            KeeperError: the files are damaged, of another run, or of another state or other batches.
        """
        known = (self.folder / FACTS).exists()
        before: dict[str, Any] = read_run(self.folder) if known else {"run": uuid.uuid4().hex}
        prints = {path: fingerprint(path) for path in self._files}
        changed = [path for path, x in prints.items() if before.get("files", {}).get(path, x) != x]
        if changed:
            raise KeeperError(f"{changed[0]} has changed since {self.folder} was trained on it; expected the same file.")
        self._run = told(before["run"])  # once all processes have read
        if writes():
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
            return state
        self.history, self._sums, self._seconds = about["history"], about["sums"], about["seconds"]
        self.notes += [f"{error} Resuming from the save before it, {path.name}." for error in damaged]
        self._damaged = path.name == BEFORE
        if about["versions"] != (here := versions()):
            saved, now = (", ".join(f"{k} {v}" for k, v in of.items()) for of in (about["versions"], here))
            self.notes.append(f"saved with {saved}, resumed with {now}: results may not be bitwise equal.")
        return state

    def __iter__(self) -> Iterator[PyTree]:
        """Yields the batches of the rest of all epochs, until the run is done or stopped."""
        self._begun = self._saved = time.monotonic()
        while not (self.done or self.stopped):
            for batches in self._loader:
                yield batches
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
            TypeError: `sums` is no dict of numbers.
            FloatingPointError: a metric is not finite.
        """
        if not isinstance(sums, Mapping) or not all(isinstance(x, ArrayLike) for x in sums.values()):
            raise TypeError(f"Keeper.add: sums: got {sums!r:.80}; expected a dict of numbers. Write {{'loss': values}}.")
        self._pending.put(dict(sums))
        self._collect(IN_FLIGHT)
        loader = self._loader
        due = bool(self._every) and loader.batch % self._every == 0 or bool(self._limit) and loader.seen >= self._limit
        if due or loader.batch >= len(loader):
            self._collect()
            self._seconds, self._begun = self.seconds, None
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
        """
        self._collect()
        epochs, whole = self._place()
        record: Evaluated = {
            "epoch": epochs,
            "step": self._loader.seen,
            "seconds": self.seconds,
            "train": dict(self._sums),
            "held_out": {name: float(x) for name, x in held_out.items()},
            "score": float(self._score(held_out)),
        }
        self.history.append(record)
        if whole:
            self._sums, self._seconds = {}, 0.0
        if is_best := self.best is record:
            self._write(BEST, state if best is None else best)
        self.save(state)
        if writes():
            write_whole(self.folder / HISTORY, json.dumps(self.history, indent=1).encode())
        self._begun = time.monotonic()
        return is_best

    def save(self, state: PyTree) -> None:
        """Saves the state and all that `restore` needs."""
        self._collect()
        path, before = self.folder / LAST, self.folder / BEFORE
        if writes() and path.exists() and not self._damaged:
            before.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a file system without links keeps one save
                os.link(path, before)
        self._write(LAST, state, self._loader)
        self._damaged, self._saved = False, time.monotonic()

    def restore_best(self, like: PyTree) -> PyTree:
        """Reads what had the best score.

        Args:
            like: a pytree of arrays, or of their shapes, with the structure of what `score` got as `best`.
        """
        in_step("best")
        return restore_best(self.folder, like)

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
