"""Processes of the benchmarks, each of which answers lines on its stdin with lines on its stdout."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRECISION = {"cpu": "fp32", "gpu": "tf32"}  # the default precision
OF_JAX = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": "BF16_BF16_F32"}  # all keep and sum float32
PROFILED = "--xla_enable_command_buffers_during_profiling=true"  # profiled kernels run as they do without the profiler
# On a CPU, every large temporary is mapped and page-faulted again in each step without these settings. All systems get them. On
# a GPU, no system does: XLA compiles for it on many threads, which would share one arena.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_ARENA_MAX": "1"}


class WorkerDied(Exception):
    """A process has ended without an answer."""


class Child:
    """A process `python -m MODULE ARGUMENTS` in the root of the repository.

    Args:
        arguments: the module and its arguments.
        environment: its environment.
        log: the file to which its stderr is appended.
        python: another interpreter.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path | None = None, python: str | None = None):
        command = [python or sys.executable, "-m", *arguments]
        with open(log or os.devnull, "a") as stderr:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            self._process = subprocess.Popen(command, **pipes, text=True, env=environment, cwd=ROOT)

    def send(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the next answer says it
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def answer(self, patience: float | None = None) -> str:
        """Returns the next line. A process that takes longer than `patience` seconds is killed.

        Raises:
            WorkerDied: If the process ends before it answers.
        """
        assert self._process.stdout
        timer = threading.Timer(patience or threading.TIMEOUT_MAX, self._process.kill)
        timer.start()
        try:
            if line := self._process.stdout.readline():
                return line.strip()
        finally:
            timer.cancel()
        raise WorkerDied(f"the worker ended with status {self._process.wait()}")

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class Setting:
    """How the systems of a run are run: on which device, with how many threads, and in which precision of products, if not the
    device's default. `pythons`: interpreters of some systems."""

    device: str
    threads: int = 2
    precision: str | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    @property
    def of_products(self) -> str:
        return self.precision or PRECISION[self.device]


class Remote(Child):
    """The worker of a system (`bench.worker`)."""

    def __init__(self, name: str, setting: Setting):
        python, threads, device = setting.pythons.get(name), str(setting.threads), setting.device
        # Another Python has packages of its own.
        paths = [str(ROOT), *([] if python else filter(None, [os.environ.get("PYTHONPATH")]))]
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(paths)}
        if device == "cpu":
            environment |= MALLOC | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "DGLBACKEND": "pytorch"}
        else:  # several systems share the card
            environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "BENCH_PRECISION": setting.of_products}
            environment["JAX_DEFAULT_MATMUL_PRECISION"] = OF_JAX[setting.of_products]
            environment["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), PROFILED]))
        super().__init__(["bench.worker", name, "--threads", threads, "--device", device], environment, setting.log, python)
        if hasattr(os, "sched_setaffinity") and device == "cpu":
            os.sched_setaffinity(self.process_id, sorted(os.sched_getaffinity(0))[: setting.threads])

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends one command and returns the answer, `{"error": ...}` if the command failed."""
        self.send(json.dumps({"command": command, **arguments}))
        return json.loads(self.answer())
