"""Records of the layouts that were fastest in measurements, by device, in the folder `tuned` (VPPS III-A: profile-guided).

`python -m bench tune` writes them. `cavs.tune` and `cavs.data.step` write the user's own records, in `~/.cache/cavs` (or under
`XDG_CACHE_HOME`). If there is no record for a program, a cost model chooses its layout.
"""

import contextlib
import functools
import json
import math
import operator
import os
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tuned"
_SAVING = threading.Lock()
OWN, SHIPPED, OTHERS = "in your cache", "shipped for this GPU", "shipped for another GPU"  # where a record lies


def file_of(device: str) -> Path:
    """Where the records of a device lie: by its name as JAX gives it, such as "NVIDIA H200"."""
    return FOLDER / f"{device.lower().replace(' ', '-')}.json"


def own_file(device: str) -> Path:
    """Where the user's own records of a device lie."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavs"
    return folder / f"layouts-{file_of(device).name}"


def keys(products: list[tuple[int, int]], forward: bool, precision: str, rows: float) -> list[str]:
    """What a layout depends on: the products as (K, columns), the direction, the precision, and vertices a level.

    Vertices are counted in powers of two. The first key has the power that is nearest to `rows`, the second one its other
    neighbour: a record of it will do, because batches of the same graphs have more or fewer vertices with their padding.
    """
    sizes = "+".join(f"{k}x{n}" for k, n in sorted(products))
    exact = math.log2(max(1.0, rows))
    powers = dict.fromkeys([round(exact), math.floor(exact), math.ceil(exact)])
    return [f"{sizes} {'forward' if forward else 'backward'} {precision} {1 << power}" for power in powers]


def records(device: str) -> dict[str, dict[str, Any]]:
    """The records of a device: key -> {"hb", "groups", ..., "us"}, fields of `LaunchConfig`, and the microseconds measured."""
    return _read(file_of(device))


@functools.cache
def nearest(device: str) -> dict[str, dict[str, Any]]:
    """The user's records of a device, then those of the package, then those of other devices.

    Hopper GPUs run each other's layouts nearly as fast.
    """
    others = [_read(path) for path in sorted(FOLDER.glob("*.json"))]
    return functools.reduce(operator.or_, others, {}) | records(device) | _read(own_file(device))


def origin(device: str, key: str) -> str:
    """Where the record that `nearest` has for a key lies: `OWN`, `SHIPPED` or `OTHERS`."""
    return OWN if key in _read(own_file(device)) else SHIPPED if key in records(device) else OTHERS


def save(path: Path, found: dict[str, dict[str, Any]], replace: bool = True) -> None:
    """Adds records to a file, `file_of` or `own_file` of a device. `replace`: whether they replace records that are there."""
    with _SAVING:
        _read.cache_clear()  # another process may have added some
        before = _read(path)
        merged = before | found if replace else found | before
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n")
        part.replace(path)
        nearest.cache_clear()
        _read.cache_clear()


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}
