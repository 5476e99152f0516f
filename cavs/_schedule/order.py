"""The breadth-first order of K batches (Cavs, Algorithm 1). The level of a vertex is its height: this is a counting sort."""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from cavs._graphs.facts import Facts
from cavs._graphs.graphs import Graphs
from cavs._graphs.segments import LONG_RUNS, ranges


class Ragged(NamedTuple):
    """Arrays that a schedule stores only if inner vertices have different numbers of children."""

    num_children: np.ndarray  # (I,)
    first_edge: np.ndarray  # (I,) first edge, within a batch and kind
    owner: np.ndarray  # (E,) the inner vertex, within its kind


class Order(NamedTuple):
    """Vertices and edges of K batches in the order in which they are run.

    Values count within a batch. Vertices are sorted by (batch, height, kind), leaves by (batch, kind), inner vertices by
    (batch, kind, height).
    """

    source: np.ndarray | slice  # (V,) row of each vertex in the graphs
    counts: np.ndarray  # (K, levels, kinds) number of vertices
    leaf_count: np.ndarray  # (K, kinds)
    inner_count: np.ndarray  # (K, kinds)
    vertices: np.ndarray  # (K,) number of vertices
    position: np.ndarray  # (V,) position of each vertex among the sorted vertices
    leaf: np.ndarray  # (L,) leaves
    inner: np.ndarray  # (I,) inner vertices
    inner_start: np.ndarray  # (K, kinds) where the inner vertices of each batch and kind begin
    edges_before: np.ndarray  # (I + 1,) number of edges before each inner vertex, through all batches; and of all edges
    fan_in: np.ndarray  # (K,) the largest number of children of a vertex
    num_edges: np.ndarray  # (K, kinds)
    child: np.ndarray  # (E,) position of the child, sorted by inner vertex
    ragged: Ragged | None
    graph_end: np.ndarray  # (G,) number of vertices of each graph and those before it
    roots: np.ndarray  # (K,) number of vertices without parents
    root: np.ndarray  # (G,) the first vertex without parents of each graph
    rooted: np.ndarray  # (K,) bool: every graph has exactly one root

    @property
    def forest(self) -> np.ndarray:
        """(K,) bool: no vertex has two parents."""
        return self.vertices - self.roots == self.num_edges.sum(1)


def order_of(
    graphs: Graphs,
    index: np.ndarray | None,
    batches: np.ndarray,
    kind: np.ndarray | None,
    num_kinds: int,
    source: np.ndarray | slice,
) -> Order:
    """Sorts the vertices and edges of K consecutive batches of `graphs[index]`.

    Args:
        graphs: the data set.
        index: the graphs of all batches, one batch after another; all graphs if `None`.
        batches: (K,) number of graphs of each batch.
        kind: (V,) kinds of the batches' vertices, or `None` if there is one kind.
        num_kinds: number of kinds.
        source: the rows of the batches' vertices in `graphs`; see `rows_of`.
    """
    facts, every = graphs._facts, slice(None) if index is None else index
    sizes = facts.sizes[every]
    vertex_offsets = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=vertex_offsets[1:])
    graph_end = batches.cumsum()
    graph_start = graph_end - batches
    vertex_start = vertex_offsets[graph_start]
    vertices = vertex_offsets[graph_end] - vertex_start
    order, counts = _sort(take(graphs.height, source), vertices, kind, num_kinds)
    leaf_count = counts[:, 0]
    inner_count = np.array([counts[:, 1:, k].sum(1) for k in range(num_kinds)]).T  # 3 times as fast as all kinds at once
    start = spread(vertex_start.astype(np.int32), vertices)
    number = np.arange(len(order), dtype=np.int32)
    number -= start
    position = np.empty(len(order), np.int32)
    position[order] = number
    vertex = order.astype(np.int32)
    vertex -= start

    # Inner vertices follow the leaves of their batch, and are then sorted by kind.
    end, after_leaves = vertex_start + vertices, vertex_start + leaf_count.sum(1)
    inner_order, inner = cut(order, after_leaves, end), cut(vertex, after_leaves, end)
    if kind is not None:
        inner_key = np.arange(0, len(batches) * num_kinds, num_kinds).repeat(end - after_leaves) + kind[inner_order]
        by_kind = np.argsort(inner_key.astype(_key_type(len(batches) * num_kinds)), kind="stable")
        inner_order, inner = inner_order[by_kind], inner[by_kind]
    inner_start = inner_count.cumsum().reshape(inner_count.shape) - inner_count
    edges_before, child, ragged = _edges(graphs, source, inner_order, position, inner_start, inner_count)
    fan_in, roots, rooted = _per_batch(facts, every, batches, graph_start)
    before = spread(vertex_start, batches)
    return Order(
        source=source,
        counts=counts,
        leaf_count=leaf_count,
        inner_count=inner_count,
        vertices=vertices,
        position=position,
        leaf=cut(vertex, vertex_start, after_leaves),
        inner=inner,
        inner_start=inner_start,
        edges_before=edges_before,
        fan_in=fan_in,
        num_edges=edges_before[inner_start + inner_count] - edges_before[inner_start],
        child=child,
        ragged=ragged,
        graph_end=vertex_offsets[1:] - before,
        roots=roots,
        root=facts.root[every] + vertex_offsets[:-1] - before,
        rooted=rooted,
    )


