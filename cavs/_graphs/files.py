"""Atomic writes: a file appears complete or not at all, and is on disk when the call returns."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader

NOT_REGULAR = "is not a regular file"
_MOST_LINKS = 40  # in a chain


def check_path(function: str, path: object, cure: str = "", argument: str = "path", what: str = "a file") -> None:
    """Raises a `TypeError`, whose text `cure` ends, if `path` is no path, such as another argument of `function`.

    Raises a `ValueError` if it contains a NUL character, which no file system allows.

    `argument`: its name. `what`: what it is the path of.
    """
    if not isinstance(path, str | os.PathLike):
        hint = cure or "For the lines of an open file write cavs.read_trees(file)." * hasattr(path, "read")
        expected = f"expected the path of {what}, as str or pathlib.Path"
        raise TypeError(f"{function}: {argument}: got a {type(path).__name__}; {expected}. {hint}".rstrip())
    if "\0" in str(path):
        raise ValueError(
            f"{function}: {argument}: got {str(path)!r:.200}; expected the path of {what}, without NUL characters."
        )


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A context manager that yields the name of a temporary file beside `path` for the block to write.

    At the end of the block the file is synced and replaces `path`. If the block or the system fails, the old file stays and the
    temporary file is removed. If `path` is a symbolic link, it stays, and the file that it names is written.

    Raises `OSError` if the file cannot be written, or there is something else than a regular file, such as a folder or a
    device.
    """
    original, path = path, target_of(path)
    folder, name = os.path.split(path)
    # The name is unique, because two processes may write the same file at once. Names may have 255 bytes.
    temporary = os.path.join(folder, f".{name[:50]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with errors_named(original, temporary):
            with open(temporary, "xb") as file:
                mode = os.fstat(file.fileno()).st_mode  # as umask has it; a library may write files that only the owner reads
            yield temporary
            with open(temporary, "rb+") as file:
                os.chmod(temporary, stat.S_IMODE(mode))
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(folder or os.curdir)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@contextlib.contextmanager
def errors_named(path: str | os.PathLike[str], temporary: str | None = None) -> Iterator[None]:
    """A context whose `OSError`s name a file. Those of `write`, as of a full disk, name none; others name a `temporary` one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # NumPy's, which are texts
            raise OSError(f"{os.fspath(path)}: {error}") from error
        if error.filename in (None, temporary):
            error.filename = os.fspath(path)
        raise


def target_of(path: str | os.PathLike[str]) -> str:
    """Returns the path of the regular file that would be written: symbolic links are followed.

    Raises `OSError` if the path names something else than a regular file, or its links form a circle.
    """
    target = os.path.realpath(path)
    for name in (target, path):  # which differ for `/dev/stdout`, if it is a pipe
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name).st_mode) or descriptor_of(path) is not None:
                raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
    return target


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """Returns the number of the open file that a path such as `/dev/stdout` stands for; `None` for other paths.

    It may be a regular file, if the shell redirects it. To replace that would lose what else the program prints.
    """
    path = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) in ("/dev/fd", f"/proc/{os.getpid()}/fd"):
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(os.path.realpath(folder), os.readlink(path)))
    return None


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a text as UTF-8. The file appears when it is complete; a pipe, a device or `/dev/stdout` is written to as it is.

    Raises:
        TypeError, ValueError: `path` is no path.
        OSError: the file cannot be written.
    """
    check_path("write_text", path, "Write write_text(text, path).")
    if (descriptor := descriptor_of(path)) is not None:
        print(end="", flush=True)  # what was printed before comes first
        with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
    elif os.path.isfile(path) or not os.path.exists(path):
        write_whole(path, text.encode())
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file; if the write is interrupted, the old file stays."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Reads all bytes of a regular file. Raises `OSError` as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | os.PathLike[str], cure: str = "") -> BufferedReader:
    """Opens a regular file for reading. `cure` ends the message of the error if it is none.

    Raises `OSError` if the file cannot be opened, or is not a regular file. Reading a pipe or a device could block forever.
    """
    # Opened without blocking, then checked: if it were checked first, the name could refer to another file by then.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, NOT_REGULAR + cure, os.fspath(path))
    return file


def _sync_folder(folder: str) -> None:
    # Makes the new name durable. Windows cannot open folders, and some network file systems cannot sync them.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
