"""The measurements of suite `memory`. Each is a generator: it plans and compiles, yields, runs, and returns a record.

A step is the loss and its gradient, and for Echo's models and networks a plain SGD update whose parameters are donated.
"""

import math
import pickle
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import cavs
from bench import graphs as generators, models, networks
from bench.ours import graphs_of
from cavs import vertex_programs as vp
from cavs.memory import BudgetError, bytes_of, plan, recompute

Record: TypeAlias = dict[str, Any]
Measured: TypeAlias = Generator[None, None, Record]
PROGRAMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "tree_lstm": (lambda h: vp.BinaryTreeLSTM(h, h), "trees"),
    "child_sum": (lambda h: vp.ChildSumTreeLSTM(h, h), "trees"),
    "tree_fc": (lambda h: vp.TreeFC(h), "trees"),
    "lstm": (lambda h: vp.LSTM(h, h), "chains"),
    "gru": (lambda h: vp.GRU(h, h), "chains"),
    "nary_tree_lstm": (lambda h: vp.NaryTreeLSTM(h, h), "trees"),
    "td_lstm": (lambda h: vp.TDLSTM(h), "trees"),
    "elman": (lambda h: vp.ElmanRNN(h, h), "chains"),
    "dagnn": (lambda h: vp.DAGNN(h, h), "trees"),
}
SECONDS = 1.0  # after which a step is not timed again
QUARTER = 0.255  # of the memory, rounded to hundredths: a part also needs the sums of gradients
ROWS = 1 << 12  # of the table from which the vertices' inputs are taken
AT_ONCE = {"cpu": 1, "gpu": 10}  # steps that are dispatched before the host waits
POINTS = 4  # budgets of `plans`, from the whole batch to the smallest plan
AGAIN = 2  # its budgets of arrays for `recompute`, from a middle one to its smallest plan


