"""Schedules made in processes of their own, so that the interpreter of the training loop only has to read them.

A process runs this module: it imports this package and nothing of the caller's, so it needs no
`if __name__ == "__main__"`, and it never touches a GPU. It ends with its standard input, whatever ends the caller.
"""

import collections
import contextlib
import io
import itertools
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from cavs._feed import messages
from cavs._feed.host_memory import keep_host_memory
from cavs._feed.messages import PIPE_BYTES, Line, file_in_memory, receive, send, widen
from cavs._feed.prefetch import refuse_inherited
from cavs._graphs.deferred import DeferredGraphs, Pass
from cavs._graphs.graphs import Graphs
from cavs._schedule.pack import Options, pack
from cavs._schedule.schedule import Schedule, Shape

UNDER_WAY = 3  # passes of one process: one that is read, one that is made, one that waits
_ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id")


def schedules_elsewhere(
    graphs: Graphs, passes: Iterator[list[np.ndarray]], options: Options, processes: int
) -> Iterator[tuple[Graphs, Schedule]]:
    """`(batch, schedule)` for each batch of each pass (a list of index arrays), made by processes that run ahead, in turn."""
    made_in = os.getpid()
    idle = _idle.setdefault(graphs, [])
    remotes = [idle.pop() if idle else _Remote(graphs) for _ in range(processes)]
    turns = itertools.cycle(remotes)
    ahead = 2 * processes + 1  # one is read; each process makes one, and another one waits for it
    assert ahead <= UNDER_WAY * processes
    under_way: collections.deque[tuple[_Remote, np.ndarray, np.ndarray]] = collections.deque()
    error: Exception | None = None
    try:
        for remote in remotes:
            remote.begin(options)
        while True:
            while error is None and len(under_way) < ahead:
                try:
                    picked = next(passes)
                except Exception as e:  # the end, or what is raised in its place: after the batches before it
                    error = e
                    break
                index, counts = np.concatenate(picked), np.array([len(some) for some in picked])
                remote = next(turns)
                remote.send((index, counts))
                under_way.append((remote, index, counts))
            if not under_way:
                break
            remote, index, counts = under_way.popleft()
            data, ends, shapes, which, new, arrays = remote.receive()
            if isinstance(options.shapes, list):
                options.shapes.extend(new)
            names = {"vocab": graphs.vocab, "kind_names": graphs.kind_names, "label_names": graphs.label_names}
            selected = None if arrays is None else Graphs(*arrays, **names)
            of_pass, begin = Pass(graphs, index, counts, selected), 0
            for number, (end, i) in enumerate(zip(ends, which, strict=True)):
                yield DeferredGraphs.of(of_pass, number), Schedule(data[begin:end], shapes[i])
                refuse_inherited("schedules", made_in)
                begin = end
    finally:
        idle += [remote for remote in remotes if remote.alive]
    if not isinstance(error, StopIteration):
        assert error is not None
        raise error


class _Remote:
    """A process of some graphs, and the line to it."""

    def __init__(self, graphs: Graphs):
        if not sys.executable:
            raise RuntimeError("schedules: process starts sys.executable, which this interpreter does not know.")
        file, self._file = file_in_memory(), file_in_memory()  # for the graphs, for schedules
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from cavs._feed.process import serve; serve({file}, {self._file})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=PIPE_BYTES,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
            start_new_session=True,  # Ctrl-C is the caller's
            pass_fds=[f for f in (file, self._file) if f is not None],
        )
        assert self._process.stdin and self._process.stdout
        if hasattr(select, "poll"):  # not on Windows
            reads, writes = (Line(os.dup(p.fileno()), d) for p, d in ((self._process.stdout, "r"), (self._process.stdin, "w")))
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.stdin = io.BufferedWriter(writes, PIPE_BYTES)
            self._process.stdout = io.BufferedReader(reads, PIPE_BYTES)
        self._in, self._out = self._process.stdin, self._process.stdout
        self._under_way = 0
        widen(self._in)
        widen(self._out)
        self.alive = True
        self.close = weakref.finalize(self, _end, self._process, self._file)  # also when the interpreter ends
        _all.add(self)
        try:
            self._put({name: getattr(graphs, name) for name in (*_ARRAYS, "kind_names")}, file)
        finally:
            if file is not None:  # the process has it
                os.close(file)

    def begin(self, options: Options) -> None:
        while self._under_way:  # by a consumer who stopped
            with contextlib.suppress(Exception):
                self.receive()
            if not self.alive:
                raise self._told(EOFError())
        self._put(options)

    def send(self, picked: tuple[np.ndarray, np.ndarray]) -> None:
        self._under_way += 1  # first: Ctrl-C may come at any time
        self._put(picked)

    def receive(self) -> Any:
        try:
            self._under_way -= 1
            answer = receive(self._out, self._file)
        except BaseException as e:  # interrupted in the middle of an answer, too: what follows would make no sense
            self._lost()
            raise self._told(e) from None
        if isinstance(answer, _Failure):
            raise answer.raised()
        return answer

    def _put(self, message: Any, file: int | None = None) -> None:
        try:
            send(self._in, message, file)
        except BaseException as e:
            self._lost()
            raise self._told(e) from None

    def _lost(self) -> None:
        self.alive = False
        self.close()

    def _told(self, error: BaseException) -> BaseException:
        """What to raise for what befell the line."""
        if isinstance(error, TimeoutError):
            return RuntimeError(
                f"schedules: the process that makes schedules has not answered for {messages.PATIENCE:g} s (is it stopped?), "
                "and was ended; call cavs.data.schedules again."
            )
        if isinstance(error, (EOFError, BrokenPipeError)):
            ended = f"ended with status {self._process.poll()}; see its output above."
            return RuntimeError(f"schedules: the process that makes schedules {ended}")
        return error

    def leave(self) -> None:
        """In a process that was forked from ours: the line and its other end are not its own."""
        self.alive = False
        self.close.detach()
        _close(self._process)
        if self._file is not None:
            os.close(self._file)


