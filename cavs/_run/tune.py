"""`tune`: times layouts of the persistent kernels for one F on this device (VPPS, section III-A)."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.engine import Job
from cavs._engines.persistent import chip
from cavs._engines.persistent.engine import Persistent
from cavs._engines.persistent.launch_calls import LaunchMark
from cavs._engines.persistent.lower import Recurrence, forward_of, recurrence_of
from cavs._function.arrays import as_arrays
from cavs._function.raw_keys import Shaped, from_stored, key_impl, stored_aval
from cavs._function.vertex import VertexFunction, check_function
from cavs._graphs.checks import check_type
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Jaxpr
from cavs._jaxpr.ruled import rules_in
from cavs._run.run import for_schedule, kind_names, plan_for, run
from cavs._schedule.schedule import Schedule, check_schedule
from cavs._schedule.shape import Shape
from cavs.kernels import LaunchConfig, LevelProgram, Target, Unfit, persistent, tuned

PASSES = 20  # in one measurement
AT_ONCE = 8  # layouts that compile side by side
# In a measurement of all layouts on an H200, the fastest was always among the first 14 by the cost model.
PROMISING = 16
_WORTH = 0.98  # a layout must take at most this part of the time of the one that is used today
_FIELDS = [f.name for f in dataclasses.fields(LaunchConfig) if f.name not in ("precision", "spins", "interpret", "wide")]

# Of a compiled loop of `PASSES` passes and what it is given: the microseconds of one.
Timer: TypeAlias = Callable[[Any, PyTree], float]


class Timed(NamedTuple):
    """A layout, and the microseconds of a pass with it; `None` if the time was up before it was measured."""

    config: LaunchConfig
    us: float | None

    @property
    def record(self) -> dict[str, Any]:
        """Its record in `kernels/tuned`."""
        measured = {} if self.us is None else {"us": round(self.us, 1)}
        return {field: getattr(self.config, field) for field in _FIELDS} | measured

    def __str__(self) -> str:
        fields = ", ".join(f"{field} {value}" for field, value in self.record.items() if field != "us")
        return f"{'not measured' if self.us is None else f'{self.us:8.1f} us'}  {fields}"


class Task(NamedTuple):
    """What is tuned: a batch, and one direction of F's recurrent part."""

    F: VertexFunction
    params: PyTree
    sched: Schedule
    inputs: PyTree
    edges: PyTree
    recurrence: Recurrence

    @property
    def arguments(self) -> PyTree:
        """The arguments of a compiled loop of passes. If they were constants, XLA would evaluate them for seconds."""
        return self.params, self.sched, self.inputs, self.edges


class Tuned(NamedTuple):
    """The layouts of one launch that were timed.

    Attributes:
        key: The key of the record.
        forward: The direction.
        today: The layout that was used before.
        layouts: The layouts that were timed, `today` first; none if the time was up before.
    """

    key: str
    forward: bool
    today: LaunchConfig
    layouts: list[Timed]

    @property
    def best(self) -> Timed:
        """The fastest layout, or the one used before if the fastest is hardly faster."""
        before, *others = self.layouts or [Timed(self.today, None)]
        candidate = min(others, key=_us, default=before)
        return candidate if _us(candidate) <= _WORTH * _us(before) else before

    def __str__(self) -> str:
        way = "forward" if self.forward else "backward"
        if not self.layouts:
            return f"{way}: no layout was timed"
        before, best = self.layouts[0], min(self.layouts, key=_us)
        return f"{way}: {before.us:.0f} us a pass before, {best.us:.0f} with the fastest of {len(self.layouts)} layouts"

    def table(self) -> str:
        """Returns the layouts and their times, from the fastest on."""
        notes = {self.today: "  (used before)", self.best.config: "  (used from now on)"}
        rows = [f"  {layout}{notes.get(layout.config, '')}" for layout in sorted(self.layouts, key=_us)]
        return "\n".join([f"{self} ({self.key})", *rows])


def _us(layout: Timed) -> float:
    return math.inf if layout.us is None else layout.us


