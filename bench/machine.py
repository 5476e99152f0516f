"""The machine while a case is timed: its cores, and how busy this benchmark and other programs keep them."""

import os
from pathlib import Path


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_seconds(processes: list[int]) -> tuple[float, float] | None:
    """Returns the busy seconds of all cores so far, and those of `processes`. Returns None without /proc."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
        mine = 0
        for process in processes + [c for p in processes for c in _children(p)]:
            after_name = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            mine += int(after_name[11]) + int(after_name[12])
    except (OSError, ValueError, IndexError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, mine / tick


def _children(process: int) -> list[int]:
    """Returns the child processes of a process, such as the workers that schedule."""
    try:
        return [int(c) for c in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:  # a kernel without this file
        return []


def load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
