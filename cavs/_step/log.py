"""`Log`: metrics, speed, and where the time goes, as JSON lines, to TensorBoard, or to any function."""

import atexit
import json
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from cavs._feed.loader import Loader
from cavs._function.arrays import is_real
from cavs._graphs.arguments import check_takes, optional_module
from cavs._graphs.checks import check_type
from cavs._graphs.files import check_path, errors_named
from cavs._graphs.pytree import PyTree

Record: TypeAlias = dict[str, float]
Write: TypeAlias = Callable[[Record], object]

# What a report says beside the metrics.
OWN = "step epoch batch seconds steps_per_second vertices_per_second device waiting host".split()
FLUSH = 5  # seconds until an event is in its file
MSG_TENSORBOARD = "tensorboard: the package tensorboardX is not installed. Write: pip install tensorboardX, or log JSON lines."


class Log:
    """Reports a training loop every few seconds, at the end of each epoch, and when it is closed.

    ```python
    with cavs.data.Log(loader, cavs.data.json_lines("log.jsonl"), print) as log:
        for batches in loader:
            state, values = step(state, batches)
            log(values)
    ```

    A report is a dict of numbers, which each of `writers` receives: a function such as `print`, `wandb.log`,
    [`cavs.data.json_lines`][] or [`cavs.data.tensorboard`][]. It describes the time since the previous report:

    | key | value |
    |---|---|
    | `step` | training steps so far |
    | `epoch`, `batch` | the position of the loader |
    | `seconds` | the length of this time |
    | `loss`, ... | the mean of each metric over those of these steps that have it |
    | `steps_per_second` | training steps per second |
    | `vertices_per_second` | vertices per second, without padding, if the loader was given a batch size |
    | `device` | the fraction of the time in which the device computed |
    | `waiting` | the fraction in which the loop waited for batches of the loader |
    | `host` | the rest of the time that the loop was busy: dispatches, and the user's own Python code |

    `log(values, steps)` adds the results of a dispatch of `steps` training steps, by default of the batches that the loop has
    received since the call before. It raises what a writer raised.

    A thread waits for the results and calls `writers`, so the loop never waits. On a GPU, `device` should be near 1. If
    `waiting` is high, let `collate` do less; if `host` is high and `device` low, use more `steps` per dispatch. On a CPU, XLA
    may compute during a dispatch, so `device` and `host` may overlap.

    Args:
        loader: the loader of the loop.
        writers: functions of a report. They are called from a thread.
        every: seconds between reports.
        metrics: `metrics(values)` returns a dict of floats, or of arrays with an axis of steps, for what the loop passes to the
            log. By default a dict is taken as it is, and an array is the `loss`. Other values raise a `TypeError` at the next
            call, and names of the table above a `ValueError`.
        step: the training steps before this loop. By default `loader.seen`, so that a restored loop continues to count.

    Raises:
        TypeError: `loader` is not a loader, or a writer is not callable, or `metrics` is no function of one argument.
        ValueError: `every` is no number of seconds, or `step` no int.
    """

    def __init__(
        self,
        loader: Loader,
        *writers: Write,
        every: float = 10.0,
        metrics: Callable[[Any], PyTree] | None = None,
        step: int | None = None,
    ):
        check_type("Log: loader", loader, Loader, "the cavs.data.Loader of the loop")
        for writer in writers:
            if not callable(writer):
                raise TypeError(
                    f"Log: writers: got a {type(writer).__name__}; expected functions of one report. Write "
                    "cavs.data.json_lines(path) for a file."
                )
        if isinstance(every, bool) or not isinstance(every, int | float | np.number) or not every >= 0:
            raise ValueError(f"Log: every: got {every!r}; expected seconds >= 0. Write every=10.")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int | np.integer)):
            raise ValueError(f"Log: step: got {step!r}; expected an int, the training steps before this loop, or None.")
        if metrics is not None:
            check_takes("Log: metrics", metrics, "values", write="metrics=lambda values: {'loss': values[0]}")
        self._loader, self._every = loader, every
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._report = _Report(writers, metrics or (lambda values: values if isinstance(values, dict) else {"loss": values}))
        size, sizes = loader._sampler.size, loader._sampler.sizes
        self._vertices = {} if size is None else {"vertices": size * float(sizes.mean())}  # of a batch
        self._left: Record | None = None  # about the results since the last report
        self._seen, self._received = loader.seen, loader._received
        self._step, self._follows = (self._seen, True) if step is None else (int(step), False)
        self._reported, self._waited, self._epoch = time.perf_counter(), 0.0, loader.epoch

    def __call__(self, values: PyTree, steps: int | None = None) -> None:
        """Adds the results of one dispatch.

        Args:
            values: an array, or a pytree that `metrics` understands.
            steps: the training steps of the dispatch. `None`: the batches that the loop has received since the call before.

        Raises:
            Exception: what a writer raised.
        """
        self._raise()
        now, loader = time.perf_counter(), self._loader
        received = loader._received - self._received
        moved = loader.seen - self._seen - received  # by a position that was restored meanwhile
        self._seen, self._received = loader.seen, loader._received
        steps = max(1, received) if steps is None else steps
        self._step += steps + moved * self._follows
        if loader.epoch != self._epoch or loader.waited < self._waited:  # the loader counts anew in each epoch
            self._epoch, self._waited = loader.epoch, 0.0
        about = {"step": self._step, "epoch": loader.epoch, "batch": loader.batch, **self._vertices}
        about["waited"] = loader.waited - self._waited
        at_end = loader._sampler.known and loader.batch >= len(loader)
        due = at_end or now - self._reported > self._every
        if due:
            self._reported, self._waited = now, loader.waited
        self._left = None if due else about
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._work, self._report, self._error), name="cavs-log", daemon=True
            )
            self._end = weakref.finalize(self, self._work.put, None)
            _threads[self._thread] = self._work
            atexit.unregister(_join)
            atexit.register(_join)  # so that it runs before what the writers registered
            self._thread.start()
        self._work.put((now, steps, values, about if due else None))

    def close(self) -> None:
        """Waits until all results have been reported."""
        if self._thread is not None:
            if self._left is not None:
                self._work.put((time.perf_counter(), 0, None, self._left))
                self._left = None
            self._end()
            self._thread.join()
            self._thread = None
        self._raise()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None:  # do not hide the exception
            self._end()

    def _raise(self) -> None:
        if self._error:
            raise self._error.pop()


