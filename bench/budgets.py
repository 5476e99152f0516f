"""Training steps under falling memory budgets: `python -m bench budgets`. Bytes as planned and as compiled, and times."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import graphs as generators
from bench.ours import graphs_of
from cavs import vertex_programs as vp

POINTS = 10
PROGRAMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "tree_lstm": (lambda h: vp.BinaryTreeLSTM(h, h), "trees"),
    "child_sum": (lambda h: vp.ChildSumTreeLSTM(h, h), "trees"),
    "tree_fc": (lambda h: vp.TreeFC(h), "trees"),
    "lstm": (lambda h: vp.LSTM(h, h), "chains"),
    "gru": (lambda h: vp.GRU(h, h), "chains"),
}


def measure(name: str, count: int, hidden: int, steps: int, points: int = POINTS) -> Iterator[dict[str, Any]]:
    """Measures a program under budgets in geometric steps from the fastest plan to the smallest.

    Args:
        name: a key of `PROGRAMS`.
        count: the number of graphs of the batch.
        hidden: the width of the states and inputs.
        steps: timed steps.
        points: the number of budgets.

    Yields:
        For each budget its bytes, the plan ("parts", "keep"), "predicted" and compiled ("temp") temporary bytes, seconds to
        plan ("plan_s"), "ms" of a step, and the largest difference of a gradient to that of the first budget, relative to the
        largest element ("difference").
    """
    make, shape = PROGRAMS[name]
    rng, program = np.random.default_rng(0), make(hidden)
    graphs = graphs_of(generators.sst_like(rng, count) if shape == "trees" else generators.chains(rng, count))
    F, params = program.vertex_function(), program.init(jax.random.key(0))

    def collate(sample: Any) -> Any:
        rows = np.random.default_rng(1).normal(size=(1 << 12, hidden)).astype(np.float32)
        return sample.sched, sample.sched.pad(rows[np.asarray(sample.graphs.input_id) % len(rows)])

    def loss(params: Any, batch: Any) -> jax.Array:
        sched, x = batch
        return jnp.sum(jnp.tanh(cavs.run(F, params, sched, x, select=sched.roots)) ** 2)

    whole = cavs.memory.plan(loss, params, graphs, collate=collate)
    smallest = cavs.memory.plan(loss, params, graphs, "min", collate=collate)
    first = None
    for budget in np.geomspace(whole.peak, smallest.peak, points):
        start = time.perf_counter()
        plan = cavs.memory.plan(loss, params, graphs, max(smallest.peak, int(np.ceil(budget))), collate=collate)
        plan_s = time.perf_counter() - start
        batch = jax.device_put(plan.batch(graphs))
        compiled = jax.jit(jax.value_and_grad(plan.loss)).lower(params, batch).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            _, grads = jax.block_until_ready(compiled(params, batch))
            times.append(time.perf_counter() - start)
        first = grads if first is None else first
        yield {
            "program": name,
            "hidden": hidden,
            "graphs": count,
            "vertices": graphs.num_vertices,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "budget": int(np.ceil(budget)),
            "parts": plan.parts,
            "keep": plan.keep,
            "predicted": plan.peak,
            "temp": analysis.temp_size_in_bytes,
            "plan_s": round(plan_s, 2),
            "ms": round(statistics.median(times[1:]) * 1e3, 3),
            "difference": max(
                float(jnp.abs(a - b).max() / jnp.abs(b).max())
                for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(first), strict=True)
            ),
        }


def main(names: list[str], count: int, hidden: int, steps: int) -> None:
    """Prints one JSON object for each program and budget."""
    for name in names or PROGRAMS:
        for found in measure(name, count, hidden, steps):
            print(json.dumps(found), flush=True)
