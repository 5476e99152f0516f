"""Graphs from what a program already holds: lengths of sequences, parents, edges."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from cavs._graphs.checks import are_ids, array_of, check_type, checked_fields, checked_sizes, integers, vertex_at
from cavs._graphs.counted import counted
from cavs._graphs.flat import children_of_parents, offsets
from cavs._graphs.graphs import Graphs

# (V,) integers over all graphs, or one array per graph.
Ids: TypeAlias = ArrayLike | Sequence[ArrayLike] | None


def from_lengths(lengths: ArrayLike, *, input_id: Ids = None, label: Ids = None, **fields: Any) -> Graphs:
    """Creates sequences: graph g is a chain of `lengths[g]` vertices, and the one child of vertex t is vertex t - 1.

    Args:
        lengths: int[G], at least 1 each.
        input_id: int[V] over all graphs, or a list of one array per graph.
        label: as `input_id`.
        **fields: `kind`, `vocab`, `kind_names`, `label_names`, `graph_label`, `x`, as in `Graphs.build`.

    Returns:
        The graphs.

    Raises:
        ValueError: a length is below 1, or an array does not fit the lengths.
        TypeError: an argument is unknown.
    """
    lengths = checked_sizes("from_lengths: lengths", lengths)
    starts = np.cumsum(lengths) - lengths
    num_children = np.ones(lengths.sum(), np.int64)
    num_children[starts] = 0
    # The position in the chain is also the height, which need not be computed.
    position = (np.arange(len(num_children)) - np.repeat(starts, lengths)).astype(np.int32)
    vertex_offsets, children = offsets(lengths), position[num_children > 0] - 1
    flat = _flat_fields("from_lengths", lengths, fields | {"input_id": input_id, "label": label})
    checked = checked_fields(vertex_offsets, len(children), flat)
    return Graphs(vertex_offsets, offsets(num_children), children, position, **checked)


def from_parents(parents: Sequence[ArrayLike], *, input_id: Ids = None, label: Ids = None, **fields: Any) -> Graphs:
    """Creates trees and forests: `parents[g][v]` is the parent of vertex v of graph g, or -1 if v is a root.

    Parents may be numbered before or after their children. The children of a vertex are ordered by vertex number.

    Args:
        parents: a list of one array per graph, each (n,) integers with n >= 1.
        input_id: int[V] over all graphs, or a list of one array per graph.
        label: as `input_id`.
        **fields: `kind`, `vocab`, `kind_names`, `label_names`, `graph_label`, `x`, as in `Graphs.build`.

    Returns:
        The graphs.

    Raises:
        ValueError: a parent is out of range, a graph is empty or has a cycle, or an array does not fit. The message names
            the graph and the vertex.
        TypeError: an argument is unknown.
    """
    arrays = _per_graph("from_parents: parents", parents, " Write from_parents([parents]) for one graph.")
    num_vertices = np.array([len(a) for a in arrays], np.int64)
    if (num_vertices == 0).any():
        g = int(np.argmin(num_vertices))
        raise ValueError(f"from_parents: parents[{g}]: got no vertex; expected at least one, such as [-1].")
    flat = np.concatenate([np.zeros(0, np.int64), *arrays])
    limit = np.repeat(num_vertices, num_vertices)
    bad = (flat < -1) | (flat >= limit)
    if bad.any():
        g, v = vertex_at(offsets(num_vertices), int(np.argmax(bad)))
        raise ValueError(
            f"from_parents: parents[{g}][{v}]: got {arrays[g][v]}; expected -1 (a root) or a vertex of graph {g}, "
            f"0 to {num_vertices[g] - 1}."
        )
    base = offsets(num_vertices)[:-1].repeat(num_vertices)
    num_children, children = children_of_parents(num_vertices, np.where(flat < 0, -1, flat + base))
    flat_fields = _flat_fields("from_parents", num_vertices, fields | {"input_id": input_id, "label": label})
    return Graphs.build(num_vertices, num_children, children, **flat_fields)


def from_edges(
    num_vertices: int | ArrayLike,
    edges: ArrayLike | Sequence[ArrayLike],
    *,
    input_id: Ids = None,
    label: Ids = None,
    edge_attr: ArrayLike | None = None,
    **fields: Any,
) -> Graphs:
    """Creates any graphs from pairs (parent, child). The parent gathers the child's state: messages flow child -> parent.

    The children of a vertex are in the order of its edges. PyTorch Geometric and DGL write (source, target) for a message
    source -> target, so the source is the child: use [`cavs.interop.from_edge_index`][] for their edge arrays.

    Args:
        num_vertices: an int for one graph, or int[G], the number of vertices of each graph.
        edges: one of

            - int[E, 2], if `num_vertices` is an int;
            - a list of G arrays (E_g, 2), with vertices numbered within each graph;
            - one array (E, 2), with vertices numbered through all graphs. Both ends of an edge lie in one graph.
        input_id: int[V] over all graphs, or a list of one array per graph.
        label: as `input_id`.
        edge_attr: num[E, ...], a row for each edge in the order of `edges`; `Graphs.edge_attr` has the order of the
            children.
        **fields: `kind`, `vocab`, `kind_names`, `label_names`, `graph_label`, `x`, as in `Graphs.build`.

    Returns:
        The graphs.

    Raises:
        ValueError: an end of an edge is out of range, a graph is empty or has a cycle, or an array has another shape. The
            message names the edge, or the graph and the vertex.
        TypeError: an argument is unknown.
    """
    fields |= {"input_id": input_id, "label": label, "edge_attr": edge_attr}
    return edges_to_graphs(num_vertices, edges, fields, EdgeArguments("from_edges", "num_vertices", "edges", "edges[{}]"))


class EdgeArguments(NamedTuple):
    """How error messages name a converter that calls `edges_to_graphs`, and its arguments."""

    function: str
    sizes: str
    edges: str
    edge: str  # a format string for the number of an edge
    child_first: bool = False  # the caller's pairs are (child, parent)


def edges_to_graphs(
    num_vertices: int | ArrayLike, edges: ArrayLike | Sequence[ArrayLike], fields: dict[str, Any], names: EdgeArguments
) -> Graphs:
    """`from_edges`, whose error messages use the caller's `names`. `edges` are pairs (parent, child)."""
    single = np.ndim(num_vertices) == 0
    sizes = checked_sizes(f"{names.function}: {names.sizes}", np.atleast_1d(num_vertices) if single else num_vertices)
    through_all = single or hasattr(edges, "__array__")
    pairs = (_edges_through_all_graphs if through_all else _edges_within_graphs)(edges, sizes, names)
    parent, child = pairs.T
    order = np.argsort(parent, kind="stable")
    fields = dict(fields)
    edge_attr = fields.pop("edge_attr")
    if edge_attr is not None:
        edge_attr = array_of(f"{names.function}: edge_attr", edge_attr)
        if edge_attr.shape[:1] != parent.shape:
            raise ValueError(
                f"{names.function}: edge_attr: got shape {edge_attr.shape}; expected ({len(parent)}, ...), one row per edge, "
                f"in the order of {names.edges}."
            )
        edge_attr = edge_attr[order]
    first_rows = (np.cumsum(sizes) - sizes).repeat(sizes)
    num_children = np.bincount(parent, minlength=sizes.sum())
    flat_fields = _flat_fields(names.function, sizes, fields)
    return Graphs.build(sizes, num_children, (child - first_rows[parent])[order], edge_attr=edge_attr, **flat_fields)


