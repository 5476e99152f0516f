"""Dynamic tensors (Cavs section 3.3): rows of one kind in schedule order, read and written in contiguous windows.

In the FORWARD, the window of a task begins at the task's first row and may extend beyond its last one. The task overwrites
rows there that belong to later tasks, which write them again. In the BACKWARD, the window of a task ends at the task's last row
and may begin before its first one, for the same reason. So no row is ever masked or copied. Every tensor has `pad` rows of
slack at both ends.

**Padding.** F may compute anything: 1/x, log, a maximum. In a batch over all rows it must not run on arbitrary values, because
0 * NaN would reach a sum. These are the rules for a kind with `size` rows (and `edges` edges), of which `count` are vertices:

1. Rows from `count` on repeat row 0, and edges after the last repeat edge 0: the same vertex, children and owner. The
   scheduler writes its index arrays like this (schedule.cpp), and `repeated` does the same with values that the levels
   stored. F computes on padding what it computes at a real vertex, and nothing reads it.
2. Cotangents of padding are zero, so padding adds zero times a finite number to the sums.
3. A batch may have rows of a kind but no vertex of it (`count` is 0). Then the sums of the kind are replaced by zeros
   (`_run.adjoint`).
4. Within a level, the rows of a window that are not its task's hold arbitrary values. They are only written to rows that a
   later task overwrites, to slack, or to row 0 of the cotangents; nothing reads them there.
5. Row 0 of the states is zero: a vertex gathers it for a child that it does not have.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._function.domains import EDGE, Domain
from cavs._function.evaluate import column, pad_rows
from cavs._function.raw_keys import Shaped, from_stored, key_impl, stored_aval
from cavs._jaxpr.hold_back import late_zero
from cavs._schedule.schedule import Schedule

Index: TypeAlias = int | jax.Array  # of a row or an edge; a scalar


def repeated(x: jax.Array, real: jax.Array | np.ndarray, first: jax.Array | None = None) -> jax.Array:
    """Returns `x` with its first row, or `first`, (1, ...), in the rows where `real`, (rows,) bool, is false."""
    if not x.shape[0]:
        return x
    return jnp.where(column(real, x), x, x[:1] if first is None else first)


class Zeros:
    """Creates tensors of zeros that XLA does not share.

    Loops update their tensors in place. If all tensors of a shape began as the same constant, XLA would keep ONE and copy it
    for each of them, which is a second pass over memory. So each is filled with a `late_zero` of its own.

    Args:
        sched: the schedule whose integers are used.
        after: arrays that are computed first. Otherwise XLA might fill the backward's tensors before the forward runs, and keep
            them all the time.
        start: the number of the first integer. The forward and the backward use different ones.
    """

    def __init__(self, sched: Schedule, after: Sequence[jax.Array] = (), start: int = 0):
        self._data, self._next = sched.data, start
        self._late = [x[(0,) * x.ndim] for x in after if x.size and jnp.issubdtype(x.dtype, jnp.floating)]

    def __call__(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Returns zeros of a shape and dtype."""
        self._next += 1
        zero = late_zero([self._data[self._next % self._data.shape[0]], *self._late])
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            stored = stored_aval(like := jax.ShapeDtypeStruct(shape, dtype))
            return from_stored(self(stored.shape, stored.dtype), key_impl(like))
        return jnp.broadcast_to(zero.astype(dtype), shape)


