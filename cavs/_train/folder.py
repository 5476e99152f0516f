"""The folder of a run: one run makes it, and one process at a time trains in it."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from cavs._train.config import Config, SaveError, TrainError

# File systems that know no locks answer with these: there, as on Windows, nothing is locked.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def latest(out: str | None) -> Path:
    """The folder `out`, else the one under `runs/` that was trained last.

    **Raises:** `TrainError` where there is none.
    """
    if out is not None:
        return Path(out)
    found = sorted(Path("runs").glob("*/last.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise TrainError("--resume: there is no run under runs/; wanted a folder: --resume DIR.")
    return found[-1].parent


def refuse_another_run(folder: Path) -> None:
    """**Raises:** `TrainError` where a folder holds a run already."""
    if (folder / "model.json").exists():
        raise TrainError(f"--out: {folder} holds a run already; wanted another folder, or, to go on, --resume {folder}.")


@contextlib.contextmanager
def new(config: Config, out: str | None) -> Iterator[Path]:
    """The folder `out`, else a new one under `runs/`, for a run that begins; as long as the context lasts it is locked."""
    try:
        folder = _made(config) if out is None else Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"--out: the folder {error.filename} cannot be made ({error.strerror}).") from error
    with locked(folder):
        refuse_another_run(folder)  # one may have begun while we read the data
        # What a run left that was killed before it had saved anything that can be gone on with.
        for pattern in ("last*.json", "last-*.npz", "best*.json", "best-*.npz"):
            for old in folder.glob(pattern):
                old.unlink(missing_ok=True)
        yield folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other process trains in `folder`; the system unlocks it, however this one ends.

    **Raises:** `TrainError` where another one does, `SaveError` where nothing can be written.
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
        for left in folder.glob(".*.tmp"):  # by a process that was killed while it saved
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _made(config: Config) -> Path:
    stem = "reviews" if config.train is None else Path(config.train).name.split(".")[0]
    for name in (stem, *(f"{stem}-{i}" for i in range(2, 10000))):
        folder = Path("runs") / name
        # Made, not looked for: of two runs that start together each gets its own.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise TrainError(f"runs/ holds {stem} to {stem}-9999 already; wanted --out DIR.")


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(descriptor, 200).decode("utf-8", "replace") or "another process"
        raise TrainError(f"{folder}: {who} trains in it now; wait for its end, or pass another folder: --out DIR.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