def _edges_through_all_graphs(edges: ArrayLike | Sequence[ArrayLike], sizes: np.ndarray, names: EdgeArguments) -> np.ndarray:
    """Validates edges (E, 2) whose vertices are numbered through all graphs."""
    pairs = _pairs(f"{names.function}: {names.edges}", edges)

    def got(e: int) -> str:
        pair = pairs[e, ::-1] if names.child_first else pairs[e]
        return f"{names.function}: {names.edge.format(e)}: got {tuple(pair.tolist())}"

    bad = (pairs < 0) | (pairs >= sizes.sum())
    if bad.any():
        raise ValueError(f"{got(int(np.argmax(bad.any(1))))}; expected vertices 0 to {sizes.sum() - 1}.")
    graph = np.arange(len(sizes)).repeat(sizes)[pairs]
    across = graph[:, 0] != graph[:, 1]
    if across.any():
        e = int(np.argmax(across))
        a, b = graph[e, ::-1] if names.child_first else graph[e]
        hint = "" if names.child_first else " Write a list of arrays if vertices are numbered within each graph."
        raise ValueError(f"{got(e)}, from graph {a} to graph {b}; expected both ends in one graph.{hint}")
    return pairs


def _edges_within_graphs(edges: ArrayLike | Sequence[ArrayLike], sizes: np.ndarray, names: EdgeArguments) -> np.ndarray:
    """Validates one array of edges per graph, and numbers their vertices (E, 2) through all graphs."""
    listed: Any = edges
    check_type(f"{names.function}: {names.edges}", listed, Iterable, "a list of arrays (E, 2), one per graph")
    arrays = [_pairs(f"{names.function}: {names.edges}[{g}]", array) for g, array in enumerate(listed)]
    if len(arrays) != len(sizes):
        raise ValueError(
            f"{names.function}: {names.edges}: got {counted(len(arrays), 'array')}; expected {len(sizes)}, one per graph."
        )
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *arrays])
    counts = np.array([len(a) for a in arrays], np.int64)
    graph = np.arange(len(sizes)).repeat(counts)
    bad = ((pairs < 0) | (pairs >= sizes[graph][:, None])).any(1)
    if bad.any():
        row = int(np.argmax(bad))
        g, e = vertex_at(offsets(counts), row)
        raise ValueError(
            f"{names.function}: {names.edges}[{g}][{e}]: got {tuple(pairs[row].tolist())}; "
            f"expected vertices of graph {g}, 0 to {sizes[g] - 1}."
        )
    return pairs + (np.cumsum(sizes) - sizes)[graph][:, None]


