"""Whether a loss is the same if its batch comes in parts: one comparison of two numbers, on graphs of the batch."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.choose import EngineError
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Jaxpr, bodies_in
from cavs._memory.batch_search import BatchGradient, dealt, scheduled, stacked
from cavs._memory.search import Choice
from cavs.kernels import Target

_FEW, _SMALL = 16, 4096  # graphs that are compared even if a part has fewer, and vertices that take little memory
# A larger relative difference is none of rounding, nor so many steps of the coarsest dtype.
_LEAST, _LEAST_ON_GPU, _ROUNDINGS = 1e-4, 1e-2, 4


def check_parts(batch: BatchGradient, parts: int) -> None:
    """Computes the loss of some graphs at once, and in two parts.

    The graphs are those of two parts of the batch: without a derivative they need about the memory of one part with it.

    Args:
        batch: the batch and its loss.
        parts: the number of parts of the plan, at least 2.

    Raises:
        ValueError: the numbers are not equal up to rounding.
    """
    halves = _halves(batch, parts)
    one, two = (stacked(scheduled(batch.graphs, of), batch.collate) for of in ([np.concatenate(halves)], halves))

    def both(params: PyTree, one: PyTree, two: PyTree) -> tuple[jax.Array, jax.Array]:
        return batch.loss_of(Choice())(params, one), batch.loss_of(Choice(2))(params, two)

    try:
        with jax.default_matmul_precision("highest"):
            traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST
    except EngineError:  # its weights fit in less precision alone
        traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST_ON_GPU
    # For what runs once, XLA for CPUs compiles in a third of the time.
    compiled = traced.lower().compile({"xla_backend_optimization_level": "0"} if Target.here().is_cpu else {})
    whole, in_parts = map(float, compiled(_values(batch.params), one, two))
    tolerance = max(least, _ROUNDINGS * max(map(_step, _dtypes(traced.jaxpr.jaxpr)), default=0.0))
    if np.isfinite([whole, in_parts]).any() and not abs(whole - in_parts) <= tolerance * (abs(whole) + abs(in_parts)):
        raise ValueError(
            f"plan: loss: got {whole:.6g} for {counted(sum(map(len, halves)), 'graph')} at once, and {in_parts:.6g} in two "
            "parts; expected a sum over graphs, or a loss of cavs.data.total and cavs.data.mean, which are over the whole "
            "batch. Write cavs.data.mean(losses) for losses.mean(). Write cavs.data.total(losses) for losses.sum() to square "
            "it or to add a regulariser. Random masks must follow from keys of graphs or vertices. If the loss needs all "
            "graphs at once, as batch statistics do, write parts=1."
        )


def _halves(batch: BatchGradient, parts: int) -> list[np.ndarray]:
    """Returns the graphs of two equal parts: of the plan's parts, or of several of these together if they are small."""
    each, sizes = dealt(batch.graphs, parts), np.diff(batch.graphs.vertex_offsets)
    count = 2
    while 2 * count <= parts and each[:count].size < _FEW and sizes[each[: 2 * count]].sum() <= _SMALL:
        count *= 2
    return [each[: count // 2].ravel(), each[count // 2 : count].ravel()]


def _values(params: PyTree) -> PyTree:
    """Returns the parameters; where shapes alone are known, random numbers."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    pairs = zip(leaves, keys, strict=False)
    return tree.unflatten([_drawn(x, key) if isinstance(x, jax.ShapeDtypeStruct) else x for x, key in pairs])


def _drawn(x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    return (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype)


def _step(dtype: Any) -> float:
    """Returns the distance of 1 and the next number of a dtype; 0 if it is not of floats."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Returns the dtypes of all values of a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
        for body in bodies_in(eqn):
            yield from _dtypes(body)
