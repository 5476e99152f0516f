"""The machine while a case is timed: its cores, and how busy this benchmark and other programs keep them."""

import os
from pathlib import Path
from typing import Any

from bench.systems import SYSTEMS

APART = 1.3  # rates of products that differ by more than this decide a comparison
LIBRARIES = {"jax": "JAX", "torch": "PyTorch"}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_seconds(processes: list[int]) -> tuple[float, float] | None:
    """Returns the busy seconds of all cores so far, and those of `processes`. Returns None without /proc."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        ticks = 0
        for process in processes + [c for p in processes for c in _children(p)]:
            after_name = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(after_name[11]) + int(after_name[12])
    except (OSError, ValueError, IndexError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, ticks / tick


def _children(process: int) -> list[int]:
    """Returns the child processes of a process, such as those that compile."""
    try:
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:  # a kernel without this file
        return []


def rates(systems: dict[str, Any]) -> dict[str, float]:
    """Returns the best GFLOP/s of a large product in a record's `systems`, by library: how fast each is on this machine."""
    best: dict[str, float] = {}
    for name, system in systems.items():
        if name in SYSTEMS and system.get("gemm"):
            library = LIBRARIES.get(SYSTEMS[name].library, SYSTEMS[name].library)
            best[library] = max(best.get(library, 0.0), system["gemm"])
    return best


def told_apart(speeds: dict[str, float]) -> str | None:
    """Returns a warning if the libraries' products run at rates that differ by more than `APART`, or None."""
    if len(speeds) < 2 or max(speeds.values()) <= APART * min(speeds.values()):
        return None
    listed = ", ".join(f"{library} {rate:.0f}" for library, rate in speeds.items())
    return (
        f"large products run at rates that differ by {max(speeds.values()) / min(speeds.values()):.1f}x (GFLOP/s: {listed}); "
        "ratios of systems on this machine say more about the products than about the systems"
    )
