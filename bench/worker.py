"""One system in a process of its own: reads commands as JSON lines from stdin and answers on stdout.

    python -m bench.worker SYSTEM --threads 2 --device cpu

The commands are:

- `open`: load a case
- `check`: losses before and after two updates, and the time of the first step
- `warm`: run every batch once
- `round`: the timed passes
- `schedule`: the host's share alone
- `profile`: time on the GPU
- `gemm`: the rate of a large product
- `quit`

One worker is timed at a time; the others wait in `readline`. This file also runs under Python 3.8 for DyNet.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import json
import os
import platform
import sys
import time
import traceback
from typing import Any

from bench import cases
from bench.systems import SYSTEMS

LEARNING_RATE = 0.05
STREAM = 1024  # batches over which the time of scheduling is averaged, if several are scheduled at once


class Worker:
    """The open case between commands."""

    def __init__(self, name, threads, device):
        self.name, self.threads, self.device, self.system = name, threads, device, SYSTEMS[name]
        self.model: Any = None
        self.batches: list[Any] = []

    def hello(self):
        if missing := self.system.missing():
            return {"missing": "needs " + ", ".join(missing) + ": " + self.system.install}
        versions = {"python": platform.python_version()}
        for module in ("numpy", *self.system.needs, *(["cavs"] if self.name.startswith("cavs") else [])):
            versions[module] = str(getattr(__import__(module), "__version__", "?"))
        if "jax" in self.system.needs:
            device = sys.modules["jax"].devices()[0]
            if self.device == "gpu" and device.platform != "gpu":
                return {"missing": "needs a GPU that JAX sees: pip install 'jax[cuda13]'"}
            versions["device"] = device.device_kind
        elif self.device == "gpu":
            cuda = sys.modules["torch"].cuda
            if not cuda.is_available():
                return {"missing": "needs a GPU that PyTorch sees"}
            versions["device"] = cuda.get_device_name()
        return {"versions": versions}

    def open(self, case, steps, path=None):
        self.model, self.batches = None, []
        gc.collect()
        case = cases.parse(case)
        batches = cases.dataset(case, steps, path)
        self.model = self.system.make(case, cases.parameters(case), self.threads, self.device)
        self.batches = self.model.load(batches) if hasattr(self.model, "load") else batches
        return {"gflop": cases.gflop(case, batches), "reading": getattr(self.model, "reading", 0.0)}

    def check(self):
        losses = []
        first = _seconds(lambda: losses.extend(self._run(self.batches[:1])))
        return {"losses": losses + self._run([self.batches[1], self.batches[0]]), "first": first}

    def warm(self, limit=None):
        compiled, seconds = 0.0, 0.0
        if self.device == "gpu" and hasattr(self.model, "compile"):
            compiled = _seconds(lambda: self.model.compile(self.batches))
        for i, batch in enumerate(self.batches):
            seconds += _seconds(lambda batch=batch: self._run([batch]))
            if limit and seconds > limit and i + 1 < len(self.batches):
                raise TimeoutError(f"compiles for minutes: {i + 1} of {len(self.batches)} batches took {seconds:.0f} s")
        if hasattr(self.model, "warm"):
            self.model.warm(self.batches)
        if self.device == "gpu":
            self.gemm()  # compiles
        count, engines = (getattr(self.model, name, None) for name in ("compilations", "engines"))
        engine = " and ".join(engines(self.batches)) if engines else ""
        return dict({"engine": engine} if engine else {}, warm=compiled + seconds, compilations=count() if count else 0)

    def round(self, samples, passes):
        """Takes `samples` samples of `passes` passes over the batches in one stream, in seconds per step."""
        gc.collect()
        batches = self.batches * passes
        return {"samples": [_seconds(lambda: self._run(batches)) / len(batches) for _ in range(samples)]}

    def schedule(self, passes=1):
        """Times the host's share alone.

        `schedules` of all batches, if the system has it, runs in turn with training steps, so that caches are as in a training
        loop. Otherwise `schedule` runs on each batch, in consecutive passes. `passes` is the number of timed passes.
        """
        schedule, schedules = getattr(self.model, "schedule", None), getattr(self.model, "schedules", None)
        if schedules is None:
            if schedule is None:
                return {"schedule": []}
            times = [_seconds(lambda schedule=schedule: [schedule(batch) for batch in self.batches]) for _ in range(3)]
            return {"schedule": [time / len(self.batches) for time in times]}
        # `schedules` takes several batches at once. It gets a stream of them: an epoch's, or half a second's.
        batches = self._stream(lambda: _take(schedules(self.batches)), 0.5)
        samples = []
        for _ in range(5):
            self._disturb()
            samples.append(_seconds(lambda: _take(schedules(batches))) / len(batches))
        return dict(self._waiting(passes), schedule=samples)

    def _stream(self, run, seconds):
        """Returns the batches so often that `run`, which takes each once, would take so long, up to `STREAM` of them."""
        return self.batches * max(1, min(STREAM // len(self.batches), int(seconds / _seconds(run))))

    def _disturb(self, seconds=0.1):
        """Runs training steps, which leave the host's caches as a training loop does."""
        start = time.perf_counter()
        for batch in itertools.cycle(self.batches):
            self._run([batch])
            if time.perf_counter() - start > seconds:
                return

    def _waiting(self, passes, most=0.5):
        """Times steps with scheduling and with prepared schedules, in turn: what scheduling adds to the wall time."""
        samples = {"with_schedule": [], "without_schedule": []}
        ahead = getattr(self.model, "ahead", self.model.schedules)
        pairs, most, batches = (7, most, []) if self.device == "cpu" else (5, 4 * most, self.batches * passes)
        if self.device == "cpu":  # a stream as long as that of `schedule`, if there is time
            batches = self._stream(lambda: self.model.train(ahead(self.batches), LEARNING_RATE), most / 2)
        prepared = list(ahead(batches))
        for _ in range(pairs):
            for name in samples:
                steps = ahead(batches) if name == "with_schedule" else prepared
                seconds = _seconds(lambda steps=steps: self.model.train(steps, LEARNING_RATE))
                samples[name].append(seconds / len(batches))
                if seconds > most:  # in a long pass, scheduling is lost in the noise
                    return {}
        return samples

    def profile(self, most=16):
        """Measures the time on the device by its profiler, outside the timed rounds."""
        if self.device == "cpu":
            return {"device": {"seconds": None, "why": "on a CPU the device is the host, and its time is the wall time"}}
        from bench import device_time

        batches = self.batches[:most]
        try:
            return {"device": device_time.measure(lambda: self._run(batches), len(batches), "jax" in self.system.needs)}
        except Exception as error:  # keep the timings if the profiler may not access the device
            traceback.print_exc()
            return {"device": {"seconds": None, "why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}}

    def gemm(self):
        """Measures the GFLOP/s of a large product by this system's library, in the run's precision."""
        n = 1024 if self.device == "cpu" else 8192
        if "jax" in self.system.needs:
            import jax.numpy as jnp

            a = jnp.ones((n, n))
            run = lambda: jnp.matmul(a, a).block_until_ready()  # noqa: E731
        elif "torch" in self.system.needs:
            import torch  # pyright: ignore[reportMissingImports]

            from bench.peers import torch_dtype

            torch.set_num_threads(self.threads)
            a = torch.ones(n, n, device="cuda" if self.device == "gpu" else "cpu", dtype=torch_dtype())
            run = lambda: (a @ a)[0, 0].item()  # noqa: E731
        else:
            return {"gflops": 0.0}
        run()
        return {"gflops": 2 * n**3 / min(_seconds(run) for _ in range(5)) / 1e9}

    def _run(self, batches):
        if hasattr(self.model, "run"):
            return self.model.run(batches, LEARNING_RATE)
        return [self.model.step(b, LEARNING_RATE) for b in batches]


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _take(iterator):
    collections.deque(iterator, maxlen=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr
    worker = Worker(args.system, args.threads, args.device)
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        if command == "quit":
            break
        try:
            answer = getattr(worker, command)(**request)
        except Exception as error:  # the table reports it
            traceback.print_exc()
            text = (str(error).splitlines() or [""])[0]
            answer = {"error": text if isinstance(error, TimeoutError) else f"{type(error).__name__}: {text}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
