"""The process of a worker: it receives graphs, and sends the schedules of each pass that it is asked for.

It imports this package and nothing of the caller, so the caller needs no `if __name__ == "__main__"`, and it never uses a GPU.
It ends when its standard input is closed, however the caller ends.
"""

import contextlib
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cavs._feed.host_memory import keep_host_memory
from cavs._feed.messages import PIPE_BYTES, receive, send
from cavs._graphs.graphs import Graphs
from cavs._schedule.batches import schedule_batches
from cavs._schedule.buckets import Options
from cavs._schedule.shape import Shape

GREETING = "started"  # a worker's first message, once it has the graphs
UNDER_WAY = 3  # passes of one worker: one that is read, one that is created, one that waits
ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id", "graph_label", "edge_attr")


class Request(NamedTuple):
    """A pass to schedule: batch k has the next `counts[k]` graphs of `index` and, if `shapes` is given, that fixed shape."""

    index: np.ndarray
    counts: np.ndarray
    shapes: np.ndarray | None = None


Fields: TypeAlias = dict[str, Any]  # of `Graphs`, by name


class Answer(NamedTuple):
    """The schedules of a pass."""

    data: np.ndarray  # the integers of all schedules
    ends: list[int]  # where the integers of each schedule end
    shapes: list[Shape]  # the distinct shapes
    which: list[int]  # index into `shapes` of each schedule
    new_shapes: list[Shape]  # those that were added to `options.shapes`
    arrays: Fields | None  # of the selected graphs, unless the schedules include fields


class Failure:
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
    requests: Requests = queue.SimpleQueue()
    # A thread always reads, so that neither side waits for the other to read.
    threading.Thread(target=_listen, args=(requests, graphs_file), daemon=True).start()
    graphs, options, known = None, None, 0
    places = itertools.cycle(range(UNDER_WAY))  # at most `UNDER_WAY` answers are requested and not read yet
    with contextlib.suppress(BrokenPipeError):
        while (request := requests.get()) is not None:
            if isinstance(request, dict):
                graphs = Graphs(**request)
                send(answers, GREETING)
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
                    send(answers, Failure(e))
    os._exit(0)  # the other end is closed, so there is nothing to clean up


Requests: TypeAlias = "queue.SimpleQueue[Fields | Options | Request | None]"


def _listen(requests: Requests, file: int | None) -> None:
    with contextlib.suppress(EOFError):
        requests.put(receive(sys.stdin.buffer, file))
        if file is not None:
            os.close(file)
        while True:
            requests.put(receive(sys.stdin.buffer))
    requests.put(None)


def _answer(graphs: Graphs, request: Request, options: Options, known: int) -> Answer:
    """Schedules a pass. The first `known` of `options.shapes` are known to the caller."""
    schedules = schedule_batches(graphs, request.counts, options, request.index, request.shapes)
    number: dict[Shape, int] = {}
    which = [number.setdefault(sched.shape, len(number)) for sched in schedules]
    ends = np.cumsum([len(sched.data) for sched in schedules]).tolist()
    whole = schedules[0].data.base  # one vector holds the integers of all schedules
    begin = (schedules[0].data.ctypes.data - whole.ctypes.data) // whole.itemsize
    data = whole[begin : begin + ends[-1]]
    # With fields, the caller may not need the graphs.
    selected = None if options.fields else graphs[request.index]
    arrays = None if selected is None else {name: getattr(selected, name) for name in ARRAYS}
    return Answer(data, ends, list(number), which, list(options.shapes or ())[known:], arrays)
