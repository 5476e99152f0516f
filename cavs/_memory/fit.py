"""The memory of a step as XLA allocates it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from cavs._memory.bytes import BudgetError, memory_of_gpu, text_of

P = TypeVar("P")
LEAPS, LEAST_SHARE, HALVINGS = 2, 0.75, 2

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
    return {"xla_gpu_cublas_fallback": False} if small and jax.default_backend() == "gpu" else {}


def compiled_step(fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, int]:
    """Compiles a function for arguments, or their `jax.ShapeDtypeStruct`s. Returns it, and the bytes of its temporary memory.

    A function for which XLA itself finds too little memory needs twice the memory of the GPU.

    Raises:
        RuntimeError: the backend does not report the memory of a program.
    """
    lowered = jax.jit(fn).lower(*args)
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


def smaller_plan(
    large: P, found: Verified, budget: int, verify: Callable[[P], Verified], plan: Callable[[int | None], tuple[P, int] | None]
) -> P:
    """Returns a plan that needs at most `budget` bytes when it is compiled. Compiles at most five plans.

    It is chosen by the error of the last prediction, but its predicted peak is at most a quarter less: a large error often
    belongs to one shape alone, such as the workspace that XLA chose for a product. If this does not fit twice, the smallest
    plan is tried, and if that fits, faster ones.

    Args:
        large: a plan that does not fit.
        found: the memory that it needs.
        budget: bytes.
        verify: compiles a plan.
        plan: returns the fastest plan that is predicted to need at most this many bytes, or the smallest plan for `None`, and
            its predicted bytes; `None` if there is none.

    Raises:
        BudgetError: the smallest plan does not fit.
    """
    for _ in range(LEAPS):
        wanted = min(int(found.predicted * max(budget / found.compiled, LEAST_SHARE)), found.predicted - 1)
        if (next_plan := plan(wanted)) is None:
            break
        large, found = next_plan[0], verify(next_plan[0])
        if found.compiled <= budget:
            return large
    most, smallest = found.predicted, plan(None)
    if smallest is not None and smallest[1] < most:
        found = verify(smallest[0])
    if smallest is None or found.compiled > budget:
        raise BudgetError(
            f"fitted: budget: got {text_of(budget)}; for the smallest plan, XLA needs {text_of(found.compiled)}, where "
            f"{text_of(found.predicted)} were predicted. Write a larger budget."
        )
    small, least = smallest
    for _ in range(HALVINGS):
        middle = plan(int(math.sqrt(least * most)))
        if middle is None or middle[1] <= least:
            break
        if verify(middle[0]).compiled <= budget:
            small, least = middle
        else:
            most = middle[1]
    return small
