"""The candidates for one convolution, and which of them was fastest: measured once on a device, and kept in the user's cache.

MegaKernels (section 7.4) selects the parameters of the task mapping for each layer by trying them. So does this.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cavs.kernels import ConvolutionLayout, ConvolutionSizes, Distances, Target, convolve, too_large

VERSION = 1  # of the records; raise it when the launch changes
XLA = "xla"  # the record of a convolution that XLA runs fastest
COLUMNS = 64  # the output channels of a product: more would not leave registers for the small terms' own sums
STAGE_BYTES = 16 * 1024  # of a chunk of rows in shared memory
RUNS, REPEATS = 5, 3  # of a measurement: the median of `REPEATS` means over `RUNS`


@dataclasses.dataclass(frozen=True)
class ConvolutionChoice:
    """What runs a convolution.

    Attributes:
        layout: The layout of the launch; `None` if XLA runs it.
        times: Microseconds by candidate, as measured; empty if they did not fit in the free memory.
    """

    layout: ConvolutionLayout | None
    times: dict[str, float] = dataclasses.field(default_factory=dict)


def candidates(sizes: ConvolutionSizes, target: Target) -> dict[str, ConvolutionLayout]:
    """Returns the layouts that are worth trying, by name. All are as exact as float32 (see `convolve`)."""
    found = {}
    for m, shares, transformers in ((4, (4, 8, 16), (3, 2)), (2, (8,), (3,))):
        s = dataclasses.replace(sizes, m=m)
        for share, count in itertools.product(shares, transformers):
            if (share == shares[0] or share < s.groups) and not too_large(s):
                found[f"F({m}x{m},3x3), M={share}, T={count}"] = layout(s, min(share, s.groups), target, count)
    return found


def layout(s: ConvolutionSizes, share: int, target: Target, transformers: int = 3) -> ConvolutionLayout:
    """Returns the layout in which `share` groups multiply one block of a filter matrix one after another (M in MegaKernels).

    Of a thread block, `transformers` warpgroups transform.
    """
    stages = target.shared_memory // (STAGE_BYTES + 3 * 64 * s.columns)
    return ConvolutionLayout(
        m=s.m,
        parts=3,
        columns=s.columns,
        distances=Distances(share, share, 1),
        input_tiles=4,
        output_tiles=4,
        stages=min(8, stages),
        apart=True,
        transformers=transformers,
        blocks=target.multiprocessors,
    )


def choose(sizes: ConvolutionSizes, target: Target, run_xla: Callable[[jax.Array, jax.Array], jax.Array]) -> ConvolutionChoice:
    """Returns what was fastest for a convolution on a device, and measures that if it is not known.

    Args:
        sizes: The sizes; `m` is ignored.
        target: The device.
        run_xla: Runs the convolution by XLA.
    """
    named = candidates(sizes, target)
    key = json.dumps([VERSION, jax.__version__, *dataclasses.astuple(sizes)])
    records = _records(target.device_kind)
    if key not in records:
        # In a thread of its own: this one may be tracing.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                records[key] = pool.submit(_measured, sizes, named, run_xla).result()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return ConvolutionChoice(None)
        _save(target.device_kind, records)
    times = records[key]
    return ConvolutionChoice(named.get(min(times, key=times.__getitem__)), times)


def _measured(
    sizes: ConvolutionSizes, named: dict[str, ConvolutionLayout], run_xla: Callable[[jax.Array, jax.Array], jax.Array]
) -> dict[str, float]:
    """Microseconds of each candidate and of XLA. Candidates compile side by side, and are timed one after another."""
    x = jnp.ones((sizes.images, sizes.height, sizes.width, sizes.inputs), jnp.float32)
    w = jnp.full((3, 3, sizes.inputs, sizes.outputs), 1e-2, jnp.float32)
    functions: dict[str, Callable[..., Any]] = {XLA: run_xla}
    functions |= {name: functools.partial(convolve, padding=sizes.padding, layout=found) for name, found in named.items()}
    lowered = {name: jax.jit(function).lower(x, w) for name, function in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
        compiled = dict(zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True))
    return {name: _microseconds(program, x, w) for name, program in compiled.items()}


def _microseconds(program: Callable[..., Any], x: jax.Array, w: jax.Array) -> float:
    jax.block_until_ready(program(x, w))
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([program(x, w) for _ in range(RUNS)])
        means.append((time.perf_counter() - start) / RUNS)
    return round(1e6 * statistics.median(means), 1)


def _file(device_kind: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavs"
    return folder / f"convolutions-{device_kind.lower().replace(' ', '-')}.json"


@functools.cache
def _records(device_kind: str) -> dict[str, dict[str, float]]:
    """The measurements on a device: key -> candidate -> microseconds."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_file(device_kind).read_text())
    return {}


def _save(device_kind: str, records: dict[str, dict[str, float]]) -> None:
    path = _file(device_kind)
    with contextlib.suppress(OSError):  # the home directory is not writable: the next process measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(records, indent=1))
        part.replace(path)
