"""Whether a loss is the same if its batch comes in parts: one comparison of two numbers, on samples of the batch."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.choose import EngineError
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Jaxpr, bodies_in
from cavs._memory.divided import Choice
from cavs._memory.fit import values
from cavs._memory.search import BatchGradient
from cavs.kernels import Target

# A larger relative difference is none of rounding, nor so many steps of the coarsest dtype.
_LEAST, _LEAST_ON_GPU, _ROUNDINGS = 1e-4, 1e-2, 4


def check_parts(batch: BatchGradient, parts: int) -> None:
    """Computes the loss of some samples at once, and in two parts.

    They are those of two parts of the batch: without a derivative they need about the memory of one part with it.

    Args:
        batch: the batch and its loss.
        parts: the number of parts of the plan, at least 2.

    Raises:
        ValueError: the numbers are not equal up to rounding.
    """
    one, two, count = batch.data.few(parts)
    found: dict[int, float] = {}

    def noting(choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
        loss = batch.loss_of(choice)

        def noted(params: PyTree, few: PyTree) -> jax.Array:
            value = loss(params, few)
            jax.debug.callback(lambda x: found.update({choice.parts: float(x)}), value)
            return value

        return noted

    def both(params: PyTree, one: PyTree, two: PyTree) -> None:  # XLA computes nothing but the losses
        batch.program(noting(Choice()))(params, one)
        batch.program(noting(Choice(2)))(params, two)

    try:
        with jax.default_matmul_precision("highest"):
            traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST
    except EngineError:  # its weights fit in less precision alone
        traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST_ON_GPU
    # For what runs once, XLA for CPUs compiles in a third of the time.
    compiled = traced.lower().compile({"xla_backend_optimization_level": "0"} if Target.here().is_cpu else {})
    jax.block_until_ready(compiled(values(batch.params), one, two))
    jax.effects_barrier()
    whole, in_parts = found[1], found[2]
    floats = {dtype for dtype in _dtypes(traced.jaxpr.jaxpr) if jnp.issubdtype(dtype, jnp.inexact)}
    tolerance = max(least, _ROUNDINGS * max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0))
    noun = batch.data.noun
    if np.isfinite([whole, in_parts]).any() and not abs(whole - in_parts) <= tolerance * (abs(whole) + abs(in_parts)):
        raise ValueError(
            f"plan: loss: got {whole:.6g} for {counted(count, noun)} at once, and {in_parts:.6g} in two parts; expected a sum "
            f"over {noun}s, or a loss of cavs.data.total and cavs.data.mean, which are over the whole batch. Write "
            "cavs.data.mean(losses) for losses.mean(). Write cavs.data.total(losses) for losses.sum() to square it or to add "
            f"a regulariser. Random masks must follow from keys of {noun}s or vertices. If the loss needs all {noun}s at once, "
            "as batch statistics do, write parts=1, or a step without memory."
        )


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Returns the dtypes of all values of a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
        for body in bodies_in(eqn):
            yield from _dtypes(body)
