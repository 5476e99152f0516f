"""The BFS scheduler: Cavs Algorithm 1 as one counting sort by height, over one batch or many at once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cavs._feed.process import schedules_elsewhere
from cavs._graphs.deferred import DeferredGraphs, Pass
from cavs._graphs.graphs import Graphs
from cavs._schedule.pack import Options, bucket as bucket, pack
from cavs._schedule.schedule import FIELDS, Schedule, Shape
from cavs._schedule.tasks import LAZY_WINDOW

# `schedules` prepares up to so many vertices at once: NumPy's calls, hundreds of microseconds a pass, are paid once for all
# batches in them. With twice as many the arrays of a pass would leave most caches.
VERTICES_AT_ONCE = 1 << 17
BATCHES_AT_ONCE = 1024


def schedule(
    graphs: Graphs,
    *,
    policy: str = "batching",
    kinds: bool = True,
    exact: bool = False,
    window: int = LAZY_WINDOW,
    shapes: list[Shape] | tuple[Shape, ...] | None = None,
    fields: Sequence[str] = (),
) -> Schedule:
    """Schedules a batch of graphs: Cavs Algorithm 1, where task t is the set of all activated vertices.

    A vertex is activated once its children are evaluated, so its level is its height, known since reading: the
    breadth-first search of a batch is a counting sort, and the backward replays the tasks in reverse.

    **Arguments:**

    - `graphs`: the batch.
    - `policy`: `"batching"` evaluates whole levels (cut into tasks of a few fixed widths); `"serial"` one vertex at a
      time, Cavs' baseline.
    - `kinds`: whether tasks hold one kind each where the graphs have kinds; `False` schedules all as one kind, for a
      vertex function that treats kinds alike.
    - `exact`: sizes are rounded up to a ladder of buckets (at most 19 % and 32 more) so that batches share compiled code;
      `True` keeps exact sizes instead: no padding, but every new size compiles.
    - `window`: the backward batches parameter gradients lazily over windows of tasks of at most this many inner vertices
      (one product per weight and window). More needs memory for the cotangents of all of them.

    - `shapes`: a list of your own, empty at first, of the shapes that were used: a batch that fits into one of them (with
      at most a third more rows than it needs) takes it, else its shape is added. Keeps rare combinations of sizes from
      compiling; the result depends on the batches before. A tuple stays as it is, and so does what a batch gets.

    - `fields`: of `"input_id"`, `"label"` and `"kind"`, what comes along: `sched.input_id` is then that of the graphs as
      `sched.pad(graphs.input_id, -1)` has it. A step that needs no more is sent one vector, and nothing is padded by hand:
      `step(params, cavs.schedule(batch, fields=("input_id", "label")))`, and in it `sched.label[sched.roots]`.

    **Raises:** `ValueError` for an unknown policy, a window below 256, or fields that the graphs do not have; `TypeError`
    where `graphs` is not a `cavs.Graphs`.
    """
    options = _checked("schedule", graphs, policy, kinds, exact, window, shapes, fields)
    return pack(graphs, np.array([len(graphs)]), options)[0]


def schedules(
    graphs: Graphs,
    batches: Iterable[Any],
    *,
    policy: str = "batching",
    kinds: bool = True,
    exact: bool = False,
    window: int = LAZY_WINDOW,
    shapes: list[Shape] | tuple[Shape, ...] | None = None,
    fields: Sequence[str] = (),
    workers: int = 0,
) -> Iterator[tuple[Graphs, Schedule]]:
    """Selects and schedules batch after batch: `(batch, schedule)` for each, several batches in one pass of NumPy.

    ```python
    for batch, sched in cavs.data.schedules(graphs, np.split(order, range(16, len(order), 16))):
        params, loss = step(params, sched, sched.pad(batch.input_id), batch.label[sched.roots])
    ```

    The same as `batch = graphs[index]` and `cavs.schedule(batch)` for each `index`, in order, and cheaper: a pass over
    several small batches costs little more than over one. It runs ahead by at most 2^17 vertices, and 1024 batches.

    **Arguments:** `graphs`, all of them; `batches`, any iterable of what selects graphs (integer arrays, slices, boolean
    arrays), may be endless; the others as in `cavs.schedule`.

    `workers=1` makes the schedules in a process of their own, up to three passes of 2^16 vertices ahead, and this one
    only reads them: for training loops that are short of Python (on a GPU, steps below a millisecond) where there is a
    core to spare. The process takes a second to start, is given a copy of `graphs`, stays for the next call with the
    same `graphs`, and ends with them. With `fields`, the graphs of a batch do not cross: they are selected here once
    somebody looks at them.

    `workers=4` has four processes make smaller passes in turn, where a step takes less time than its schedule. The results
    are the same, and in order. Made side by side, passes cannot add to `shapes`: fill a list beforehand, by a loop over
    `cavs.data.schedules(graphs, batches, shapes=shapes)`, and give `tuple(shapes)`; or `None`.

    **Raises:** as `cavs.schedule`, at the call; `TypeError` or `ValueError` for an invalid `workers`, or several workers
    with a list of `shapes`; `IndexError` for a batch that selects graphs which there are not; with `workers`, what failed
    there, with its traceback as a note, and `RuntimeError` where a process ended or has not answered for ten minutes, and in a
    process forked from the one that began to iterate (call `cavs.data.schedules` there).
    """
    options = _checked("schedules", graphs, policy, kinds, exact, window, shapes, fields)
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise TypeError(f"schedules: workers is {workers!r}; expected an int >= 0, the number of processes. Write workers=1.")
    if workers < 0:
        raise ValueError(f"schedules: workers is {workers}; expected an int >= 0, the number of processes. Write workers=1.")
    if workers > 1 and isinstance(shapes, list):
        raise ValueError(
            f"schedules: shapes is a list and workers is {workers}, but passes that are made side by side cannot add to it; "
            "write shapes=tuple(shapes), filled beforehand, or workers=1."
        )
    # Kinds without names are numbered up to the largest of a batch.
    alone = kinds and graphs.kind is not None and graphs.kind_names is None
    most = 1 if alone else BATCHES_AT_ONCE
    if workers:  # the first passes are small: training starts while the next ones are made
        first, limit = VERTICES_AT_ONCE // 64, VERTICES_AT_ONCE // min(2 * workers, 4)
        passes = _passes(graphs, iter(batches), most, first, limit, 2 ** (1 / workers))
        return schedules_elsewhere(graphs, passes, options, workers)
    return _here(graphs, _passes(graphs, iter(batches), most, VERTICES_AT_ONCE), options)


def _passes(
    graphs: Graphs, batches: Iterator[Any], most: int, first: float, limit: int = VERTICES_AT_ONCE, growth: float = 1
) -> Iterator[list[np.ndarray]]:
    """The batches of each pass as index arrays: at most `most`, about `first` vertices, then `growth` times as many up to
    `limit`."""
    numbers, mean = np.arange(len(graphs)), graphs.num_vertices / max(len(graphs), 1)
    error: Exception | None = None
    while error is None:
        picked: list[np.ndarray] = []
        vertices = 0.0
        while len(picked) < most and vertices < first:
            try:
                index = numbers[next(batches)]
            except Exception as e:  # the end, or what is raised in its place: after the batches before it
                error = e
                break
            picked.append(index if index.ndim else index[None])
            vertices += mean * index.size
        if picked:
            yield picked
        first = min(growth * first, limit)
    if not isinstance(error, StopIteration):
        raise error


def _here(graphs: Graphs, passes: Iterator[list[np.ndarray]], options: Options) -> Iterator[tuple[Graphs, Schedule]]:
    for picked in passes:
        counts, index = np.array([len(index) for index in picked]), np.concatenate(picked)
        of_pass = Pass(graphs, index, counts)
        for number, sched in enumerate(pack(graphs, counts, options, index)):
            yield DeferredGraphs.of(of_pass, number), sched


def _checked(
    name: str,
    graphs: Graphs,
    policy: str,
    kinds: bool,
    exact: bool,
    window: int,
    shapes: list[Shape] | tuple[Shape, ...] | None,
    fields: Sequence[str],
) -> Options:
    if not isinstance(graphs, Graphs):
        raise TypeError(
            f"{name}: graphs is a {type(graphs).__name__}, wanted a cavs.Graphs, such as cavs.read_trees(path)[:64]."
        )
    if policy not in ("batching", "serial"):
        raise ValueError(f"{name}: policy is {policy!r}, wanted 'batching' or 'serial'.")
    if not isinstance(window, int) or window < 256:
        raise ValueError(f"{name}: window is {window!r}, wanted an int >= 256: inner vertices whose gradients are batched.")
    fields = tuple(fields)
    for field in fields:
        if field not in FIELDS or getattr(graphs, field) is None:
            has = [name for name in FIELDS if getattr(graphs, name) is not None]
            raise ValueError(f"{name}: fields names {field!r}, wanted a tuple of what these graphs have: {', '.join(has)}.")
    return Options(policy, kinds, exact, window, shapes, fields, scripts=jax.default_backend() == "gpu")
