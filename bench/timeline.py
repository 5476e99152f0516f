"""`python -m bench profile CASE ...`: what a training step of ours runs on this GPU, kernel after kernel.

Batches are made and sent beforehand, so that the device alone is seen. What kernels take is per step, of all steps that were
profiled; the step that is shown in order is one of them. Kernels run beside each other: their sum is more than the time busy.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench import device_time

Event = tuple[str, float, float]  # a kernel's name, start and end in nanoseconds
LAUNCH = "cavs_forward"  # a step's first launch, by which steps are told apart
STACKS = 4  # dispatches that are profiled, each of one batch again and again
REPEATS = 5  # of all of them by the clock
MOST = 30  # kernels by name
WIDTH = 80  # of a name


def profile(names: list[str], precision: str) -> Iterator[str]:
    """Text for each case."""
    import jax

    from bench import cases, ours, remote, systems

    try:
        known = [cases.parse(name) for name in names]
    except ValueError as error:
        raise SystemExit(f"profile: {error}") from None
    cells = systems.SYSTEMS["cavs_persistent"].cells  # without the applications, whose batches are of other kinds
    for case in known:
        if case.cell not in cells:
            raise SystemExit(f"profile: case {case.name!r} is of cell {case.cell!r}, wanted one of {', '.join(cells)}")
    if jax.default_backend() != "gpu":
        raise SystemExit(f"profile: it shows kernels on a GPU, and JAX runs on {jax.default_backend()!r} here")
    jax.config.update("jax_default_matmul_precision", remote.OF_JAX[precision])
    for case in known:
        model = ours.Cavs(case.cell, cases.parameters(case), device="gpu")
        stacks = _stacks(model, model.load(cases.dataset(case, STACKS)))
        count = sum(len(s.data) for s in stacks)
        model.train(stacks)
        start = time.perf_counter()
        for _ in range(REPEATS):
            model.train(stacks)
        wall = (time.perf_counter() - start) / count / REPEATS
        events = device_time.of_jax(lambda model=model, stacks=stacks: model.train(stacks))
        yield f"{case.name}, {precision}: {1e6 * wall:.1f} us a step by the clock\n{text(events, count)}"


def _stacks(model: Any, batches: list[Any]) -> list[Any]:
    """Stacks of training steps, on the device."""
    import jax

    import cavs

    model.compile(batches)
    repeated = itertools.chain.from_iterable(itertools.repeat(s, model._stack) for s in model.schedules(batches))
    return [jax.device_put(stack) for stack in cavs.data.stacked(repeated, model._stack)]


def text(events: list[Event], steps: int) -> str:
    """The kernels by what they take, and those of one step in order."""
    if not events:
        return "  the profiler recorded no kernels"
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel, start, end in events:
        by_name[kernel[:WIDTH]].append((end - start) / 1000)
    total = sum(map(sum, by_name.values()))
    lines = [
        f"  busy {device_time.busy(events) / steps / 1000:.1f} us, kernels {total / steps:.1f} us in all",
        "  us, times a step:",
    ]
    for kernel, took in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST]:
        lines.append(f"  {sum(took) / steps:9.2f}  x{len(took) / steps:5.2f}  {kernel}")
    lines.append("  one step, from one forward launch to the next: us from, to, and what it took")
    one = a_step(events)
    for kernel, start, end in one:
        a, b = (start - one[0][1]) / 1000, (end - one[0][1]) / 1000
        lines.append(f"  {a:9.1f} {b:9.1f} {b - a:9.1f}  {kernel[:WIDTH]}")
    return "\n".join(lines)


def a_step(events: list[Event]) -> list[Event]:
    """From the middle one of the launches that begin a step to the one after it; all events, where there are not two."""
    in_order = sorted(events, key=lambda event: event[1])
    launches = [i for i, event in enumerate(in_order) if event[0].startswith(LAUNCH)]
    before = ["", *(in_order[i][0] for i in launches)]  # one for wide levels is followed by another of the same step
    begins = [i for i, name in zip(launches, before, strict=False) if not name.startswith(LAUNCH + "_wide")]
    if len(begins) < 2:
        return in_order
    middle = (len(begins) - 1) // 2
    return in_order[begins[middle] : begins[middle + 1]]