# The threads of logs. One that waits for the device must not outlive Python, which would abort.
_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]" = weakref.WeakKeyDictionary()
LONGEST_WAIT = 10.0  # seconds for a writer that does not return


def _join() -> None:
    for thread, work in [*_threads.items()]:
        work.put(None)
        thread.join(LONGEST_WAIT)


class _Report:
    """The thread's sums since the last report."""

    def __init__(self, writers: tuple[Write, ...], metrics: Callable[[Any], PyTree]):
        self.writers, self.metrics = writers, metrics
        self.begun = self.finished = time.perf_counter()
        self.busy, self.steps = 0.0, 0
        self.sums: dict[str, tuple[float, int]] = {}  # of each metric over the steps that have it, and their number

    def add(self, dispatched: float, steps: int, values: PyTree, about: Record | None) -> None:
        """Adds results, unless there are no `steps`, and writes a report if it is told `about` the loader."""
        values = jax.block_until_ready(values)
        now = time.perf_counter()
        if steps:
            self.busy += now - max(dispatched, self.finished)
            self.finished, self.steps = now, self.steps + steps
            for name, x in _checked(self.metrics(values)).items():
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = (total + steps * float(np.mean(np.asarray(x, np.float64))), count + steps)
        if about is not None:
            self._write(about, now)

    def _write(self, about: Record, now: float) -> None:
        seconds = max(now - self.begun, 1e-9)
        waited, vertices = about.pop("waited"), about.pop("vertices", None)
        device, waiting = (min(1.0, x / seconds) for x in (self.busy, waited))
        record = {**about, "seconds": seconds, **{name: x / count for name, (x, count) in self.sums.items()}}
        record["steps_per_second"] = self.steps / seconds
        if vertices is not None:
            record["vertices_per_second"] = vertices * self.steps / seconds
        record |= {"device": device, "waiting": waiting, "host": max(0.0, 1 - waiting - device)}
        self.begun, self.busy, self.steps, self.sums = now, 0.0, 0, {}
        for write in self.writers:
            write(dict(record))


def _checked(metrics: Any) -> Mapping[str, Any]:
    """Returns metrics. Raises `TypeError` if they are no dict of real numbers, and `ValueError` for a name in `OWN`."""
    if not isinstance(metrics, Mapping) or not all(map(is_real, metrics.values())):
        got = jax.tree.map(lambda x: type(x).__name__, metrics, is_leaf=lambda x: x is None)
        raise TypeError(
            f"Log: values: got {got!r:.200}; expected an array, the loss, or a dict of real arrays. Write {{'loss': loss, "
            "'accuracy': accuracy}, or Log(..., metrics=lambda values: {'loss': values[0]})."
        )
    if taken := [name for name in OWN if name in metrics]:
        raise ValueError(f"Log: values: got the metric {taken[0]!r}; expected other names than {', '.join(OWN)}.")
    return metrics


def _run(work: "queue.SimpleQueue[Any]", report: _Report, error: list[BaseException]) -> None:
    while (item := work.get()) is not None:
        if error:
            continue
        try:
            report.add(*item)
        except Exception as e:  # raised by the next call of the log
            error.append(e)


def json_lines(path: str | Path) -> Write:
    """A writer of [`cavs.data.Log`][]: appends each report to a file as a line of JSON. NaN and infinity become null.

    If the file ends within a line, as after a full disk, the reports begin on a new line. Its folder is created. Of several
    processes, the first one writes.

    Raises:
        TypeError, ValueError: `path` is no path.
        OSError: the file cannot be written.
    """

    check_path("json_lines", path)
    if not jax.process_index() and (os.path.isfile(path) or not os.path.exists(path)):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        open(path, "a").close()  # an error here costs no training
    begin = "\n" if _ends_within_a_line(path) else ""

    def write(record: Record) -> None:
        if jax.process_index():
            return
        nonlocal begin
        values = {name: x if math.isfinite(x) else None for name, x in record.items()}
        with errors_named(path), open(path, "a", encoding="utf-8") as file:
            file.write(begin + json.dumps({"time": time.time(), **values}) + "\n")
        begin = ""

    return write


def _ends_within_a_line(path: str | Path) -> bool:
    if not os.path.isfile(path) or not (size := os.path.getsize(path)):
        return False
    with open(path, "rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


def tensorboard(folder: str | Path) -> Write:
    """A writer of [`cavs.data.Log`][]: writes event files, which `tensorboard --logdir FOLDER` shows.

    Of several processes, the first one writes.

    Raises:
        ModuleNotFoundError: the package tensorboardX is missing.
    """
    package = optional_module("tensorboardX", MSG_TENSORBOARD)
    if jax.process_index():
        return lambda record: None
    events = package.SummaryWriter(str(folder), flush_secs=FLUSH)
    atexit.register(events.close)

    def write(record: Record) -> None:
        for name, x in record.items():
            if name != "step":
                events.add_scalar(name, x, int(record["step"]))

    return write
