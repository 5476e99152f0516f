"""The folder of a run: one process at a time trains in it, and its facts are JSON with a checksum."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cavs._readers.files import read_whole, write_whole

FORMAT = 3
# The errors of file systems without locks. There, as on Windows, folders are not locked.
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
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, folder)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        for left in folder.glob(".*.tmp"):  # from a process that was killed during a save
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(descriptor, 200).decode("utf-8", "replace") or "another process"
        raise KeeperError(f"{folder}: {who} is training in it. Wait until it ends, or choose another folder.") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


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
    """Writes facts as JSON, with the checksum that `read_facts` verifies."""
    facts = {"format": FORMAT, **facts}
    text = json.dumps(facts | {"sha256": _checksum(facts)}, ensure_ascii=False, indent=1)
    write_whole(path, text.encode("utf-8", "backslashreplace"))  # words may contain half a surrogate pair: `\ud800` in JSON


def read_facts(path: Path) -> dict[str, Any]:
    """Reads what `write_facts` wrote.

    Raises:
        KeeperError: there is no such file, it is damaged, or another version of cavs wrote it.
        OSError: the file cannot be read.
    """
    try:
        facts = json.loads(read_whole(path))
    except (FileNotFoundError, NotADirectoryError):
        raise KeeperError(
            f"{path.parent}: there is no {path.name} in it; expected a folder that training has written."
        ) from None
    except (ValueError, RecursionError) as error:
        raise KeeperError(f"{path}: {error}; expected JSON as cavs writes it.") from error
    if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
        raise KeeperError(f"{path}: expected format {FORMAT}; another version of cavs wrote it, or it is damaged.")
    if facts.pop("sha256", None) != _checksum({"format": FORMAT, **facts}):
        raise KeeperError(f"{path} is damaged: its checksum is wrong.")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
