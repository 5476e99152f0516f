"""One training step of `bench.budget_runs`, in a process: plans and compiles it, or runs what another process compiled."""

import json
import math
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SECONDS, MOST = 1.5, 20  # a step is timed for so long, or so often
Draw = Callable[..., Any]  # calls a function with arguments, or returns the shapes of its result: `jax.eval_shape`


def called(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def model(task: Record, draw: Draw = called) -> tuple[Callable[..., Any], Any, Any, Record]:
    """Returns a loss of parameters, a batch and a `remat`; both of them; and arguments of `cavs.memory.plan`."""
    import jax

    import cavs
    from bench import budgets, echo_cases, networks, plans

    name = task["model"]
    if name in budgets.PROGRAMS:
        step = budgets.Step(name, "auto", task["samples"], task["hidden"])
        return lambda p, b, remat: step.loss(p, b), step.params, step.graphs, {"collate": step.collate}
    if name == "wide":
        return _wide_loss, *draw(partial(wide, task["samples"], task["hidden"])), {}
    if "hidden" in task:
        made = plans.ARRAYS[name.removesuffix("_of_arrays")](task["samples"], task["hidden"])
        return lambda p, b, remat: made[0](p, b), made[1], made[2], {"axis": made[3]}
    if name in networks.NETWORKS:
        norm, net = "group" if "group" in task["variant"] else "batch", networks.NETWORKS[name]()
        net = networks.with_images(net, task["side"], norm)
        params, batch = draw(net.init, jax.random.key(0)), draw(partial(net.batch, count=task["samples"]), jax.random.key(1))
        return lambda p, b, remat: cavs.data.mean(net.losses(p, *b, remat=remat)), params, batch, {}
    case = echo_cases.CASES[name]
    sizes = case.small if task["small"] else case.full
    params, batch = draw(jax.jit(partial(case.init, **sizes)), jax.random.key(0))
    return case.loss, params, batch, {}


def _wide_loss(params: Any, batch: Any, remat: Any) -> Any:
    import jax.numpy as jnp

    for w in params:
        batch = jnp.tanh((batch - batch.mean(0)) @ w)  # the mean: samples cannot run in parts
    return (batch**2).mean()


def wide(samples: int, hidden: int) -> tuple[Any, Any]:
    """Returns weights, and a batch."""
    import jax
    import jax.numpy as jnp

    rows = min(hidden, 1024)
    tile = jax.random.normal(jax.random.key(0), (rows, hidden))
    weights = [jnp.tile(tile * (1 + 0.01 * i) / hidden**0.5, (hidden // rows, 1)) for i in range(5)]
    return weights, jnp.tile(tile[:32], (samples // 32, 1))


def plan_of(task: Record, folder: Path) -> Path:
    """The file of a plan."""
    return folder / f"{name_of(task)}.json"


def program_of(task: Record, folder: Path) -> Path:
    """The file of a compiled step."""
    return folder / f"{name_of(task)}.program"


def prepared(task: Record, folder: Path) -> Record:
    """Plans and compiles a step, writes the plan and the program, and returns a record.

    A capped step is the gradient alone, as the plan has compiled it; the other ones update the parameters, too.
    """
    import jax
    from jax.experimental import serialize_executable

    from bench.echo_cases import identity
    from cavs._remat import rows
    from cavs.memory import plan, recompute

    with jax.default_device(jax.devices("cpu")[0]):
        loss, params, batch, how = model(task, jax.eval_shape)
    kind, _, amount = task["variant"].removesuffix(" group").partition(" ")
    if amount == "rows":
        amount, rows._ROWS = "", 2048
    fn: Callable[..., Any] = partial(_with, loss, jax.checkpoint if kind == "checkpoint" else identity)
    path, found, options, budget = plan_of(task, folder), Record(), Record(), None
    start = time.perf_counter()
    if kind == "parts":
        if amount.startswith("="):
            planned = plan(fn, params, batch, parts=int(amount[1:]), **how)
        else:
            budget = _budget(amount, lambda: plan(fn, params, batch, **how).peak)
            planned = plan(fn, params, batch, budget, **how)
        planned.save(path)
        fn, batch, options = planned.loss, planned.batch(batch), planned.compiler_options
        found |= {"parts": planned.parts * planned.segments, "planned": planned.peak}
    elif kind in ("recompute", "smallest", "host", "offload"):
        if kind in ("host", "smallest"):
            made = recompute(fn, names=None).plan(params, batch)
            point = made._search.point(math.inf, host=float(amount)) if kind == "host" else made._search.points()[-1]
            options = _host_options() if kind == "host" else {}
            path.write_text(json.dumps(point.as_json()))
        else:
            budget = _budget(amount, lambda: _temp(fn, params, batch))
            made = recompute(fn, budget, offload=kind == "offload").plan(params, batch)
            made.save(path)
            point, options = made._point, made.compiler_options
            found |= {"planned": made._search.compiled.get(point)}
        regions = point.regions.values()
        found |= {"kept": point.bytes, "flops": point.flops, "on_host": sum(r.times * _bytes(r.kept.host) for r in regions)}
        fn = recompute(fn, plan=path)
    found["plan_s"] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    compiled = _compiled(fn, params, batch, options, update=task["part"] != "capped")
    found |= {"options": options, "budget": budget, "compile_s": round(time.perf_counter() - start, 1)}
    if (memory := compiled.memory_analysis()) is not None:
        arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        found |= {"temp": memory.temp_size_in_bytes, "arrays": arrays, "total": arrays + memory.temp_size_in_bytes}
    program_of(task, folder).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return found


def _with(loss: Callable[..., Any], remat: Any, params: Any, batch: Any) -> Any:
    return loss(params, batch, remat)


def _bytes(values: Any) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in values)


def _budget(amount: str, whole: Callable[[], int]) -> int | str | None:
    from cavs.memory import bytes_of

    return int(whole() / float(amount[1:])) if amount.startswith("/") else bytes_of(amount or None)


def _host_options() -> Record:
    from cavs._memory.fit import compiler_options

    return compiler_options(None, host=True)


def _compiled(fn: Any, params: Any, batch: Any, options: Record, update: bool = True) -> Any:
    """A step of training, whose parameters are donated, or else the gradient alone."""
    import jax

    gradient = jax.value_and_grad(fn)

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = gradient(params, batch)
        return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    jitted = jax.jit(step, donate_argnums=0) if update else jax.jit(gradient)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    return jitted.lower(*shapes).compile(options)


def _temp(fn: Any, params: Any, batch: Any) -> int:
    return _compiled(fn, params, batch, {}).memory_analysis().temp_size_in_bytes


def loaded(task: Record, folder: Path) -> tuple[Any, Any, Any]:
    """Returns the step that another process has compiled, and what it takes."""
    import jax
    from jax.experimental import serialize_executable

    from bench.echo_cases import identity
    from cavs.memory import load

    with jax.default_device(jax.devices("cpu")[0]):
        loss, params, batch, how = model(task)
    if task["variant"].startswith("parts"):
        batch = load(plan_of(task, folder), partial(_with, loss, identity), params, batch, **how).batch(batch)
    return serialize_executable.deserialize_and_load(*pickle.loads(program_of(task, folder).read_bytes())), params, batch


def measured(compiled: Any, params: Any, batch: Any, update: bool) -> Record:
    """Runs a step, and returns its time and the allocator's peak."""
    import jax

    params, batch = jax.device_put((params, batch), jax.devices()[0])
    times = []
    while sum(times[2:]) < SECONDS and len(times) < MOST + 2:
        start = time.perf_counter()
        value, found = compiled(params, batch)
        params = found if update else params
        del found  # or the gradients of two steps would exist at once
        value = float(value)
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    found = {"ms": round(1e3 * sorted(times[2:])[len(times[2:]) // 2], 3), "loss": value}  # pyright: ignore[reportPossiblyUnbound]
    return found | {"peak": stats.get("peak_bytes_in_use"), "limit": stats.get("bytes_limit")}


def bandwidth() -> Record:
    """Bytes in a second to the host and back."""
    import jax
    import jax.numpy as jnp

    there, here = (jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=k) for k in ("pinned_host", "device"))
    x = jnp.zeros(1 << 26, jnp.float32, device=here)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        x = jax.block_until_ready(jax.device_put(jax.block_until_ready(jax.device_put(x, there)), here))
        seconds.append(time.perf_counter() - start)
    return {"part": "bandwidth", "bytes_per_second": 2 * x.nbytes / min(seconds)}


def process(task: Record, folder: Path) -> None:
    """Plans and compiles, or, if that was done, says that it is ready, waits, and runs."""
    import jax

    if task["part"] == "bandwidth":
        print(json.dumps(bandwidth()), flush=True)
    elif not program_of(task, folder).exists():
        print(json.dumps(prepared(task, folder)), flush=True)
    else:
        step = loaded(task, folder)
        print("ready", flush=True)
        if sys.stdin.readline():
            found = measured(*step, update=task["part"] != "capped")
            print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__} | found), flush=True)


def name_of(task: Record) -> str:
    return "-".join(str(v).replace(" ", "_").replace("/", "by") for k, v in task.items() if k not in ("small", "error"))


if __name__ == "__main__":
    process(json.loads(sys.argv[1]), Path(sys.argv[2]))