class Rows(NamedTuple):
    """The vertices with children of one kind, or its leaves: index arrays over its rows, padded at both ends for windows."""

    kind: int  # the number of the kind; the leaves of the kinds count as kinds after all others
    size: int  # the number of rows, padded
    edges: int  # the number of edges, padded
    pad: int  # the slack at both ends of a tensor of rows
    edge_pad: int  # the slack at both ends of a tensor of edges
    count: jax.Array  # the number of vertices
    vertex: jax.Array  # (size,) rows in the inputs
    row: jax.Array  # (size,) rows in the dynamic tensors of the states
    num_children: jax.Array  # (pad + size + pad,)
    kids: jax.Array  # (pad + size + pad, arity) the row of child k in the dynamic tensors; 0, a row of zeros, if there is none
    edge_child: jax.Array  # (edge_pad + edges + edge_pad,) the row of an edge's child in the dynamic tensors
    edge_owner: jax.Array  # (edge_pad + edges + edge_pad,) the row (of `size`) that owns the edge; `size` or more for padding
    edge_row: jax.Array  # (edges,) rows in the edges of `run`; empty if F does not read them

    @property
    def as_leaves(self) -> "Rows":
        """These vertices without their children, and without slack."""
        no_edges, fields = self.edge_row[:0], {"num_children": self.inner(self.num_children), "kids": self.inner(self.kids)}
        return self._replace(edges=0, pad=0, edge_pad=0, edge_child=no_edges, edge_owner=no_edges, edge_row=no_edges, **fields)

    @property
    def real(self) -> jax.Array:
        """(size,) bool: which rows are vertices."""
        return jnp.arange(self.size) < self.count

    @property
    def real_edges(self) -> jax.Array:
        """(edges,) bool: which edges are not padding."""
        return self.inner_edges(self.edge_owner) < self.count

    def inner(self, padded: jax.Array) -> jax.Array:
        """Returns the rows of a tensor without its slack."""
        return padded[self.pad : self.pad + self.size]

    def inner_edges(self, padded: jax.Array) -> jax.Array:
        """Returns the edges of a tensor without its slack."""
        return padded[self.edge_pad : self.edge_pad + self.edges]

    def padded(self, x: jax.Array) -> jax.Array:
        """Returns `x`, (size, ...), with zeros of slack at both ends."""
        return pad_rows(x, self.size + 2 * self.pad, self.pad)

    def padded_in(self, domain: Domain, x: jax.Array) -> jax.Array:
        """Returns `x`, (size, ...) or (edges, ...), with zeros of slack at both ends."""
        return pad_rows(x, self.edges + 2 * self.edge_pad, self.edge_pad) if domain == EDGE else self.padded(x)

    def tensor(self, zeros: Zeros, aval: Shaped, domain: Domain) -> jax.Array:
        """Returns a dynamic tensor of zeros for values like `aval` at these rows, or at their edges."""
        n = self.edges + 2 * self.edge_pad if domain == EDGE else self.size + 2 * self.pad
        return zeros((n, *aval.shape), aval.dtype)


class RowSpan(NamedTuple):
    """A contiguous part of the rows of a kind, and of their edges: where they begin in tensors with slack, and how many."""

    start: Index
    size: int
    edge_start: Index
    edges: int

    def rows(self, padded: jax.Array) -> jax.Array:
        """Returns the span's rows of a tensor with slack."""
        return _part(padded, self.start, self.size)

    def of_edges(self, padded: jax.Array) -> jax.Array:
        """Returns the span's edges of a tensor with slack."""
        return _part(padded, self.edge_start, self.edges)

    def rows_in(self, domain: Domain, padded: jax.Array) -> jax.Array:
        """Returns `rows(padded)`, or `of_edges(padded)` if the tensor has a row for each edge."""
        return self.of_edges(padded) if domain == EDGE else self.rows(padded)

    def start_in(self, domain: Domain) -> Index:
        """Returns where `rows_in` begins."""
        return self.edge_start if domain == EDGE else self.start

    def size_in(self, domain: Domain) -> int:
        """Returns how many rows `rows_in` has."""
        return self.edges if domain == EDGE else self.size

    def segments(self, rows: Rows) -> jax.Array:
        """Returns for each edge the row of its owner within the span; `size` or more if the owner is not in the span."""
        owner = self.of_edges(rows.edge_owner) - (self.start - rows.pad)
        return jnp.where(owner < 0, self.size, owner)


def _part(x: jax.Array, start: Index, size: int) -> jax.Array:
    return x[start : start + size] if isinstance(start, int) else window(x, start, size)


def rows_of_kinds(sched: Schedule, arity: int, reads_edges: bool) -> list[Rows]:
    """Returns the index arrays of every kind of a schedule, for an F that reads `arity` numbered children, and maybe edges."""
    shape, out = sched.shape, []
    edge_rows = rows_of_edges(sched) if reads_edges else [jnp.zeros(0, jnp.int32)] * len(shape.kinds)
    pad, edge_pad = shape.pad, max(e for _, e in shape.classes)
    kinds = zip(shape.inner, shape.edges, _side_by_side(shape.inner), _side_by_side(shape.edges), strict=True)
    for k, (size, edges, of_rows, of_edges) in enumerate(kinds):
        vertex, num_children, edge_child = sched.inner_vertex[of_rows], sched.num_children[of_rows], sched.edge_child[of_edges]
        kids = jnp.zeros((size, 0), jnp.int32)
        if shape.arity and edges:
            kids = jnp.pad(edge_child, (0, max(0, size * shape.arity - edges)))[: size * shape.arity]
            kids = kids.reshape(size, shape.arity)[:, :arity]
            kids = repeated(kids, np.arange(size) < sched.inner_count[k])  # `edge_child` repeats an edge
        elif edges:
            first, slots = sched.first_edge[of_rows], np.arange(arity, dtype=np.int32)
            kids = edge_child.at[first[:, None] + slots[None]].get(mode="clip")
            kids = jnp.where(num_children[:, None] > slots[None], kids, 0)
        kids = jnp.pad(kids, ((pad, pad), (0, arity - kids.shape[1])))
        owner = jnp.asarray(sched.edge_owner[of_edges])
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
                edge_row=edge_rows[k],
            )
        )
    return out


