"""Time on a GPU, from the profilers of JAX and PyTorch.

Both profilers record the start and the duration of every kernel and copy (CUPTI). Overlapping work is counted once.
`seconds` is the time during which the device was busy, `span` the time from the first start to the last end, and
`seconds / span` the utilisation.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path

HEAVIEST = 6  # kernel names in a record
# The purpose of kernels by their names: products, and kernels that only move memory (Cavs, table 2). All others are
# element-wise operations, fused with their reads and writes.
PRODUCTS = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|splitk|xmma|dot_|_dot|wgmma|cudnn|persist", re.IGNORECASE)
MOVES = re.compile(r"memcpy|memset|gather|scatter|index|copy|slice|concat|pad|transpose|CatArray|fill", re.IGNORECASE)


def measure(run, steps, jax_device):
    """Returns the seconds per step, kernels per step and heaviest kernels of `run()`, which takes `steps` training steps."""
    return summary((of_jax if jax_device else _of_torch)(run), steps, "jax.profiler" if jax_device else "torch.profiler")


def summary(events, steps, by):
    """Summarises events (name, start, end) in nanoseconds. Without events, `seconds` is None and `why` is the reason."""
    if not events:
        return {"seconds": None, "why": by + " recorded no kernels"}
    kernels = [e for e in events if not e[0].lower().startswith(("memcpy", "memset"))]
    by_name = defaultdict(lambda: [0.0, 0])
    for name, start, end in events:
        by_name[name[:80]][0] += (end - start) / steps * 1e-9
        by_name[name[:80]][1] += 1
    heaviest = sorted(by_name.items(), key=lambda kv: -kv[1][0])[:HEAVIEST]
    return {
        "seconds": busy(events) / steps * 1e-9,
        "span": (max(e[2] for e in events) - min(e[1] for e in events)) / steps * 1e-9,
        "kernels": len(kernels) / steps,
        "products": sum(end - start for name, start, end in events if PRODUCTS.search(name)) / steps * 1e-9,
        "moves": sum(end - start for name, start, end in events if MOVES.search(name) and not PRODUCTS.search(name))
        / steps
        * 1e-9,
        "heaviest": [[name, seconds, count / steps] for name, (seconds, count) in heaviest],
        "by": by,
    }


def busy(events):
    """Returns the length of the union of the intervals (name, start, end)."""
    total, until = 0, float("-inf")
    for _, start, end in sorted(events, key=lambda e: e[1]):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def of_jax(run):
    """Returns (name, start, end) of everything that ran on the GPU during `run()`, in nanoseconds."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found = []
        for path in Path(folder).rglob("*.xplane.pb"):
            found += gpu_events(jax.profiler.ProfileData.from_file(str(path)))
    return found


def gpu_events(profile):
    """Returns (name, start, end) of everything on GPU streams. Other lines of the planes repeat it by module and scope."""
    return [
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def _of_torch(run):
    import torch  # pyright: ignore[reportMissingImports]
    from torch.autograd import DeviceType  # pyright: ignore[reportMissingImports]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [
        (e.name, 1e3 * e.time_range.start, 1e3 * e.time_range.end)
        for e in profile.events() or ()
        if e.device_type == DeviceType.CUDA
    ]