def tune(
    F: VertexFunction, params: PyTree, sched: Schedule, inputs: PyTree = None, *, edges: PyTree = None, seconds: float = 120
) -> str:
    """Times layouts of the persistent kernels for F on this device, and keeps the fastest in the user's cache.

    All programs use them from then on, also in other processes, for batches with about as many vertices a level and the same
    precision of products. If a layout changes, functions that JAX has compiled in this process are compiled again when they are
    called next. The results of a step stay the same but for rounding. Forward and backward launches are timed one after
    another, each as part of whole passes over the batch. [`cavs.data.step`][] does the same with a few layouts, in a few
    seconds, and never again for layouts that were tuned here (VPPS, section III-A).

    ```python
    print(cavs.tune(F, params, sched, inputs))
    ```

    Args:
        F: the vertex function.
        params: its parameters.
        sched: a batch as in training.
        inputs: one row per vertex, as for [`cavs.run`][].
        edges: one row per edge, if F reads them.
        seconds: after so long, no other layouts are compiled; at least eight are timed for each direction.

    Returns:
        For each direction the layout used before, the fastest, and their times: one line each.

    Raises:
        TypeError: `F` is no `VertexFunction`, `sched` is no `Schedule`, `seconds` is no number, or a leaf is no array.
        ValueError: engine `persistent` cannot run F, this batch, or on this device.
    """
    check_function("tune", F)
    check_schedule("tune", sched)
    check_type("tune: seconds", seconds, int | float, "a number, such as 120")
    params, inputs, edges = (
        as_arrays(x, f"tune: {name}") for x, name in ((params, "params"), (inputs, "inputs"), (edges, "edges"))
    )
    target = Target.here()
    return "\n".join(map(str, tune_tasks(tasks(F, params, sched, inputs, edges, target), target, seconds)))


def tune_tasks(launches: Iterable[Task], target: Target, seconds: float) -> list[Tuned]:
    """Times all promising layouts of some launches, and keeps the fastest."""
    end, out = time.monotonic() + seconds, []
    for task in launches:
        layouts = fastest(task, target, end)
        out.append(Tuned(key_of(task), task.recurrence.forward, layouts[0].config, layouts))
        keep(out[-1:], target)
    return out


def keep(launches: Sequence[Tuned], target: Target, replace: bool = True) -> None:
    """Saves the best layouts in the user's cache. `replace`: whether they replace those that are there by now.

    Raises `OSError` if the cache cannot be written.
    """
    tuned.save(tuned.own_file(target.device_kind), {launch.key: launch.best.record for launch in launches}, replace)
    now = tuned.nearest(target.device_kind)
    if any(now[launch.key] | {"us": 0} != Timed(launch.today, 0).record for launch in launches):
        jax.clear_caches()  # what JAX has traced has the layouts of before


def tasks(F: VertexFunction, params: PyTree, sched: Schedule, inputs: PyTree, edges: PyTree, target: Target) -> Iterator[Task]:
    """Yields the forward and the backward of the kind whose vertices have children.

    Raises `ValueError` if engine `persistent` cannot run them.
    """
    kinds = kind_names(F, sched)
    F, inputs = for_schedule(F, sched, inputs)
    plan = plan_for(F, params, sched, inputs, edges)
    job = Job(plan, sched.shape, kinds, target)
    if reason := Persistent().unfit(job):
        raise ValueError(f"tune: it times launches of engine 'persistent', but {reason}.")
    (kind,) = job.inner_kinds
    plan = Persistent().plan_for(job)
    yield Task(F, params, sched, inputs, edges, forward_of(plan, kind, sched.shape, True, target))
    yield Task(F, params, sched, inputs, edges, recurrence_of(plan, kind, False, sched.shape.forest, target=target))


def key_of(task: Task) -> str:
    return chip.key_of(task.recurrence, task.sched.shape)


def promising(task: Task, target: Target) -> list[LaunchConfig]:
    """Returns the layouts to time, the one that is used today first."""
    program, shape = task.recurrence.program, task.sched.shape
    today = chip.configure(task.recurrence, chip.LaunchOptions(target), shape)
    fitting = [c for c in chip.candidates(program, task.recurrence.precision, target) if not chip.is_crowded(program, c)]
    if chip.has_few_graphs(shape):
        fitting += chip.spread(fitting)
    ranked = sorted((c for c in fitting if c != today), key=lambda c: chip.mean_cost(program, c, shape, shape.graphs))
    return [today, *ranked[: PROMISING - 1]]


