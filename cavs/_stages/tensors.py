"""Dynamic tensors (Cavs section 3.3): rows of one kind in schedule order, read and written in contiguous windows.

A task's window in the FORWARD begins at the task's first row and may run past its last one: what it writes there is
overwritten by the tasks that own those rows, as they come later. A window in the BACKWARD ends at the task's last row
and may begin before its first one, for the same reason. So no row is ever masked or copied; every tensor has `pad` rows
of slack at both ends.

**Padding.** F may be anything: 1/x, log, a maximum. So no equation of F ever runs on made-up values in a batch over all rows,
where 0 * NaN would reach a sum. The rules, for a kind with `size` rows (and `edges` edges) of which `count` are vertices:

1. Rows from `count` on repeat row 0, and edges beyond the last repeat edge 0: same vertex, same children, same owner. The
   scheduler writes index arrays so (`_schedule.write`), and `repeated` does the same with what the levels stored. F computes
   there what it computes at a real vertex, and nobody reads it.
2. Cotangents of these rows and edges are zero, so that they add zero times a finite number to the sums.
3. A batch may have no vertex of a kind whose rows it has (`count` is 0). Then the kind's sums are replaced by zeros
   (`_run.adjoint`).
4. Within a level, a window's rows beyond its task hold garbage. It is written only to rows that a later task overwrites, to
   slack, or to row 0 of the cotangents, none of which is read.
5. Row 0 of the states is zeros: what a vertex gathers from a child that it does not have.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._function.evaluate import pad_rows
from cavs._schedule.schedule import Schedule


def repeated(x: Any, real: Any) -> Any:
    """`x` with its first row in the rows where `real` (rows,) is false."""
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1]) if x.shape[0] else x


class Zeros:
    """Makes tensors of zeros that XLA does not share.

    Loops update their tensors in place, but XLA keeps ONE constant of zeros for all tensors of a shape and copies it for
    each: a second pass over memory. So each is filled with its own run-time number, which is 0: min(an index, 0).
    """

    def __init__(self, sched: Schedule, start: int = 0):
        self._data, self._next = sched.data, start

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self._next += 1
        zero = jnp.minimum(self._data[self._next % self._data.shape[0]], 0)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            stored = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
            return jax.random.wrap_key_data(self(stored.shape, stored.dtype), impl=dtype._impl.name)
        return jnp.broadcast_to(zero.astype(dtype), shape)


class Rows(NamedTuple):
    """The inner vertices of one kind: index arrays over its rows, padded at both ends for windows."""

    kind: int
    size: int  # inner rows, padded to the bucket
    edges: int
    pad: int
    edge_pad: int
    count: Any  # vertices in truth
    vertex: Any  # (size,) row in inputs
    row: Any  # (size,) row in the state tensors
    num_children: Any  # (pad + size + pad,)
    kids: Any  # (pad + size + pad, arity): row of child k in the state tensors, 0 (zeros) where there is none
    edge_child: Any  # (edge_pad + edges + edge_pad,): the same per edge
    edge_owner: Any  # (edge_pad + edges + edge_pad,): inner row that owns the edge; `size` or more where none does

    @property
    def real(self) -> Any:
        """(size,) which rows are vertices."""
        return jnp.arange(self.size) < self.count

    @property
    def real_edges(self) -> Any:
        """(edges,) which edges are no padding."""
        return self.inner_edges(self.edge_owner) < self.count

    def inner(self, padded: Any) -> Any:
        """The rows of a padded tensor without its slack."""
        return padded[self.pad : self.pad + self.size]

    def inner_edges(self, padded: Any) -> Any:
        """The edges of a padded tensor without its slack."""
        return padded[self.edge_pad : self.edge_pad + self.edges]

    def padded(self, x: Any) -> Any:
        """(size, ...) with zeros of slack at both ends."""
        return pad_rows(x, self.size + 2 * self.pad, self.pad)

    def padded_edges(self, x: Any) -> Any:
        """(edges, ...) with zeros of slack at both ends."""
        return pad_rows(x, self.edges + 2 * self.edge_pad, self.edge_pad)

    def tensor(self, zeros: Zeros, aval: Any, edge: bool = False) -> Any:
        """A dynamic tensor of zeros for values like `aval` at these rows (or their edges)."""
        n = self.edges + 2 * self.edge_pad if edge else self.size + 2 * self.pad
        return zeros((n, *aval.shape), aval.dtype)


class View(NamedTuple):
    """A contiguous part of the inner rows of a kind, and of their edges: where they lie in padded tensors."""

    start: Any
    size: int
    edge_start: Any
    edges: int

    def rows(self, padded: Any) -> Any:
        """The view's rows of a tensor with slack."""
        return _part(padded, self.start, self.size)

    def of_edges(self, padded: Any) -> Any:
        """The view's edges of a tensor with slack."""
        return _part(padded, self.edge_start, self.edges)

    def segments(self, rows: Rows) -> Any:
        """For each edge the row of its owner within the view; `size` or more where it is none of the view's."""
        owner = self.of_edges(rows.edge_owner) - (self.start - rows.pad)
        return jnp.where(owner < 0, self.size, owner)


