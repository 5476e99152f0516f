"""Training steps within memory budgets (`cavs.memory.plan`): bytes as compiled, and times. For `bench.memory`."""

import math
import statistics
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench import graphs as generators
from bench.ours import graphs_of
from cavs import vertex_programs as vp

PROGRAMS: dict[str, tuple[Callable[[int], Any], str]] = {
    "tree_lstm": (lambda h: vp.BinaryTreeLSTM(h, h), "trees"),
    "child_sum": (lambda h: vp.ChildSumTreeLSTM(h, h), "trees"),
    "tree_fc": (lambda h: vp.TreeFC(h), "trees"),
    "lstm": (lambda h: vp.LSTM(h, h), "chains"),
    "gru": (lambda h: vp.GRU(h, h), "chains"),
    "nary_tree_lstm": (lambda h: vp.NaryTreeLSTM(h, h), "trees"),  # this one and the following ones: for `bench.plans`
    "td_lstm": (lambda h: vp.TDLSTM(h), "trees"),
    "elman": (lambda h: vp.ElmanRNN(h, h), "chains"),
    "dagnn": (lambda h: vp.DAGNN(h, h), "trees"),
}
Measured: TypeAlias = Generator[None, None, dict[str, Any]]
Choice: TypeAlias = tuple[int, int]  # the parts and the segments of a plan
Compiled: TypeAlias = tuple[Any, Any, int]  # a step, its batch on the device, and the bytes of its temporary memory
SECONDS = 1.0  # after which the step of a plan is not timed again
QUARTER = 0.255  # of the memory, rounded to hundredths: a part also needs the sums of gradients
ROWS = 1 << 12  # of the table from which the vertices' inputs are taken
AT_ONCE = {"cpu": 1, "gpu": 10}  # steps that are dispatched before the host waits
AT_ONCE_COMPILED = {"cpu": 1, "gpu": 5}  # programs of one process that are compiled at the same time


class Step:
    """The gradient of one batch of a program, on one engine."""

    def __init__(self, program: str, engine: str, graphs: int, hidden: int):
        asked = None if engine == "auto" else engine
        make, shape = PROGRAMS[program]
        rng, ready = np.random.default_rng(0), make(hidden)
        self.graphs = graphs_of(
            generators.sst_like(rng, graphs) if shape == "trees" else generators.chains(rng, graphs),
        )
        F, self.params = ready.vertex_function(), ready.init(jax.random.key(0))
        self._table = np.random.default_rng(1).normal(size=(ROWS, hidden)).astype(np.float32)

        def collate(sample: Any) -> Any:
            return sample.sched, sample.sched.pad(self.rows(sample.graphs))

        def loss(params: Any, batch: Any) -> jax.Array:
            sched, x = batch
            return jnp.sum(jnp.tanh(cavs.run(F, params, sched, x, select=sched.roots, engine=asked)) ** 2)

        self.loss, self.collate = loss, collate

    def rows(self, graphs: Any) -> np.ndarray:
        """The inputs of the vertices."""
        return self._table[np.asarray(graphs.input_id) % ROWS]

    def plan(self, budget: int | str | None = None, **how: Any) -> Any:
        """A plan, and the CPU seconds that it took."""
        start = time.process_time()
        plan = cavs.memory.plan(self.loss, self.params, self.graphs, budget, collate=self.collate, **how)
        return plan, time.process_time() - start

    def compiled(self, plan: Any, ready: dict[Choice, Compiled]) -> int:
        """Compiles the step of a plan, unless it is in `ready`, and adds it. Returns the bytes of its temporary memory."""
        if (choice := choice_of(plan)) not in ready:
            batch = jax.device_put(plan.batch(self.graphs))
            compiled = jax.jit(jax.value_and_grad(plan.loss)).lower(self.params, batch).compile(plan.compiler_options)
            analysis = compiled.memory_analysis()
            assert analysis is not None
            ready[choice] = compiled, batch, analysis.temp_size_in_bytes
        return ready[choice][2]

    def grads(self, compiled: Any, batch: Any) -> Any:
        return jax.block_until_ready(compiled(self.params, batch))[1]

    def seconds(self, compiled: Any, batch: Any) -> float:
        """Seconds of a step."""
        n = AT_ONCE["cpu" if jax.default_backend() == "cpu" else "gpu"]
        start = time.perf_counter()
        for _ in range(n):
            out = compiled(self.params, batch)
        jax.block_until_ready(out)  # pyright: ignore[reportPossiblyUnbound]
        return (time.perf_counter() - start) / n

    def times(self, compiled: Any, batch: Any, steps: int) -> list[float]:
        """Seconds of a step, measured `steps` times, or fewer if it is slow."""
        end, found = time.perf_counter() + SECONDS, [self.seconds(compiled, batch)]
        while len(found) < steps and time.perf_counter() < end:
            found.append(self.seconds(compiled, batch))
        return found


