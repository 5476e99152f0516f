"""Conversion from and to networkx directed graphs."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cavs._graphs.arguments import optional_module
from cavs._graphs.checks import check_type
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._readers.json_values import are_targets, id_values, ids_of, targets_of
from cavs._readers.names import arrays_by_name, nested

if TYPE_CHECKING:
    import networkx

MSG_NETWORKX = "{}: networkx is not installed. Write: pip install networkx"


def from_networkx(
    graphs: "networkx.DiGraph | Iterable[networkx.DiGraph]",
    *,
    kind: str = "kind",
    label: str = "label",
    input: str = "input",
    edge_attr: str = "edge_attr",
    x: str = "x",
) -> Graphs:
    """Creates graphs from one or several networkx directed graphs.

    An edge u -> v makes u a child of v: v depends on u, and messages flow along the arrow. Vertices are numbered in the
    order of the graph's nodes. The children of a vertex are ordered by the edge attribute "order", which holds numbers and
    is present on all edges into the vertex or on none; without it, in the order in which the edges were added.

    The node attributes hold integers >= 0, or strings, which are numbered in the order of first appearance and become
    `kind_names`, `label_names`, `vocab`. A node whose label or input is missing or `None` gets -1. The kind is present on
    all nodes or on none. If no node has an attribute, the field is `None`. If a label is a number with decimals, or a list or
    an array of numbers, all labels are targets of a regression: they become (V, ...) float64, NaN where one is missing.

    Args:
        graphs: `networkx.DiGraph` or `networkx.MultiDiGraph`, one or an iterable.
        kind: the node attribute that becomes `kind`.
        label: the node attribute that becomes `label`.
        input: the node attribute that becomes `input_id`.
        edge_attr: the edge attribute that becomes `edge_attr`, such as "weight": numbers, or lists or arrays of numbers of one
            shape, on all edges or on none.
        x: the node attribute that becomes `x`: as `edge_attr`, or dicts of such values.

    Returns:
        The graphs.

    Raises:
        ValueError: a graph is undirected, empty or cyclic, or the values of an attribute are of different types or shapes.
        ImportError: networkx is not installed.
    """
    networkx = optional_module("networkx", MSG_NETWORKX.format("from_networkx"))
    check_type("from_networkx: graphs", graphs, Iterable, "a networkx.DiGraph, or a list of them")
    all_graphs: list[Any] = [graphs] if isinstance(graphs, networkx.Graph) else list(graphs)
    sources = {"kind": (kind, "kind_names"), "label": (label, "label_names"), "input_id": (input, "vocab")}
    sizes: list[int] = []
    children: list[list[int]] = []
    values: dict[str, list[Any]] = {ids: [] for ids in sources}
    edge_values: list[object] = []
    features: list[object] = []
    for g, graph in enumerate(all_graphs):
        if not isinstance(graph, networkx.DiGraph):
            raise ValueError(
                f"from_networkx: graphs[{g}]: got a {type(graph).__name__}; expected a networkx DiGraph or MultiDiGraph."
            )
        sizes.append(len(graph))
        for pairs in _ordered_children(g, graph, edge_attr):
            children.append([child for child, _ in pairs])
            edge_values.extend(value for _, value in pairs)
        for ids, (attribute, _) in sources.items():
            values[ids].extend(data for _, data in graph.nodes(data=attribute))
        features.extend(data for _, data in graph.nodes(data=x))
    fields: dict[str, Any] = {}
    for ids, (attribute, names) in sources.items():
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values[ids]]  # of NumPy, JAX or PyTorch
        if all(value is None for value in plain):
            continue
        try:
            if ids == "label" and are_targets(plain):
                fields[ids] = targets_of(plain)
            else:
                fields[ids], fields[names] = ids_of(plain, optional=ids != "kind")
        except ValueError as error:
            where = "on every node, " if ids == "kind" else ""
            argument = ids.removesuffix("_id")
            raise ValueError(
                f"from_networkx: {argument}={attribute!r}: got {error}; expected {where}only int >= 0 or only str."
            ) from error
    fields |= {"edge_attr": _row_values(edge_values, "edge_attr", edge_attr, "edge"), "x": _features(features, x)}
    if not edge_values:  # `to_networkx` keeps the shape of a row in the graph
        rows = [graph.graph.get(edge_attr) for graph in all_graphs]
        fields["edge_attr"] = next((x for x in rows if isinstance(x, np.ndarray) and not len(x)), None)
    return Graphs.build(sizes, list(map(len, children)), [child for row in children for child in row], **fields)


def _features(values: list[Any], name: str) -> Any:
    """The features of all nodes: an array, dicts of arrays, or `None`."""
    keys = dict.fromkeys(key for value in values if isinstance(value, dict) for key in value)
    if not keys:
        return _row_values(values, "x", name, "node")
    return {key: _features([v.get(key) if isinstance(v, dict) else None for v in values], name) for key in keys}


def _row_values(values: list[object], argument: str, name: str, noun: str) -> np.ndarray | None:
    """The values of all edges or nodes as an array; `None` if none has one."""
    lacking = sum(value is None for value in values)
    if lacking == len(values):
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # of different shapes
        array = np.asarray(None)
    if lacking or array.dtype.kind not in "biufc":
        coverage = f"it on {len(values) - lacking} of {len(values)} {noun}s"
        got = coverage if lacking else "values that are not numbers of one shape"
        raise ValueError(
            f"from_networkx: {argument}={name!r}: got {got}; expected numbers, or arrays of numbers of one shape, on every "
            f"{noun}."
        )
    return array


def _ordered_children(g: int, graph: "networkx.DiGraph", edge_attr: str) -> Iterator[list[tuple[int, object]]]:
    """The children of each node of graph number `g`, and the values of the edges to them."""
    number = {node: i for i, node in enumerate(graph)}
    edges: list[list[tuple[Any, int, object]]] = [[] for _ in number]  # (order, child, value)
    for u, v, data in graph.in_edges(data=True):
        edges[number[v]].append((data.get("order"), number[u], data.get(edge_attr)))
    for node, incoming in zip(graph, edges, strict=True):
        with_order = sum(order is not None for order, *_ in incoming)
        if with_order:
            numbers = (int, float, np.integer, np.floating)
            if not all(isinstance(order, numbers) and order <= np.inf for order, *_ in incoming):
                raise ValueError(
                    f"from_networkx: graphs[{g}]: got an attribute 'order' on {with_order} of {counted(len(incoming), 'edge')} "
                    f"into node {node!r}; expected numbers on all of them or on none."
                )
            incoming.sort(key=lambda edge: edge[0])
        yield [(child, value) for _, child, value in incoming]


def to_networkx(graphs: Graphs) -> "list[networkx.DiGraph]":
    """Converts each graph to a networkx graph; the inverse of `from_networkx`.

    Nodes are 0, 1, ... with the attributes "kind", "label" and "input": the name if there are names, otherwise the
    integer. A node whose id is -1 lacks the attribute. Edges lead from a child to its parent; their attribute "order" is
    the child's place among the parent's children, and "edge_attr" the edge's value, if there are values. In a graph without
    edges, the graph's attribute "edge_attr" is an array of no rows. Features `x` become lists, or dicts of lists. Labels of
    graphs (`graph_label`) are left out.

    Args:
        graphs: the graphs.

    Returns:
        One `networkx.DiGraph` per graph; a `networkx.MultiDiGraph` if a vertex has the same child twice.

    Raises:
        TypeError: `graphs` is something else.
        ImportError: networkx is not installed.
    """
    networkx = optional_module("networkx", MSG_NETWORKX.format("to_networkx"))
    check_graphs(graphs, "to_networkx(graphs)")
    owner, _ = graphs._edges
    edges = {"order": (np.arange(graphs.num_edges) - graphs.child_offsets[owner]).tolist()}
    if graphs.edge_attr is not None:
        edges["edge_attr"] = graphs.edge_attr.tolist()
    ids = {"kind": graphs.kind, "label": graphs.label, "input": graphs.input_id}
    names = {"kind": graphs.kind_names, "label": graphs.label_names, "input": graphs.vocab}
    nodes = {name: id_values(values, names[name]) for name, values in ids.items() if values is not None}
    if graphs.x is not None:
        rows = {name: leaf.tolist() for name, leaf in arrays_by_name(graphs.x, "to_networkx").items()}
        nodes["x"] = [nested({name: leaf[i] for name, leaf in rows.items()}).get("x") for i in range(graphs.num_vertices)]
    pairs = list(zip(graphs.children.tolist(), (owner - graphs._first_rows[owner]).tolist(), strict=True))
    out = []
    for start, stop in pairwise(graphs.vertex_offsets.tolist()):
        numbers = range(int(graphs.child_offsets[start]), int(graphs.child_offsets[stop]))
        graph = networkx.DiGraph() if len({pairs[e] for e in numbers}) == len(numbers) else networkx.MultiDiGraph()
        for row in range(start, stop):
            graph.add_node(row - start, **{name: values[row] for name, values in nodes.items() if values[row] is not None})
        if graphs.edge_attr is not None and not numbers:
            graph.graph["edge_attr"] = graphs.edge_attr[:0]
        for e in numbers:
            graph.add_edge(*pairs[e], **{name: values[e] for name, values in edges.items()})
        out.append(graph)
    return out
