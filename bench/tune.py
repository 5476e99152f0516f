"""`python -m bench tune`: times layouts of the persistent kernels on this device (VPPS, section III-A).

For each recurrent part and batch, it times the most promising layouts, forward and backward separately, on batches of the
benchmarks. It stores the fastest in kernels/tuned/, by device, and `cavs.run` uses them from then on. Existing entries are not
measured again: delete the file to repeat them. One launch runs all levels during tuning. The launch for wide levels has no
entry; a cost model lays it out (`cavs._engines.persistent.wide_levels`).
"""

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
from cavs._run.tune import Task, fastest, key_of, tasks
from cavs.kernels import Target, persistent
from cavs.kernels._layout import tuned

SIZES = [("tree_lstm", h, b) for h in (512, 1024) for b in (64, 1, 16, 256)]
SIZES += [("lstm", h, b) for h in (512, 1024) for b in (64, 16, 1)] + [("tree_fc", 512, b) for b in (64, 16, 1)]
SIZES += [("tree_lstm", 256, b) for b in (64, 1, 16, 256)] + [("lstm", 256, b) for b in (64, 16, 1)]
SIZES += [("lstm", 1024, 256), ("tree_fc", 1024, 64), ("tree_fc", 2048, 16), ("tree_lstm", 2048, 64), ("lstm", 2048, 64)]


def tune(minutes: float, precision: str | None) -> Iterator[str]:
    """Measures until the time is over. Yields lines of text for each recurrent part, direction and size."""
    why = persistent.unsupported(Target.here())
    if why:
        raise SystemExit(f"tune: the persistent kernels cannot run on this machine: {why}")
    target, end = Target.here(), time.monotonic() + 60 * minutes
    for cell, hidden, batch in SIZES:
        with jax.default_matmul_precision(precision):
            for task in tasks_of(cell, hidden, batch):
                key = key_of(task)
                if time.monotonic() > end:
                    return
                if key in tuned.records(target.device_kind):
                    continue
                name = "cavs_forward" if task.recurrence.forward else "cavs_backward"
                layouts = fastest(task, target, end, lambda step, args, name=name: _of_the_launch(step, args, name))
                best = sorted((layout.record for layout in layouts), key=lambda record: record["us"])
                tuned.save(tuned.file_of(target.device_kind), {key: best[0]})
                yield f"{key}:\n" + "\n".join(f"    {record}" for record in best)


def tasks_of(cell: str, hidden: int, batch: int) -> Iterator[Task]:
    """What is tuned for one size: both directions."""
    make = {"tree_lstm": graphs.sst_like, "lstm": graphs.fixed, "tree_fc": graphs.complete}[cell]
    sched = jax.device_put(cavs.schedule(graphs_of(make(np.random.default_rng(0), batch)), scripts=True))
    ready = program(cell, hidden, hidden)
    F = ready.vertex_function()
    x = jnp.asarray(np.random.default_rng(1).standard_normal((sched.shape.vertices, hidden), np.float32))
    return tasks(F, ready.init(jax.random.key(0)), sched, x, None, Target.here())


def _of_the_launch(step: Any, args: Any, name: str) -> float:
    """Returns the microseconds of the launch alone."""
    jax.block_until_ready(step(args))
    events = device_time.of_jax(lambda: jax.block_until_ready(step(args)))
    return statistics.median(end - start for kernel, start, end in events if kernel.startswith(name)) / 1000
