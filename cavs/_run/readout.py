"""`readout`: one value per graph from one per vertex."""

from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cavs._function.arrays import as_array, as_arrays
from cavs._function.children import wide
from cavs._function.evaluate import column
from cavs._function.gather_all import REDUCERS
from cavs._graphs.checks import check_choice
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.settings import promoting
from cavs._schedule.schedule import Schedule, check_schedule

Tree = TypeVar("Tree")


@overload
def readout(
    values: jax.Array | np.ndarray, sched: Schedule, reduce: str = "sum", *, score: ArrayLike | None = None
) -> jax.Array: ...
@overload
def readout(values: Tree, sched: Schedule, reduce: str = "sum", *, score: ArrayLike | None = None) -> Tree: ...
@promoting
def readout(values: PyTree, sched: Schedule, reduce: str = "sum", *, score: ArrayLike | None = None) -> PyTree:
    """Reduces values of vertices to one value per graph (the readouts of Gilmer et al., 2017, section 2).

    This is plain JAX and composes with `jit`, `grad` and `vmap`. V is the number of vertices, Vp the padded number, and G the
    number of graphs.

    Args:
        values: a pytree of arrays with one row per vertex, as [`cavs.run`][] returns: (V, ...), or padded (Vp, ...). Padding
            is not read.
        sched: the schedule of the batch, from [`cavs.schedule`][].
        reduce: `"sum"`, `"mean"`, `"max"`, or `"softmax"`: attention (Li et al., 2016, equation 7), the sum of the values
            weighted by the softmax of `score` over the vertices of each graph.
        score: float[V] or float[Vp], for `"softmax"` only.

    Returns:
        The pytree with leaves (G, ...), in the order of the graphs.

    Raises:
        TypeError: `sched` is not a schedule.
        ValueError: `reduce` is unknown, `score` is missing or not allowed for it, or an array has a wrong number of rows.
    """
    check_schedule("readout", sched)
    check_choice("readout: reduce", reduce, REDUCERS)
    if (score is not None) != (reduce == "softmax"):
        has = "a score" if score is not None else "no score"
        raise ValueError(
            f'readout: score: got {has} with reduce={reduce!r}. Write readout(values, sched, "softmax", score=...).'
        )
    padded, graphs = sched.shape.vertices, sched.shape.graphs
    allowed = {padded, int(sched.host().num_vertices)} if sched.is_concrete else {padded}
    values = as_arrays(values, "readout: values")
    shapes = [jnp.shape(x) for x in jax.tree.leaves(values)] + ([] if score is None else [jnp.shape(score)])
    rows = {s[0] if s else None for s in shapes}
    if len(rows) > 1 or not rows <= allowed or (score is not None and len(shapes[-1]) != 1):
        hint = " Write np.asarray(rows) for nested lists." * (None in rows)
        raise ValueError(
            f"readout: values and score: got leaves of shapes {shapes[:8]}; expected a first axis of "
            f"{' or '.join(map(str, sorted(allowed)))}, one row per vertex, as cavs.run returns it, and a 1-d score.{hint}"
        )
    if not rows:
        return values
    graph = jnp.asarray(sched.graph)[: rows.pop()]

    def total(x: jax.Array) -> jax.Array:  # padding is of graph G, which is dropped
        terms = wide(x.astype(jax.eval_shape(jnp.sum, x).dtype))  # int32 for int8, uint32 for uint8
        return jax.ops.segment_sum(terms, graph, graphs, indices_are_sorted=True)

    def floats(x: jax.Array) -> jax.Array:  # a sum of integers may be too large for them
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jax.eval_shape(jnp.sum, x).dtype) / 1

    def like(reduced: jax.Array, x: jax.Array) -> jax.Array:
        return reduced.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else reduced

    def top(x: jax.Array) -> jax.Array:  # the derivative counts the vertices that share a maximum
        return jax.ops.segment_max(wide(x), graph, graphs, indices_are_sorted=True).astype(x.dtype)

    if reduce == "max":
        return jax.tree.map(top, values)
    if reduce == "sum":
        return jax.tree.map(lambda x: like(total(x), x), values)
    if reduce == "mean":
        count = total(jnp.ones_like(graph))
        return jax.tree.map(lambda x: like(total(floats(x)) / column(count, x), x), values)
    assert score is not None
    score = as_array(score, "readout: score")
    score = score.astype(jax.eval_shape(jnp.exp, score).dtype)  # a float: unsigned integers have no negative differences
    below = score - jax.lax.stop_gradient(top(score)).at[graph].get(mode="clip")
    weight = jnp.exp(jnp.where(graph < graphs, below, 0))  # finite in padding, too, where the cotangent is 0

    def weighted(x: jax.Array) -> jax.Array:
        x = column(weight, x) * x
        return like(total(x) / column(total(weight), x), x)

    return jax.tree.map(weighted, values)
