"""Files that are there whole or not at all, and on the disk once the call returns."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name of a temporary file beside `path`, for the block to write; then it is synced and takes the place of `path`.

    Where the block or the system fails, what was under `path` stays and the temporary file goes.
    """
    folder, name = os.path.split(os.fspath(path))
    # Another name each time: two processes that write the same file do not write into each other's.
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(folder or os.curdir)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes the whole file or, when interrupted, none of it."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data)


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file. **Raises:** `OSError` as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, to read. **Raises:** `OSError`, for a pipe or device too: they could have us wait for ever."""
    # Opened without waiting and then looked at: a name may be given to something else in between.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return file


def _sync_folder(folder: str) -> None:
    # The new name itself. Windows opens no folders, and some network file systems do not sync them.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
