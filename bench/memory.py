"""Suite `memory`: what training steps need under budgets, in parts, and with recomputation. `python -m bench memory`.

Every measurement has a process of its own (`python -m bench.memory TASK FOLDER`): it plans, compiles, says "ready", and waits.
Several compile at once; then one after another runs alone, so that times are true. A whole training step is compiled in one
process, which also tries algorithms of convolutions, and runs in another one, whose allocator may be capped.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import store
from bench.remote import ROOT, Child, WorkerDied

AT_ONCE = {"cpu": 1, "gpu": 16}  # processes that compile or wait at the same time
PATIENCE = 900  # seconds until a process must be ready, and until it must have answered
PARTS = ("budgets", "quarter", "plans", "echo", "steps")
PROGRAMS = ("tree_lstm", "child_sum", "tree_fc", "lstm", "gru")
PLANS = ("mlp", "resnet_with_group_norm", "autoencoder", "mixer", "series", "nary_tree_lstm", "td_lstm", "elman", "dagnn")
CASES = ("nmt", "deepspeech2", "transformer", "resnet")
VARIANTS = ("jax.grad", "jax.checkpoint", "recompute", "recompute hand", "recompute min")
TORCH = ("torch", "torch checkpoint", "torch in a CUDA graph")  # of the translation model, on a GPU
ENGINES = {"cpu": ("scan", "auto"), "gpu": ("persistent", "scan")}  # "auto": the one that `cavs.run` chooses
CONSTANT = 192 << 20  # bytes of a capped allocator beyond the budget of a step: workspaces, and what runs before it
# Steps of part `steps` compile in a tenth of the time with cuBLAS alone: XLA would compile each product in tens of ways.
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"


@dataclass(frozen=True)
class Size:
    """How large the measurements are."""

    graphs: int
    hidden: int
    points: int
    steps: int
    quarters: tuple[int, ...]  # numbers of graphs
    echo: str
    samples: int  # of part "plans"


SIZES = {
    ("cpu", True): Size(graphs=64, hidden=32, points=4, steps=3, quarters=(64,), echo="small", samples=32),
    ("cpu", False): Size(graphs=512, hidden=128, points=10, steps=5, quarters=(512,), echo="small", samples=32),
    ("gpu", True): Size(graphs=512, hidden=512, points=4, steps=10, quarters=(512,), echo="full", samples=64),
    ("gpu", False): Size(graphs=512, hidden=512, points=10, steps=20, quarters=(512, 4096, 16384), echo="full", samples=64),
}
Task = dict[str, Any]  # a part, and the arguments of its function


def tasks(device: str, size: Size, only: Sequence[str] = PARTS, names: Sequence[str] | None = None) -> list[Task]:
    """Returns the measurements of a run: all, or those of some programs and cases."""
    programs, sizes = [p for p in PROGRAMS if not names or p in names], {"hidden": size.hidden, "steps": size.steps}
    measurements: list[Task] = [
        {"part": "budgets", "program": p, "engine": e, "graphs": size.graphs, "points": size.points} | sizes
        for p in programs
        for e in ENGINES[device]
    ]
    measurements += [
        {"part": "quarter", "program": p, "engine": ENGINES[device][0], "graphs": n} | sizes
        for p in programs[:1]
        for n in size.quarters
    ]
    measurements += [{"part": "plans", "program": p, "samples": size.samples, "hidden": size.hidden} for p in PLANS]
    measurements += [
        {"part": "echo", "case": c, "size": size.echo, "variant": v, "steps": size.steps, "capped": False}
        for c in CASES
        for v in (*VARIANTS, *(TORCH if c == "nmt" and device == "gpu" else ()))
    ]
    if device == "gpu":
        measurements += [{"part": "steps", "steps": size.steps} | step for step in _steps()]
    return [t for t in measurements if t["part"] in only and (not names or {t.get("program"), t.get("case")} & set(names))]


def _steps() -> Iterator[Task]:
    """Steps whose allocator is capped at their budget, and steps of large batches of images."""
    for case, samples in (("tree_lstm", 2048), ("lstm", 2048), ("resnet_with_group_norm", 1024), ("mixer", 8192)):
        hidden = 512 if case in PROGRAMS else 128
        yield {"case": case, "samples": samples, "hidden": hidden, "variant": "parts 700MB", "capped": True}
    for case, budget in (("resnet", "2500MB"), ("transformer", "1300MB")):
        yield {"case": case, "size": "full", "variant": f"recompute {budget}", "capped": True}
    # The largest batches that fit 12 GB, and moDNN's quarter and twentieth of the memory of a batch at once.
    images = [("vgg16", "batch", 80, "jax.grad"), ("vgg16", "batch", 192, "recompute")]
    images += [("vgg16", "batch", 256, v) for v in ("jax.grad", "parts =8", "parts =64")]
    images += [("resnet152", "batch", n, v) for n, v in ((60, "jax.grad"), (96, "recompute"), (256, "recompute min"))]
    images += [("resnet152", "group", 128, v) for v in ("jax.grad", "parts =8")]
    for case, norm, samples, variant in images:
        yield {"case": case, "norm": norm, "samples": samples, "variant": variant, "side": 224, "capped": False}


def run(
    device: str, wanted: Sequence[Task], results: Path, commit: str | None = None, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Runs measurements and writes their records to `memory-<device>.json`, after each of them. Returns the records.

    A record of a measurement that failed has an "error".
    """
    records = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE[device]) as pool:
        for i in range(0, len(wanted), AT_ONCE[device]):
            group = [
                Measurement(task, device, Path(folder) / str(n)) for n, task in enumerate(wanted[i:][: AT_ONCE[device]], i)
            ]
            list(pool.map(Measurement.prepare, group))  # all compile before the first one runs
            for measurement in group:
                record = measurement.finish()
                tell(json.dumps(record))
                records.append(record)
                versions = record.pop("versions", {})
                if "device" in versions or device == "cpu":
                    name = store.device_name(device, os.cpu_count() or 1, {"cavs": versions})
                    environment = store.environment(device, os.cpu_count() or 1, {"cavs": versions}, commit)
                    environment = {k: environment[k] for k in ("commit", "changed", "device", "cores", "platform", "versions")}
                    store.Store(results / f"memory-{name}.json", key, dumps).add(record, environment)
    return records


