"""Schedules made in a process of their own, so that the interpreter of the training loop only has to read them.

The process runs this module: it imports this package and nothing of the caller's, so it needs no
`if __name__ == "__main__"`, and it never touches a GPU. It ends with its standard input, whatever ends the caller.
Integers cross the pipe as they lie in memory (out-of-band buffers, PEP 574).
"""

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from cavs._graphs import Graphs
from cavs._host_memory import keep_host_memory
from cavs._pack import Options, pack
from cavs._schedule import Schedule, Shape

PASSES_AHEAD = 3  # one that is read, one that is made, one that waits
_PIPE_BYTES = 1 << 20  # asked for, so that a pass crosses in few pieces
_ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id")
_NAMES = ("vocab", "kind_names", "label_names")


def schedules_elsewhere(
    graphs: Graphs, passes: Iterator[list[np.ndarray]], options: Options
) -> Iterator[tuple[Graphs, Schedule]]:
    """`(batch, schedule)` for each batch of each pass (a list of index arrays), made by a process that runs ahead."""
    idle = _idle.setdefault(graphs, [])
    remote = idle.pop() if idle else _Remote(graphs)
    sent: list[list[int]] = []  # sizes of the batches of each pass that is under way
    error: Exception | None = None
    try:
        remote.begin(options)
        while True:
            while error is None and len(sent) < PASSES_AHEAD:
                try:
                    picked = next(passes)
                except Exception as e:  # the end, or what is raised in its place: after the batches before it
                    error = e
                    break
                remote.send(picked)
                sent.append([len(index) for index in picked])
            if not sent:
                break
            arrays, data, ends, shapes, which, new = remote.receive()
            if options.shapes is not None:
                options.shapes.extend(new)
            together = Graphs(*arrays, *(getattr(graphs, name) for name in _NAMES))
            begin = start = 0
            for size, end, i in zip(sent.pop(0), ends, which, strict=True):
                yield together[start : start + size], Schedule(data[begin:end], shapes[i])
                begin, start = end, start + size
    finally:
        if remote.alive:
            idle.append(remote)
    if not isinstance(error, StopIteration):
        assert error is not None
        raise error


class _Remote:
    """The process of some graphs, and its pipes."""

    def __init__(self, graphs: Graphs):
        if not sys.executable:
            raise RuntimeError("schedules: process=True starts sys.executable, which this interpreter does not know.")
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cavs._process import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=_PIPE_BYTES,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
            start_new_session=True,  # Ctrl-C is the caller's
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        self._under_way = 0
        _widen(self._out)
        self.alive = True
        self.close = weakref.finalize(self, _end, self._process)  # also when the interpreter ends
        self._put({name: getattr(graphs, name) for name in (*_ARRAYS, "kind_names")})

    def begin(self, options: Options) -> None:
        while self._under_way:  # by a consumer who stopped
            with contextlib.suppress(Exception):
                self.receive()
            if not self.alive:
                break
        self._put(options)

    def send(self, picked: list[np.ndarray]) -> None:
        self._put(picked)
        self._under_way += 1

    def receive(self) -> Any:
        try:
            answer = _read(self._out)
        except BaseException as e:  # interrupted in the middle of an answer, too: what follows would make no sense
            self._lost()
            if isinstance(e, EOFError):
                raise self._died() from None
            raise
        self._under_way -= 1
        if isinstance(answer, _Failure):
            raise answer.raised()
        return answer

    def _put(self, message: Any) -> None:
        try:
            pickle.dump(message, self._in, protocol=5)
            self._in.flush()
        except BaseException as e:
            self._lost()
            if isinstance(e, BrokenPipeError):
                raise self._died() from None
            raise

    def _lost(self) -> None:
        self.alive = False
        self.close()

    def _died(self) -> RuntimeError:
        status = self._process.poll()
        return RuntimeError(f"schedules: the process that makes schedules ended with status {status}; see its output above.")


# Processes that nobody uses now; they end with their graphs.
_idle: "weakref.WeakKeyDictionary[Graphs, list[_Remote]]" = weakref.WeakKeyDictionary()


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _widen(pipe: IO[bytes]) -> None:
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl  # not on Windows

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class _Failure:
    """An exception on its way."""

    def __init__(self, error: BaseException):
        self.text = "".join(traceback.format_exception(error))
        try:
            self.error: bytes | None = pickle.dumps(error)
            pickle.loads(self.error)
        except Exception:
            self.error = None

    def raised(self) -> BaseException:
        error = RuntimeError("schedules: the process failed") if self.error is None else pickle.loads(self.error)
        error.add_note("In the process that makes schedules:\n" + self.text)
        return error


def _write(pipe: IO[bytes], message: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [head, *(b.raw() for b in buffers)]
    pipe.write(struct.pack(f"<{len(raw) + 1}q", len(raw), *map(len, raw)))
    for part in raw:
        pipe.write(part)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    def read(n: int) -> memoryview:
        memory, done = memoryview(np.empty(n, np.uint8)), 0  # type: ignore[arg-type]
        while done < n:
            got = pipe.readinto(memory[done:])  # type: ignore[attr-defined]
            if not got:
                raise EOFError
            done += got
        return memory

    (count,) = struct.unpack("<q", read(8))
    head, *buffers = [read(n) for n in struct.unpack(f"<{count}q", read(8 * count))]
    return pickle.loads(head, buffers=buffers)


def serve() -> None:
    """The process: graphs first, then for every run of batches its options, then lists of index arrays."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_host_memory()  # a pass makes the arrays of the pass before
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Always reading, so that neither side waits for the other to read.
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    graphs, options, known = None, None, 0
    with contextlib.suppress(BrokenPipeError):
        while (request := requests.get()) is not None:
            if isinstance(request, dict):
                graphs = Graphs(**request)
            elif isinstance(request, Options):
                options, known = request, len(request.shapes or ())
            else:
                assert graphs is not None and options is not None
                try:
                    _write(answers, _answer(graphs, request, options, known))
                    known = len(options.shapes or ())
                except BrokenPipeError:
                    raise
                except Exception as e:
                    _write(answers, _Failure(e))
    os._exit(0)  # nobody reads: there is nothing to tidy


def _listen(requests: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except (EOFError, pickle.UnpicklingError):
        requests.put(None)


def _answer(graphs: Graphs, picked: list[np.ndarray], options: Options, known: int) -> tuple[Any, ...]:
    together = graphs[np.concatenate(picked)]
    made = pack(together, np.array([len(index) for index in picked]), options)
    number: dict[Shape, int] = {}
    which = [number.setdefault(sched.shape, len(number)) for sched in made]
    ends = np.cumsum([len(sched.data) for sched in made]).tolist()
    data = np.concatenate([sched.data for sched in made])
    arrays = tuple(getattr(together, name) for name in _ARRAYS)
    return arrays, data, ends, list(number), which, (options.shapes or [])[known:]
