"""Training steps in processes of their own: the allocator's peak, runs with a capped allocator, largest batches, and the host.

`python -m bench.budget_runs FOLDER [--limit SECONDS] [--small] [--only PART ...]` writes `budget_runs.json`, after each run.

Each step is planned and compiled in one process, which also measures algorithms of convolutions, and runs in another one, which
reads the compiled program: so the allocator's peak is that of the step.

Variants: "jax.grad"; "checkpoint", by hand; "recompute" without a budget, or with one; "smallest", the plan of `recompute` that
is estimated to need the least; "parts" with a budget, or "=8" of them; "host 0.5": half of what is kept is on the host. Budgets
are bytes, or "/5": a fifth of what the step needs without one. "group": a normalisation of each image alone.
"""

import argparse
import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.remote import ROOT, Child, WorkerDied

Record = dict[str, Any]
CONSTANT = 192 << 20  # bytes of a capped allocator beyond the budget of a step: workspaces, and what runs before it
AT_ONCE, LARGE_AT_ONCE = (
    16,
    4,
)  # processes that compile or wait for their turn; those that compile large steps share the memory of the GPU
SECONDS, MOST = 1.5, 20  # a step is timed for so long, or so often
# Steps of these parts compile in a tenth of the time with cuBLAS alone: XLA would compile each product in tens of ways.
NO_TRITON, OF_CUBLAS = "--xla_gpu_enable_triton_gemm=false", ("capped", "largest", "wide")


def tasks(small: bool) -> list[Record]:
    """The runs: "model", "variant", sizes, and whether the allocator is capped."""
    echo = [
        {"part": "peak", "model": m, "variant": v}
        for m in ("transformer", "resnet", "nmt")
        for v in ("jax.grad", "checkpoint", "recompute", "recompute min")
    ]
    echo += [{"part": "peak", "model": "resnet", "variant": v} for v in ("recompute /2.2", "recompute /2.5")]
    host = [
        ("transformer", "host 0.5"),
        ("transformer", "host 1"),
        ("transformer", "recompute /5"),
        ("transformer", "offload /5"),
    ]
    host += [("resnet", "host 0.2"), ("resnet", "host 1"), ("deepspeech2", "host 1"), ("deepspeech2", "recompute")]
    # With the whole batch in one part, none of these would fit the cap.
    arrays = {"relu_cnn": 512, "resnet_with_group_norm": 1024, "mixer": 8192, "lstm_language_model": 4096}
    arrays["transformer_of_arrays"] = 2048
    chosen = arrays | dict.fromkeys(("tree_lstm", "lstm", "child_sum"), 2048)
    capped = [
        {"model": m, "variant": "parts /3" if small else "parts 700MB", "samples": 16 if small else n}
        | {"hidden": 16 if small else 128 if m in arrays else 512}
        for m, n in chosen.items()
    ]
    capped += [
        {"model": m, "variant": "recompute /2" if small else f"recompute {n}MB"}
        for m, n in (("resnet", 2500), ("transformer", 1300))
    ]
    # The largest batches that fit 12 GB, and moDNN's quarter and twentieth of the memory of a batch at once.
    large = [("vgg16", 80, "jax.grad"), ("vgg16", 192, "recompute"), ("vgg16", 256, "jax.grad")]
    large += [("vgg16", 256, "parts =8"), ("vgg16", 256, "parts =64")]
    large += [("resnet152", 60, "jax.grad"), ("resnet152", 96, "recompute"), ("resnet152", 256, "smallest")]
    large += [("resnet152", 128, "jax.grad group"), ("resnet152", 128, "parts =8 group")]
    large += [("fcn", 48, "jax.grad"), ("fcn", 112, "recompute"), ("fcn", 128, "parts =8")]
    largest: list[Record] = [
        {"part": "largest", "model": m, "variant": v, "samples": 64 if small and "parts" in v else 2 if small else n}
        | {"side": 32 if small else 224}
        for m, n, v in large
    ]
    # Where products take as long as copies: layers of 16,384 units, and 32,768 samples.
    wide = {"model": "wide", "samples": 64 if small else 32768, "hidden": 32 if small else 16384}
    budget = "/1.95" if small else "11500MB"
    ways = ("jax.grad", "host 0.5", f"recompute {budget}", f"offload {budget}")
    second = [{"part": "wide", "variant": v} | wide for v in ways]
    second += [{"part": "rows", "model": "transformer", "variant": v} for v in ("jax.grad", "recompute", "recompute rows")]
    found = [{"part": "capped"} | c for c in capped] + second + echo
    found += [{"part": "host", "model": m, "variant": v} for m, v in host] + largest
    return [t | {"small": small} for t in found if not (small and t["model"] == "vgg16")]


# --- In a process.


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
            point = made._search.on_host(float(amount)) if kind == "host" else made._search.points()[-1]
            options = _host_options() if kind == "host" else {}
            path.write_text(json.dumps(point.as_json()))
        else:
            budget = _budget(amount, lambda: _temp(fn, params, batch))
            made = recompute(fn, budget, offload=kind == "offload").plan(params, batch)
            made.save(path)
            point, options = made._point, made.compiler_options
            found |= {"planned": made._search.compiled.get(point.kept)}
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
    from cavs._remat.fit import compiler_options

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
    from cavs._remat.offload import host_bandwidth

    return {"part": "bandwidth", "bytes_per_second": host_bandwidth()}


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


