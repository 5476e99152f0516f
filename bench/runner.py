"""Runs a suite: one worker process per system, systems interleaved in rounds, every sample recorded.

A worker keeps its system through all cases, so it imports once. Only one worker is timed at a time. On a GPU machine with many
cores, several cases are compiled in parallel, in workers of their own, before any of them is timed. In a round each system
passes over the same batches once or a few times, in an order that rotates. Drift of the machine therefore affects all systems
equally, and ratios compare medians of one run.
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from bench.cases import Case
from bench.machine import cores, processor_seconds, rates, told_apart
from bench.remote import Remote, Setting, WorkerDied
from bench.systems import SYSTEMS

TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 2e-2}  # relative, of the losses before and after two updates
QUICK_WARM = 60.0  # seconds of compilation after which a quick run leaves a system out of a case, if there are others
BUSY = 0.5  # load above which the results may be noisy
# On a GPU one sample is a stream of steps, like an epoch, with the start-up of the system's pipeline. These are its length in
# seconds, its maximum number of batches, and the minimum number of samples of each system.
STREAM, LONGEST, SAMPLES = 0.35, 1024, 5
DISPATCH = 128  # longer streams are multiples of so many batches, the most that Cavs dispatches together


class Bench:
    """The workers of one run."""

    def __init__(self, names: tuple[str, ...], setting: Setting):
        self.missing: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}  # of the systems that run
        self._setting, self.device, self._warned = setting, setting.device, False
        self._workers: dict[tuple[str, int], Remote] = {}  # by system, and by its place among cases prepared together
        # On a GPU machine workers start and compile in parallel. They are timed one at a time.
        self._pool = ThreadPoolExecutor(cores() if self.device == "gpu" else 1)
        wanted = [n for n in names if self.device in SYSTEMS[n].devices]
        for name, hello in zip(wanted, self._pool.map(lambda name: self.ask(name, "hello"), wanted), strict=True):
            if "versions" in hello:
                self.versions[name] = hello["versions"]
            else:
                self.missing[name] = hello.get("missing") or hello["error"]
                self._end(name, 0)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers.values():
            worker.close()

    def ask(self, name: str, command: str, slot: int = 0, **arguments: Any) -> dict[str, Any]:
        """Returns a worker's answer. After a worker died (out of memory, for example) the next question starts another one."""
        try:
            if (name, slot) not in self._workers:
                self._workers[name, slot] = Remote(name, self._setting)
            return self._workers[name, slot](command, **arguments)
        except (OSError, WorkerDied) as error:
            self._end(name, slot)
            return {"error": str(error)}

    def _end(self, name: str, slot: int) -> None:
        if worker := self._workers.pop((name, slot), None):
            worker.close()

    def _work(self) -> tuple[float, float] | None:
        return processor_seconds([os.getpid(), *(worker.process_id for worker in self._workers.values())])

    def run_together(
        self,
        cases: list[Case],
        names: tuple[str, ...],
        *,
        quick: bool,
        rounds: int,
        seconds: float,
        path: str | None = None,
        left_out: Callable[[Case, str], str | None],
    ) -> Iterator[dict[str, Any]]:
        """Runs cases on all systems. Prepares all cases in parallel, then times and yields each.

        `left_out(case, system)` returns why a system does not run in a case, or None.
        """

        def prepare(slot: int, case: Case, name: str) -> dict[str, Any]:
            if reason := self.missing.get(name) or left_out(case, name):
                return {"error": reason}
            answers: dict[str, Any] = {}
            for command, arguments in (
                ("open", {"case": case.name, "steps": case.steps(quick, self.device), "path": path}),
                ("check", {}),
                ("warm", {"limit": QUICK_WARM if quick and len(names) > 1 else None}),
            ):
                answers |= self.ask(name, command, slot, **arguments)
                if "error" in answers:
                    break
            return answers

        before, started = os.getloadavg()[0], time.strftime("%Y-%m-%dT%H:%M:%S")
        jobs = [(slot, case, name) for slot, case in enumerate(cases) for name in names]
        # Systems with long compilation come first; the others then fill the remaining cores.
        jobs.sort(key=lambda job: not SYSTEMS[job[2]].compiles_long)
        prepared = {(slot, name): self._pool.submit(prepare, slot, case, name) for slot, case, name in jobs}
        wait(prepared.values())  # nothing is timed while something compiles
        for slot, case in enumerate(cases):
            record: dict[str, Any] = {
                "case": case.name,
                "batch": case.batch,
                "steps": case.steps(quick, self.device),
                "data": "file" if path and case.shape == "sst" else "generated",
                "load_before": before,
                "started": started,
                "systems": {},
            }
            self._time(record, slot, {name: prepared[slot, name].result() for name in names}, rounds, seconds)
            yield _rounded(record)

    def _time(self, record: dict[str, Any], slot: int, answers: dict[str, Any], rounds: int, seconds: float) -> None:
        """Times one case and fills its record. `answers` are those of each system's preparation."""
        case, steps, systems = record["case"], record["steps"], record["systems"]
        for name, prepared in answers.items():
            if "error" in prepared:
                systems[name] = {"absent": prepared["error"]}
                continue
            record["gflop"] = prepared.pop("gflop")
            systems[name] = prepared | {"samples": [], "schedule": [], "gemm": 0.0}
        ready = [name for name in systems if "samples" in systems[name]]
        samples, passes = dict.fromkeys(ready, 1), dict.fromkeys(ready, 1)
        if self.device == "gpu":
            samples = dict.fromkeys(ready, math.ceil(SAMPLES / rounds))
            passes = {name: self._passes(name, slot, steps) for name in ready}
        for name in ready:
            systems[name]["stream"] = steps * passes[name]
        before, start = self._work(), time.perf_counter()
        for r in range(rounds):
            for name in ready[r % max(len(ready), 1) :] + ready[: r % max(len(ready), 1)]:
                if "samples" not in systems[name]:
                    continue
                answer = self.ask(name, "round", slot, samples=samples[name], passes=passes[name])
                if "error" in answer:
                    systems[name] = {"absent": answer["error"]}
                    continue
                systems[name]["samples"] += answer["samples"]
                duration = steps * passes[name] * min(answer["samples"])
                samples[name] = max(samples[name] if self.device == "gpu" else 1, min(20, round(seconds / duration)))
                if r in (0, rounds - 1):
                    rate = self.ask(name, "gemm", slot).get("gflops", 0.0)
                    systems[name]["gemm"] = max(systems[name]["gemm"], rate)
        after, seconds_taken = self._work(), time.perf_counter() - start
        if before and after:
            other_seconds = (after[0] - before[0]) - (after[1] - before[1])
            record["other_cores"] = max(0.0, other_seconds / max(seconds_taken, 1e-9))
        for name in ready:
            if "samples" in systems[name]:
                systems[name] |= self.ask(name, "schedule", slot, passes=passes[name]) | self.ask(name, "profile", slot)
        record["gemm"] = max((s.get("gemm", 0.0) for s in systems.values()), default=0.0)
        record["rates"] = rates(systems)
        if self.device == "cpu" and (warning := told_apart(record["rates"])) and not self._warned:
            self._warned = True
            print(f"{case}: {warning}", file=sys.stderr)
        _check(systems, TOLERANCE[self._setting.of_products])
        record["load_after"] = os.getloadavg()[0]

    def _passes(self, name: str, slot: int, steps: int) -> int:
        """Returns the passes over the batches in one sample on a GPU. Short streams are mostly start-up: measure again."""
        passes, most, whole = 1, max(1, LONGEST // steps), DISPATCH // math.gcd(DISPATCH, steps)
        for _ in range(3):
            answer = self.ask(name, "round", slot, samples=1, passes=passes)
            if "error" in answer or passes == most:
                break
            seconds = steps * passes * min(answer["samples"])
            if seconds > 0.75 * STREAM:
                break
            passes = max(1, min(most, round(passes * STREAM / seconds)))
            passes -= passes % whole if passes > whole else 0
        return passes


def _check(systems: dict[str, Any], tolerance: float) -> None:
    """Marks the systems whose losses differ from the median of all."""
    by_system = {name: s["losses"] for name, s in systems.items() if "losses" in s}
    for name, losses in by_system.items():
        middle = [statistics.median(values[i] for values in by_system.values()) for i in range(len(losses))]
        deviation = max(abs(x - m) / max(abs(m), 1e-30) for x, m in zip(losses, middle, strict=True))
        systems[name]["deviation"] = deviation
        systems[name]["agrees"] = bool(deviation <= tolerance)  # False for NaN too


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Rounds to seven digits, so that diffs of results stay readable."""
    return json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.7g}"))
