"""`gather_all` as it is traced: over the children of a vertex, however many, and padded inside another `gather_all`.

`fn` takes the arrays that are stored of one child's state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from cavs._function.children import enter_p, reduce_max, reduce_sum, spread, stack_p

REDUCERS = ("sum", "mean", "max", "softmax")


class NestedGatherAll(Exception):
    """F calls `gather_all` within `gather_all`; to be traced for a known largest number of children."""


def over_children(fn: Callable[[list[Any]], Any], reduce: str, child: list[Any], count: Any, call: int) -> Any:
    """For any number of children: `child` is any one of them, `count` their number, `call` the number of this call in F."""
    out = _of_child(fn, child, call)
    if reduce == "softmax":
        score, value = score_and_value(out)
        top = jax.lax.stop_gradient(reduce_max(score, call))
        weight = jnp.exp(score - spread(top, call))
        total = reduce_sum(weight, call)
        return jax.tree.map(lambda x: reduce_sum(weight * x, call) / total, value)

    def reduced(x: Any) -> Any:
        x = jnp.asarray(x)
        if reduce == "max":
            return reduce_max(_counted(x), call).astype(x.dtype)
        total = reduce_sum(_counted(x), call)
        return _mean(total, count) if reduce == "mean" else total

    return jax.tree.map(reduced, out)


def _of_child(fn: Callable[[list[Any]], Any], child: list[Any], call: int) -> Any:
    """`fn` of a child's state.

    What is the vertex's own is the same for every child, which `rewrite.make_levels_explicit` sees later. It must be seen now
    where F itself differentiates: there the sum over the children belongs to the derivative.
    """
    trace = child[0]._trace  # of F

    def differentiated(x: Any) -> bool:
        while type(x).__name__ == "BatchTracer":
            x = x.val
        return isinstance(x, Tracer) and x._trace is not trace

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in child]
    closed, out = jax.make_jaxpr(fn, return_shape=True)(shapes)
    consts = [spread(x, call) if differentiated(x) else x for x in closed.consts]
    leaves = eval_jaxpr(closed.jaxpr, consts, *(enter_p.bind(x, call=call) for x in child))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def over_padded(fn: Callable[[list[Any]], Any], reduce: str, child: list[Any], count: Any, size: int) -> Any:
    """The same in plain JAX, for `count` children side by side, padded to `size` of them."""
    out = jax.vmap(fn)([stack_p.bind(x, size=size) for x in child])
    there = jnp.arange(size) < count

    def only(x: Any, rest: Any) -> Any:
        x = jnp.asarray(x)
        return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.asarray(rest, x.dtype))

    def reduced(x: Any) -> Any:
        x = jnp.asarray(x)
        if reduce == "max":
            return only(x, _least(x.dtype)).max(0)
        total = only(_counted(x), 0).sum(0, _counted(x).dtype)
        return _mean(total, count) if reduce == "mean" else total

    if reduce != "softmax":
        return jax.tree.map(reduced, out)
    score, value = score_and_value(out, (size,))
    weight = jax.nn.softmax(only(score, -jnp.inf))
    return jax.tree.map(lambda x: jnp.tensordot(weight, x, 1), value)


def score_and_value(out: Any, shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """What `fn` returns for a softmax; `shape` is that of the children.

    **Raises:** `ValueError` unless it is a pair that begins with a scalar.
    """
    if not isinstance(out, tuple) or len(out) != 2 or jnp.shape(out[0]) != shape:
        got = jax.tree.map(lambda x: jnp.shape(x)[len(shape) :], out)
        raise ValueError(
            f"gather_all: with reduce='softmax' fn must return (score, value), score a scalar; got shapes {got}. For several "
            "scores of one child, such as those of attention heads, write jax.vmap around gather_all."
        )
    return jnp.asarray(out[0]), out[1]


def _counted(x: Any) -> Any:
    """Booleans as int32."""
    return x.astype(jnp.int32) if x.dtype == bool else x


def _mean(total: Any, count: Any) -> Any:
    dtype = jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((1,), total.dtype)).dtype  # of integers a float
    return total.astype(dtype) / count.astype(dtype)


def _least(dtype: Any) -> Any:
    """What is below all numbers of a dtype."""
    if jnp.issubdtype(dtype, bool):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
