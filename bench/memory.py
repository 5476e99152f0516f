"""Suite `memory`: what training steps need under budgets, in parts, and with recomputation. `python -m bench memory`.

Every measurement has a process of its own (`python -m bench.memory PART JSON`): it plans, compiles, says "ready", and waits.
Several compile at once; then one after another runs alone, so that times are true.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench import store

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = {"cpu": 1, "gpu": 16}  # processes that compile at the same time
PATIENCE = 900  # seconds until a process must be ready, and until it must have answered
PARTS = ("budgets", "quarter", "scan", "echo")
PROGRAMS = ("tree_lstm", "child_sum", "tree_fc", "lstm", "gru")
SCANS = ("tree_lstm", "gru", "tree_fc", "attention")  # programs in a plain level scan, too
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


SIZES = {
    ("cpu", True): Size(graphs=64, hidden=32, points=4, steps=3, quarters=(64,), echo="small"),
    ("cpu", False): Size(graphs=512, hidden=128, points=10, steps=5, quarters=(512,), echo="small"),
    ("gpu", True): Size(graphs=512, hidden=512, points=4, steps=10, quarters=(512,), echo="full"),
    ("gpu", False): Size(graphs=512, hidden=512, points=10, steps=20, quarters=(512, 4096, 16384), echo="full"),
}


Task = tuple[str, dict[str, Any]]  # a part, and the arguments of its function


def tasks(device: str, size: Size, only: Sequence[str] = PARTS, names: Sequence[str] | None = None) -> list[Task]:
    """Returns the measurements of a run: all, or those of some programs and cases."""
    programs = names or (*PROGRAMS, *SCANS, *CASES)
    known, same = [p for p in PROGRAMS if p in programs], {"hidden": size.hidden, "steps": size.steps}
    found: list[Task] = [
        ("budgets", {"program": p, "engine": e, "graphs": size.graphs, "points": size.points} | same)
        for p in known
        for e in ENGINES[device]
    ]
    found += [
        ("quarter", {"program": p, "engine": ENGINES[device][0], "graphs": n} | same) for p in known[:1] for n in size.quarters
    ]
    # Each vertex of "attention" reads a matrix, so there are fewer graphs.
    found += [
        ("scan", {"program": p, "engine": ENGINES[device][1], "graphs": size.graphs // (8 if p == "attention" else 1)} | same)
        for p in SCANS
        if p in programs
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
    found = []
    for i in range(0, len(wanted), AT_ONCE[device]):
        group = [_Process(task, device) for task in wanted[i : i + AT_ONCE[device]]]
        for process in group:  # all compile before the first one runs
            process.wait()
        for process in group:
            record = process.answer()
            tell(json.dumps(record))
            found.append(record)
            versions = record.pop("versions", {})
            if "device" in versions or device == "cpu":
                name = store.device_name(device, os.cpu_count() or 1, {"cavs": versions})
                add(results / f"memory-{name}.json", device, record, versions, commit)
    return found


class _Process:
    """A measurement in a process of its own."""

    def __init__(self, task: Task, device: str):
        self._task = task
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        command = [sys.executable, "-m", "bench.memory", task[0], json.dumps(task[1])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self._late = False

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._errors[:] = [*self._errors[-20:], line]

    def _line(self) -> str:
        """The next line of the process; it is killed if it takes too long."""
        timer = threading.Timer(PATIENCE, self._kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            return self._process.stdout.readline().strip()
        finally:
            timer.cancel()

    def _kill(self) -> None:
        self._late = True
        self._process.kill()

    def wait(self) -> None:
        """Waits until the process has compiled everything, or failed."""
        self._line()

    def answer(self) -> dict[str, Any]:
        """Lets the process run, and returns its record."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        said = self._line()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        part, arguments = self._task
        record = {"part": part, **arguments}
        if not said.startswith("{"):
            why = f"no answer after {PATIENCE} s" if self._late else "".join(self._errors).strip()[-500:]
            return record | {"error": why}
        return record | json.loads(said)


def add(path: Path, device: str, record: dict[str, Any], versions: dict[str, str], commit: str | None = None) -> None:
    """Replaces the record of the same measurement in a file of results."""
    data = json.loads(path.read_text()) if path.exists() else {"environments": [], "records": []}
    made = store.environment(device, os.cpu_count() or 1, {"cavs": versions}, commit)
    kept = {k: made[k] for k in ("commit", "changed", "device", "cores", "platform", "versions")}
    if kept not in data["environments"]:
        data["environments"].append(kept)
    record["environment"] = data["environments"].index(kept)
    data["records"] = [r for r in data["records"] if key(r) != key(record)] + [record]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(dumps(data))
    partial.replace(path)


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured."""
    return tuple(record.get(k) for k in ("part", "program", "engine", "graphs", "hidden", "case", "size", "variant"))


def dumps(data: dict[str, Any]) -> str:
    """Returns JSON with a line for each record, or each of its points."""
    records = [json.dumps(r) for r in data["records"]]
    lines = [r.replace('"points": [', '"points": [\n   ').replace("}, {", "},\n   {") for r in records]
    head = json.dumps(data["environments"], indent=1)
    return '{"environments": ' + head + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]}\n"


def _measure(part: str, arguments: dict[str, Any]) -> Iterator[str]:
    """The lines of a measurement: "ready", and the record when the caller asks for it."""
    import jax

    from bench import budgets, echo, level_scan

    parts = {"budgets": budgets.budgets, "quarter": budgets.quarter, "scan": level_scan.against_scan, "echo": echo.echo}
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
