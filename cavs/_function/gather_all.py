"""How `gather_all` is traced: over any number of children, and inside another `gather_all` over children that are padded.

Here `fn` takes the leaves of one child's state, as stored (see `_function.raw_keys`), and the leaves of the edge's row.
"""

from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.typing import ArrayLike

from cavs._function.children import enter_p, reduce_max, reduce_sum, spread, stack_p, wide
from cavs._function.evaluate import by_rows, column
from cavs._function.user_rules import has_rule, varying, with_rules_per_child
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_bool
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Jaxpr
from cavs._jaxpr.settings import promoting

REDUCERS = ("sum", "mean", "max", "softmax")
OfChild: TypeAlias = Callable[[list[jax.Array]], PyTree]


class NestedGatherAll(Exception):
    """F calls `gather_all` within `gather_all`, so it must be traced for a known largest number of children."""


def over_children(fn: OfChild, reduce: str, child: list[jax.Array], count: jax.Array, call: int) -> PyTree:
    """Traces a call of `gather_all` for any number of children.

    Args:
        fn: the function that `gather_all` received.
        reduce: one of `REDUCERS`.
        child: the leaves of the state of one child, which stands for all, and of the row of its edge, if `fn` reads it.
        count: the number of children.
        call: the number of this call of `gather_all` in F.

    Returns what `gather_all` returns: the results of `fn`, reduced over the children.
    """
    out = _of_child(fn, child, count, call)
    if reduce == "softmax":
        score, value = score_and_value(out)
        top = jax.lax.stop_gradient(reduce_max(score, call))
        weight = jnp.exp(score - spread(top, call))
        total = reduce_sum(wide(weight), call)

        @promoting
        def mixed(x: ArrayLike) -> jax.Array:
            x = weight * x
            return (reduce_sum(wide(x), call) / total).astype(x.dtype)

        return jax.tree.map(mixed, value)

    def reduced(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        if reduce == "max":
            return reduce_max(_counted(x), call).astype(x.dtype)
        x = _added(x, reduce)
        return _reduced(reduce_sum(wide(x), call), count, reduce, x)

    return jax.tree.map(reduced, out)


def check_child_function(fn: Callable[..., PyTree], reads_edges: bool, edges: PyTree) -> None:
    """Checks the arguments of `gather_all(fn, edges=reads_edges)` in a run with these `edges`.

    Raises:
        TypeError: `reads_edges` is no bool, or `fn` is no function of a child's state, or, with edges, of the state and the
            edge's row.
        ValueError: the run has no edges.
    """
    check_bool("gather_all: edges", reads_edges)
    names = ("state", "edge") if reads_edges else ("state",)
    lambda_of = f"lambda {', '.join(names)}: ...{', edges=True' * reads_edges}"
    check_takes("gather_all: fn", fn, *names, write=f"v.gather_all({lambda_of})")
    if reads_edges and edges is None:
        raise ValueError(
            "gather_all: edges: got edges=True in a run without edges; expected edges. Write cavs.run(F, params, sched, "
            "inputs, edges=...), with a row for each edge."
        )


def _of_child(fn: OfChild, child: list[jax.Array], count: jax.Array, call: int) -> PyTree:
    """Returns `fn` of a child's state, and of the row of its edge.

    `fn` may read values of the vertex, which are the same for every child. `rewrite.make_domains_explicit` spreads them to the
    children later. If F itself differentiates such a value, it is spread now, because its derivative sums over the children.
    """
    trace = child[0]._trace  # type: ignore[attr-defined]; of F

    def differentiated(x: ArrayLike) -> bool:
        while type(x).__name__ == "BatchTracer":
            x = x.val  # type: ignore[union-attr]
        return isinstance(x, Tracer) and x._trace is not trace

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in child]
    closed, out_shapes = jax.make_jaxpr(fn, return_shape=True)(shapes)
    jaxpr, entered = cast(Jaxpr, closed.jaxpr), [enter_p.bind(x, call=call) for x in child]
    rules, per_child = any(map(has_rule, jaxpr.eqns)), [differentiated(x) for x in closed.consts]

    def to_child(x: jax.Array) -> jax.Array:
        return spread(varying(x, count) if rules and is_float(x) else x, call)  # a parameter would not stay spread

    consts = [to_child(x) if is_per_child else x for x, is_per_child in zip(closed.consts, per_child, strict=True)]
    leaves = with_rules_per_child(jaxpr, consts, per_child, entered, to_child) if rules else eval_jaxpr(jaxpr, consts, *entered)
    return jax.tree.unflatten(jax.tree.structure(out_shapes), leaves)