def fastest(task: Task, target: Target, end: float, timer: Timer | None = None) -> list[Timed]:
    """Times the layout that is used today, and then promising ones until the time is up. Returns them in this order."""
    layouts = promising(task, target)
    out: list[Timed] = []
    for first in range(0, len(layouts), AT_ONCE):
        if out and time.monotonic() > end:
            break
        configs = layouts[first : first + AT_ONCE]
        lowered = [lower(task, config) for config in configs]
        with concurrent.futures.ThreadPoolExecutor(max(4, (os.cpu_count() or 1) - 4)) as pool:
            steps = list(pool.map(compiled, lowered))
        out += [Timed(c, (timer or by_the_clock)(step, task.arguments)) for c, step in zip(configs, steps, strict=True)]
    return out


def compiled(lowered: Any) -> Any:
    """Compiles a loop of passes. XLA need not tune its own products for it."""
    return lowered.compile({"xla_gpu_autotune_level": 0})


def lower(task: Task, config: LaunchConfig) -> Any:
    """Lowers `PASSES` chained passes. The other direction keeps its usual layout."""
    forward = task.recurrence.forward

    def choose(level: LevelProgram, is_forward: bool, usual: LaunchConfig) -> LaunchConfig:
        return dataclasses.replace(config, precision=usual.precision) if is_forward == forward else usual

    engine = Persistent(layouts=chip.Layouts(choose))

    def loss(params: PyTree, sched: Schedule, inputs: PyTree, edges: PyTree) -> jax.Array:
        select = sched.roots if sched.shape.rooted else None
        out = run(task.F, params, sched, inputs, edges=edges, select=select, engine=engine)
        return jnp.asarray(sum((x.sum() for x in jax.tree.leaves(out) if is_float(x)), 0.0))

    def one_pass(params: PyTree, *rest: PyTree) -> PyTree:
        # Each pass reads what the one before wrote, so that XLA cannot run it once for all.
        if forward:
            value = loss(params, *rest)
            return jax.tree.map(lambda p: p + (0 * value).astype(p.dtype) if is_float(p) else p, params)
        grads = jax.grad(loss, allow_int=True)(params, *rest)
        return jax.tree.map(lambda p, g: p - 1e-6 * g if is_float(p) else p, params, grads)

    def passes(arguments: PyTree) -> PyTree:
        params, *rest = arguments
        return jax.lax.scan(lambda params, _: (one_pass(params, *rest), None), params, length=PASSES)[0]

    return jax.jit(passes).lower(task.arguments)


def by_the_clock(step: Any, arguments: PyTree) -> float:
    """Returns the microseconds of a pass: the least of three measurements."""
    jax.block_until_ready(step(arguments))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(step(arguments))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / PASSES


# --- before a traced training step is compiled (VPPS, section III-A: tuning in situ) ---

# Each launch whose layout is not on record for this GPU gets a record, once and for all: the fastest of a few layouts, or
# today's layout if the time is up. Only records decide then, so a run that is resumed has the layouts with which it began.
FEW = 8  # layouts of a launch that are tried
COMPILING = 0.8  # after this part of the time, what is compiled by then is timed


def unable(target: Target) -> str | None:
    """Returns why no launch can be tuned here, as words that follow "but"; `None` if launches can."""
    if (count := jax.process_count()) > 1:
        return f"{count} processes train together, which must compile the same program"
    return persistent.unsupported(target)


def launches_in(jaxpr: Jaxpr) -> dict[str, LaunchMark]:
    """Returns the launches in a jaxpr by the keys of their records."""
    return {chip.key_of(mark.recurrence, mark.job.shape): mark for mark in rules_in(jaxpr, LaunchMark)}


