"""Graphs from what a program already holds: lengths, parents, edges, networkx graphs; and back to networkx."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cavs._graphs.flat import children_of_parents, ids_and_names, value_type
from cavs._graphs.graphs import Graphs
from cavs._graphs.heights import offsets
from cavs._graphs.integers import check_total, integers

if TYPE_CHECKING:
    import networkx

_MSG_NETWORKX = "{}: networkx is not installed; wanted it for this converter alone. Write: pip install networkx"


def from_lengths(lengths: Sequence[int] | np.ndarray, *, input_id: Any = None, label: Any = None, **fields: Any) -> Graphs:
    """Sequences: graph g is a chain of `lengths[g]` vertices, in which vertex t has the one child t - 1.

    **Arguments:** `lengths` (G,), at least 1 each. `input_id` and `label` (V,) integers, flat over all graphs or a list
    of one array a graph; `kind`, `vocab`, `kind_names`, `label_names` may follow, as in `Graphs.build`.

    **Raises:** `ValueError` for a length under 1 or an array of another length.
    """
    lengths = integers("from_lengths: lengths", lengths)
    if (lengths < 1).any():
        g = int(np.argmax(lengths < 1))
        raise ValueError(f"from_lengths: lengths[{g}] is {lengths[g]}, wanted at least 1: a graph has a vertex.")
    check_total("from_lengths: lengths", lengths)
    starts = np.cumsum(lengths) - lengths
    num_children = np.ones(lengths.sum(), np.int64)
    num_children[starts] = 0
    # Also the height of each vertex: it need not be found.
    position = (np.arange(len(num_children)) - np.repeat(starts, lengths)).astype(np.int32)
    fields = _fields("from_lengths", lengths, fields | {"input_id": input_id, "label": label})
    return Graphs._of(offsets(lengths), offsets(num_children), position[num_children > 0] - 1, position, fields)


def from_parents(
    parents: Sequence[Sequence[int] | np.ndarray], *, input_id: Any = None, label: Any = None, **fields: Any
) -> Graphs:
    """Trees and forests: `parents[g][v]` is the parent of vertex v within graph g, or -1 where v is a root.

    A vertex's children are ordered by their numbers. The numbering is free: parents before or after their children.

    **Arguments:** `parents` is a list of one array a graph, each of (n,) integers, n >= 1. `input_id` and `label` (V,)
    integers, flat over all graphs or a list of one array a graph; `kind`, `vocab`, `kind_names`, `label_names` may
    follow, as in `Graphs.build`.

    **Raises:** `ValueError` that names graph and vertex for a parent out of range or a cycle, and for an array of another
    length.
    """
    arrays = _per_graph("from_parents: parents", parents, "from_parents([parents])")
    num_vertices = np.array([len(a) for a in arrays], np.int64)
    flat = _concatenate(arrays)
    limit = np.repeat(num_vertices, num_vertices)
    bad = (flat < -1) | (flat >= limit)
    if bad.any():
        g, v = _place(num_vertices, int(np.argmax(bad)))
        raise ValueError(
            f"from_parents: parents[{g}][{v}] is {arrays[g][v]}, wanted -1 (a root) or a vertex of graph {g}, "
            f"0 to {num_vertices[g] - 1}."
        )
    base = np.repeat(np.cumsum(num_vertices) - num_vertices, num_vertices)
    num_children, children = children_of_parents(num_vertices, np.where(flat < 0, -1, flat + base))
    fields = _fields("from_parents", num_vertices, fields | {"input_id": input_id, "label": label})
    return Graphs.build(num_vertices, num_children, children, **fields)


def from_edges(
    num_vertices: int | Sequence[int] | np.ndarray,
    edges: Any,
    *,
    input_id: Any = None,
    label: Any = None,
    **fields: Any,
) -> Graphs:
    """Any graphs, from pairs (parent, child): the parent gathers the child's state, so messages flow child -> parent.

    A vertex's children are ordered as its edges are. PyTorch Geometric and DGL write (source, target) for a message
    source -> target: there the source is the child. Of a PyG `edge_index` (2, E) make
    `from_edges(n, edge_index.T[:, ::-1])`.

    **Arguments:** one of

    - `num_vertices` an int, `edges` (E, 2) integers: one graph;
    - `num_vertices` (G,), `edges` a list of G arrays (E_g, 2): vertices numbered within each graph;
    - `num_vertices` (G,), `edges` one numpy array (E, 2): vertices numbered as flat rows through all graphs, as PyG
      batches do; both ends of an edge lie in one graph.

    `input_id` and `label` (V,) integers, flat over all graphs or a list of one array a graph; `kind`, `vocab`,
    `kind_names`, `label_names` may follow, as in `Graphs.build`.

    **Raises:** `ValueError` that names the edge for an end out of range; one that names graph and vertex for a cycle; for
    arrays of another shape.
    """
    single = isinstance(num_vertices, (int, np.integer))
    sizes = integers("from_edges: num_vertices", [num_vertices] if single else num_vertices)
    if (sizes < 1).any():
        g = int(np.argmax(sizes < 1))
        raise ValueError(f"from_edges: graph {g} has {sizes[g]} vertices, wanted at least 1.")
    check_total("from_edges: num_vertices", sizes)
    starts = np.cumsum(sizes) - sizes
    if single or isinstance(edges, np.ndarray):
        flat = _pairs("from_edges: edges", edges)
        bad = (flat < 0) | (flat >= sizes.sum())
        if bad.any():
            e = int(np.argmax(bad.any(1)))
            raise ValueError(f"from_edges: edges[{e}] is {tuple(flat[e].tolist())}, wanted vertices 0 to {sizes.sum() - 1}.")
        graph = np.searchsorted(starts, flat, side="right") - 1
        if (graph[:, 0] != graph[:, 1]).any():
            e = int(np.argmax(graph[:, 0] != graph[:, 1]))
            raise ValueError(
                f"from_edges: edges[{e}] is {tuple(flat[e].tolist())}, from graph {graph[e, 0]} to graph {graph[e, 1]}; "
                "wanted both ends in one graph. For vertices numbered within each graph pass a list of arrays."
            )
    else:
        arrays = [_pairs(f"from_edges: edges[{g}]", one) for g, one in enumerate(edges)]
        if len(arrays) != len(sizes):
            raise ValueError(f"from_edges: edges has {len(arrays)} arrays, wanted {len(sizes)}: one a graph.")
        flat = np.concatenate([np.zeros((0, 2), np.int64), *arrays])
        graph = np.repeat(np.arange(len(sizes)), [len(a) for a in arrays])
        bad = ((flat < 0) | (flat >= sizes[graph][:, None])).any(1)
        if bad.any():
            row = int(np.argmax(bad))
            g, e = _place(np.array([len(a) for a in arrays]), row)
            raise ValueError(
                f"from_edges: edges[{g}][{e}] is {tuple(flat[row].tolist())}, "
                f"wanted vertices of graph {g}, 0 to {sizes[g] - 1}."
            )
        flat = flat + starts[graph][:, None]
        graph = np.stack([graph, graph], axis=1)
    parent, child = flat[:, 0], flat[:, 1] - starts[graph[:, 1]]
    order = np.argsort(parent, kind="stable")
    fields = _fields("from_edges", sizes, fields | {"input_id": input_id, "label": label})
    return Graphs.build(sizes, np.bincount(parent, minlength=sizes.sum()), child[order], **fields)


def from_networkx(
    graphs: "networkx.DiGraph | Iterable[networkx.DiGraph]", *, kind: str = "kind", label: str = "label", input: str = "input"
) -> Graphs:
    """Graphs from one networkx directed graph or several.

    An edge u -> v says that v depends on u: u is a child of v, and messages flow along the arrow, as networkx draws a
    DAG. Vertices are numbered in the order of the graph's nodes. A vertex's children are ordered by the edges' attribute
    "order" (numbers; on all edges into the vertex or on none), otherwise as the edges were added; parallel edges of a
    `MultiDiGraph` stand together unless "order" says otherwise.

    **Arguments:** `kind`, `label`, `input` name the node attributes that are read: all integers >= 0, or all str, which
    are numbered by first appearance in `kind_names`, `label_names`, `vocab`. A node without the attribute (or with
    `None`) has label or input -1; `kind` is on all nodes or on none. An attribute that no node has gives `None`.

    **Raises:** `ValueError` for undirected graphs, mixed attributes, graphs without a node, a cycle; `ImportError` where
    networkx is not installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise ImportError(_MSG_NETWORKX.format("from_networkx")) from error
    all_graphs = [graphs] if isinstance(graphs, networkx.Graph) else list(graphs)
    sizes: list[int] = []
    num_children: list[int] = []
    children: list[int] = []
    values: dict[str, list[Any]] = {"kind": [], "label": [], "input_id": []}
    for g, graph in enumerate(all_graphs):
        if not isinstance(graph, networkx.DiGraph):
            raise ValueError(
                f"from_networkx: graph {g} is a {type(graph).__name__}, wanted a networkx DiGraph or MultiDiGraph."
            )
        number = {node: i for i, node in enumerate(graph)}
        sizes.append(len(number))
        kids: list[list[tuple[Any, int]]] = [[] for _ in number]
        for u, v, order in graph.in_edges(data="order"):
            kids[number[v]].append((order, number[u]))
        for node, own in zip(graph, kids, strict=True):
            ordered = [order is not None for order, _ in own]
            if any(ordered):
                numeric = all(isinstance(order, (int, float, np.integer, np.floating)) for order, _ in own)
                if not numeric:
                    raise ValueError(
                        f"from_networkx: of the edges into node {node!r} of graph {g} {sum(ordered)} of {len(own)} have an "
                        "attribute 'order'; wanted numbers on all of them or on none."
                    )
                own.sort(key=lambda pair: pair[0])
            num_children.append(len(own))
            children.extend(child for _, child in own)
        for ids, attribute in (("kind", kind), ("label", label), ("input_id", input)):
            values[ids].extend(data for _, data in graph.nodes(data=attribute))
    fields: dict[str, Any] = {}
    for ids, attribute, names in (("kind", kind, "kind_names"), ("label", label, "label_names"), ("input_id", input, "vocab")):
        given = [value.item() if isinstance(value, np.integer) else value for value in values[ids]]
        if all(value is None for value in given):
            continue
        found = value_type(given, optional=ids != "kind")
        if isinstance(found, str):
            wanted = "on every node, " if ids == "kind" else ""
            raise ValueError(f"from_networkx: {ids}={attribute!r}: got {found}, wanted {wanted}all int >= 0 or all str.")
        fields[ids], fields[names] = ids_and_names(given)
    return Graphs.build(sizes, num_children, children, **fields)


