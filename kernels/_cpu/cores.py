"""How many threads of this process can run at once."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process may keep busy, at least 1.

    On Linux these are the cores that its affinity names, and no more than the quotas of its cgroup and of those around it,
    rounded down: a thread that waits actively would use up what the others need. A container without a quota has all cores of
    the machine.

    Args:
        root: The root of the file system, in which /proc and /sys are read.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the quotas of the process, in cores, of cgroups of both versions."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _around(mounted, path):
                yield from _cores(_read(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in (x for name in ("cpu", controllers) for x in _around(mounted / name, path)):
                yield from _cores(f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}")


def _around(mounted: Path, path: str) -> list[Path]:
    """Returns the folders of a cgroup and of those around it. In a container only some of them may be there."""
    inner = mounted.joinpath(*(name for name in path.split("/") if name not in ("", "..")))
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mounted)]


def _cores(text: str) -> list[float]:
    """Returns the quota that "200000 100000" gives: 2 cores; nothing for "max 100000", "-1 100000", or what is no quota."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return []
    return [int(words[0]) / int(words[1])]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