def settle(jaxpr: Jaxpr, batches: PyTree, target: Target, seconds: float) -> list[Tuned]:
    """Puts the layouts of all launches in a jaxpr on record that are not, after timing a few layouts of each.

    Returns these launches. If the user's cache cannot be written, there are none.

    Args:
        jaxpr: the training step.
        batches: the batches that it reads, with the schedules of its launches. If they are stacked, the first one is taken.
        target: the GPU.
        seconds: the time for all launches together; one compilation more may pass. With 0, nothing is timed.
    """
    new = {
        key: mark for key, mark in launches_in(jaxpr).items() if not chip.is_settled(mark.recurrence, target, mark.job.shape)
    }
    if not new:
        return []
    today = {
        key: chip.chosen(mark.recurrence, target, mark.job.shape)[0] for key, mark in new.items()
    }  # with which it was traced
    try:
        tuned.save(tuned.own_file(target.device_kind), {})
    except OSError:  # later processes would not know the layouts
        return []
    timed = dict[str, list[Timed]]()
    try:
        timed = few_timed(tasks_of(new, batches), target, seconds) if seconds > 0 else timed
    except jax.errors.JaxRuntimeError as error:  # the step itself may still fit
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    launches = [Tuned(key, mark.recurrence.forward, today[key], timed.get(key, [])) for key, mark in new.items()]
    keep(launches, target, replace=False)  # of processes that tune at the same time, the first one decides for all
    return launches


def tasks_of(marks: Mapping[str, LaunchMark], batches: PyTree) -> dict[str, Task]:
    """Returns the launches whose schedules are among the batches, with random parameters and inputs.

    Leaves out launches of vertex functions that were deleted, such as one that a step creates for itself.
    Under a mesh that is set for all of JAX, arrays are divided, and a launch would not be the one of the step: there are none.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return {}
    scheds = _schedules(batches)
    known = {key: (mark, mark.job.plan.function.original) for key, mark in marks.items() if mark.job.shape in scheds}
    return {key: _task(mark, F, scheds[mark.job.shape]) for key, (mark, F) in known.items() if F is not None}


def _schedules(batches: PyTree) -> dict[Shape, Schedule]:
    """Returns the first schedule of each shape."""
    leaves = jax.tree.leaves(batches, is_leaf=lambda x: isinstance(x, Schedule))
    by_shape = {x.shape: np.asarray(x.data) for x in leaves if type(x) is Schedule}
    return {shape: jax.device_put(Schedule(data.reshape(-1, data.shape[-1])[0], shape)) for shape, data in by_shape.items()}


def _task(mark: LaunchMark, F: VertexFunction, sched: Schedule) -> Task:
    noise = 0.1 * np.random.default_rng(0).standard_normal(1 << 12, np.float32)

    def drawn(x: Shaped, *rows: int) -> jax.Array:
        like = stored_aval(x)
        values = np.resize(noise if jnp.issubdtype(like.dtype, jnp.floating) else np.zeros(1), (*rows, *like.shape))
        return from_stored(jnp.asarray(values, like.dtype), key_impl(x))

    plan, shape = mark.job.plan, sched.shape
    params = jax.tree.map(drawn, plan.shapes.params)
    inputs = jax.tree.map(lambda x: drawn(x, shape.vertices), plan.shapes.inputs)
    edges = jax.tree.map(lambda x: drawn(x, shape.all_edges), plan.shapes.edges)
    return Task(F, params, sched, inputs, edges, mark.recurrence)


def few_timed(tasks: Mapping[str, Task], target: Target, seconds: float) -> dict[str, list[Timed]]:
    """Times a few layouts of each task, today's first, until the time is up. A task is missing if today's was not timed.

    The layouts of all tasks compile side by side. Those that are not compiled in time go on in the background, unused.
    """
    begin, timed = time.monotonic(), dict[str, list[Timed]]()
    left = lambda part: part * seconds - (time.monotonic() - begin)  # noqa: E731
    layouts = [[(key, config) for config in promising(task, target)[:FEW]] for key, task in tasks.items()]
    firsts = [pairs[0] for pairs in layouts]
    pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1))
    running: list[tuple[str, LaunchConfig, concurrent.futures.Future[Any]]] = []
    try:
        for key, config in (pair for pairs in itertools.zip_longest(*layouts) for pair in pairs if pair):
            if left(COMPILING) <= 0:
                break
            with contextlib.suppress(Unfit):  # F alone, without the step around it, may keep more for its backward
                running.append((key, config, pool.submit(compiled, lower(tasks[key], config))))
        concurrent.futures.wait([future for *_, future in running], max(0.0, left(COMPILING)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    for key, config, future in running:
        if future.done() and not future.cancelled() and left(1) > 0 and (key in timed or (key, config) in firsts):
            timed.setdefault(key, []).append(Timed(config, by_the_clock(future.result(), tasks[key].arguments)))
    return timed
