"""The memory of a step as XLA allocates it."""

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cavs._graphs.pytree import PyTree
from cavs._memory.bytes import memory_of_gpu
from cavs.kernels import Target

MOST_COMPILED = 5  # plans that are compiled for a budget
_FENCE = "xla_gpu_experimental_scheduler_memory_fencing_"
_FENCES = {_FENCE + "threshold_bytes": 1 << 20, _FENCE + "slack_windows": 1}
SMALL = 512 << 20  # bytes of a budget of which cuBLAS's workspace of 32 MiB is more than 6 %


class Verified(NamedTuple):
    """The temporary memory of a step.

    Attributes:
        predicted: bytes as estimated before it was compiled.
        compiled: bytes that XLA allocates for the compiled step.
        allocator: the peak of this process on the GPU after the step has run, which is that of the step only in a new process.
            `None` on a CPU, or if the step did not run.
    """

    predicted: int
    compiled: int
    allocator: int | None


def compiler_options(budget: int | str | None, least: int = 0, host: bool = False) -> dict[str, Any]:
    """Returns the options for `jax.jit` with which a small step fits its budget.

    On a GPU, products of large steps may use cuBLAS, which can be faster and takes a workspace of 32 MiB; those within a small
    budget do not. Beside copies to the host, XLA would let products of gradients wait, with what they read: a fence forbids it.

    `budget`: as `bytes_of` returns it. `least`: bytes that the step needs in any case. `host`: whether values are kept in the
    memory of the host.
    """
    small = least < SMALL if budget == "min" else budget is not None and int(budget) < SMALL
    options = {"xla_gpu_cublas_fallback": False} if small else {}
    options |= _FENCES if host and jax.__version_info__ >= (0, 11, 2) else {}
    return options if Target.here().is_gpu else {}


def seconds_of_step(compiled: Any, shapes: Sequence[Any], times: int = 3) -> float:
    """Returns how long a compiled function runs, for random numbers of these shapes: the fastest of some runs."""
    seconds = []
    with jax.ensure_compile_time_eval():  # the caller may be tracing
        args = jax.device_put(values([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]))
        jax.block_until_ready(compiled(*args))
        for _ in range(times):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def values(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree; where shapes alone are known, random numbers."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    pairs = zip(leaves, keys, strict=False)
    return treedef.unflatten([_drawn(x, key) if isinstance(x, jax.ShapeDtypeStruct) else x for x, key in pairs])


def _drawn(x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    return (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Stops garbage collection: a trace makes so many objects that collections would take a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def compiled_step(jitted: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, int]:
    """Compiles what `jax.jit` returns for arguments, or their `jax.ShapeDtypeStruct`s.

    Returns the compiled function, and the bytes of its temporary memory. A function for which XLA itself finds too little
    memory needs twice the memory of the GPU. Raises a `RuntimeError` if the backend does not report the memory of a program.
    """
    with no_collections():
        lowered = jitted.lower(*args)
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) and (limit := memory_of_gpu()) is not None:
            return None, 2 * limit
        raise
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("cavs.memory: this backend does not report how much memory a program needs. Write no budget.")
    return compiled, analysis.temp_size_in_bytes
