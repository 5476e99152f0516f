"""Time on a GPU, from the profilers of JAX and PyTorch: in total, and kernel after kernel (`python -m bench profile CASE ...`).

Both profilers record the start and the duration of every kernel and copy (CUPTI). Overlapping work is counted once.
`seconds` is the time during which the device was busy, `span` the time from the first start to the last end, and
`seconds / span` the utilisation.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = tuple[str, float, float]  # a kernel's name, start and end in nanoseconds
HEAVIEST, WIDTH = 6, 80  # kernel names in a record, and of a name
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
    scale = 1e-9 / steps  # from nanoseconds of all steps to seconds of one
    products = [e for e in events if PRODUCTS.search(e[0])]
    moves = [e for e in events if MOVES.search(e[0]) and not PRODUCTS.search(e[0])]
    return {
        "seconds": busy(events) * scale,
        "span": (max(end for _, _, end in events) - min(start for _, start, _ in events)) * scale,
        "kernels": sum(not name.lower().startswith(("memcpy", "memset")) for name, _, _ in events) / steps,
        "products": sum(end - start for _, start, end in products) * scale,
        "moves": sum(end - start for _, start, end in moves) * scale,
        "heaviest": [[name, sum(times) * scale, len(times) / steps] for name, times in by_name(events)[:HEAVIEST]],
        "by": by,
    }


def by_name(events):
    """Returns the names of kernels with the nanoseconds of each run, the heaviest first."""
    durations = defaultdict(list)
    for name, start, end in events:
        durations[name[:WIDTH]].append(end - start)
    return sorted(durations.items(), key=lambda item: -sum(item[1]))


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
        events = []
        for path in Path(folder).rglob("*.xplane.pb"):
            events += gpu_events(jax.profiler.ProfileData.from_file(str(path)))
    return events


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


# --- `python -m bench profile`: batches are prepared and sent beforehand, so only the device is measured. Times of kernels are
# per step, averaged over all profiled steps. The step shown in order is one of them. Kernels overlap, so their sum exceeds the
# busy time.

LAUNCH = "cavs_forward"  # the first launch of a step, which separates steps
STACKS = 4  # profiled dispatches, each of one repeated batch
REPEATS = 5  # of all dispatches, for the wall time
MOST = 30  # kernel names shown


def profile(names: list[str], precision: str) -> Iterator[str]:
    """Yields the text of each case."""
    import jax

    from bench import cases, ours, remote, systems

    try:
        parsed = [cases.parse(name) for name in names]
    except ValueError as error:
        raise SystemExit(f"profile: {error}") from None
    cells = systems.SYSTEMS["cavs_persistent"].cells  # not the applications, which have other batches
    for case in parsed:
        if case.cell not in cells:
            raise SystemExit(f"case: got {case.name!r} of cell {case.cell!r}; expected one of {', '.join(cells)}")
    if jax.default_backend() != "gpu":
        raise SystemExit(f"profile: JAX runs on {jax.default_backend()!r}; expected a GPU")
    jax.config.update("jax_default_matmul_precision", remote.OF_JAX[precision])
    for case in parsed:
        model = ours.Cavs(case.cell, cases.parameters(case), device="gpu")
        stacks = _stacks(model, model.load(cases.dataset(case, STACKS)))
        count = sum(map(len, stacks))
        model.train(stacks)
        start = time.perf_counter()
        for _ in range(REPEATS):
            model.train(stacks)
        wall = (time.perf_counter() - start) / count / REPEATS
        events = of_jax(lambda model=model, stacks=stacks: model.train(stacks))
        yield f"{case.name}, {precision}: {1e6 * wall:.1f} us a step by the clock\n{text(events, count)}"


def _stacks(model: Any, batches: list[Any]) -> list[Any]:
    """Returns stacks of training steps on the device."""
    model.compile(batches)
    return list(model.ahead([batch for batch in batches for _ in range(model.steps)]))


def text(events: list[Event], steps: int) -> str:
    """Formats the kernels by their time, and those of one step in order."""
    if not events:
        return "  the profiler recorded no kernels"
    scale = 1e-3 / steps  # from nanoseconds of all steps to microseconds of one
    total = sum(end - start for _, start, end in events)
    lines = [
        f"  busy {busy(events) * scale:.1f} us, kernels {total * scale:.1f} us in total",
        "  us per step, launches per step:",
    ]
    lines += [f"  {sum(times) * scale:9.2f}  x{len(times) / steps:5.2f}  {name}" for name, times in by_name(events)[:MOST]]
    lines.append("  one step, from one forward launch to the next: start, end and duration in us")
    step = a_step(events)
    for kernel, start, end in step:
        a, b = (start - step[0][1]) / 1000, (end - step[0][1]) / 1000
        lines.append(f"  {a:9.1f} {b:9.1f} {b - a:9.1f}  {kernel[:WIDTH]}")
    return "\n".join(lines)


def a_step(events: list[Event]) -> list[Event]:
    """Returns the events of the step of median length, or all events if fewer than two launches begin a step."""
    in_order = sorted(events, key=lambda event: event[1])
    launches = [i for i, event in enumerate(in_order) if event[0].startswith(LAUNCH)]
    before = ["", *(in_order[i][0] for i in launches)]  # a launch for wide levels is followed by another of the same step
    begins = [i for i, name in zip(launches, before, strict=False) if not name.startswith(LAUNCH + "_wide")]
    if len(begins) < 2:
        return in_order
    steps = sorted(zip(begins, begins[1:], strict=False), key=lambda step: in_order[step[1]][1] - in_order[step[0]][1])
    begin, end = steps[(len(steps) - 1) // 2]
    return in_order[begin:end]