def budgets(program: str, engine: str, graphs: int, hidden: int, points: int, steps: int) -> Measured:
    """Measures a program under budgets in geometric steps from the fastest plan to the smallest.

    Yields once when all plans are compiled, and nothing has run.

    Returns:
        A record. "points" has for each budget its bytes, the plan ("parts", "segments"), how many steps were compiled to find
        it ("compilations") in how many CPU seconds ("plan_s"), its temporary bytes as compiled here ("temp"), "ms" of a step,
        and the largest difference of a gradient to that of the first budget, relative to its largest element ("difference").
    """
    step = Step(program, engine, graphs, hidden)
    (whole, _), (smallest, _) = step.plan(), step.plan("min")
    wanted = [max(smallest.peak, math.ceil(b)) for b in np.geomspace(whole.peak, smallest.peak, points)]
    ready: dict[Choice, Compiled] = {}
    # XLA uses one core for much of the time, so several programs are compiled at once.
    with ThreadPoolExecutor(AT_ONCE_COMPILED["cpu" if jax.default_backend() == "cpu" else "gpu"]) as pool:
        asked = list(pool.map(step.plan, wanted))
        each = {choice_of(plan): plan for plan, _ in asked}
        list(pool.map(lambda plan: step.compiled(plan, ready), each.values()))
    yield
    measured, first = {}, None
    for choice, (compiled, batch, temp) in ready.items():
        grads = step.grads(compiled, batch)
        first = grads if first is None else first
        measured[choice] = {
            "temp": temp,
            "ms": _ms(step.times(compiled, batch, steps)),
            "difference": difference_of(grads, first),
        }
    found = [
        {"budget": budget, "parts": plan.parts, "segments": plan.segments, "compilations": len(plan._batch.sizes)}
        | {"plan_s": round(seconds, 2)}
        | measured[choice_of(plan)]
        for budget, (plan, seconds) in zip(wanted, asked, strict=True)
    ]
    return _named(program, engine, step, hidden) | {"points": found}


def quarter(program: str, engine: str, graphs: int, hidden: int, steps: int) -> Measured:
    """Measures moDNN's claim: a quarter of the memory, by parts alone. Whole and in parts take turns.

    Yields once when all is compiled, and nothing has run.

    Returns:
        A record: "parts", "temp" and "ms" of both, whole first, and the median of the quotients of their times ("time").
    """
    step = Step(program, engine, graphs, hidden)
    whole, _ = step.plan()
    small, _ = step.plan(int(QUARTER * whole.peak))
    ready: dict[Choice, Compiled] = {}
    for plan in (whole, small):
        step.compiled(plan, ready)
    (one, batch, temp), (other, parts, temp_of_parts) = ready.values()
    yield
    for _ in range(2):
        step.grads(one, batch)
        step.grads(other, parts)
    pairs = [(step.seconds(one, batch), step.seconds(other, parts)) for _ in range(steps)]
    return _named(program, engine, step, hidden) | {
        "parts": [whole.parts, small.parts],
        "temp": [temp, temp_of_parts],
        "ms": [_ms(times) for times in zip(*pairs, strict=True)],
        "time": round(statistics.median(b / a for a, b in pairs), 4),
    }


def choice_of(plan: Any) -> Choice:
    return plan.parts, plan.segments


def _named(program: str, engine: str, step: Step, hidden: int) -> dict[str, Any]:
    sizes = {"graphs": len(step.graphs), "vertices": step.graphs.num_vertices, "hidden": hidden}
    return {"program": program, "engine": engine} | sizes


def _ms(times: Any) -> float:
    return round(statistics.median(times) * 1e3, 3)


def difference_of(grads: Any, want: Any) -> float:
    """The largest difference of a gradient, relative to its largest element."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