def to_networkx(graphs: Graphs) -> "list[networkx.DiGraph]":
    """One networkx graph a graph; the inverse of `from_networkx`.

    Nodes are 0, 1, ... with attributes "kind", "label", "input": the name where there are names, else the integer, and
    none where the id is -1. An edge leads from a child to its parent, its attribute "order" is the place among the
    parent's children. A graph in which a vertex has the same child twice becomes a `MultiDiGraph`.

    **Raises:** `ImportError` where networkx is not installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise ImportError(_MSG_NETWORKX.format("to_networkx")) from error
    counts = np.diff(graphs.child_offsets)
    owner = np.repeat(np.arange(graphs.num_vertices), counts)
    order = (np.arange(graphs.num_edges) - graphs.child_offsets[owner]).tolist()
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    parents, children = (owner - base[owner]).tolist(), graphs.children.tolist()
    attributes = []
    for attribute, ids, names in (
        ("kind", graphs.kind, graphs.kind_names),
        ("label", graphs.label, graphs.label_names),
        ("input", graphs.input_id, graphs.vocab),
    ):
        if ids is not None:
            attributes.append((attribute, ids.tolist(), names))
    out = []
    for start, stop in pairwise(graphs.vertex_offsets.tolist()):
        first, last = int(graphs.child_offsets[start]), int(graphs.child_offsets[stop])
        pairs = list(zip(children[first:last], parents[first:last], strict=True))
        graph = networkx.DiGraph() if len(set(pairs)) == len(pairs) else networkx.MultiDiGraph()
        for row in range(start, stop):
            own = {a: ids[row] if names is None else names[ids[row]] for a, ids, names in attributes if ids[row] >= 0}
            graph.add_node(row - start, **own)
        for (child, parent), place in zip(pairs, order[first:last], strict=True):
            graph.add_edge(child, parent, order=place)
        out.append(graph)
    return out


def _pairs(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if not array.size and array.shape in ((0,), (0, 2)):
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or not np.issubdtype(array.dtype, np.integer):
        hint = " Pass the transpose?" if array.ndim == 2 and array.shape[0] == 2 else ""
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}, wanted integers (E, 2): (parent, child) a row.{hint}"
        )
    return array.astype(np.int64)


def _per_graph(name: str, value: Any, single: str) -> list[np.ndarray]:
    arrays = list(value)
    if arrays and np.ndim(arrays[0]) == 0:
        raise ValueError(f"{name} is one array of integers, wanted a list of arrays, one a graph. For one graph: {single}.")
    return [integers(f"{name}[{g}]", a) for g, a in enumerate(arrays)]


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _place(sizes: np.ndarray, row: int) -> tuple[int, int]:
    """Group and place within the group of a flat row."""
    ends = np.cumsum(sizes)
    group = int(np.searchsorted(ends, row, side="right"))
    return group, int(row - ends[group] + sizes[group])


def _fields(name: str, num_vertices: np.ndarray, fields: dict[str, Any]) -> dict[str, Any]:
    """The optional arguments of `Graphs.build`; ids given as a list of one array a graph become flat."""
    known = ("kind", "label", "input_id", "kind_names", "label_names", "vocab")
    out = {}
    for field, value in fields.items():
        if field not in known:
            raise TypeError(f"{name}: unknown argument {field!r}, wanted one of {', '.join(known)}.")
        if field in known[:3] and isinstance(value, (list, tuple)) and len(value) and np.ndim(value[0]) == 1:
            arrays = _per_graph(f"{name}: {field}", value, "")
            lengths = [len(a) for a in arrays]
            if lengths != num_vertices.tolist():
                wrong = [g for g, (a, b) in enumerate(zip(lengths, num_vertices.tolist(), strict=False)) if a != b]
                got = f"{field}[{wrong[0]}] of length {lengths[wrong[0]]}" if wrong else f"{len(arrays)} arrays in {field}"
                wanted = f"{num_vertices[wrong[0]]}: one per vertex" if wrong else f"{len(num_vertices)}: one a graph"
                raise ValueError(f"{name}: got {got}, wanted {wanted}.")
            value = _concatenate(arrays)
        out[field] = value
    return out
