"""Workers: processes that create schedules, so that the training loop's process only reads them.

A worker runs `serve` of this module. It imports this package and nothing of the caller, so the caller needs no
`if __name__ == "__main__"`, and it never uses a GPU. It ends when its standard input is closed, however the caller ends.
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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cavs._feed import messages
from cavs._feed.host_memory import keep_host_memory
from cavs._feed.messages import PIPE_BYTES, PipeEnd, file_in_memory, receive, send, widen
from cavs._feed.prefetch import refuse_inherited
from cavs._graphs.deferred import DeferredGraphs, Pass
from cavs._graphs.graphs import Graphs
from cavs._schedule.batches import schedule_batches
from cavs._schedule.buckets import Options
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape

UNDER_WAY = 3  # passes of one worker: one that is read, one that is created, one that waits
_ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id")


def schedules_of_workers(
    graphs: Graphs, passes: Iterator[list[np.ndarray]], options: Options, workers: int
) -> Iterator[tuple[Graphs, Schedule]]:
    """Yields (batch, schedule) for each batch of each pass. A pass is a list of index arrays; workers create passes in turn."""
    made_in = os.getpid()
    idle = _idle.setdefault(graphs, [])
    team = [idle.pop() if idle else _Worker(graphs) for _ in range(workers)]
    turns = itertools.cycle(team)
    ahead = 2 * workers + 1  # one is read; for each worker, one is created and one waits
    assert ahead <= UNDER_WAY * workers
    under_way: collections.deque[tuple[_Worker, np.ndarray, np.ndarray]] = collections.deque()
    error: Exception | None = None
    try:
        for worker in team:
            worker.begin(options)
        while True:
            while error is None and len(under_way) < ahead:
                try:
                    picked = next(passes)
                except Exception as e:  # the end of the passes or an error, raised after the batches before it
                    error = e
                    break
                index, counts = np.concatenate(picked), np.array([len(some) for some in picked])
                worker = next(turns)
                worker.send(_Request(index, counts))
                under_way.append((worker, index, counts))
            if not under_way:
                break
            worker, index, counts = under_way.popleft()
            answer = worker.receive()
            if isinstance(options.shapes, list):
                options.shapes.extend(answer.new_shapes)
            names: _Fields = {"vocab": graphs.vocab, "kind_names": graphs.kind_names, "label_names": graphs.label_names}
            selected = None if answer.arrays is None else Graphs(**answer.arrays, **names)
            of_pass, begin = Pass(graphs, index, counts, selected), 0
            for number, (end, i) in enumerate(zip(answer.ends, answer.which, strict=True)):
                yield DeferredGraphs.of(of_pass, number), Schedule(answer.data[begin:end], answer.shapes[i])
                refuse_inherited("schedules", made_in)
                begin = end
    finally:
        idle += [worker for worker in team if worker.alive]
    if not isinstance(error, StopIteration):
        assert error is not None
        raise error


class _Request(NamedTuple):
    """A pass to schedule: batch k has the next `counts[k]` graphs of `index`."""

    index: np.ndarray
    counts: np.ndarray


_Fields: TypeAlias = dict[str, Any]  # of `Graphs`, by name


class _Answer(NamedTuple):
    """The schedules of a pass."""

    data: np.ndarray  # the integers of all schedules
    ends: list[int]  # where the integers of each schedule end
    shapes: list[Shape]  # the distinct shapes
    which: list[int]  # index into `shapes` of each schedule
    new_shapes: list[Shape]  # those that were added to `options.shapes`
    arrays: _Fields | None  # of the selected graphs, unless the schedules include fields


class _Worker:
    """A process with a copy of some graphs, and the connection to it."""

    def __init__(self, graphs: Graphs):
        if not sys.executable:
            raise RuntimeError("schedules: got no sys.executable; expected the path of the interpreter, to start workers.")
        file, self._file = file_in_memory(), file_in_memory()  # for the graphs, for schedules
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from cavs._feed.workers import serve; serve({file}, {self._file})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=PIPE_BYTES,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
            start_new_session=True,  # the caller handles Ctrl-C
            pass_fds=[f for f in (file, self._file) if f is not None],
        )
        assert self._process.stdin and self._process.stdout
        if hasattr(select, "poll"):  # not on Windows
            reads = PipeEnd(os.dup(self._process.stdout.fileno()), "r")
            writes = PipeEnd(os.dup(self._process.stdin.fileno()), "w")
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.stdin = io.BufferedWriter(writes, PIPE_BYTES)
            self._process.stdout = io.BufferedReader(reads, PIPE_BYTES)
        self._in, self._out = self._process.stdin, self._process.stdout
        self._under_way = 0
        widen(self._in)
        widen(self._out)
        self.alive = True
        self.close = weakref.finalize(self, _end, self._process, self._file)  # called also when the interpreter ends
        _all.add(self)
        try:
            self._put({name: getattr(graphs, name) for name in (*_ARRAYS, "kind_names")}, file)
        finally:
            if file is not None:  # the worker has opened it
                os.close(file)

    def begin(self, options: Options) -> None:
        while self._under_way:  # requests of an iterator that was not consumed
            with contextlib.suppress(Exception):
                self.receive()
            if not self.alive:
                raise self._explained(EOFError())
        self._put(options)

    def send(self, request: _Request) -> None:
        self._under_way += 1  # counted first: Ctrl-C may come at any time
        self._put(request)

    def receive(self) -> _Answer:
        try:
            self._under_way -= 1
            answer = receive(self._out, self._file)
        except BaseException as e:  # includes Ctrl-C: the rest of a partly read answer is useless
            self._lost()
            raise self._explained(e) from None
        if isinstance(answer, _Failure):
            raise answer.raised()
        return answer

    def _put(self, message: object, file: int | None = None) -> None:
        try:
            send(self._in, message, file)
        except BaseException as e:
            self._lost()
            raise self._explained(e) from None

    def _lost(self) -> None:
        self.alive = False
        self.close()

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise for an error of the connection."""
        if isinstance(error, TimeoutError):
            return RuntimeError(
                f"schedules: the worker has not answered for {messages.TIMEOUT:g} s (is it stopped?) and was ended. Call "
                "cavs.data.schedules again."
            )
        if isinstance(error, (EOFError, BrokenPipeError)):
            ended = f"ended with status {self._process.poll()}; see its output above."
            return RuntimeError(f"schedules: the worker {ended}")
        return error

    def leave(self) -> None:
        """Closes this end of the connection in a forked process, which must not use it, without ending the worker."""
        self.alive = False
        self.close.detach()
        _close(self._process)
        if self._file is not None:
            os.close(self._file)


