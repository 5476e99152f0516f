"""Where the operands of lazy gradients lie, for an engine that reads them there rather than from copies."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Var, is_var
from cavs._stages.cotangents import Floats
from cavs._stages.entrance import Memory, slots_together_of
from cavs._stages.tensors import Index, Rows, RowSpan


class Operand(NamedTuple):
    """Rows of a matrix."""

    source: jax.Array  # (m, ...)
    index: jax.Array | None  # (n, parts) ints; `None` for all rows of `source`
    start: Index  # row i is row start + i of `source`, or the rows index[start + i] of it, one after another
    # Matrices of the same shape, whose rows stand beside the rows of `source`, if there is no index.
    beside: tuple[jax.Array, ...] = ()
    fold: int = 1  # into how many rows the rows of all of these are cut; `start` counts them

    @property
    def sources(self) -> tuple[jax.Array, ...]:
        """All matrices."""
        return (self.source, *self.beside)

    @property
    def parts(self) -> int:
        """How many rows of the matrices are a row."""
        return len(self.sources) // self.fold if self.index is None else self.index.shape[1]

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return self.parts * int(np.prod(self.source.shape[1:]))


class LazyProduct(NamedTuple):
    """left^T right over some rows: what one equation adds to the cotangent of a static value."""

    static: int  # the number of the static value
    left: Operand | None  # `None` for a column of ones, so that the result has one axis
    right: Operand  # the other matrix
    rows: Index  # how many there are


Products: TypeAlias = Callable[[Sequence[LazyProduct]], Floats]  # computes the sums of products, by their static value


def operands(part: Split, rows: Rows, span: RowSpan, memory: Memory, values: Sequence[Var]) -> dict[Var, Operand]:
    """Returns where `values` of the joint program lie, if they are rows of tensors, gathered or not, at the rows of a span."""
    edge_child = rows.edge_child[:, None]
    located = {}
    for v, x, domain in zip(part.forward.cross, memory.crossing, part.reverse.cross_domain, strict=True):
        located[v] = Operand(x, None, span.start_in(domain))
    for v, (k, i) in zip(part.forward.slots, part.recurrent.slots, strict=True):
        located[v] = Operand(memory.states[i], rows.kids[:, k : k + 1], span.start)
    for v, i in zip(part.forward.child, part.recurrent.child, strict=True):
        located[v] = Operand(memory.states[i], edge_child, span.edge_start)
    for v, x in zip((*part.forward.keep, *part.forward.extra), (*memory.kept, *memory.extras), strict=True):
        if is_var(v) and v not in located:
            located[v] = Operand(x, None, span.start_in(part.joint.row_domain(v)))
    for v, (i, slots) in slots_together_of(part, values).items():
        located[v] = Operand(memory.states[i], rows.kids[:, np.array(slots)], span.start)
    return {v: located[v] for v in values if v in located and located[v].source.dtype == v.aval.dtype == jnp.float32}


def in_parts(parts: Mapping[Var, Sequence[Var]], located: Mapping[Var, Operand]) -> dict[Var, Operand]:
    """Returns the values whose parts are in `located`, if these have one shape and begin at the same row."""
    out = {}
    for v, components in parts.items():
        blocks = [located[x] for x in components]
        if all(x.index is None and x.start is blocks[0].start and x.source.shape == blocks[0].source.shape for x in blocks):
            out[v] = blocks[0]._replace(beside=tuple(x.source for x in blocks[1:]))
    return out


def split_rows(x: Operand, pieces: int) -> Operand | None:
    """Returns a matrix with each row split in `pieces` rows of equal width; `None` if one of its matrices had to be split."""
    if pieces == 1:
        return x
    if x.beside:
        return x._replace(start=x.start * pieces, fold=pieces) if len(x.sources) % pieces == 0 else None
    if x.index is None:
        return Operand(_cut(x.source, pieces), None, x.start * pieces)
    parts = x.index.shape[1]
    if parts % pieces == 0:
        return Operand(x.source, x.index.reshape(-1, parts // pieces), x.start * pieces)
    assert pieces % parts == 0
    more = pieces // parts  # rows of the source are split, too
    index = (x.index.reshape(-1, 1) * more + np.arange(more, dtype=np.int32)).reshape(-1, 1)
    return Operand(_cut(x.source, more), index, x.start * pieces)


def _cut(x: jax.Array, pieces: int) -> jax.Array:
    """Returns a matrix with each row cut into `pieces` rows; there may be no row."""
    return x.reshape(x.shape[0] * pieces, math.prod(x.shape[1:]) // pieces)
