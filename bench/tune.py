"""`python -m bench tune`: measures the layouts of the persistent kernels on this device (VPPS III-A).

For each recurrent part and batch, every layout that fits is timed, forward and backward apart, on batches as the
bench's; the fastest are kept in kernels/tuned/, by device, and `cavs.run` uses them from then on. What is there already is
not measured again: delete the file for that.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import cases
from bench.ours import graphs_of, program
from cavs import _chip, _persistent
from cavs.kernels import _tuned, persistent

SIZES = [("tree_lstm", h, b) for h in (512, 256) for b in (64, 1, 16, 256)]
SIZES += [("lstm", h, b) for h in (512, 256, 1024) for b in (16, 64, 1)]
SIZES += [("tree_fc", 512, b) for b in (64, 16, 1)] + [("tree_lstm", 1024, b) for b in (64, 16, 1, 256)]
REPEATS = 20


def tune(minutes: float, precision: str | None) -> Iterator[str]:
    """Measures until the time is over; a line of text for each size."""
    why = persistent.supported()
    if why:
        raise SystemExit(f"tune: the persistent kernels cannot run here: {why}")
    device, end = jax.devices()[0].device_kind, time.monotonic() + 60 * minutes
    for cell, hidden, batch in SIZES:
        if time.monotonic() > end:
            return
        with jax.default_matmul_precision(precision):
            found = _tune_one(cell, hidden, batch, end)
        if not found:
            continue
        _tuned.save(device, found)
        yield "; ".join(f"{k}: {v}" for k, v in found.items())


def _tune_one(cell: str, hidden: int, batch: int, end: float) -> dict[str, dict[str, Any]]:
    make = {"tree_lstm": cases.sst_like, "lstm": cases.fixed, "tree_fc": cases.complete}[cell]
    sched = jax.device_put(cavs.schedule(graphs_of(make(np.random.default_rng(0), batch))))
    ready = program(cell, hidden, hidden)
    params = ready.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sched.shape.vertices, hidden))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    found = {}
    for forward in (True, False):
        F = _fresh(ready)
        plan = F.plan(shapes, jax.ShapeDtypeStruct((hidden,), jnp.float32))
        made = _persistent.programs(plan, None, sched.shape.forest)[0 if forward else 1]
        asked = _persistent.precision_of(made)
        key = _chip.tuning_key(made.level, forward, asked, sched.shape)
        if key in _tuned.records(jax.devices()[0].device_kind):
            continue
        times = []
        for config in _chip.candidates(made.level, asked):
            if time.monotonic() > end and times:
                break
            times.append((_time(_fresh(ready), params, sched, x, config, forward), config))
        us, best = min(times, key=lambda t: t[0])
        fields = ("hb", "groups", "clustered", "rows", "resident")
        found[key] = {f: getattr(best, f) for f in fields} | {"us": round(us, 1)}
    return found


def _fresh(ready: Any) -> cavs.VertexFunction:
    F = ready.vertex_function()
    state = F.state_tree.unflatten([(ready.hidden,)] * F.state_tree.num_leaves)
    return cavs.VertexFunction(ready, state=state, arity=F.arity)


def _time(F: Any, params: Any, sched: Any, x: Any, config: Any, forward: bool) -> float:
    """Microseconds of a pass; the other direction is laid out as it would be."""

    def choose(level: Any, way: bool, other: Any) -> Any:
        return dataclasses.replace(config, precision=other.precision) if way == forward else other

    def loss(params: Any) -> Any:
        return cavs.run(F, params, sched, x, at=sched.roots if sched.shape.rooted else None, engine="persistent").sum()

    step = jax.jit(loss if forward else jax.grad(loss))
    with _chip.using(choose):
        jax.block_until_ready(step(params))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(REPEATS):
            out = step(params)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / REPEATS * 1e6)
    return min(samples)
