"""Where the edges of a schedule are among the edges of the batch, whose rows `gather_all(..., edges=True)` reads.

A schedule has the edges of its tasks side by side. The user's rows have the order of `Graphs.children`: the edges of the first
vertex, then those of the second, and so on. The edges of a vertex follow each other in both, so the place of an edge follows
from the numbers of children.
"""

import jax
import jax.numpy as jnp

from cavs._schedule.schedule import Schedule


def rows_of_edges(sched: Schedule) -> list[jax.Array]:
    """Returns for each kind the row of each of its edges, (edges,), in the order of `Graphs.children`.

    Padding repeats the first edge, as all padding of a schedule does (`_stages.tensors`); it is row 0 if a kind has no edges.
    """
    shape, at = sched.shape, 0
    count = jnp.zeros(shape.vertices, jnp.int32)
    for size, number in zip(shape.inner, sched.inner_count, strict=True):
        mine = slice(at, at + size)
        vertex = jnp.where(jnp.arange(size) < number, sched.inner_vertex[mine], shape.vertices)
        count = count.at[vertex].set(sched.num_children[mine], mode="drop")
        at += size
    begins = count.cumsum() - count
    out, at, edge_at = [], 0, 0
    for size, edges, number in zip(shape.inner, shape.edges, sched.inner_count, strict=True):
        rows, owner = slice(at, at + size), jnp.asarray(sched.edge_owner[edge_at : edge_at + edges])
        at, edge_at = at + size, edge_at + edges
        if not edges or not size:
            out.append(jnp.zeros(edges, jnp.int32))
            continue
        known = jnp.minimum(owner, size - 1)
        vertex = jnp.asarray(sched.inner_vertex[rows])[known]
        row = begins[vertex] + jnp.arange(edges, dtype=jnp.int32) - jnp.asarray(sched.first_edge[rows])[known]
        real = owner < number
        out.append(jnp.where(real, row, jnp.where(real[0], row[0], 0)).astype(jnp.int32))
    return out
