"""Primitives between a vertex and its children. `gather_all` is traced with them, for ONE vertex.

A value is STATIC (the same for all vertices), ROW (one per vertex) or EDGE (one per child of a vertex, inside the function
that `gather_all` calls); see `_function.domains`. The primitives convert between ROW and EDGE:

- `enter`: a child's state at the start of a call of `gather_all`. It returns its argument; it marks the call for
  `checked_calls`.
- `spread`: ROW to EDGE. Every child gets the value of its vertex.
- `reduce_sum`, `reduce_max`: EDGE to ROW. They reduce over the children of a vertex.
- `stack`: EDGE to ROW, (size, ...). It stacks the values of all children; if there are fewer than `size`, it repeats the first.
- `unstack`: ROW to EDGE. It is the transpose of `stack`.

Sum and spread are each other's transpose, as gather and scatter are (Cavs 3.4). All primitives are elementwise within the
value of a vertex or child, so `jax.vmap` over them only changes shapes.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import ad, batching
from jax.typing import ArrayLike

from cavs._jaxpr.jaxprs import Atom, Eqn, Jaxpr, Var, all_equations, is_var
from cavs._jaxpr.source_lines import line_of

enter_p = jex.Primitive("enter_gather_all")
spread_p = jex.Primitive("spread")
reduce_sum_p = jex.Primitive("reduce_children_sum")
reduce_max_p = jex.Primitive("reduce_children_max")
stack_p = jex.Primitive("nested_gather_all")
unstack_p = jex.Primitive("nested_gather_all_transpose")
REDUCTIONS = (reduce_sum_p, reduce_max_p)
TO_ROWS = (*REDUCTIONS, stack_p)  # EDGE to ROW
TO_EDGES = (spread_p, unstack_p)  # ROW to EDGE
ALL = (enter_p, *TO_ROWS, *TO_EDGES)

# `call` numbers F's calls of `gather_all`. It is `None` after `checked_calls`.


def spread(x: ArrayLike, call: int | None = None) -> jax.Array:
    """Returns the value of a vertex for each of its children."""
    return spread_p.bind(jnp.asarray(x), call=call)


def reduce_sum(x: ArrayLike, call: int | None = None) -> jax.Array:
    """Returns the sum over the children of a vertex, in the dtype of `x`."""
    return reduce_sum_p.bind(jnp.asarray(x), call=call)


def reduce_max(x: ArrayLike, call: int | None = None) -> jax.Array:
    """Returns the maximum over the children of a vertex. Children that share it share its gradient, as for `jnp.max`."""
    return reduce_max_p.bind(jnp.asarray(x), call=call)


def wide(x: jax.Array) -> jax.Array:
    """Converts what is added up: bfloat16 cannot count to 257, and int8 not to 128."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32)


for _p in (enter_p, spread_p, reduce_sum_p, reduce_max_p):
    _p.def_abstract_eval(lambda x, *, call: ShapedArray(x.shape, x.dtype))
    batching.primitive_batchers[_p] = lambda args, dims, *, call, p=_p: (p.bind(*args, call=call), dims[0])
ad.deflinear2(enter_p, lambda ct, x, *, call: [enter_p.bind(ct, call=call)])
ad.deflinear2(spread_p, lambda ct, x, *, call: [reduce_sum(wide(ct), call).astype(ct.dtype)])
ad.deflinear2(reduce_sum_p, lambda ct, x, *, call: [spread(ct, call)])


def _reduce_max_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, call: int | None
) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    top = reduce_max(x, call)
    if type(t) is ad.Zero:
        return top, ad.Zero(jax.typeof(top).to_tangent_aval())  # type: ignore
    hit = x == spread(top, call)
    # `where` rather than a product: tangents of other children may be infinite.
    total = reduce_sum(wide(jnp.where(hit, t, jnp.zeros_like(t))), call)
    return top, (total / reduce_sum(hit.astype(total.dtype), call)).astype(t.dtype)


ad.primitive_jvps[reduce_max_p] = _reduce_max_jvp

stack_p.def_abstract_eval(lambda x, *, size: ShapedArray((size, *x.shape), x.dtype))
unstack_p.def_abstract_eval(lambda x, *, size: ShapedArray(x.shape[1:], x.dtype))
ad.deflinear2(stack_p, lambda ct, x, *, size: [unstack_p.bind(ct, size=size)])
ad.deflinear2(unstack_p, lambda ct, x, *, size: [stack_p.bind(ct, size=size)])
batching.primitive_batchers[stack_p] = lambda args, dims, *, size: (stack_p.bind(*args, size=size), dims[0] + 1)
batching.primitive_batchers[unstack_p] = lambda args, dims, *, size: (
    unstack_p.bind(jnp.moveaxis(args[0], dims[0], 1), size=size),
    0,
)


def has_children_in(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr calls `gather_all`, itself or in a jaxpr inside it."""
    return any(e.primitive in ALL for e in all_equations(jaxpr.eqns))


MSG_ESCAPED = (
    "gather_all: the value of one child leaves the function that was given to gather_all{where}. A vertex has any number of "
    "children, so only what gather_all returns may be used after it. Return the value from that function, "
    "v.gather_all(lambda s: ..., reduce=...), or name the child: v.gather(k)."
)


def checked_calls(eqns: Sequence[Eqn], outs: Sequence[Atom]) -> None:
    """Checks that no value of a child is used outside its own call of `gather_all`.

    `outs`: what F scatters and pushes. Raises `ValueError` if such a value is used elsewhere; the message names the line of F.
    """
    calls: dict[Var, frozenset[int | None]] = {}  # the calls in which a variable is a value of a child
    maker: dict[Var, Eqn] = {}
    for e in eqns:
        read: frozenset[int | None] = frozenset().union(*(calls.get(x, frozenset()) for x in e.invars if is_var(x)))
        call: int | None = e.params.get("call") if e.primitive in ALL else None
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
        if is_var(x) and x in calls:
            raise ValueError(MSG_ESCAPED.format(where=line_of(maker[x])))


def stack_rows(x: jax.Array, segments: jax.Array, rows: int, size: int) -> jax.Array:
    """Evaluates `stack` for all rows at once. Returns (rows, size, ...).

    Args:
        x: (edges, ...).
        segments: (edges,) the row of each edge, as in `_function.evaluate.evaluate`.
        rows: the number of rows.
        size: the number of children that are stacked.
    """
    first, count = _edges_of(segments, rows)
    slot = jnp.arange(size)
    edge = first[:, None] + jnp.where(slot < count[:, None], slot, 0)
    return x.at[jnp.minimum(edge, len(segments) - 1)].get(mode="clip")


def unstack_rows(x: jax.Array, segments: jax.Array, rows: int) -> jax.Array:
    """Evaluates `unstack` for all edges at once: (rows, size, ...) to (edges, ...)."""
    first, _ = _edges_of(segments, rows)
    owner = jnp.where((segments >= 0) & (segments < rows), segments, 0)
    slot = jnp.clip(jnp.arange(len(segments)) - first[owner], 0, x.shape[1] - 1)
    return x[owner, slot]


def _edges_of(segments: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first edge of each row, and the number of its edges."""
    edge = jnp.arange(len(segments), dtype=jnp.int32)
    first = jax.ops.segment_min(edge, segments, rows, mode="drop")
    count = jax.ops.segment_sum(jnp.ones_like(edge), segments, rows, mode="drop")
    return jnp.where(count > 0, first, 0), count