class Model(NamedTuple):
    """A loss of parameters, a batch and a `remat`; both of them; and arguments of `cavs.memory.plan`."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    how: Record

    def plan(self, budget: int | str | None = None, parts: int | None = None) -> Any:
        return plan(self.plain, self.params, self.batch, budget=budget, parts=parts, **self.how)

    def plain(self, params: Any, batch: Any) -> Any:
        return self.loss(params, batch, models.identity)

    def by_hand(self, params: Any, batch: Any) -> Any:
        return self.loss(params, batch, jax.checkpoint)


def program(name: str, engine: str, samples: int, hidden: int) -> Model:
    """Returns a recurrent program over a batch of graphs. `engine` "auto" is the one that `cavs.run` chooses."""
    make, shape = PROGRAMS[name]
    rng, ready = np.random.default_rng(0), make(hidden)
    graphs = graphs_of(generators.sst_like(rng, samples) if shape == "trees" else generators.chains(rng, samples))
    F, params = ready.vertex_function(), ready.init(jax.random.key(0))
    table = np.random.default_rng(1).normal(size=(ROWS, hidden)).astype(np.float32)

    def collate(sample: Any) -> Any:
        return sample.sched, sample.sched.pad(table[np.asarray(sample.graphs.input_id) % ROWS])

    def loss(params: Any, batch: Any, remat: Any) -> jax.Array:
        sched, x = batch
        h = cavs.run(F, params, sched, x, select=sched.roots, engine=None if engine == "auto" else engine)
        return jnp.sum(jnp.tanh(h) ** 2)

    return Model(loss, params, graphs, {"collate": collate})


def model(case: str, size: str = "", samples: int = 0, hidden: int = 0, side: int = 0, norm: str = "batch") -> Model:
    """Returns a model by name: a recurrent program, a program over arrays, a network of images, or a case of Echo."""
    if case in PROGRAMS:
        return program(case, "auto", samples, hidden)
    if case in models.ARRAYS:
        loss, params, batch, axis = models.ARRAYS[case](samples, hidden)
        return Model(lambda p, b, remat: loss(p, b), params, batch, {"axis": axis})
    if case in networks.NETWORKS:
        net = replace(networks.NETWORKS[case](), side=side, norm=norm)
        params, batch = net.init(jax.random.key(0)), net.batch(jax.random.key(1), samples)
        return Model(lambda p, b, remat: cavs.data.mean(net.losses(p, *b, remat=remat)), params, batch, {})
    entry = models.CASES[case]
    params, batch = jax.jit(partial(entry.init, **getattr(entry, size)))(jax.random.key(0))
    return Model(entry.loss, params, batch, {})


# ---------------------------------------------------------------- plans within budgets


class Compiled(NamedTuple):
    """The gradient of a plan, its batch on the device, and the bytes of its temporary memory."""

    step: Any
    params: Any
    batch: Any
    temp: int

    def grads(self) -> Any:
        return jax.block_until_ready(self.step(self.params, self.batch))[1]

    def seconds(self) -> float:
        """Times a step."""
        n = AT_ONCE["cpu" if jax.default_backend() == "cpu" else "gpu"]
        start, out = time.perf_counter(), None
        for _ in range(n):
            out = self.step(self.params, self.batch)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / n

    def times(self, steps: int) -> list[float]:
        """Times `steps` steps, or fewer if they are slow."""
        end, seconds = time.perf_counter() + SECONDS, [self.seconds()]
        while len(seconds) < steps and time.perf_counter() < end:
            seconds.append(self.seconds())
        return seconds


def _compiled(loss: Any, params: Any, batch: Any, options: Record) -> Compiled:
    batch = jax.device_put(batch)
    step: Any = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile(options)
    return Compiled(step, params, batch, step.memory_analysis().temp_size_in_bytes)


def _compiled_plan(planned: Any, workload: Model) -> Compiled:
    return _compiled(planned.loss, workload.params, planned.batch(workload.batch), planned.compiler_options)


def _between(most: int, least: int, count: int) -> list[int]:
    return [max(least, math.ceil(b)) for b in np.geomspace(most, least, count)]


def _planned(workload: Model, count: int) -> list[tuple[Any, Record]]:
    """Returns plans for budgets in geometric steps from the fastest plan to the smallest, each with its record."""
    planned = []
    for budget in _between(workload.plan().peak, workload.plan("min").peak, count):
        start = time.process_time()
        small = workload.plan(budget)
        point = {"budget": budget, "parts": small.parts, "segments": small.segments, "compilations": len(small._batch.sizes)}
        planned.append((small, point | {"plan_s": _since(start)}))
    return planned


def budgets(name: str, engine: str, graphs: int, hidden: int, points: int, steps: int) -> Measured:
    """Measures a program under budgets in geometric steps from the fastest plan to the smallest.

    Returns:
        A record. "points" has for each budget its bytes, the plan ("parts", "segments"), how many steps were compiled to find
        it ("compilations") in how many CPU seconds ("plan_s"), its temporary bytes as compiled here ("temp"), "ms" of a step,
        and the largest difference of a gradient to that of the first budget, relative to its largest element ("difference").
    """
    workload = program(name, engine, graphs, hidden)
    planned, compiled = _planned(workload, points), dict[Any, Compiled]()
    for small, _ in planned:
        if (choice := (small.parts, small.segments)) not in compiled:
            compiled[choice] = _compiled_plan(small, workload)
    yield
    measured, first = {}, next(iter(compiled.values())).grads()
    for choice, step in compiled.items():
        difference, ms = _difference(step.grads(), first), _ms(step.times(steps))
        measured[choice] = {"temp": step.temp, "ms": ms, "difference": difference}
    measured_points = [point | measured[point["parts"], point["segments"]] for _, point in planned]
    return {"vertices": workload.batch.num_vertices, "points": measured_points}


def quarter(name: str, engine: str, graphs: int, hidden: int, steps: int) -> Measured:
    """Measures moDNN's claim: a quarter of the memory, by parts alone. Whole and in parts take turns.

    Returns:
        A record: "parts", "temp" and "ms" of both, whole first, and the median of the quotients of their times ("time").
    """
    workload = program(name, engine, graphs, hidden)
    whole = workload.plan()
    small = workload.plan(int(QUARTER * whole.peak))
    whole_step, small_step = (_compiled_plan(choice, workload) for choice in (whole, small))
    yield
    for compiled in (whole_step, small_step, whole_step, small_step):
        compiled.grads()
    pairs = [(whole_step.seconds(), small_step.seconds()) for _ in range(steps)]
    return {
        "vertices": workload.batch.num_vertices,
        "parts": [whole.parts, small.parts],
        "temp": [whole_step.temp, small_step.temp],
        "ms": [_ms(times) for times in zip(*pairs, strict=True)],
        "time": round(statistics.median(b / a for a, b in pairs), 4),
    }


def plans(name: str, samples: int, hidden: int) -> Measured:
    """Plans a program under budgets in geometric steps from the whole batch to the smallest plan, and compiles each plan.

    Returns:
        A record. "points" has for each budget its bytes, "temp" of the step as compiled here, and the plan as for `budgets`,
        or for `recompute` the FLOPs of products that run twice ("flops"). "refused": whether less than the smallest plan is
        refused.
    """
    workload = model(name, samples=samples, hidden=hidden)
    points = [point | {"temp": _compiled_plan(small, workload).temp} for small, point in _planned(workload, POINTS)]
    least = points[-1]["budget"]
    if name in models.ARRAYS:
        free, floor = (recompute(workload.plain, budget).plan(workload.params, workload.batch).peak for budget in (None, "min"))
        for budget in _between(free, floor, AGAIN + 1)[1:]:
            small = recompute(workload.plain, budget)
            again = small.plan(workload.params, workload.batch)
            temp = _compiled(small, workload.params, workload.batch, again.compiler_options).temp
            points.append({"budget": budget, "flops": again.flops, "temp": temp, "compilations": len(again._search.compiled)})
    try:
        refused = workload.plan(max(1, least // 2)) is None
    except BudgetError:
        refused = True
    yield
    return {"points": points, "refused": refused}


def _ms(times: Any) -> float:
    return round(statistics.median(times) * 1e3, 3)


def _difference(grads: Any, expected: Any) -> float:
    """Returns the largest difference of a gradient, relative to its largest element."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


