"""The breadth-first order of K batches (Cavs Algorithm 1): a vertex's level is its height, so it is a counting sort."""

from typing import Any, NamedTuple

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._graphs.segments import LONG_RUNS, ranges


class Ragged(NamedTuple):
    """What follows from the arity where all inner vertices have as many children, and is written down where they have not."""

    num_children: np.ndarray  # (I,)
    first_edge: np.ndarray  # (I,) edges before those of each, within a batch and kind
    owner: np.ndarray  # (E,) the number of the inner vertex within its kind


class Order(NamedTuple):
    """Vertices and edges of K batches in the order in which they are run.

    Values count within a batch. Vertices "in order" are sorted by (batch, height, kind), leaves by (batch, kind), inner
    vertices by (batch, kind, height).
    """

    source: np.ndarray | slice  # (V,) of each vertex, in the order of the batches: where the graphs have it
    counts: np.ndarray  # (K, levels, kinds) vertices
    leaf_count: np.ndarray  # (K, kinds)
    inner_count: np.ndarray  # (K, kinds)
    vertices: np.ndarray  # (K,) vertices
    position: np.ndarray  # (V,) of each vertex in order
    leaf: np.ndarray  # (L,) leaves
    inner: np.ndarray  # (I,) inner vertices
    inner_start: np.ndarray  # (K, kinds) where those of a batch and kind begin
    edges_before: np.ndarray  # (I + 1,) edges before those of each, of all batches, and at last all
    fan_in: np.ndarray  # (K,) the most children of a vertex
    num_edges: np.ndarray  # (K, kinds)
    child: np.ndarray  # (E,) edges by inner vertex: the position of the child
    ragged: Ragged | None
    graph_end: np.ndarray  # (G,) vertices of each graph and those before it
    roots: np.ndarray  # (K,) vertices without parents
    root: np.ndarray  # (G,) the first of each graph
    rooted: np.ndarray  # (K,) bool: every graph has exactly one root


