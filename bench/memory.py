"""Suite `memory`: what training steps need under budgets, in parts, and with recomputation. `python -m bench memory`.

Every measurement has a process of its own (`python -m bench.memory PART JSON`): it plans, compiles, says "ready", and waits.
Several compile at once; then one after another runs alone, so that times are true.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import store
from bench.remote import ROOT, Child, WorkerDied

AT_ONCE = {"cpu": 1, "gpu": 16}  # processes that compile at the same time
PATIENCE = 900  # seconds until a process must be ready, and until it must have answered
PARTS = ("budgets", "quarter", "plans", "echo")
PROGRAMS = ("tree_lstm", "child_sum", "tree_fc", "lstm", "gru")
PLANS = (
    "mlp", "relu_cnn", "resnet_with_group_norm", "autoencoder", "transformer", "mixer", "lstm_language_model", "series",
    "nary_tree_lstm", "td_lstm", "elman", "dagnn",
)  # fmt: skip
CASES = ("nmt", "deepspeech2", "transformer", "resnet")
VARIANTS = ("jax.grad", "jax.checkpoint", "recompute", "recompute hand", "recompute min")
TORCH = ("torch", "torch checkpoint", "torch in a CUDA graph")  # of the translation model, on a GPU
ENGINES = {"cpu": ("scan", "auto"), "gpu": ("persistent", "scan")}  # "auto": the one that `cavs.run` chooses


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


Task = tuple[str, dict[str, Any]]  # a part, and the arguments of its function


def tasks(device: str, size: Size, only: Sequence[str] = PARTS, names: Sequence[str] | None = None) -> list[Task]:
    """Returns the measurements of a run: all, or those of some programs and cases."""
    programs = names or (*PROGRAMS, *CASES)
    known, same = [p for p in PROGRAMS if p in programs], {"hidden": size.hidden, "steps": size.steps}
    found: list[Task] = [
        ("budgets", {"program": p, "engine": e, "graphs": size.graphs, "points": size.points} | same)
        for p in known
        for e in ENGINES[device]
    ]
    found += [
        ("quarter", {"program": p, "engine": ENGINES[device][0], "graphs": n} | same) for p in known[:1] for n in size.quarters
    ]
    found += [
        ("plans", {"program": p, "samples": size.samples, "hidden": size.hidden}) for p in PLANS if not names or p in names
    ]
    found += [
        ("echo", {"case": c, "size": size.echo, "variant": v, "steps": size.steps})
        for c in CASES
        if c in programs
        for v in (*VARIANTS, *(TORCH if c == "nmt" and device == "gpu" else ()))
    ]
    return [task for task in found if task[0] in only]


def run(
    device: str, wanted: Sequence[Task], results: Path, commit: str | None = None, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Runs measurements and writes their records to `memory-<device>.json`, after each of them. Returns the records.

    A record of a measurement that failed has an "error".
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(0, len(wanted), AT_ONCE[device]):
            group = list(enumerate(wanted[i : i + AT_ONCE[device]], i))
            logs = [Path(folder) / str(n) for n, _ in group]
            started = [
                Child(["bench.memory", part, json.dumps(arguments)], environment, log)
                for (_, (part, arguments)), log in zip(group, logs, strict=True)
            ]
            for child in started:  # all compile before the first one runs
                with contextlib.suppress(WorkerDied):  # its next answer says it
                    child.answer(PATIENCE)
            for (_, task), child, log in zip(group, started, logs, strict=True):
                record = _record(task, child, log)
                tell(json.dumps(record))
                found.append(record)
                versions = record.pop("versions", {})
                if "device" in versions or device == "cpu":
                    name = store.device_name(device, os.cpu_count() or 1, {"cavs": versions})
                    made = store.environment(device, os.cpu_count() or 1, {"cavs": versions}, commit)
                    made = {k: made[k] for k in ("commit", "changed", "device", "cores", "platform", "versions")}
                    store.Store(results / f"memory-{name}.json", key, dumps).add(record, made)
    return found


def _record(task: Task, child: Child, log: Path) -> dict[str, Any]:
    """Lets a process that has compiled run, and returns the record of its measurement."""
    record = {"part": task[0], **task[1]}
    try:
        child.send("go")
        return record | json.loads(child.answer(PATIENCE))
    except WorkerDied as died:
        return record | {"error": log.read_text().strip()[-500:] or f"{died} within {PATIENCE} s"}
    finally:
        child.close()


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured."""
    return tuple(record.get(k) for k in ("part", "program", "engine", "graphs", "samples", "hidden", "case", "size", "variant"))


def dumps(data: dict[str, Any]) -> str:
    """Returns JSON with a line for each record, or each of its points."""
    records = [json.dumps(r) for r in data["records"]]
    lines = [r.replace('"points": [', '"points": [\n   ').replace("}, {", "},\n   {") for r in records]
    head = json.dumps(data["environments"], indent=1)
    return '{"environments": ' + head + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]}\n"


def _measure(part: str, arguments: dict[str, Any]) -> Iterator[str]:
    """The lines of a measurement: "ready", and the record when the caller asks for it."""
    import jax

    from bench import budgets, echo, plans

    parts = {"budgets": budgets.budgets, "quarter": budgets.quarter, "plans": plans.plans, "echo": echo.echo}
    function = parts[part]
    if arguments.get("variant") in TORCH:
        from bench.peers import torch_nmt

        function = torch_nmt.echo
    measurement = function(**arguments)
    next(measurement)
    yield "ready"
    try:
        next(measurement)
    except StopIteration as done:
        versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        yield json.dumps({"device": jax.devices()[0].device_kind, "versions": versions} | done.value)


if __name__ == "__main__":
    lines = _measure(sys.argv[1], json.loads(sys.argv[2]))
    print(next(lines), flush=True)
    if sys.stdin.readline():
        print(next(lines), flush=True)