# ---------------------------------------------------------------- whole training steps


def compiling(task: Record, folder: Path) -> Measured:
    """Plans and compiles a training step, and writes it for `running`. A capped step is the gradient alone, as it was planned.

    The variants: "jax.grad"; "jax.checkpoint" as an expert places it; "recompute", without a budget or with one in bytes;
    "recompute hand", whose budget is what "jax.checkpoint" needs, or the floor; "recompute min"; and "parts" with a budget, or
    "parts =8".

    Returns:
        A record: bytes of temporary memory as the compiler says ("temp"), those of arguments and results less what is donated
        ("arrays"), and "total"; CPU seconds to plan, and seconds to compile. If there is a plan, its "parts", or its
        "predicted" temporary bytes, those of the loss and its gradients alone as "compiled", and FLOPs run twice ("flops").
    """
    with jax.default_device(jax.devices("cpu")[0]):
        workload = _model_of(task)
    kind, _, amount = task["variant"].partition(" ")
    fn, batch, options, record = workload.plain, workload.batch, Record(), Record()
    start = time.process_time()
    if kind == "jax.checkpoint":
        fn = workload.by_hand
    elif kind == "parts":
        parts: Record = {"parts": int(amount[1:])} if amount.startswith("=") else {"budget": bytes_of(amount)}
        small = workload.plan(**parts)
        small.save(folder / "plan.json")
        fn, batch, options = small.loss, small.batch(batch), small.compiler_options
        record = {"parts": small.parts * small.segments, "budget": parts.get("budget"), "plan_s": _since(start)}
    elif kind == "recompute":
        if amount == "hand":
            floor = recompute(workload.plain).plan(workload.params, batch).floor
            budget = max(_whole_step(workload.by_hand, workload.params, batch).memory_analysis().temp_size_in_bytes, floor)
        else:
            budget = bytes_of(amount or None)
        start, fn = time.process_time(), recompute(workload.plain, budget)
        small = fn.plan(workload.params, batch)
        record = {"kept": small.bytes, "flops": small.flops, "budget": budget, "plan_s": _since(start)}
        record["predicted"], record["compiled"], _ = fn.verify(workload.params, batch)
        options = small.compiler_options
    start = time.perf_counter()
    compiled = _whole_step(fn, workload.params, batch, options, update=not task["capped"])
    record["compile_s"], memory = round(time.perf_counter() - start, 2), compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    record |= {"temp": memory.temp_size_in_bytes, "arrays": arrays, "total": arrays + memory.temp_size_in_bytes}
    (folder / "program").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    yield
    return record


def _since(start: float) -> float:
    """Returns CPU seconds."""
    return round(time.process_time() - start, 2)


def _model_of(task: Record) -> Model:
    sizes = {k: task[k] for k in ("case", "size", "samples", "hidden", "side", "norm") if k in task}
    return model(**sizes)


def _whole_step(fn: Any, params: Any, batch: Any, options: Record | None = None, update: bool = True) -> Any:
    gradient = jax.value_and_grad(fn)

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = gradient(params, batch)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    jitted = jax.jit(step, donate_argnums=0) if update else jax.jit(gradient)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    return jitted.lower(*shapes).compile(options)


def running(task: Record, folder: Path) -> Measured:
    """Runs a step that another process has compiled: so the allocator's peak is that of the step.

    Returns:
        A record: "ms", the median of `steps` steps; the last loss; and the allocator's peak and limit, on a GPU.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        workload = _model_of(task)
        batch = workload.batch
        if task["variant"].startswith("parts"):
            batch = cavs.memory.load(folder / "plan.json", workload.plain, workload.params, batch, **workload.how).batch(batch)
    compiled = serialize_executable.deserialize_and_load(*pickle.loads((folder / "program").read_bytes()))
    yield
    (params, batch), times, value = jax.device_put((workload.params, batch), jax.devices()[0]), [], 0.0
    for _ in range(task["steps"] + 3):
        start = time.perf_counter()
        value, outputs = compiled(params, batch)
        params = params if task["capped"] else outputs
        del outputs  # or the gradients of two steps would exist at once
        value = float(value)
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {"ms": _ms(times[3:]), "loss": value, "peak": stats.get("peak_bytes_in_use"), "limit": stats.get("bytes_limit")}
