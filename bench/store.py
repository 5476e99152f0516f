"""Results as data: `bench/results/<device>/<date>.json`, written after every case so that a run can be resumed."""

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import cores

Records = dict[str, list[dict[str, Any]]]  # of each device
RESULTS = Path(__file__).resolve().parent / "results"
CLOCK = (
    "Wall time of a whole training step. Included: selecting the batch, scheduling or graph construction, padding, transfer to "
    "the device, forward, backward, SGD of all parameters and of the embedding's rows that were read, and for the synchronous "
    "systems reading the loss. Excluded: reading graphs from files (Cavs computes heights there; `reading` is its time per "
    "step), compilation and the first pass over every batch (`first`, `warm`). Cavs may prepare the next batches meanwhile."
)


# The meaning of a run's precision, stored in every record's environment.
MEANING = {
    "fp32": "float32",
    "tf32": "float32 with TF32 products; products of Cavs may be in scaled float16, which has as many bits",
    "bf16": "bf16 products: JAX systems keep float32 and sum in float32 (BF16_BF16_F32), PyTorch's are bf16 throughout",
}


def device_name(device: str, threads: int, versions: dict[str, dict[str, str]]) -> str:
    """Returns the name of the device, for example `cpu-amd-epyc-2t` or `gpu-nvidia-h200`."""
    if device == "gpu":
        name = next((v["device"] for v in versions.values() if "device" in v), "unknown")
    else:
        name = platform.processor() or platform.machine()
        try:
            name = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0]
        except (OSError, IndexError):
            pass
    words = re.sub(r"\(.*?\)|\b(processor|cpu)\b|@.*|\d+-core", " ", name.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    return f"{device}-{slug}-{threads}t" if device == "cpu" else f"{device}-{slug}"


def environment(
    device: str, threads: int, versions: dict[str, dict[str, str]], commit: str | None = None, precision: str | None = None
) -> dict[str, Any]:
    """Returns what a reader needs to judge or repeat the results. Pass `commit` if this is not a git checkout."""
    changes = _git("status", "--porcelain", "--", "cavs", "vertex_programs", "kernels", "bench/*.py")
    return {
        "commit": commit or _git("rev-parse", "HEAD") or "unknown",
        "changed": None if changes is None else bool(changes),  # `None`: unknown
        "device": device,
        "threads": threads,
        "cores": cores(),
        "platform": platform.platform(),
        "precision": MEANING[precision] if precision else "float32" if device == "cpu" else MEANING["tf32"],
        "clock": CLOCK,
        "compilation_cache": bool(os.environ.get("JAX_COMPILATION_CACHE_DIR")),
        "versions": versions,
    }


def _git(*arguments: str) -> str | None:
    """Returns what git prints, or `None` if this is not a git checkout."""
    command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Returns suite, case and precision ("" for the device's default). The newest record of a key counts."""
    return record["suite"], record["case"], record.get("precision", "")


def dumps(data: dict[str, Any]) -> str:
    """Returns JSON with one line per system, so that diffs are readable."""
    # Collapse everything nested deeper than the systems of a record.
    return re.sub(r"\n {6,}|\n {5}(?=[}\]])", " ", json.dumps(data, indent=1)) + "\n"


class Store:
    """One file of results: environments, and records with the index of their environment."""

    def __init__(
        self,
        path: Path,
        key: Callable[[dict[str, Any]], Any] = key,
        dumps: Callable[[dict[str, Any]], str] = dumps,
    ):
        self.path, self._key, self._dumps = path, key, dumps
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"environments": [], "records": []}

    def done(self, suite: str, case: str, names: tuple[str, ...], quick: bool, precision: str = "") -> bool:
        """Returns whether a record of this case holds all these systems. A full record also counts as a quick one."""
        return any(
            key(r) == (suite, case, precision) and r["quick"] <= quick and set(names) <= set(r["systems"])
            for r in self.data["records"]
        )

    def add(self, record: dict[str, Any], environment: dict[str, Any]) -> None:
        """Replaces the record with the same key, and writes the file."""
        if environment not in self.data["environments"]:
            self.data["environments"].append(environment)
        record["environment"] = self.data["environments"].index(environment)
        self.data["records"] = [r for r in self.data["records"] if self._key(r) != self._key(record)] + [record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(self._dumps(self.data))
        partial.replace(self.path)


def median(system: dict[str, Any]) -> float | None:
    """Returns the median seconds per step of one system of a record, or None if it did not run."""
    return statistics.median(system["samples"]) if system.get("samples") else None


def latest(results: Path = RESULTS) -> Records:
    """Returns the newest record of each case by device, with its environment and date."""
    records: Records = {}
    for folder in sorted(p for p in results.glob("*") if p.is_dir()):
        newest: dict[Any, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")):
            data = json.loads(path.read_text())
            for r in data["records"]:
                r = r | {"environment": data["environments"][r["environment"]], "date": path.stem}
                newest.pop(key(r), None)
                newest[key(r)] = r
        if newest:
            records[folder.name] = list(newest.values())
    return records