def _part(x: Any, start: Any, size: int) -> Any:
    return x[start : start + size] if isinstance(start, int) else window(x, start, size)


def rows_of_kinds(sched: Schedule, arity: int) -> list[Rows]:
    """The index arrays of every kind of a schedule."""
    shape, out = sched.shape, []
    pad, edge_pad = shape.pad, max(e for _, e in shape.classes)
    at = edge_at = 0
    for k, (size, edges) in enumerate(zip(shape.inner, shape.edges, strict=True)):
        vertex = sched.inner_vertex[at : at + size]
        num_children = sched.num_children[at : at + size]
        edge_child = sched.edge_child[edge_at : edge_at + edges]
        kids = jnp.zeros((size, 0), jnp.int32)
        if shape.arity and edges:
            kids = jnp.pad(edge_child, (0, max(0, size * shape.arity - edges)))[: size * shape.arity]
            kids = kids.reshape(size, shape.arity)[:, :arity]
            kids = repeated(kids, np.arange(size) < sched.inner_count[k])  # `edge_child` repeats an edge, not a row
        elif edges:
            first, slots = sched.first_edge[at : at + size], np.arange(arity, dtype=np.int32)
            kids = edge_child.at[first[:, None] + slots].get(mode="clip")
            kids = jnp.where(num_children[:, None] > slots, kids, 0)
        kids = jnp.pad(kids, ((pad, pad), (0, arity - kids.shape[1])))
        owner = jnp.asarray(sched.edge_owner[edge_at : edge_at + edges])
        out.append(
            Rows(
                kind=k,
                size=size,
                edges=edges,
                pad=pad,
                edge_pad=edge_pad,
                count=sched.inner_count[k],
                vertex=vertex,
                row=jnp.asarray(sched.row).at[vertex].get(mode="clip"),
                num_children=jnp.pad(num_children, (pad, pad)),
                kids=kids,
                edge_child=jnp.pad(edge_child, (edge_pad, edge_pad)),
                edge_owner=jnp.pad(owner, (edge_pad, edge_pad), constant_values=size + pad),
            )
        )
        at, edge_at = at + size, edge_at + edges
    return out


def leaf_vertices(sched: Schedule) -> list[Any]:
    """For each kind the rows of its leaves in the inputs, padded."""
    out, end = [], 0
    for size in sched.shape.leaves:
        begin, end = end, end + size
        out.append(sched.leaf_vertex[begin:end])
    return out


def window(x: Any, start: Any, size: int) -> Any:
    """Rows start .. start + size - 1."""
    return lax.dynamic_slice_in_dim(x, start, size)


def write(x: Any, value: Any, start: Any) -> Any:
    """`x` with rows from `start` replaced by `value`."""
    return lax.dynamic_update_slice_in_dim(x, value if value.dtype == x.dtype else value.astype(x.dtype), start, 0)


def get_rows(x: Any, index: Any) -> Any:
    """Rows of `x` by number (gather, pull)."""
    return x.at[index].get(mode="promise_in_bounds")
