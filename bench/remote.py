"""The worker process of a system (`bench.worker`), and the pipe to it."""

import json
import os
import subprocess
import sys
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
    """The process of a system has ended."""


class Remote:
    """A worker process and its pipe."""

    def __init__(
        self,
        name: str,
        threads: int,
        device: str,
        python: str | None = None,
        log: Path | None = None,
        precision: str | None = None,
    ):
        paths = [
            str(ROOT),
            *([] if python else filter(None, [os.environ.get("PYTHONPATH")])),
        ]  # for this Python
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
        if device == "cpu":
            environment |= MALLOC | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "DGLBACKEND": "pytorch"}
        else:
            # Several systems share the card.
            precision = precision or PRECISION[device]
            environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": OF_JAX[precision]}
            environment["BENCH_PRECISION"] = precision
            environment["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), PROFILED]))
        command = [python or sys.executable, "-m", "bench.worker", name, "--threads", str(threads), "--device", device]
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") and device == "cpu" else None
        with open(log or os.devnull, "a") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        if cores:
            os.sched_setaffinity(self._process.pid, cores)

    def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends one command and returns the answer, `{"error": ...}` if the command failed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorkerDied(f"the worker ended with status {self._process.wait()}")
        return json.loads(answer)

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
