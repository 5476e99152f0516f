"""The breadth-first order of K batches (Cavs Algorithm 1): a vertex's level is its height, so it is a counting sort."""

from typing import NamedTuple

import numpy as np

from cavs._graphs import Graphs


class Order(NamedTuple):
    """Vertices and edges of K batches in the order in which they are run. Indices run through all batches."""

    counts: np.ndarray  # (K, levels, kinds) vertices
    leaf_count: np.ndarray  # (K, kinds)
    inner_count: np.ndarray  # (K, kinds)
    vertices: np.ndarray  # (K,) vertices
    vertex_start: np.ndarray  # (K,) the first of them
    position: np.ndarray  # (V,) of each vertex, by (batch, height, kind): the order of rows in the dynamic tensors
    leaf: np.ndarray  # (L,) leaves, by (batch, kind)
    inner: np.ndarray  # (I,) inner vertices, by (batch, kind, height)
    inner_start: np.ndarray  # (K, kinds) where those of a batch and kind begin
    num_children: np.ndarray  # (I,) of inner vertices
    edges_before: np.ndarray  # (I + 1,) edges before those of each
    fan_in: np.ndarray  # (K,) the most children of a vertex
    num_edges: np.ndarray  # (K, kinds)
    edge_start: np.ndarray  # (K, kinds)
    child: np.ndarray  # (E,) edges by inner vertex: their children
    graph: np.ndarray  # (V,)
    root: np.ndarray  # (R,) vertices without parents
    root_batch: np.ndarray  # (R,)
    rooted: np.ndarray  # (K,) bool: every graph has exactly one root


def order_of(graphs: Graphs, batches: np.ndarray, kind: np.ndarray | None, num_kinds: int) -> Order:
    """The order of consecutive batches; `batches` (K,) graphs of each, `kind` (V,) where there are `num_kinds` of them."""
    num_batches, num_vertices, num_graphs = len(batches), graphs.num_vertices, len(graphs)
    graph_end = batches.cumsum()
    vertex_start = graphs.vertex_offsets[graph_end - batches]
    vertices = graphs.vertex_offsets[graph_end] - vertex_start

    # 16-bit keys make numpy's stable sort a counting (radix) sort.
    levels = int(graphs.height.max(initial=0)) + 1
    num_keys = num_batches * levels * num_kinds
    key_type = np.uint16 if num_keys < 1 << 16 else np.int64
    key = graphs.height.astype(key_type)
    if num_batches > 1:
        key += np.arange(0, num_batches * levels, levels, dtype=key_type).repeat(vertices)
    if kind is not None:
        key = key * key_type(num_kinds) + kind.astype(key_type)
    order = np.argsort(key, kind="stable")
    position = np.empty(num_vertices, np.int64)
    position[order] = np.arange(num_vertices)
    counts = np.bincount(key, minlength=num_keys).reshape(num_batches, levels, num_kinds)
    leaf_count, inner_count = counts[:, 0], counts[:, 1:].sum(1)
    num_leaves, num_inner = leaf_count.sum(1), inner_count.sum(1)
    if num_batches == 1:
        leaf, inner = order[: num_leaves[0]], order[num_leaves[0] :]
    else:
        is_inner = (graphs.height > 0)[order]
        leaf, inner = order[~is_inner], order[is_inner]
    if kind is not None:
        inner_key = np.arange(0, num_batches * num_kinds, num_kinds).repeat(num_inner) + kind[inner]
        inner = inner[np.argsort(inner_key.astype(key_type), kind="stable")]
    inner_start = inner_count.cumsum().reshape(inner_count.shape) - inner_count

    # Edges in the order of their owners.
    num_children = graphs.child_offsets[inner + 1] - (first_edge := graphs.child_offsets[inner])
    edges_before = np.zeros(len(inner) + 1, np.int64)
    np.cumsum(num_children, out=edges_before[1:])
    edge_start = edges_before[inner_start]
    fan_in = np.zeros(num_batches, np.int64)
    if len(inner):
        some = num_inner > 0
        fan_in[some] = np.maximum.reduceat(num_children, (num_inner.cumsum() - num_inner)[some])
    picked = np.arange(graphs.num_edges) + (first_edge - edges_before[:-1]).repeat(num_children)
    graph_edge = graphs.child_offsets[graphs.vertex_offsets]
    child = (graphs.children + graphs.vertex_offsets[:-1].repeat(graph_edge[1:] - graph_edge[:-1]))[picked]

    # Roots.
    is_root = np.ones(num_vertices, bool)
    is_root[child] = False
    root = is_root.nonzero()[0]
    graph = np.arange(num_graphs).repeat(graphs.vertex_offsets[1:] - graphs.vertex_offsets[:-1])
    one_root = np.bincount(graph[root], minlength=num_graphs) == 1
    batch_of_graph = np.arange(num_batches).repeat(batches)
    return Order(
        counts=counts,
        leaf_count=leaf_count,
        inner_count=inner_count,
        vertices=vertices,
        vertex_start=vertex_start,
        position=position,
        leaf=leaf,
        inner=inner,
        inner_start=inner_start,
        num_children=num_children,
        edges_before=edges_before,
        fan_in=fan_in,
        num_edges=edges_before[inner_start + inner_count] - edge_start,
        edge_start=edge_start,
        child=child,
        graph=graph,
        root=root,
        root_batch=batch_of_graph[graph[root]],
        rooted=np.bincount(batch_of_graph, one_root, minlength=num_batches) == batches,
    )
