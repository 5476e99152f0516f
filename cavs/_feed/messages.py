"""Messages between two processes: pickles through a pipe, and their arrays through shared memory.

The sender writes arrays into a file in memory (`memfd_create`, Linux), and the receiver reads them into its own memory. Each
side copies once, and neither waits for the other as at a pipe. (Mapping new memory for every message was slower: page faults
cost more than copies.) On other systems, and if they are small, arrays are sent through the pipe as out-of-band buffers (PEP
574).
"""

import contextlib
import io
import itertools
import os
import pickle
import select
from collections.abc import Callable
from typing import IO, Any, TypeAlias

import numpy as np

# Seconds within which the other process must read or write, if this one waits for it: far longer than any pass takes.
TIMEOUT = 600.0
PIPE_BYTES = 1 << 20  # requested size of a pipe's buffer, so that a message takes few reads and writes
PLACE = 1 << 40  # bytes between messages in a file; only bytes that were written occupy memory
_SMALL = 1 << 16  # bytes that a pipe accepts at once
_ALIGNED = 64

# Objects that `io` reads into and writes from. `collections.abc.Buffer` begins with Python 3.12.
Buffer: TypeAlias = Any


def file_in_memory() -> int | None:
    """Creates a file in memory. Returns its descriptor, or `None` if the system has no such files."""
    return os.memfd_create("cavs") if hasattr(os, "memfd_create") else None


def send(pipe: IO[bytes], message: object, file: int | None = None, place: int = 0) -> None:
    """Sends a message. Large arrays are written into `file`, at `place`.

    Raises:
        BrokenPipeError: the other process does not read any more.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    sizes = [len(part) for part in parts]
    ends = list(itertools.accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
    at = None if file is None or ends[-1] <= _SMALL else place * PLACE
    if file is not None and at is not None:
        for begin, part in zip(ends, parts, strict=False):
            done = 0
            while done < len(part):
                done += os.pwrite(file, part[done:], at + begin + done)
    pickle.dump((head, sizes, ends, at), pipe, protocol=5)
    if at is None:
        for part in parts:
            pipe.write(part)
            pipe.write(bytes(-len(part) % _ALIGNED))
    pipe.flush()


def receive(pipe: IO[bytes], file: int | None = None) -> Any:
    """Receives a message.

    Raises:
        EOFError: the other process does not send any more.
    """
    try:
        head, sizes, ends, at = pickle.load(pipe)
    except pickle.UnpicklingError:  # the message is incomplete
        raise EOFError from None
    size = ends[-1] if at is None else ends[-2] + sizes[-1]
    memory, done = memoryview(np.empty(size, np.uint8)), 0  # type: ignore[arg-type]
    while done < size:
        left = memory[done:]
        got = pipe.readinto(left) if at is None else os.preadv(file, [left], at + done)  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        done += got
    return pickle.loads(head, buffers=[memory[a : a + n] for a, n in zip(ends, sizes, strict=False)])


def widen(pipe: IO[bytes]) -> None:
    """Enlarges the buffer of a pipe, if the system can."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl  # not on Windows

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class PipeEnd(io.RawIOBase):
    """One end of a pipe, whose reads and writes raise `TimeoutError` after `TIMEOUT`."""

    def __init__(self, descriptor: int, direction: str):
        self._descriptor, self._reads = descriptor, direction == "r"
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return not self._reads

    def readinto(self, buffer: Buffer) -> int:
        return self._wait(lambda: os.readv(self._descriptor, [buffer]))

    def write(self, data: Buffer) -> int:
        return self._wait(lambda: os.write(self._descriptor, data))

    def has_data(self) -> bool:
        """Whether a read would return at once: there are bytes, or the other process closed its end."""
        return self._ready(0)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)

    def _wait(self, call: Callable[[], int]) -> int:
        while True:
            with contextlib.suppress(BlockingIOError):
                return call()
            if not self._ready(TIMEOUT):
                raise TimeoutError

    def _ready(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN if self._reads else select.POLLOUT)
        return bool(poll.poll(1000 * seconds))
