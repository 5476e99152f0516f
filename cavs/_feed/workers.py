"""Workers: processes that create schedules, so that the training loop's process only reads them. They run `_feed.serve`."""

import collections
import contextlib
import io
import itertools
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

from cavs._feed import messages
from cavs._feed.messages import PIPE_BYTES, PipeEnd, file_in_memory, receive, send, widen
from cavs._feed.prefetch import refuse_inherited
from cavs._feed.serve import ARRAYS, GREETING, UNDER_WAY, Answer, Failure, Fields, Request
from cavs._graphs.deferred import DeferredGraphs, Pass
from cavs._graphs.graphs import Graphs
from cavs._schedule.buckets import Options
from cavs._schedule.schedule import Schedule

# A worker takes a second to start. Meanwhile this process creates passes of this many vertices, if their shapes are known.
WHILE_STARTING = 1 << 16

Schedules: TypeAlias = Iterator[tuple[Graphs, Schedule]]


def schedules_of_workers(
    graphs: Graphs,
    passes: Iterator[Request],
    options: Options,
    workers: int,
    here: Callable[[Graphs, Iterator[Request], Options], Schedules],
) -> Schedules:
    """Yields (batch, schedule) for each batch of each pass. Workers create passes in turn, and `here` the first ones."""
    made_in = os.getpid()
    idle, team = _teams(graphs, workers)
    left = 0 if team[0].started or not options.fixed else WHILE_STARTING
    turns = itertools.cycle(team)
    ahead = 2 * len(team) + 1  # one is read; for each worker, one is created and one waits
    assert ahead <= UNDER_WAY * len(team)
    under_way: collections.deque[tuple[_Worker | None, Request]] = collections.deque()
    error, more = None, True
    try:
        for worker in team:
            worker.begin(options)
        while True:
            while more and len(under_way) < ahead:
                try:
                    request = next(passes)
                except StopIteration:
                    more = False
                    break
                except Exception as e:  # raised after the batches before it
                    error, more = e, False
                    break
                worker = next(turns) if left <= 0 else None
                if worker is None:
                    left -= len(request.index) * graphs.num_vertices / len(graphs)
                else:
                    worker.send(request)
                under_way.append((worker, request))
            if not under_way:
                break
            worker, request = under_way.popleft()
            if worker is None:
                for found in here(graphs, iter([request]), options):
                    yield found
                    refuse_inherited("schedules", made_in)
                continue
            index, counts, _ = request
            answer = worker.receive()
            if isinstance(options.shapes, list):
                options.shapes.extend(answer.new_shapes)
            names: Fields = {"vocab": graphs.vocab, "kind_names": graphs.kind_names, "label_names": graphs.label_names}
            selected = None if answer.arrays is None else Graphs(**answer.arrays, **names)
            of_pass, begin = Pass(graphs, index, counts, selected), 0
            for number, (end, i) in enumerate(zip(answer.ends, answer.which, strict=True)):
                yield DeferredGraphs.of(of_pass, number), Schedule(answer.data[begin:end], answer.shapes[i])
                refuse_inherited("schedules", made_in)
                begin = end
    finally:
        idle += [worker for worker in team if worker.alive]
    if error is not None:
        raise error


def _teams(graphs: Graphs, workers: int) -> tuple[list["_Worker"], list["_Worker"]]:
    """Returns the workers of some graphs that nothing uses, and those that are taken from them, at most `workers`.

    Workers that have just been started are taken only if there are no others, so that no loop waits for them.
    """
    idle, taken = _idle.setdefault(graphs, []), []
    with contextlib.suppress(IndexError):  # when none is left
        while True:
            taken.append(idle.pop(0))  # in one step, because threads of other loops take workers, too
    taken += [_Worker(graphs) for _ in range(workers - len(taken))]
    team = [worker for worker in taken if worker.started][:workers] or taken[:workers]
    idle += [worker for worker in taken if worker not in team]
    return idle, team


class _Worker:
    """A process with a copy of some graphs, and the connection to it."""

    def __init__(self, graphs: Graphs):
        if not sys.executable:
            raise RuntimeError("schedules: got no sys.executable; expected the path of the interpreter, to start workers.")
        file, self._file = file_in_memory(), file_in_memory()  # for the graphs, for schedules
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from cavs._feed.serve import serve; serve({file}, {self._file})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=PIPE_BYTES,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
            start_new_session=True,  # the caller handles Ctrl-C
            pass_fds=[f for f in (file, self._file) if f is not None],
        )
        assert self._process.stdin and self._process.stdout
        self._reads: PipeEnd | None = None
        if hasattr(select, "poll"):  # not on Windows
            self._reads = PipeEnd(os.dup(self._process.stdout.fileno()), "r")
            writes = PipeEnd(os.dup(self._process.stdin.fileno()), "w")
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.stdin = io.BufferedWriter(writes, PIPE_BYTES)
            self._process.stdout = io.BufferedReader(self._reads, PIPE_BYTES)
        self._in, self._out = self._process.stdin, self._process.stdout
        self._under_way, self._greeted = 0, False
        widen(self._in)
        widen(self._out)
        self.close = weakref.finalize(self, _end, self._process, self._file)  # called also when the interpreter ends
        _all.add(self)
        try:
            self._put({name: getattr(graphs, name) for name in (*ARRAYS, "kind_names")}, file)
        finally:
            if file is not None:  # the worker has opened it
                os.close(file)

    @property
    def alive(self) -> bool:
        """Whether the connection is open. It is closed after an error, and if the garbage collector finds this worker."""
        return self.close.alive

    @property
    def started(self) -> bool:
        """Whether the process has read the graphs, or ended; on systems that cannot tell, always."""
        return self._greeted or self._reads is None or self._reads.has_data()

    def begin(self, options: Options) -> None:
        while self._under_way:  # requests of an iterator that was not consumed
            with contextlib.suppress(Exception):
                self.receive()
            if not self.alive:
                raise self._explained(EOFError())
        self._put(options)

    def send(self, request: Request) -> None:
        self._under_way += 1  # counted first: Ctrl-C may come at any time
        self._put(request)

    def receive(self) -> Answer:
        try:
            self._under_way -= 1
            if not self._greeted:
                self._greeted = receive(self._out) == GREETING
            answer = receive(self._out, self._file)
        except BaseException as e:  # includes Ctrl-C: the rest of a partly read answer is useless
            self.close()
            raise self._explained(e) from None
        if isinstance(answer, Failure):
            raise answer.raised()
        return answer

    def _put(self, message: object, file: int | None = None) -> None:
        try:
            send(self._in, message, file)
        except BaseException as e:
            self.close()
            raise self._explained(e) from None

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise for an error of the connection."""
        if isinstance(error, TimeoutError):
            return RuntimeError(
                f"schedules: the worker has not answered for {messages.TIMEOUT:g} s (is it stopped?) and was ended. Iterate "
                "over the loader again."
            )
        if isinstance(error, (EOFError, BrokenPipeError)):
            ended = f"ended with status {self._process.poll()}; see its output above."
            return RuntimeError(f"schedules: the worker {ended}")
        return error

    def leave(self) -> None:
        """Closes this end of the connection in a forked process, which must not use it, without ending the worker."""
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
        # Do not flush the buffer: it holds part of a message that no process reads, or that another process sends.
        pipe.raw.close()  # type: ignore[union-attr]
