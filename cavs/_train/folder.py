"""The folder of a run: it contains one run, and one process at a time trains in it."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from cavs._train.config import Config, SaveError, TrainError

# The errors of file systems without locks. There, as on Windows, folders are not locked.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def latest(out: str | None) -> Path:
    """The folder `out`, or the most recently trained folder under `runs/`. Raises a `TrainError` if there is none."""
    if out is not None:
        return Path(out)
    found = sorted(Path("runs").glob("*/last.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise TrainError("--resume: got no folder, and there is no run under runs/. Write --resume DIR.")
    return found[-1].parent


def refuse_another_run(folder: Path) -> None:
    """Raises a `TrainError` if a folder already contains a run."""
    if (folder / "model.json").exists():
        raise TrainError(
            f"--out: got {folder}, which already contains a run; expected another folder. To continue, write --resume {folder}."
        )


@contextlib.contextmanager
def new(config: Config, out: str | None) -> Iterator[Path]:
    """The folder of a new run, locked while the context lasts: `out`, or a new folder under `runs/`."""
    try:
        folder = _create(config) if out is None else Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"--out: the folder {error.filename} cannot be created ({error.strerror}).") from error
    with locked(folder):
        refuse_another_run(folder)  # another run may have started while the data was read
        # Files of a run that was killed before it could be resumed.
        for pattern in ("last*.json", "last-*.npz", "best*.json", "best-*.npz"):
            for old in folder.glob(pattern):
                old.unlink(missing_ok=True)
        yield folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process trains in `folder`. The operating system releases the lock if the process dies.

    Raises:
        TrainError: another process trains in the folder.
        SaveError: the folder is not writable.
    """
    path = folder / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise SaveError(f"{path} cannot be written ({error.strerror}).") from error
    try:
        _lock(descriptor, folder)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        for left in folder.glob(".*.tmp"):  # from a process that was killed during a save
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _create(config: Config) -> Path:
    stem = "reviews" if config.train is None else Path(config.train).name.split(".")[0]
    for name in (stem, *(f"{stem}-{i}" for i in range(2, 10000))):
        folder = Path("runs") / name
        # `mkdir` is atomic, so two runs that start together get different folders.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise TrainError(f"--out: got no folder, and runs/ contains {stem} to {stem}-9999 already. Write --out DIR.")


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(descriptor, 200).decode("utf-8", "replace") or "another process"
        raise TrainError(
            f"{folder}: {who} is training in it. Wait until it ends, or write --out DIR with another folder."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
