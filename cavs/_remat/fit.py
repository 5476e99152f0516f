"""The memory of a step as XLA allocates it."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from cavs._remat.bytes import memory_of_gpu
from cavs.kernels import Target

MOST_COMPILED = 5  # plans that are compiled for a budget
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


def compiler_options(budget: int | str | None, least: int = 0) -> dict[str, Any]:
    """Returns the options for `jax.jit` with which a small step fits its budget.

    On a GPU, products of large steps may use cuBLAS, which can be faster and takes a workspace of 32 MiB; those within a small
    budget do not.

    Args:
        budget: as `bytes_of` returns it.
        least: bytes that the step needs in any case.
    """
    small = least < SMALL if budget == "min" else budget is not None and int(budget) < SMALL
    return {"xla_gpu_cublas_fallback": False} if small and Target.here().is_gpu else {}


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

    Returns the compiled function, and the bytes of its temporary memory.

    A function for which XLA itself finds too little memory needs twice the memory of the GPU.

    Raises:
        RuntimeError: the backend does not report the memory of a program.
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