def rows_of_edges(sched: Schedule) -> list[jax.Array]:
    """Returns for each kind the row of each of its edges, (edges,), in the order of `Graphs.children`.

    A schedule has the edges of its tasks side by side. The user's rows have the order of `Graphs.children`: the edges of the
    first vertex, then those of the second, and so on. The edges of a vertex follow each other in both, so the place of an edge
    follows from the numbers of children.

    Padding repeats the first edge, as all padding of a schedule does; it is row 0 if a kind has no edges.
    """
    shape, out = sched.shape, []
    count = jnp.zeros(shape.vertices, jnp.int32)
    for size, number, of_rows in zip(shape.inner, sched.inner_count, _side_by_side(shape.inner), strict=True):
        vertex = jnp.where(jnp.arange(size) < number, sched.inner_vertex[of_rows], shape.vertices)
        count = count.at[vertex].set(sched.num_children[of_rows], mode="drop")
    begins = count.cumsum() - count
    parts = _side_by_side(shape.inner), _side_by_side(shape.edges)
    for size, edges, number, of_rows, of_edges in zip(shape.inner, shape.edges, sched.inner_count, *parts, strict=True):
        owner = jnp.asarray(sched.edge_owner[of_edges])
        if not edges or not size:
            out.append(jnp.zeros(edges, jnp.int32))
            continue
        clipped = jnp.minimum(owner, size - 1)
        vertex = jnp.asarray(sched.inner_vertex[of_rows])[clipped]
        row = begins[vertex] + jnp.arange(edges, dtype=jnp.int32) - jnp.asarray(sched.first_edge[of_rows])[clipped]
        real = owner < number
        out.append(jnp.where(real, row, jnp.where(real[0], row[0], 0)).astype(jnp.int32))
    return out


def rows_of_leaves(sched: Schedule, arity: int) -> list[Rows]:
    """Builds index arrays for leaves: the leaves of each kind are an additional kind without children."""
    kinds, no_edges, out = len(sched.shape.kinds), jnp.zeros(0, jnp.int32), []
    for k, vertex in enumerate(leaf_vertices(sched)):
        size, row = vertex.shape[0], jnp.asarray(sched.row).at[vertex].get(mode="clip")
        kids = {"num_children": jnp.zeros(size, jnp.int32), "kids": jnp.zeros((size, arity), jnp.int32)}
        edges = {"edge_child": no_edges, "edge_owner": no_edges, "edge_row": no_edges}
        out.append(Rows(kinds + k, size, 0, 0, 0, sched.leaf_count[k], vertex, row, **kids, **edges))
    return out


def leaf_vertices(sched: Schedule) -> list[jax.Array]:
    """Returns for each kind the rows of its leaves in the inputs, padded."""
    return [sched.leaf_vertex[part] for part in _side_by_side(sched.shape.leaves)]


def _side_by_side(sizes: Iterable[int]) -> list[slice]:
    """Returns where parts of these sizes lie that follow each other in an array."""
    return [slice(begin, end) for begin, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def window(x: jax.Array, start: Index, size: int) -> jax.Array:
    """Returns the rows start, ..., start + size - 1."""
    return lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False)


def write(x: jax.Array, value: jax.Array, start: Index) -> jax.Array:
    """Returns `x` with rows from `start` replaced by `value`."""
    value = value if value.dtype == x.dtype else value.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, value, start, 0, allow_negative_indices=False)


def get_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of `x` with the numbers `index` (gather, pull)."""
    return x.at[index].get(mode="promise_in_bounds")


class Pulled(NamedTuple):
    """Rows of the inputs, or of the edges, that are read where they lie."""

    source: jax.Array  # the leaf of the inputs or of the edges
    index: jax.Array  # (rows,) the numbers of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape + self.source.shape[1:]

    @property
    def dtype(self) -> Any:
        return self.source.dtype

    def copied(self) -> jax.Array:
        return get_rows(self.source, self.index)


Values: TypeAlias = Any  # an array with one row for each vertex or edge, or `Pulled`