def _pairs(name: str, value: ArrayLike | Sequence[ArrayLike]) -> np.ndarray:
    array = array_of(name, value)
    if not array.size and array.shape in ((0,), (0, 2)):
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or not np.issubdtype(array.dtype, np.integer):
        hint = " Write the transpose." if array.ndim == 2 and array.shape[0] == 2 else ""
        raise ValueError(
            f"{name}: got dtype {array.dtype} and shape {array.shape}; expected integers (E, 2), a pair (parent, child) "
            f"per row.{hint}"
        )
    return array.astype(np.int64)


def _per_graph(name: str, value: Sequence[ArrayLike], hint: str = "") -> list[np.ndarray]:
    if not isinstance(value, Iterable):
        raise ValueError(f"{name}: got a {type(value).__name__}; expected a list of arrays, one per graph.{hint}")
    arrays = list(value)
    if arrays and array_of(f"{name}[0]", arrays[0]).ndim == 0:
        raise ValueError(f"{name}: got one array of integers; expected a list of arrays, one per graph.{hint}")
    return [integers(f"{name}[{g}]", a) for g, a in enumerate(arrays)]


def _flat_fields(function: str, num_vertices: np.ndarray, fields: dict[str, Any]) -> dict[str, Any]:
    """The optional arguments of `Graphs.build`. Concatenates ids that are a list of one array per graph."""
    known = ("kind", "label", "input_id", "kind_names", "label_names", "vocab", "graph_label", "x")
    if unknown := [field for field in fields if field not in known]:
        raise TypeError(f"{function}: got unknown argument {unknown[0]!r}; expected one of {', '.join(known)}.")
    out = dict(fields)
    for field in known[:3]:
        value = fields.get(field)
        if not (isinstance(value, (list, tuple)) and len(value)):
            continue
        first = array_of(f"{function}: {field}[0]", value[0])
        if first.ndim != 1 or not are_ids(first):
            continue
        arrays = _per_graph(f"{function}: {field}", value)
        if len(arrays) != len(num_vertices):
            raise ValueError(
                f"{function}: {field}: got {counted(len(arrays), 'array')}; expected {len(num_vertices)}, one per graph."
            )
        for g, (array, n) in enumerate(zip(arrays, num_vertices.tolist(), strict=True)):
            if len(array) != n:
                raise ValueError(f"{function}: {field}[{g}]: got {counted(len(array), 'value')}; expected {n}, one per vertex.")
        out[field] = np.concatenate(arrays)
    return out
