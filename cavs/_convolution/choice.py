"""Which candidate for one convolution was fastest: measured once on a device, and kept in the user's cache.

MegaKernels (section 7.4) selects the parameters of the task mapping for each layer by trying them. So does this.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cavs.kernels import ConvolutionLayout, ConvolutionSizes, Target, tuned

VERSION = 2  # of the records; raise it when the launch changes
XLA = "xla"  # the record of a convolution that XLA runs fastest
RUNS, REPEATS = 5, 3  # of a measurement: the median of `REPEATS` means over `RUNS`


@dataclasses.dataclass(frozen=True)
class Operation:
    """A convolution, or its gradient with respect to the filters. Its first operand are the images."""

    name: str  # in the records
    other: Callable[[ConvolutionSizes], tuple[int, ...]]  # the shape of the second operand
    by_xla: Callable[..., jax.Array]  # (images, other, pads) -> result
    launch: Callable[..., jax.Array]  # (images, other, pads, layout) -> result
    layouts: Callable[[ConvolutionSizes, Target], dict[str, ConvolutionLayout]]  # worth trying, by name

    def shapes(self, s: ConvolutionSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of both operands."""
        return (s.images, s.height, s.width, s.inputs), self.other(s)


class ConvolutionChoice(NamedTuple):
    """What runs a convolution."""

    layout: ConvolutionLayout | None  # of the launch; `None` if XLA runs it
    times: Mapping[str, float] = {}  # microseconds by candidate; empty if they did not fit in the free memory


def choose(operation: Operation, sizes: ConvolutionSizes, target: Target) -> ConvolutionChoice:
    """Returns what was fastest on a device, and measures that if it is not known. `m` and `columns` of `sizes` are ignored."""
    layouts = operation.layouts(sizes, target)
    key = json.dumps([VERSION, jax.__version__, operation.name, *dataclasses.astuple(sizes)])
    records = _records(target.device_kind)
    if key not in records:
        # In a thread of its own: this one may be tracing.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                records[key] = pool.submit(_measured, operation, sizes, layouts).result()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return ConvolutionChoice(None)
        with contextlib.suppress(OSError):  # the home directory is not writable: the next process measures again
            tuned.save(_file(target.device_kind), {key: records[key]})
    times = records[key]
    return ConvolutionChoice(layouts.get(min(times, key=times.__getitem__)), times)


def _measured(operation: Operation, sizes: ConvolutionSizes, layouts: dict[str, ConvolutionLayout]) -> dict[str, float]:
    """Microseconds of each candidate and of XLA. Candidates compile side by side, and are timed one after another."""
    # Constant operands: how long a candidate takes does not depend on them, but for the power that the chip draws.
    operands = [jnp.full(shape, 1e-2, jnp.float32) for shape in operation.shapes(sizes)]
    functions = {XLA: functools.partial(operation.by_xla, pads=sizes.padding)}
    functions |= {name: functools.partial(operation.launch, pads=sizes.padding, layout=of) for name, of in layouts.items()}
    lowered = {name: jax.jit(function).lower(*operands) for name, function in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
        compiled = dict(zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True))
    return {name: _microseconds(program, *operands) for name, program in compiled.items()}


def _microseconds(program: Callable[..., Any], *operands: jax.Array) -> float:
    jax.block_until_ready(program(*operands))
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([program(*operands) for _ in range(RUNS)])
        means.append((time.perf_counter() - start) / RUNS)
    return round(1e6 * statistics.median(means), 1)


def _file(device_kind: str) -> Path:
    return tuned.own_file(device_kind).with_name(f"convolutions-{tuned.file_of(device_kind).name}")


@functools.cache
def _records(device_kind: str) -> dict[str, dict[str, float]]:
    """The measurements on a device: key -> candidate -> microseconds."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_file(device_kind).read_text())
    return {}