class Measurement:
    """The processes of one measurement."""

    def __init__(self, task: Task, device: str, folder: Path):
        folder.mkdir()
        self._record, self._folder, self._log = dict(task), folder, folder / "log"
        # Processes share what XLA measures. JAX's cache would, too, but a program read from it cannot be written on a CPU.
        flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_gpu_per_fusion_autotune_cache_dir={folder.parent}"]
        flags += [NO_TRITON] if task["part"] == "steps" else []
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._environment |= {"XLA_FLAGS": " ".join(flags).strip(), "JAX_ENABLE_COMPILATION_CACHE": "0"}
        self._environment |= {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
        self._child: Child | None = None

    def _start(self, task: Task) -> Child:
        """Starts a process, and waits until it has compiled."""
        child = Child(["bench.memory", json.dumps(task), str(self._folder)], self._environment, self._log)
        with contextlib.suppress(WorkerDied):  # its next answer says it
            child.answer(PATIENCE)
        return child

    def _answer(self, child: Child) -> dict[str, Any]:
        try:
            child.send("go")
            return json.loads(child.answer(PATIENCE))
        except WorkerDied as died:
            text = self._log.read_text().strip()
            return {"error": text[-500:] or f"{died} within {PATIENCE} s"}
        finally:
            child.close()

    def prepare(self) -> None:
        """Compiles what is measured."""
        if self._record["part"] in ("echo", "steps") and self._record["variant"] not in TORCH:
            self._record |= self._answer(self._start(self._record | {"part": "compiling"}))
            if "error" in self._record:
                return
            if self._record["capped"] and (total := memory_of_gpu()):
                self._record["cap"] = cap = self._record["budget"] + self._record["arrays"] + CONSTANT
                self._environment |= {"XLA_CLIENT_MEM_FRACTION": str(cap / total), "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
        self._child = self._start(self._record)

    def finish(self) -> dict[str, Any]:
        """Lets the process run, and returns the record."""
        return self._record | (self._answer(self._child) if self._child else {})


def memory_of_gpu() -> int | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    return None


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured."""
    names = ("part", "program", "engine", "graphs", "samples", "hidden", "case", "size", "variant", "norm")
    return tuple(record.get(k) for k in names)


def dumps(data: dict[str, Any]) -> str:
    """Returns JSON with a line for each record, or each of its points."""
    records = [json.dumps(r) for r in data["records"]]
    lines = [r.replace('"points": [', '"points": [\n   ').replace("}, {", "},\n   {") for r in records]
    head = json.dumps(data["environments"], indent=1)
    return '{"environments": ' + head + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]}\n"


def _measure(task: Task, folder: Path) -> Iterator[str]:
    """The lines of a measurement: "ready", and the record when the caller asks for it."""
    import jax

    from bench import memory_steps

    part, arguments = task["part"], {k: v for k, v in task.items() if k != "part"}
    if task.get("variant") in TORCH:
        from bench.peers import torch_nmt

        measurement = torch_nmt.echo(task["case"], task["size"], task["variant"], task["steps"])
    elif part in ("budgets", "quarter", "plans"):
        measurement = getattr(memory_steps, part)(arguments.pop("program"), **arguments)
    else:
        measurement = (memory_steps.compiling if part == "compiling" else memory_steps.running)(task, folder)
    next(measurement)
    yield "ready"
    try:
        next(measurement)
    except StopIteration as done:
        versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        yield json.dumps({"device": jax.devices()[0].device_kind, "versions": versions} | done.value)


if __name__ == "__main__":
    lines = _measure(json.loads(sys.argv[1]), Path(sys.argv[2]))
    print(next(lines), flush=True)
    if sys.stdin.readline():
        print(next(lines), flush=True)