def over_padded(fn: OfChild, reduce: str, child: list[jax.Array], count: jax.Array, size: int) -> PyTree:
    """Traces a call of `gather_all` in plain JAX, over `count` children that are stacked and padded to `size`."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in child]
    closed, out_shapes = jax.make_jaxpr(fn, return_shape=True)(shapes)
    per_child = [False for _ in closed.consts]

    def of_one(slot: jax.Array, *stored: jax.Array) -> PyTree:
        leaves = with_rules_per_child(cast(Jaxpr, closed.jaxpr), closed.consts, per_child, stored, lambda x: varying(x, slot))
        return jax.tree.unflatten(jax.tree.structure(out_shapes), leaves)

    slots = jnp.arange(size, dtype=count.dtype)
    out = by_rows(of_one, [0] * (1 + len(child)))(slots, *(stack_p.bind(x, size=size) for x in child))
    present = slots < count

    def only(x: ArrayLike, padding: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        return jnp.where(column(present, x), x, jnp.asarray(padding, x.dtype))

    def reduced(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        if reduce == "max":
            return only(x, _least(x.dtype)).max(0)
        x = _added(x, reduce)
        terms = only(wide(x), 0)
        return _reduced(terms.sum(0, terms.dtype), count, reduce, x)

    if reduce != "softmax":
        return jax.tree.map(reduced, out)
    score, value = score_and_value(out, (size,))
    weight = jax.nn.softmax(only(score, -jnp.inf))
    return jax.tree.map(promoting(lambda x: jnp.tensordot(weight, x, 1)), value)


def score_and_value(out: PyTree, shape: tuple[int, ...] = ()) -> tuple[jax.Array, PyTree]:
    """Returns the score and the value of what `fn` returned for a softmax.

    `shape`: the axes of the children, which come before the axes of one result. Raises `ValueError` if `out` is not a pair
    that begins with a scalar.
    """
    if not isinstance(out, tuple) or len(out) != 2 or jnp.shape(out[0]) != shape:
        got = jax.tree.map(lambda x: jnp.shape(x)[len(shape) :], out)
        raise ValueError(
            f"gather_all: with reduce='softmax' fn must return (score, value), score a scalar; got shapes {got}. For several "
            "scores of one child, such as those of attention heads, write jax.vmap around gather_all."
        )
    score = jnp.asarray(out[0])
    return score.astype(jax.eval_shape(jnp.exp, score).dtype), out[1]  # a float for integers and booleans


def _counted(x: jax.Array) -> jax.Array:
    """Converts booleans to int32."""
    return x.astype(jnp.int32) if x.dtype == bool else x


def _added(x: jax.Array, reduce: str) -> jax.Array:
    """Returns the terms of a sum or mean in its dtype: a float for a mean of integers, whose sum may be too large for them."""
    if reduce == "sum":
        return _counted(x)
    return x if is_float(x) else x.astype(jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((1,), x.dtype)).dtype)


def _reduced(total: jax.Array, count: jax.Array, reduce: str, x: jax.Array) -> jax.Array:
    """Returns a sum or mean over children from the sum of what `wide` returned for `x`, in the dtype of `x`."""
    return (total if reduce == "sum" else total / count.astype(total.dtype)).astype(x.dtype)


def _least(dtype: jnp.dtype) -> float | bool:
    """Returns a value that no number of a dtype is less than."""
    if jnp.issubdtype(dtype, bool):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