# Workers that no iterator uses now. They end when their graphs are deleted.
_idle: "weakref.WeakKeyDictionary[Graphs, list[_Worker]]" = weakref.WeakKeyDictionary()
_all: "weakref.WeakSet[_Worker]" = weakref.WeakSet()


def _after_fork() -> None:
    # Two processes on one connection would read each other's answers.
    for worker in list(_all):
        if worker.alive:
            worker.leave()
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
    for pipe in (process.stdin, process.stdout):
        # Without flushing the buffer: it holds part of a message that nobody reads, or that another process sends.
        pipe.raw.close()  # type: ignore[union-attr]


class _Failure:
    """An exception in a worker, and its traceback."""

    def __init__(self, error: BaseException):
        self.text = "".join(traceback.format_exception(error))
        try:
            self.error: bytes | None = pickle.dumps(error)
            pickle.loads(self.error)
        except Exception:
            self.error = None

    def raised(self) -> BaseException:
        error = RuntimeError("schedules: the worker failed") if self.error is None else pickle.loads(self.error)
        error.add_note("In the worker:\n" + self.text)
        return error


def serve(graphs_file: int | None, answers_file: int | None) -> None:
    """The main loop of a worker. It receives graphs, then for each iterator its options, then a request for each pass."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_host_memory()  # a pass allocates arrays of the same sizes as the pass before
    answers = os.fdopen(os.dup(1), "wb", PIPE_BYTES)
    os.dup2(2, 1)  # what a library prints must not be mixed with answers
    requests: _Requests = queue.SimpleQueue()
    # A thread always reads, so that neither side waits for the other to read.
    threading.Thread(target=_listen, args=(requests, graphs_file), daemon=True).start()
    graphs, options, known = None, None, 0
    places = itertools.cycle(range(UNDER_WAY))  # at most `UNDER_WAY` answers are requested and not read yet
    with contextlib.suppress(BrokenPipeError):
        while (request := requests.get()) is not None:
            if isinstance(request, dict):
                graphs = Graphs(**request)
            elif isinstance(request, Options):
                options, known = request, len(request.shapes or ())
            else:
                assert graphs is not None and options is not None
                try:
                    send(answers, _answer(graphs, request, options, known), answers_file, next(places))
                    known = len(options.shapes or ())
                except BrokenPipeError:
                    raise
                except Exception as e:
                    send(answers, _Failure(e))
    os._exit(0)  # nobody reads: there is nothing to clean up


_Requests: TypeAlias = "queue.SimpleQueue[_Fields | Options | _Request | None]"


def _listen(requests: _Requests, file: int | None) -> None:
    with contextlib.suppress(EOFError):
        requests.put(receive(sys.stdin.buffer, file))
        if file is not None:
            os.close(file)
        while True:
            requests.put(receive(sys.stdin.buffer))
    requests.put(None)


def _answer(graphs: Graphs, request: _Request, options: Options, known: int) -> _Answer:
    """Schedules a pass. The first `known` of `options.shapes` are known to the caller."""
    schedules = schedule_batches(graphs, request.counts, options, request.index)
    number: dict[Shape, int] = {}
    which = [number.setdefault(sched.shape, len(number)) for sched in schedules]
    ends = np.cumsum([len(sched.data) for sched in schedules]).tolist()
    whole = schedules[0].data.base  # one vector holds the integers of all schedules
    begin = (schedules[0].data.ctypes.data - whole.ctypes.data) // whole.itemsize
    data = whole[begin : begin + ends[-1]]
    # With fields, the caller may not need the graphs.
    selected = None if options.fields else graphs[request.index]
    arrays = None if selected is None else {name: getattr(selected, name) for name in _ARRAYS}
    return _Answer(data, ends, list(number), which, list(options.shapes or ())[known:], arrays)
