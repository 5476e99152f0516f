"""Primitives between a vertex and its children, with which `gather_all` is traced for ONE vertex.

A value is STATIC (parameters), ROW (one per vertex) or EDGE (one per child of a vertex, inside the function given to
`gather_all`); see `_function.equations`. These primitives move between the last two:

- `enter`: the child's state at the start of one call of `gather_all`; an identity that marks the call (`checked_calls`);
- `spread`: ROW to EDGE, the same value for every child;
- `reduce_sum`, `reduce_max`: EDGE to ROW, over the vertex's children;
- `stack`: EDGE to ROW, all children side by side, (size, ...). A vertex with fewer children repeats its first one;
- `unstack`: the other way.

Sum and spread are each other's transpose, as gather and scatter are (Cavs 3.4); so are stack and unstack. All of them act
on each number alone, so that `jax.vmap` over them changes nothing but shapes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import ad, batching

from cavs._function.lines import line_of

enter_p = jex.Primitive("enter_gather_all")
spread_p = jex.Primitive("spread")
reduce_sum_p = jex.Primitive("reduce_children_sum")
reduce_max_p = jex.Primitive("reduce_children_max")
stack_p = jex.Primitive("stack_children")
unstack_p = jex.Primitive("unstack_children")
REDUCTIONS = (reduce_sum_p, reduce_max_p)
TO_ROWS = (*REDUCTIONS, stack_p)  # from a value per child to one per vertex
TO_EDGES = (spread_p, unstack_p)
ALL = (enter_p, *TO_ROWS, *TO_EDGES)

# `call` is the number of the call of `gather_all` whose children a value belongs to; `None` after `checked_calls`.


def spread(x: Any, call: int | None = None) -> Any:
    """A vertex's value for each of its children."""
    return spread_p.bind(jnp.asarray(x), call=call)


def reduce_sum(x: Any, call: int | None = None) -> Any:
    """The sum over a vertex's children, in their dtype."""
    return reduce_sum_p.bind(jnp.asarray(x), call=call)


def reduce_max(x: Any, call: int | None = None) -> Any:
    """The largest of a vertex's children; its gradient goes to the largest in equal parts, as that of `jnp.max` does."""
    return reduce_max_p.bind(jnp.asarray(x), call=call)


for _p in (enter_p, spread_p, reduce_sum_p, reduce_max_p):
    _p.def_abstract_eval(lambda x, *, call: ShapedArray(x.shape, x.dtype))
    batching.primitive_batchers[_p] = lambda args, dims, *, call, p=_p: (p.bind(*args, call=call), dims[0])
ad.deflinear2(enter_p, lambda ct, x, *, call: [enter_p.bind(ct, call=call)])
ad.deflinear2(spread_p, lambda ct, x, *, call: [reduce_sum(ct, call)])
ad.deflinear2(reduce_sum_p, lambda ct, x, *, call: [spread(ct, call)])


def _reduce_max_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: int | None) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    top = reduce_max(x, call)
    if type(t) is ad.Zero:
        return top, ad.Zero.from_primal_value(top)  # type: ignore
    hit = x == spread(top, call)
    # Selected, not multiplied: the others may be infinite.
    total = reduce_sum(jnp.where(hit, t, jnp.zeros_like(t)), call)
    return top, total / reduce_sum(hit.astype(t.dtype), call)


ad.primitive_jvps[reduce_max_p] = _reduce_max_jvp

stack_p.def_abstract_eval(lambda x, *, size: ShapedArray((size, *x.shape), x.dtype))
unstack_p.def_abstract_eval(lambda x, *, size: ShapedArray(x.shape[1:], x.dtype))
ad.deflinear2(stack_p, lambda ct, x, *, size: [unstack_p.bind(ct, size=size)])
ad.deflinear2(unstack_p, lambda ct, x, *, size: [stack_p.bind(ct, size=size)])
batching.primitive_batchers[stack_p] = lambda args, dims, *, size: (stack_p.bind(*args, size=size), dims[0] + 1)


def _unstack_batched(args: Sequence[Any], dims: Sequence[int], *, size: int) -> tuple[Any, int]:
    return unstack_p.bind(jnp.moveaxis(args[0], dims[0], 1), size=size), 0


batching.primitive_batchers[unstack_p] = _unstack_batched


def has_children_in(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, calls `gather_all`."""
    return any(e.primitive in ALL or any(map(has_children_in, jex.jaxprs_in_params(e.params))) for e in jaxpr.eqns)


MSG_ESCAPED = (
    "gather_all: the value of one child leaves the function that was given to gather_all{where}. A vertex has any number of "
    "children, so only what gather_all returns may be used after it. Return the value from that function, "
    "v.gather_all(lambda s: ..., reduce=...), or name the child: v.gather(k)."
)


def checked_calls(eqns: Sequence[Any], outs: Sequence[Any]) -> None:
    """Refuses a child's value that is used outside its own call of `gather_all`.

    **Raises:** `ValueError` with the line of F that uses it.
    """
    calls: dict[Any, frozenset[int]] = {}  # of which calls a variable is a child's value
    maker: dict[Any, Any] = {}
    for e in eqns:
        read = frozenset().union(*(calls.get(x, frozenset()) for x in e.invars if not isinstance(x, jex.Literal)))
        call = e.params.get("call") if e.primitive in ALL else None
        if e.primitive is enter_p or e.primitive is spread_p:
            read = read | {call}
        elif e.primitive in REDUCTIONS:
            if read - {call}:
                raise ValueError(MSG_ESCAPED.format(where=line_of(e)))
            read = frozenset()
        if read:
            calls |= dict.fromkeys(e.outvars, read)
            maker |= dict.fromkeys(e.outvars, e)
    for x in outs:
        if not isinstance(x, jex.Literal) and x in calls:
            raise ValueError(MSG_ESCAPED.format(where=line_of(maker[x])))


def stack_rows(x: Any, segments: Any, rows: int, size: int) -> Any:
    """`stack` for all rows at once: (edges, ...) to (rows, size, ...); `segments` as in `_function.equations.evaluate`."""
    first, count = _edges_of(segments, rows)
    slot = jnp.arange(size)
    at = first[:, None] + jnp.where(slot < count[:, None], slot, 0)
    return x.at[jnp.minimum(at, len(segments) - 1)].get(mode="clip")


def unstack_rows(x: Any, segments: Any, rows: int) -> Any:
    """`unstack` for all edges at once: (rows, size, ...) to (edges, ...)."""
    first, _ = _edges_of(segments, rows)
    owner = jnp.where((segments >= 0) & (segments < rows), segments, 0)
    slot = jnp.clip(jnp.arange(len(segments)) - first[owner], 0, x.shape[1] - 1)
    return x[owner, slot]


def _edges_of(segments: Any, rows: int) -> tuple[Any, Any]:
    """The first edge of each row, and how many it has."""
    at = jnp.arange(len(segments), dtype=jnp.int32)
    first = jax.ops.segment_min(at, segments, rows, mode="drop")
    count = jax.ops.segment_sum(jnp.ones_like(at), segments, rows, mode="drop")
    return jnp.where(count > 0, first, 0), count
