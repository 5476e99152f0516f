"""What a `Keeper` has written, and the processes and signals of a run."""

import contextlib
import importlib.metadata
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import jax
import numpy as np
from jax.experimental import multihost_utils

from cavs._feed.loader import Loader
from cavs._fit.evaluate import Sums
from cavs._fit.folder import DamagedError, KeeperError, read_facts
from cavs._graphs.pytree import PyTree
from cavs._interop.checkpoint import restore_checkpoint
from cavs._readers.files import open_regular
from cavs._readers.npz import stored_arrays

FACTS, HISTORY, LAST, BEFORE, BEST = "model.json", "history.json", "last.npz", "last-before.npz", "best.npz"
ABOUT = "[1]"  # the array of a checkpoint with its JSON


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


class NextEpoch:
    """The position of a loader at the end of an epoch, as the begin of the next one."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def state(self) -> dict[str, int]:
        return self._loader.state() | {"epoch": self._loader.epoch + 1, "batch": 0, "order": 0}


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the `facts` that a [`cavs.data.Keeper`][] was given, and its identifier of the run, `run`.

    Raises:
        KeeperError: the folder does not contain them, or they are damaged.
        OSError: the file cannot be read.
    """
    return read_facts(Path(folder) / FACTS)


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
    path, run = folder / BEST, read_facts(folder / FACTS)["run"]
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