# Processes that nobody uses now; they end with their graphs.
_idle: "weakref.WeakKeyDictionary[Graphs, list[_Remote]]" = weakref.WeakKeyDictionary()
_all: "weakref.WeakSet[_Remote]" = weakref.WeakSet()


def _after_fork() -> None:
    # Two processes on one line would read each other's answers.
    for remote in list(_all):
        if remote.alive:
            remote.leave()
    _all.clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _end(process: "subprocess.Popen[bytes]", file: int | None) -> None:
    _close(process)
    if file is not None:
        os.close(file)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close(process: "subprocess.Popen[bytes]") -> None:
    pipes: tuple[Any, ...] = (process.stdin, process.stdout)
    for pipe in pipes:
        pipe.raw.close()  # without what is in the buffer: part of a message, which nobody takes or another process sends


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


def serve(graphs_file: int | None, answers_file: int | None) -> None:
    """The process: graphs first, then for every run of batches its options, then `(index, counts)` of each pass."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_host_memory()  # a pass makes the arrays of the pass before
    answers = os.fdopen(os.dup(1), "wb", PIPE_BYTES)
    os.dup2(2, 1)  # whatever a library prints is no answer
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Always reading, so that neither side waits for the other to read.
    threading.Thread(target=_listen, args=(requests, graphs_file), daemon=True).start()
    graphs, options, known = None, None, 0
    places = itertools.cycle(range(UNDER_WAY))  # an answer is read before the next but `UNDER_WAY` is asked for
    with contextlib.suppress(BrokenPipeError):
        while (request := requests.get()) is not None:
            if isinstance(request, dict):
                graphs = Graphs(**request)
            elif isinstance(request, Options):
                options, known = request, len(request.shapes or ())
            else:
                assert graphs is not None and options is not None
                index, counts = request
                try:
                    send(answers, _answer(graphs, index, counts, options, known), answers_file, next(places))
                    known = len(options.shapes or ())
                except BrokenPipeError:
                    raise
                except Exception as e:
                    send(answers, _Failure(e))
    os._exit(0)  # nobody reads: there is nothing to tidy


def _listen(requests: "queue.SimpleQueue[Any]", file: int | None) -> None:
    with contextlib.suppress(EOFError):
        requests.put(receive(sys.stdin.buffer, file))
        if file is not None:
            os.close(file)
        while True:
            requests.put(receive(sys.stdin.buffer))
    requests.put(None)


def _answer(graphs: Graphs, index: np.ndarray, counts: np.ndarray, options: Options, known: int) -> tuple[Any, ...]:
    made = pack(graphs, counts, options, index)
    number: dict[Shape, int] = {}
    which = [number.setdefault(sched.shape, len(number)) for sched in made]
    ends = np.cumsum([len(sched.data) for sched in made]).tolist()
    whole = made[0].data.base  # all integers, in one vector
    begin = (made[0].data.ctypes.data - whole.ctypes.data) // whole.itemsize
    data = whole[begin : begin + ends[-1]]
    # Who asked for fields may have no need to look at the graphs.
    together = None if options.fields else graphs[index]
    arrays = together and tuple(getattr(together, name) for name in _ARRAYS)
    return data, ends, list(number), which, (options.shapes or [])[known:], arrays
