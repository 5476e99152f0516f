"""Engine `persistent`: the integers of a launch, and how vertices gather cotangents from their parents.

In the backward a vertex writes the cotangents of its children to rows of its own, by edge and by slot. The children gather and
add them. So no two thread blocks write to the same row, and sums have a fixed order.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.persistent.lower import (
    EDGE_CHILD,
    EDGE_COUNT,
    PARENT,
    PARENT_COUNT,
    PARENT_FIRST,
    PARENT_SLOT,
    PUSHED_ROW,
    Recurrence,
)
from cavs._engines.persistent.wide_levels import count_wide_levels
from cavs._jaxpr.hold_back import barrier
from cavs._schedule.schedule import Schedule
from cavs._stages.tensors import Rows as KindRows, get_rows
from cavs.kernels import COLUMNS, Index, IndexRole, segment_rows


def integers_of(
    recurrence: Recurrence,
    rows: KindRows,
    sched: Schedule,
    state_row: jax.Array,
    wide_rows: int | None,
    g_row: jax.Array | None,
) -> dict[Index, jax.Array]:
    """Returns the vectors of integers of a launch.

    The scalars are in the order of `kernels._program.arrays.NUM_LEVELS` and `_engines.persistent.lower.STATE_ROW`. The last is
    the number of wide levels, which have at least `wide_rows` vertices, if these have a launch of their own.
    """
    num_children, first = rows.inner(rows.num_children), sched.first_edge[_inner_slice(sched, rows)]
    owner, size = rows.inner_edges(rows.edge_owner), rows.size
    last = jnp.maximum(rows.count - 1, 0)
    num_edges = first[last] + num_children[last]
    slots = [k * size for k in range(max(recurrence.arity, 1))]
    scalars = [sched.num_levels, rows.count, num_edges, state_row, rows.pad, rows.edge_pad, *slots]
    if wide_rows is not None:
        scalars.append(count_wide_levels(sched.part_start, wide_rows))
    integers = {
        Index(IndexRole.SCALARS): jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        Index(IndexRole.PART_STARTS): sched.part_start,
        Index(IndexRole.FIRST_EDGE): first,
        EDGE_COUNT: num_children,
        Index(IndexRole.EDGE_OWNER): owner,
        EDGE_CHILD: rows.inner_edges(rows.edge_child),
        **{Index(IndexRole.KID, k): rows.inner(rows.kids)[:, k] for k in range(recurrence.arity)},
    }
    if not recurrence.forward:
        integers |= parents(sched, rows, recurrence.arity, state_row, size)
        own = state_row + jnp.arange(size, dtype=jnp.int32)
        integers[PUSHED_ROW] = own if g_row is None else lax.dynamic_slice_in_dim(g_row, state_row, size)
    return integers


def _inner_slice(sched: Schedule, rows: KindRows) -> slice:
    """Returns where the vertices of a kind are among those with children of all kinds."""
    start = sum(sched.shape.inner[: rows.kind])
    return slice(start, start + rows.size)


def parents(sched: Schedule, rows: KindRows, arity: int, at: jax.Array | int, size: int) -> dict[Index, jax.Array]:
    """Returns where vertices from row `at` of the dynamic tensors find what their parents wrote: by edge and by slot."""
    edge = jnp.asarray(sched.parent_edge)
    out: dict[Index, jax.Array] = {}
    if sched.shape.forest:
        edge = lax.dynamic_slice_in_dim(edge, at, size)
    else:
        out[PARENT_FIRST] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_first), at, size)
        out[PARENT_COUNT] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_count), at, size)
    out[PARENT] = edge
    known = jnp.maximum(edge, 0)
    owner = get_rows(rows.inner_edges(rows.edge_owner), known)
    slot = known - get_rows(jnp.asarray(sched.first_edge[_inner_slice(sched, rows)]), jnp.minimum(owner, rows.size - 1))
    out[PARENT_SLOT] = jnp.where((edge < 0) | (slot >= arity), -1, slot * rows.size + owner)
    return out


def gathered(tensor: jax.Array, up: dict[Index, jax.Array], index: Index, n: int, interpret: bool) -> jax.Array:
    """Sums the cotangents that parents wrote, for each of n vertices, in a fixed order.

    Args:
        tensor: (rows, ...) what the parents wrote.
        up: from `parents`.
        index: the place in `up` of the rows to read.
        interpret: whether the engine runs in Pallas' interpreter.
    """
    edge = up[index]
    if PARENT_FIRST not in up:
        return some_rows(tensor, edge)
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    first, count = up[PARENT_FIRST], up[PARENT_COUNT]
    if not interpret:
        # A kernel's operands must be aligned, and slices of the schedule may not be: copy them.
        operands = (jnp.concatenate([x, jnp.zeros(4, jnp.int32)]) for x in (edge, first, count))
        edge, first, count = barrier(tuple(operands))
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % COLUMNS)))
        total = segment_rows(flat, edge, first[:n], count[:n])
        return total[:, : tensor[0].size].reshape(n, *tensor.shape[1:])
    # `parent_edge` lists edges child after child: a sorted segment sum.
    at, ends = jnp.arange(edge.shape[0]), first + count
    child = jnp.clip(jnp.searchsorted(ends, at, side="right"), 0, n)
    rows = jnp.where((edge >= 0)[:, None], get_rows(flat, jnp.maximum(edge, 0)), 0)
    total = jax.ops.segment_sum(rows, jnp.where(at < ends[-1], child, n), n, indices_are_sorted=True)
    return total.reshape(n, *tensor.shape[1:])


def some_rows(x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the rows of `x` with these numbers, zeros where a number is negative."""
    return jnp.where((number >= 0).reshape(-1, *(1,) * (x.ndim - 1)), get_rows(x, jnp.maximum(number, 0)), 0)