# --- The parent.


def name_of(task: Record) -> str:
    return "-".join(str(v).replace(" ", "_").replace("/", "by") for k, v in task.items() if k not in ("small", "error"))


def environment(task: Record, folder: Path, cap: int | None, total: int | None) -> dict[str, str]:
    # Processes share what XLA measures. JAX's cache would, too, but a program read from it cannot be written again on a CPU.
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_gpu_per_fusion_autotune_cache_dir={folder}"]
    flags += [NO_TRITON] if task["part"] in OF_CUBLAS else []
    found = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags).strip(), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    if cap and total:
        return found | {"XLA_CLIENT_MEM_FRACTION": str(cap / total), "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    return found | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def cap_of(record: Record) -> int:
    """The bytes of a capped allocator: for the budget of a step, its arguments and its results."""
    return record["budget"] + record["arrays"] + CONSTANT


def memory_of_gpu() -> int | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    return None


def run_all(wanted: Sequence[Record], out: Path, limit: float) -> list[Record]:
    """Runs the tasks, until the time is up, and writes and returns their records."""
    end, found, total = time.perf_counter() + limit, list[Record](), memory_of_gpu()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def child(task: Record, cap: int | None = None) -> Child:
            arguments = ["bench.budget_runs", "--process", json.dumps(task), str(folder)]
            return Child(arguments, environment(task, folder, cap, total), folder / f"{name_of(task)}.log")

        def failed(task: Record, died: WorkerDied) -> Record:
            log = folder / f"{name_of(task)}.log"
            return task | {"error": (log.read_text().strip() if log.exists() else str(died))[-600:]}

        def compiled(task: Record) -> Record:
            if end - time.perf_counter() < 0.3 * limit:
                return task | {"error": "no time to compile"}
            one = child(task)
            try:
                return task | json.loads(one.answer(max(1, end - 0.2 * limit - time.perf_counter())))
            except WorkerDied as died:
                return failed(task, died)
            finally:
                one.close()

        def save(record: Record) -> None:
            found.append(record)
            out.mkdir(parents=True, exist_ok=True)
            lines = ",\n ".join(json.dumps(r) for r in found)
            (out / "budget_runs.json").write_text(f"[\n {lines}\n]\n")
            print(line_of(record), flush=True)

        def answered(task: Record, one: Child) -> Record:
            try:
                if one.answer(max(1, end - time.perf_counter())) != "ready" or time.perf_counter() > end:
                    return task | {"error": "no time to run"}
                one.send("go")
                return task | records[name_of(task)] | json.loads(one.answer(max(1, end - time.perf_counter())))
            except WorkerDied as died:
                return failed(task, died)
            finally:
                one.close()

        if any(task["part"] == "host" for task in wanted):
            save(compiled({"part": "bandwidth"}))
        slow_first = sorted(wanted, key=lambda task: task["model"] != "resnet152")
        is_large = any(
            task["part"] in ("largest", "wide") for task in wanted
        )  # algorithms are measured on the GPU that all share
        with ThreadPoolExecutor(LARGE_AT_ONCE if is_large else AT_ONCE) as pool:
            records = {name_of(t): r for t, r in zip(slow_first, pool.map(compiled, slow_first), strict=True)}
        print(f"compiled: {limit - (end - time.perf_counter()):.0f} s", flush=True)
        ready = [task for task in wanted if "error" not in records[name_of(task)]]
        for record in records.values():
            if "error" in record:
                save(record)

        def started(tasks: Sequence[Record]) -> list[tuple[Record, int | None, Child]]:
            caps = [cap_of(records[name_of(t)]) if t["part"] == "capped" else None for t in tasks]
            return [(t, cap, child(t, cap)) for t, cap in zip(tasks, caps, strict=True)]

        groups = [ready[i : i + AT_ONCE] for i in range(0, len(ready), AT_ONCE)]
        following = started(groups[0]) if groups else []
        for i in range(len(groups)):
            group, following = following, started(groups[i + 1]) if i + 1 < len(groups) else []
            for task, cap, one in group:
                save(answered(task, one) | ({"cap": cap} if cap else {}))
    return found


def line_of(r: Record) -> str:
    """One line of the summary."""
    sizes = [f"{k} {r[k] / 1e6:.0f} MB" for k in ("temp", "total", "budget", "peak", "cap", "limit", "on_host") if r.get(k)]
    more = [f"{k} {r[k]}" for k in ("parts", "ms", "samples", "bytes_per_second") if r.get(k)]
    return " ".join([r["part"], r.get("model", ""), r.get("variant", ""), *sizes, *more, r.get("error", "")[-200:]])


if __name__ == "__main__":
    if sys.argv[1] == "--process":
        process(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("--limit", type=float, default=480)
        parser.add_argument("--small", action="store_true")
        parser.add_argument("--only", nargs="*")
        asked = parser.parse_args()
        run_all([t for t in tasks(asked.small) if not asked.only or t["part"] in asked.only], asked.folder, asked.limit)
