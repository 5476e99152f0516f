"""The folder of a run: who trains in it, its facts, its checkpoints, and the processes and signals of a run."""

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
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import jax
import numpy as np
from jax.experimental import multihost_utils

from cavs._feed.loader import Loader
from cavs._fit.evaluate import Sums
from cavs._graphs.checks import check_type
from cavs._graphs.files import check_path, open_regular, read_whole, write_whole
from cavs._graphs.pytree import PyTree
from cavs._interop.checkpoint import restore_checkpoint
from cavs._readers.npz import stored_arrays

try:
    import fcntl
except ImportError:  # on Windows, where folders are not locked
    fcntl = None

FACTS, HISTORY, LAST, BEFORE, BEST = "model.json", "history.json", "last.npz", "last-before.npz", "best.npz"
ABOUT = "[1]"  # the array of a checkpoint with its JSON
FORMAT = 3  # of FACTS
RESERVED = ("format", "run", "files", "sha256")  # names in FACTS that are no facts of the user
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
        for leftover in folder.glob(f".*.{'[0-9a-f]' * 12}.tmp"):  # from a process that was killed during a save
            leftover.unlink(missing_ok=True)
        yield


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Creates a folder that nobody has: `path`, or `path-2`, `path-3`, ...

    Raises:
        TypeError, ValueError: `path` is no path.
        OSError: the folder cannot be created.
    """
    check_path("new_folder", path, what="a folder")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))):
        # `mkdir` is atomic, so two runs that start together get different folders.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def fingerprint(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open_regular(path) as file:  # a pipe might never end
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of the user as JSON has them: the keys of dicts are texts.

    Raises `TypeError` or `ValueError`, which name `Keeper`, if JSON cannot store them, or they have a name in `RESERVED`.
    """
    check_type("Keeper: facts", facts, Mapping, "a dict")
    if taken := [name for name in RESERVED if name in facts]:
        raise ValueError(
            f"Keeper: facts: got {taken[0]!r}; expected other names than {', '.join(RESERVED)}, which {FACTS} has already."
        )
    try:
        return json.loads(json.dumps(dict(facts)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Keeper: facts: {error}; expected what JSON stores. Write float(x), or x.tolist() for arrays."
        ) from error


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
    check_path("read_run", folder, argument="folder", what="a folder")
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

    If all scores are NaN, that is the first evaluation, and a warning is issued.

    Args:
        folder: the folder of the run.
        like: a pytree of arrays, or of their shapes, with the structure of what [`cavs.data.Keeper.score`][] got as `best`.

    Raises:
        KeeperError: there is no such file; it is damaged, of another run, or of another structure.
        OSError: the file cannot be read.
    """
    check_path("restore_best", folder, argument="folder", what="a folder")
    folder = Path(folder)
    path, run = folder / BEST, read_run(folder)["run"]
    if not path.exists():
        raise KeeperError(f"{folder}: there is no {BEST} in it; expected a run that has finished an epoch.")
    (best, _), about = read_checkpoint(path, like, run)
    if math.isnan(about["history"][-1]["score"]):  # the evaluation that is kept
        text = "got only scores that are NaN, such as 0 / 0; this is the first evaluation, not the best"
        warnings.warn(f"restore_best: {folder}: {text}. For the last one write keeper.restore(state).", stacklevel=2)
    return best


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
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old_handlers = {s: signal.signal(s, handler) for s in signals}
    try:
        yield
    finally:
        for s, old in old_handlers.items():
            signal.signal(s, old)