def order_of(
    graphs: Graphs, index: np.ndarray | None, batches: np.ndarray, kind: np.ndarray | None, num_kinds: int, source: Any
) -> Order:
    """The order of consecutive batches of `graphs[index]`; `batches` (K,) graphs of each, `kind` (V,) where there are
    `num_kinds` of them, `source` as `rows_of` has it."""
    facts, num_batches = graphs._facts, len(batches)
    every = slice(None) if index is None else index
    sizes = facts.sizes[every]
    vertex_offsets = np.zeros(len(sizes) + 1, np.int64)
    sizes.cumsum(out=vertex_offsets[1:])
    graph_end = batches.cumsum()
    graph_start = graph_end - batches
    vertex_start = vertex_offsets[graph_start]
    vertices = vertex_offsets[graph_end] - vertex_start
    num_vertices = int(vertex_offsets[-1])

    # 16-bit keys make numpy's stable sort a counting (radix) sort.
    height = take(graphs.height, source)
    levels = int(height.max(initial=0)) + 1
    num_keys = num_batches * levels * num_kinds
    key_type = np.uint16 if num_keys < 1 << 16 else np.int64
    key = height.astype(key_type)
    if num_batches > 1:
        key += np.arange(0, num_batches * levels, levels, dtype=key_type).repeat(vertices)
    if kind is not None:
        key = key * key_type(num_kinds) + kind.astype(key_type)
    order = np.argsort(key, kind="stable")
    if 16 * num_keys < num_vertices:  # where few levels begin is found sooner than many vertices are counted
        counts = np.diff(key.take(order).searchsorted(np.arange(num_keys + 1, dtype=key_type)))
    else:
        counts = np.bincount(key, minlength=num_keys)
    counts = counts.reshape(num_batches, levels, num_kinds)
    leaf_count = counts[:, 0]
    inner_count = np.array([counts[:, 1:, k].sum(1) for k in range(num_kinds)]).T  # a third of the time of all kinds at once
    num_leaves = leaf_count.sum(1)
    start = spread(vertex_start.astype(np.int32), vertices)
    number = np.arange(num_vertices, dtype=np.int32)
    number -= start
    position = np.empty(num_vertices, np.int32)
    position[order] = number
    vertex = order.astype(np.int32)
    vertex -= start

    # Inner vertices lie after the leaves of their batch; then by kind.
    end = vertex_start + vertices
    after_leaves = vertex_start + num_leaves
    leaf = cut(vertex, vertex_start, after_leaves)
    inner_order, inner = cut(order, after_leaves, end), cut(vertex, after_leaves, end)
    if kind is not None:
        inner_key = np.arange(0, num_batches * num_kinds, num_kinds).repeat(vertices - num_leaves) + kind[inner_order]
        by_kind = np.argsort(inner_key.astype(key_type), kind="stable")
        inner_order, inner = inner_order[by_kind], inner[by_kind]
    inner_start = inner_count.cumsum().reshape(inner_count.shape) - inner_count

    # Edges in the order of their owners.
    inner_source = inner_order if isinstance(source, slice) else source.take(inner_order)
    ragged = None
    if facts.arity:
        edges_before = np.arange(0, facts.arity * len(inner) + 1, facts.arity)
        child = np.empty((len(inner), facts.arity), np.int32)
        for k, back in enumerate(facts.back):
            child[:, k] = position.take(inner_order - back.take(inner_source))
        child = child.ravel()
    else:
        num_children = facts.num_children.take(inner_source)
        edges_before = np.zeros(len(inner) + 1, np.int64)
        num_children.cumsum(out=edges_before[1:])
        picked = (graphs.child_offsets.take(inner_source) - edges_before[:-1]).repeat(num_children)
        picked += np.arange(len(picked))
        child = position.take(inner_order.repeat(num_children) - facts.back.take(picked))
        of_kind = inner_count.ravel()
        owner = np.arange(len(inner), dtype=np.int32)
        owner -= inner_start.ravel().astype(np.int32).repeat(of_kind)
        owner = owner.repeat(num_children)
        first_edge = edges_before[:-1] - edges_before[inner_start].ravel().repeat(of_kind)
        ragged = Ragged(num_children, first_edge, owner)
    num_edges = edges_before[inner_start + inner_count] - edges_before[inner_start]

    whole = batches > 0
    fan_in, roots, one_root = (np.zeros(num_batches, np.int64) for _ in range(3))
    if whole.any():
        begin, of_graph = graph_start[whole], facts.roots[every]
        fan_in[whole] = np.maximum.reduceat(facts.fan_in[every], begin)
        roots[whole] = np.add.reduceat(of_graph, begin)
        one_root[whole] = np.add.reduceat(of_graph == 1, begin, dtype=np.int64)
    before = spread(vertex_start, batches)
    return Order(
        source=source,
        counts=counts,
        leaf_count=leaf_count,
        inner_count=inner_count,
        vertices=vertices,
        position=position,
        leaf=leaf,
        inner=inner,
        inner_start=inner_start,
        edges_before=edges_before,
        fan_in=fan_in,
        num_edges=num_edges,
        child=child,
        ragged=ragged,
        graph_end=vertex_offsets[1:] - before,
        roots=roots,
        root=facts.root[every] + vertex_offsets[:-1] - before,
        rooted=one_root == batches,
    )


def rows_of(graphs: Graphs, index: np.ndarray | None) -> np.ndarray | slice:
    """The rows of graphs `index`, which are in range, one after another; of all graphs, where it is None."""
    return slice(None) if index is None else ranges(graphs.vertex_offsets[index], graphs._facts.sizes[index])


def take(values: np.ndarray, source: np.ndarray | slice) -> np.ndarray:
    """`values[source]`, in two thirds of the time."""
    return values[source] if isinstance(source, slice) else values.take(source)


def cut(values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Parts of `values`, one after another."""
    if len(start) == 1:
        return values[start[0] : end[0]]
    if len(values) < LONG_RUNS * len(start):
        return values.take(ranges(start, end - start))
    return np.concatenate([values[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)])


def spread(values: np.ndarray, lengths: np.ndarray) -> Any:
    """`values[i]`, `lengths[i]` times; one number, where they are all the same."""
    return values[0] if len(values) == 1 or (len(values) and (values == values[0]).all()) else values.repeat(lengths)