def _key_type(num_keys: int) -> DTypeLike:
    # NumPy's stable sort of 16-bit keys is a counting (radix) sort.
    return np.uint16 if num_keys < 1 << 16 else np.int64


def _sort(height: np.ndarray, vertices: np.ndarray, kind: np.ndarray | None, num_kinds: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts vertices by (batch, height, kind). Returns their order (V,) and their counts (K, levels, kinds)."""
    num_batches, levels = len(vertices), int(height.max(initial=0)) + 1
    num_keys = num_batches * levels * num_kinds
    key_type = np.dtype(_key_type(num_keys)).type
    key = height.astype(key_type)
    if num_batches > 1:
        key += np.arange(0, num_batches * levels, levels, dtype=key_type).repeat(vertices)
    if kind is not None:
        key = key * key_type(num_kinds) + kind.astype(key_type)
    order = np.argsort(key, kind="stable")
    if 16 * num_keys < len(height):  # to search where few levels begin is faster than to count many vertices
        counts = np.diff(key.take(order).searchsorted(np.arange(num_keys + 1, dtype=key_type)))
    else:
        counts = np.bincount(key, minlength=num_keys)
    return order, counts.reshape(num_batches, levels, num_kinds)


def _edges(
    graphs: Graphs,
    source: np.ndarray | slice,
    inner_order: np.ndarray,
    position: np.ndarray,
    inner_start: np.ndarray,
    inner_count: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, Ragged | None]:
    """Returns `edges_before`, `child` and `ragged` of `Order`: the edges sorted by their inner vertices, `inner_order` (I,)."""
    facts = graphs._facts
    inner_source = inner_order if isinstance(source, slice) else source.take(inner_order)
    if facts.arity:
        edges_before = np.arange(0, facts.arity * len(inner_order) + 1, facts.arity)
        child = np.empty((len(inner_order), facts.arity), np.int32)
        for k, back in enumerate(facts.back):
            child[:, k] = position.take(inner_order - back.take(inner_source))
        return edges_before, child.ravel(), None
    num_children = facts.num_children.take(inner_source)
    edges_before = np.zeros(len(inner_order) + 1, np.int64)
    num_children.cumsum(out=edges_before[1:])
    picked = (graphs.child_offsets.take(inner_source) - edges_before[:-1]).repeat(num_children)
    picked += np.arange(len(picked))
    child = position.take(inner_order.repeat(num_children) - facts.back.take(picked))
    of_kind = inner_count.ravel()
    owner = np.arange(len(inner_order), dtype=np.int32)
    owner -= inner_start.ravel().astype(np.int32).repeat(of_kind)
    owner = owner.repeat(num_children)
    first_edge = edges_before[:-1] - edges_before[inner_start].ravel().repeat(of_kind)
    return edges_before, child, Ragged(num_children, first_edge, owner)


def _per_batch(
    facts: Facts, every: np.ndarray | slice, batches: np.ndarray, graph_start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `fan_in`, `roots` and `rooted` of `Order`: (K,) facts about the graphs `every` of K batches."""
    not_empty = batches > 0
    fan_in, roots, one_root = (np.zeros(len(batches), np.int64) for _ in range(3))
    if not_empty.any():
        begin, of_graph = graph_start[not_empty], facts.roots[every]
        fan_in[not_empty] = np.maximum.reduceat(facts.fan_in[every], begin)
        roots[not_empty] = np.add.reduceat(of_graph, begin)
        one_root[not_empty] = np.add.reduceat(of_graph == 1, begin, dtype=np.int64)
    return fan_in, roots, one_root == batches


def rows_of(graphs: Graphs, index: np.ndarray | None) -> np.ndarray | slice:
    """The rows of the vertices of graphs `index`, concatenated; of all graphs if it is `None`."""
    return slice(None) if index is None else ranges(graphs.vertex_offsets[index], graphs._facts.sizes[index])


def take(values: np.ndarray, source: np.ndarray | slice) -> np.ndarray:
    """`values[source]`, which takes 1.5 times as long."""
    return values[source] if isinstance(source, slice) else values.take(source)


def cut(values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The slices `values[start[i] : end[i]]`, concatenated."""
    if len(start) == 1:
        return values[start[0] : end[0]]
    if len(values) < LONG_RUNS * len(start):
        return values.take(ranges(start, end - start))
    return np.concatenate([values[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)])


def spread(values: np.ndarray, lengths: np.ndarray) -> np.ndarray | np.integer:
    """`values.repeat(lengths)`, or a scalar if all values are the same."""
    return values[0] if len(values) == 1 or (len(values) and (values == values[0]).all()) else values.repeat(lengths)
