"""`python -m bench tune`: times layouts of the persistent kernels on this device (VPPS, section III-A).

For each recurrent part and batch, it times the most promising layouts, forward and backward separately, on batches of the
benchmarks. It stores the fastest in kernels/tuned/, by device, and `cavs.run` uses them from then on. Existing entries are not
measured again: delete the file to repeat them. One launch runs all levels during tuning. The launch for wide levels has no
entry; a cost model lays it out (`cavs._engines.persistent.wide_levels`).
"""

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import device_time, graphs
from bench.ours import graphs_of, program
from cavs._engines.persistent import chip, lower
from cavs._engines.persistent.engine import Persistent
from cavs._run.plans import plan_of
from cavs.kernels import Target, persistent
from cavs.kernels._layout import tuned
from cavs.kernels._layout.config import LaunchConfig

SIZES = [("tree_lstm", h, b) for h in (512, 1024) for b in (64, 1, 16, 256)]
SIZES += [("lstm", h, b) for h in (512, 1024) for b in (64, 16, 1)] + [("tree_fc", 512, b) for b in (64, 16, 1)]
SIZES += [("tree_lstm", 256, b) for b in (64, 1, 16, 256)] + [("lstm", 256, b) for b in (64, 16, 1)]
SIZES += [("lstm", 1024, 256), ("tree_fc", 1024, 64), ("tree_lstm", 2048, 64), ("lstm", 2048, 64)]
REPEATS = 20
# The number of layouts measured, the best by the cost model. In a measurement of all layouts on an H200, the fastest was always
# among the first 14.
PROMISING = 16


def tune(minutes: float, precision: str | None) -> Iterator[str]:
    """Measures until the time is over. Yields lines of text for each recurrent part, direction and size."""
    why = persistent.unsupported(Target.here())
    if why:
        raise SystemExit(f"tune: the persistent kernels cannot run on this machine: {why}")
    device, end = jax.devices()[0].device_kind, time.monotonic() + 60 * minutes
    for cell, hidden, batch in SIZES:
        if time.monotonic() > end:
            return
        with jax.default_matmul_precision(precision):
            found = _tune_one(cell, hidden, batch, end)
        tuned.save(device, {key: records[0] for key, records in found.items()})
        for key, records in found.items():
            yield f"{key}:\n" + "\n".join(f"    {record}" for record in records)


def _tune_one(cell: str, hidden: int, batch: int, end: float) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of all layouts by key, the fastest first."""
    make = {"tree_lstm": graphs.sst_like, "lstm": graphs.fixed, "tree_fc": graphs.complete}[cell]
    sched = jax.device_put(cavs.schedule(graphs_of(make(np.random.default_rng(0), batch))))
    ready = program(cell, hidden, hidden)
    params = ready.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sched.shape.vertices, hidden))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    found: dict[str, list[dict[str, Any]]] = {}
    for forward in (True, False):
        plan = plan_of(_fresh(ready), shapes, jax.ShapeDtypeStruct((hidden,), jnp.float32))
        made = lower.recurrence_of(plan, None, forward, sched.shape.forest, target=Target.here())
        asked = made.precision
        key = chip.tuning_keys(made.program, forward, asked, sched.shape)[0]
        if key in tuned.records(jax.devices()[0].device_kind) or time.monotonic() > end:
            continue
        layouts = sorted(
            chip.candidates(made.program, asked, Target.here()), key=lambda c: chip.mean_cost(made.program, c, sched.shape)
        )
        layouts = layouts[:PROMISING]
        lowered = [_lowered(_fresh(ready), params, sched, x, config, forward) for config in layouts]
        with concurrent.futures.ThreadPoolExecutor(max(4, (os.cpu_count() or 1) - 4)) as pool:  # compile before the timed part
            # Only the launch is timed, so XLA need not tune its own products.
            compiled = list(pool.map(lambda step: step.compile({"xla_gpu_autotune_level": 0}), lowered))
        times = [round(_time(step, params, forward), 1) for step in compiled]
        fields = [f.name for f in dataclasses.fields(LaunchConfig) if f.name not in ("precision", "spins", "interpret", "wide")]
        records = [{f: getattr(c, f) for f in fields} | {"us": us} for c, us in zip(layouts, times, strict=True)]
        found[key] = sorted(records, key=lambda record: record["us"])
    return found


def _fresh(ready: Any) -> cavs.VertexFunction:
    F = ready.vertex_function()
    state = F.state_tree.unflatten([(ready.hidden,)] * F.state_tree.num_leaves)
    return cavs.VertexFunction(ready, state=state, arity=F.arity)


def _lowered(F: Any, params: Any, sched: Any, x: Any, config: Any, forward: bool) -> Any:
    """Lowers `REPEATS` chained passes. The other direction keeps its usual layout."""

    def choose(level: Any, way: bool, other: Any) -> Any:
        return dataclasses.replace(config, precision=other.precision) if way == forward else other

    engine = Persistent(layouts=chip.Layouts(choose))

    def loss(params: Any) -> Any:
        return cavs.run(F, params, sched, x, select=sched.roots if sched.shape.rooted else None, engine=engine).sum()

    def one(params: Any, _: Any) -> Any:
        if forward:
            value = loss(params)
            return jax.tree.map(lambda p: p + 0 * value, params), None
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, jax.grad(loss)(params)), None

    return jax.jit(lambda params: jax.lax.scan(one, params, length=REPEATS)[0]).lower(params)


def _time(step: Any, params: Any, forward: bool) -> float:
    """Returns the microseconds of the launch alone."""
    jax.block_until_ready(step(params))
    events = device_time.of_jax(lambda: jax.block_until_ready(step(params)))
    name = "cavs_forward" if forward else "cavs_backward"
    return statistics.median(end - start for kernel, start, end in events if kernel.startswith(name)) / 1000
