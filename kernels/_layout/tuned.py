"""Records of the layouts that were fastest in measurements, by device, in the folder `tuned` (VPPS III-A: profile-guided).

`python -m bench tune` writes them. If there is no record for a program, a cost model chooses its layout.
"""

import functools
import json
import math
import operator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tuned"


def file_of(device: str) -> Path:
    """Where the records of a device lie: by its name as JAX gives it, such as "NVIDIA H200"."""
    return FOLDER / f"{device.lower().replace(' ', '-')}.json"


def keys(products: list[tuple[int, int]], forward: bool, precision: str, rows: float) -> list[str]:
    """What a layout depends on: the products as (K, columns), the direction, the precision, and vertices a level.

    Vertices are counted in powers of two. The first key has the power that is nearest to `rows`, the second one its other
    neighbour: a record of it will do, because batches of the same graphs have more or fewer vertices with their padding.
    """
    sizes = "+".join(f"{k}x{n}" for k, n in sorted(products))
    exact = math.log2(max(1.0, rows))
    powers = dict.fromkeys([round(exact), math.floor(exact), math.ceil(exact)])
    return [f"{sizes} {'forward' if forward else 'backward'} {precision} {1 << power}" for power in powers]


@functools.cache
def records(device: str) -> dict[str, dict[str, Any]]:
    """The records of a device: key -> {"hb", "groups", ..., "us"}, fields of `LaunchConfig`, and the microseconds measured."""
    path = file_of(device)
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def nearest(device: str) -> dict[str, dict[str, Any]]:
    """The records of a device, and where it has none those of other devices: Hopper GPUs run them nearly as fast."""
    others = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return functools.reduce(operator.or_, others, {}) | records(device)


def save(device: str, found: dict[str, dict[str, Any]]) -> Path:
    """Adds records to those of a device."""
    path = file_of(device)
    path.parent.mkdir(exist_ok=True)
    merged = dict(sorted((records(device) | found).items()))
    path.write_text(json.dumps(merged, indent=1) + "\n")
    records.cache_clear()
    nearest.cache_clear()
    return path
