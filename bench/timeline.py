"""`python -m bench profile CASE ...`: the kernels of a training step of Cavs on this GPU, in order.

Batches are prepared and sent beforehand, so only the device is measured. Times of kernels are per step, averaged over all
profiled steps. The step shown in order is one of them. Kernels overlap, so their sum exceeds the busy time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench import device_time

Event = tuple[str, float, float]  # a kernel's name, start and end in nanoseconds
LAUNCH = "cavs_forward"  # the first launch of a step, which separates steps
STACKS = 4  # profiled dispatches, each of one repeated batch
REPEATS = 5  # of all dispatches, for the wall time
MOST = 30  # kernel names shown
WIDTH = 80  # of a kernel name


def profile(names: list[str], precision: str) -> Iterator[str]:
    """Yields the text of each case."""
    import jax

    from bench import cases, ours, remote, systems

    try:
        known = [cases.parse(name) for name in names]
    except ValueError as error:
        raise SystemExit(f"profile: {error}") from None
    cells = systems.SYSTEMS["cavs_persistent"].cells  # not the applications, which have other batches
    for case in known:
        if case.cell not in cells:
            raise SystemExit(f"case: got {case.name!r} of cell {case.cell!r}; expected one of {', '.join(cells)}")
    if jax.default_backend() != "gpu":
        raise SystemExit(f"profile: JAX runs on {jax.default_backend()!r}; expected a GPU")
    jax.config.update("jax_default_matmul_precision", remote.OF_JAX[precision])
    for case in known:
        model = ours.Cavs(case.cell, cases.parameters(case), device="gpu")
        stacks = _stacks(model, model.load(cases.dataset(case, STACKS)))
        count = sum(map(len, stacks))
        model.train(stacks)
        start = time.perf_counter()
        for _ in range(REPEATS):
            model.train(stacks)
        wall = (time.perf_counter() - start) / count / REPEATS
        events = device_time.of_jax(lambda model=model, stacks=stacks: model.train(stacks))
        yield f"{case.name}, {precision}: {1e6 * wall:.1f} us a step by the clock\n{text(events, count)}"


def _stacks(model: Any, batches: list[Any]) -> list[Any]:
    """Returns stacks of training steps on the device."""
    model.compile(batches)
    return list(model.ahead([batch for batch in batches for _ in range(model.steps)]))


def text(events: list[Event], steps: int) -> str:
    """Formats the kernels by their time, and those of one step in order."""
    if not events:
        return "  the profiler recorded no kernels"
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel, start, end in events:
        by_name[kernel[:WIDTH]].append((end - start) / 1000)
    total = sum(map(sum, by_name.values()))
    lines = [
        f"  busy {device_time.busy(events) / steps / 1000:.1f} us, kernels {total / steps:.1f} us in total",
        "  us per step, launches per step:",
    ]
    for kernel, took in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST]:
        lines.append(f"  {sum(took) / steps:9.2f}  x{len(took) / steps:5.2f}  {kernel}")
    lines.append("  one step, from one forward launch to the next: start, end and duration in us")
    one = a_step(events)
    for kernel, start, end in one:
        a, b = (start - one[0][1]) / 1000, (end - one[0][1]) / 1000
        lines.append(f"  {a:9.1f} {b:9.1f} {b - a:9.1f}  {kernel[:WIDTH]}")
    return "\n".join(lines)


def a_step(events: list[Event]) -> list[Event]:
    """Returns the events between the middle two launches that begin a step, or all events if there are fewer than two."""
    in_order = sorted(events, key=lambda event: event[1])
    launches = [i for i, event in enumerate(in_order) if event[0].startswith(LAUNCH)]
    before = ["", *(in_order[i][0] for i in launches)]  # a launch for wide levels is followed by another of the same step
    begins = [i for i, name in zip(launches, before, strict=False) if not name.startswith(LAUNCH + "_wide")]
    if len(begins) < 2:
        return in_order
    middle = (len(begins) - 1) // 2
    return in_order[begins[middle] : begins[middle + 1]]
