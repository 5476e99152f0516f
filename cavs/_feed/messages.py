"""Messages between two processes: pickles through a pipe, and their arrays through memory that both see.

The sender writes arrays into a file that lies in memory (`memfd_create`, Linux), and the receiver reads them into memory of
its own, which it may keep: one copy each, without waiting for one another as at a pipe. (To map new memory for every message
was slower: pages cost more than copies.) Elsewhere, and where they are small, arrays cross the pipe as they lie in memory
(out-of-band buffers, PEP 574).
"""

import contextlib
import io
import itertools
import os
import pickle
import select
from typing import IO, Any

import numpy as np

# Seconds in which a process must read or write something, if we wait for it: far longer than any pass takes.
PATIENCE = 600.0
PIPE_BYTES = 1 << 20  # asked for, so that what crosses a pipe does in few pieces
PLACE = 1 << 40  # bytes between places in a file, of which only those that were written take memory
_SMALL = 1 << 16  # bytes that a pipe takes at once
_ALIGNED = 64


def file_in_memory() -> int | None:
    """Its descriptor; `None` where the system has no such files."""
    return os.memfd_create("cavs") if hasattr(os, "memfd_create") else None


def send(pipe: IO[bytes], message: Any, file: int | None = None, place: int = 0) -> None:
    """Sends it, large arrays by a place in a file. Raises `BrokenPipeError` where nobody reads."""
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
    """What was sent. Raises `EOFError` where nobody sends any more."""
    try:
        head, sizes, ends, at = pickle.load(pipe)
    except pickle.UnpicklingError:  # in the middle of a message
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
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl  # not on Windows

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class Line(io.RawIOBase):
    """One end of a pipe, at which nobody waits longer than `PATIENCE`."""

    def __init__(self, descriptor: int, direction: str):
        self._descriptor, self._reads = descriptor, direction == "r"
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return not self._reads

    def readinto(self, buffer: Any) -> int:
        return self._patiently(os.readv, [buffer])

    def write(self, data: Any) -> int:
        return self._patiently(os.write, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)

    def _patiently(self, call: Any, data: Any) -> int:
        while True:
            with contextlib.suppress(BlockingIOError):
                return call(self._descriptor, data)
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN if self._reads else select.POLLOUT)
            if not poll.poll(1000 * PATIENCE):
                raise TimeoutError
