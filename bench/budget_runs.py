"""Training steps in processes of their own: the allocator's peak, runs with a capped allocator, largest batches, and the host.

`python -m bench.budget_runs FOLDER [--limit SECONDS] [--small] [--only PART ...] [--model MODEL ...]` writes
`budget_runs.json`, after each run.

Each step is planned and compiled in one process, which also measures algorithms of convolutions, and runs in another one, which
reads the compiled program: so the allocator's peak is that of the step.

Variants: "jax.grad"; "checkpoint", by hand; "recompute" without a budget, or with one; "smallest", the plan of `recompute` that
is estimated to need the least; "parts" with a budget, or "=8" of them; "host 0.5": half of what is kept is on the host. Budgets
are bytes, or "/5": a fifth of what the step needs without one. "group": a normalisation of each image alone.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.budget_steps import Record, name_of
from bench.remote import ROOT, Child, WorkerDied

CONSTANT = 192 << 20  # bytes of a capped allocator beyond the budget of a step: workspaces, and what runs before it
AT_ONCE = 16  # processes that compile or wait for their turn
LARGE_AT_ONCE = 4  # of those that compile large steps: XLA tries algorithms on the GPU, whose memory all share
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
            arguments = ["bench.budget_steps", json.dumps(task), str(folder)]
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
        is_large = any(task["part"] in ("largest", "wide") for task in wanted)
        with ThreadPoolExecutor(LARGE_AT_ONCE if is_large else AT_ONCE) as pool:
            at_once = [t for t in slow_first if not t["variant"].startswith("offload")]
            records = {name_of(t): r for t, r in zip(at_once, pool.map(compiled, at_once), strict=True)}
        records |= {name_of(t): compiled(t) for t in slow_first if t not in at_once}  # alone: `recompute` times these plans
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
    amounts = {k: r.get(k) for k in ("temp", "total", "budget", "peak", "cap", "limit", "on_host")}
    sizes = [f"{k} {n / 1e6:.0f} MB" for k, n in amounts.items() if isinstance(n, int) and n]
    more = [f"{k} {r[k]}" for k in ("parts", "ms", "samples", "bytes_per_second") if r.get(k)]
    return " ".join([r["part"], r.get("model", ""), r.get("variant", ""), *sizes, *more, r.get("error", "")[-200:]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=480)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="*", help="parts")
    parser.add_argument("--model", nargs="*")
    asked = parser.parse_args()
    wanted = [t for t in tasks(asked.small) if not asked.only or t["part"] in asked.only]
    run_all([t for t in wanted if not asked.model or t["model"] in asked.model], asked.folder, asked.limit)
