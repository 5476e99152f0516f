"""Graphs from what a program holds: lengths, parents, edges, networkx, and the edge arrays of PyG and DGL."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import networkx
import numpy as np
import pytest

import cavs
from tests.odd_graphs import children_of
from tests.random_graphs import assert_same


def test_lengths_make_chains():
    graphs = cavs.from_lengths([3, 1], input_id=[[7, 8, 9], [5]], label=np.array([0, 1, 2, 3]), kind=[0, 0, 1, 0])
    assert children_of(graphs, 0) == [[], [0], [1]] and children_of(graphs, 1) == [[]]
    assert graphs.input_id.tolist() == [7, 8, 9, 5] and graphs.label.tolist() == [0, 1, 2, 3]
    assert len(cavs.from_lengths([])) == 0


def test_parents_order_children_by_number():
    graphs = cavs.from_parents([[3, 3, 1, -1], np.array([-1, 0, 0]), (-1, -1)], label=[[0, 1, 2, 3], [4, 5, 6], [7, 8]])
    assert [children_of(graphs, g) for g in range(3)] == [[[], [2], [], [0, 1]], [[1, 2], [], []], [[], []]]
    assert graphs.label.tolist() == list(range(9))
    assert len(cavs.from_parents([])) == 0


def test_edges_three_ways_are_one():
    one = cavs.from_edges(3, [(2, 1), (2, 0), (1, 0)])
    assert children_of(one, 0) == [[], [0], [1, 0]]
    batch = [np.array([[2, 1], [2, 0], [1, 0]]), [], [[0, 1], [0, 1]]]
    local = cavs.from_edges([3, 1, 2], batch)
    flat = cavs.from_edges([3, 1, 2], np.array([[4, 5], [2, 1], [4, 5], [2, 0], [1, 0]]))
    assert_same(local, flat)
    assert_same(local[0], one)
    assert children_of(local, 1) == [[]] and children_of(local, 2) == [[1, 1], []]
    assert_same(cavs.from_edges(jnp.array([3, 1, 2]), jnp.array([[4, 5], [2, 1], [4, 5], [2, 0], [1, 0]])), flat)
    assert_same(cavs.from_edges(np.array(3), batch[0]), one)
    # PyG's (source, target): the source is the child.
    edge_index = np.array([[1, 0, 0], [2, 2, 1]])
    assert_same(cavs.from_edges(3, edge_index.T[:, ::-1]), one)
    assert_same(cavs.from_edges(2, []), cavs.from_parents([[-1, -1]]))


def test_data_sets_of_pyg_and_labels_of_graphs_get_a_hint():
    data = SimpleNamespace(edge_index=np.array([[0], [1]]), num_nodes=2)
    text = r"edge_index: got a list of 2 graphs; expected one, .* cavs.Graphs.concat\(\[from_edge_index\(data\) for"
    with pytest.raises(TypeError, match=text):
        cavs.interop.from_edge_index([data, data])
    for label in ([1], [0.5], [[0.5, 1]]):
        with pytest.raises(ValueError, match="label: got 1 value; expected 2, one per vertex. For one per graph write gr"):
            cavs.interop.from_edge_index(data, label=label)
    assert cavs.interop.from_edge_index(data, graph_label=[0.5]).graph_label.tolist() == [0.5]


def test_networkx_labels_may_be_numbers_of_numpy():
    for values, want in (
        ([np.float64(3), None], [3, np.nan]),
        ([np.float32(0.5), 2], [0.5, 2]),
        ([np.array([1, 2]), [3.0, np.nan]], [[1, 2], [3, np.nan]]),
    ):
        graph = networkx.DiGraph([(0, 1)])
        networkx.set_node_attributes(graph, dict(enumerate(values)), "label")
        np.testing.assert_array_equal(cavs.interop.from_networkx(graph).label, np.array(want, float))
    with pytest.raises(TypeError, match="to_networkx: graphs: got a DiGraph; expected cavs.Graphs. Write to_networkx"):
        cavs.interop.to_networkx(graph)


def test_networkx_arrows_lead_from_child_to_parent():
    graph = networkx.DiGraph()
    graph.add_node("root", kind="inner", label=4)
    graph.add_node("a", kind="leaf", input="x", label=np.int64(1))
    graph.add_node("b", kind="leaf", input="y")
    graph.add_edges_from([("b", "root"), ("a", "root")])
    graphs = cavs.interop.from_networkx(graph)
    assert children_of(graphs, 0) == [[2, 1], [], []]  # as added
    assert graphs.label.tolist() == [4, 1, -1] and graphs.label_names is None
    assert graphs.kind_names == ("inner", "leaf") and graphs.vocab == ("x", "y") and graphs.input_id.tolist() == [-1, 0, 1]
    graph.edges["b", "root"]["order"], graph.edges["a", "root"]["order"] = 2, 0.5
    assert children_of(cavs.interop.from_networkx([graph, graph]), 1) == [[1, 2], [], []]
    other = cavs.interop.from_networkx(graph, kind="none", label="kind", input="none")
    assert other.kind is None and other.input_id is None and other.label_names == ("inner", "leaf")


def test_edge_arrays_of_pyg_and_dgl() -> None:
    # Two graphs: 2 -> 0 <- 1, and 3 -> 4 -> 5, 3 -> 5.
    edge_index = np.array([[2, 1, 3, 4, 3], [0, 0, 4, 5, 5]])
    want = cavs.from_edges([3, 3], [[(0, 2), (0, 1)], [(1, 0), (2, 1), (2, 0)]])
    for graphs in (
        cavs.interop.from_edge_index(edge_index, num_nodes=[3, 3]),
        cavs.interop.from_edge_index(edge_index, ptr=np.array([0, 3, 6])),
        cavs.interop.from_edge_index(edge_index, batch=[0, 0, 0, 1, 1, 1]),
        cavs.interop.from_edge_index((edge_index[0], edge_index[1]), num_nodes=np.array([3, 3])),
    ):
        for field in ("vertex_offsets", "child_offsets", "children", "height"):
            np.testing.assert_array_equal(getattr(graphs, field), getattr(want, field))
    one = cavs.interop.from_edge_index(np.zeros((2, 0), int), num_nodes=4, label=[0, 1, 2, 3])
    assert one.num_vertices == 4 and len(one) == 1 and one.label is not None


# ---- what is refused ----


def nx(edges=(), cls=networkx.DiGraph, nodes=({},), **attributes):
    graph = cls()
    graph.add_nodes_from(enumerate(nodes))
    graph.add_edges_from(edges, **attributes)
    return graph


WRONG = [
    (lambda: cavs.from_lengths([2, 0]), r"from_lengths: lengths: got 0 vertices for graph 1; expected at least 1"),
    (lambda: cavs.from_lengths([2**62] * 5), r"lengths\[0\]: got 4611686018427387904; expected a sum below 2\*\*31"),
    (lambda: cavs.from_lengths([2**30] * 2), "from_lengths: lengths: got a sum of 2147483648"),
    (lambda: cavs.from_edges([1, 2**63 - 1, 2**63 - 1, 1], [[]] * 4), r"num_vertices\[1\]: got 9223372036854775807"),
    (lambda: cavs.from_edges(2**31, []), r"from_edges: num_vertices\[0\]: got 2147483648; expected a sum below 2\*\*31"),
    (
        lambda: cavs.interop.from_edge_index(np.zeros((2, 0), int), ptr=[0, 2**63 - 1]),
        r"from_edge_index: ptr\[0\]: got .*; expected",
    ),
    (lambda: cavs.from_lengths(5), r"from_lengths: lengths: got dtype int64 and shape \(\)"),
    (lambda: cavs.from_lengths([1.5]), "from_lengths: lengths: got dtype float64"),
    (lambda: cavs.from_lengths([2, 1], label=[[1], [1, 2]]), r"label\[0\]: got 1 value; expected 2, one per vertex"),
    (lambda: cavs.from_lengths([2, 1], label=[[1, 2]]), "label: got 1 array; expected 2, one per graph"),
    (lambda: cavs.from_lengths([2, 1], label=[1, 2]), "label: got 2 values; expected 3"),
    (lambda: cavs.from_parents([1, -1]), r"expected a list of arrays.*from_parents\(\[parents\]\)"),
    (lambda: cavs.from_parents(np.array([1, -1])), r"from_parents\(\[parents\]\)"),
    (lambda: cavs.from_parents(None), r"parents: got a NoneType; expected a list of arrays"),  # type: ignore[arg-type]
    (lambda: cavs.from_parents([[-1], [0, 2]]), r"parents\[1\]\[1\]: got 2; expected -1 \(a root\) or .* 0 to 1"),
    (lambda: cavs.from_parents([[-2]]), r"parents\[0\]\[0\]: got -2"),
    (lambda: cavs.from_parents([[-1], [1, 0]]), "a cycle in graph 1"),
    (
        lambda: cavs.from_parents([[-1], []]),
        r"from_parents: parents\[1\]: got no vertex; expected at least one, such as \[-1\]",
    ),
    (
        lambda: cavs.from_lengths([1], kind=["a"]),
        "kind: got dtype <U1 .*; expected a 1-d array of integers. Number the names: ",
    ),
    (
        lambda: cavs.from_lengths([1], label=["a"]),
        "label: got dtype <U1; expected numbers. Number the names: write label_names,",
    ),
    (lambda: cavs.from_edges(2, [(0, 2)]), r"edges\[0\]: got \(0, 2\); expected vertices 0 to 1"),
    (lambda: cavs.from_edges(3, [(0, 1), (2,)]), "from_edges: edges: got lists or arrays of different shapes; expected one"),
    (lambda: cavs.from_edges(True, []), "from_edges: num_vertices: got dtype bool"),
    (lambda: cavs.from_edges(0, []), "num_vertices: got 0 vertices for graph 0"),
    (
        lambda: cavs.from_edges(3, np.zeros((2, 3), int)),
        r"expected integers \(E, 2\), a pair \(parent, child\) per row. Write the transpose",
    ),
    (lambda: cavs.from_edges([2, 2], [[(0, 1)]]), "edges: got 1 array; expected 2"),
    (
        lambda: cavs.from_edges([2, 2], [[(0, 1)], [(0, 1), (3, 0)]]),
        r"edges\[1\]\[1\]: got \(3, 0\); expected vertices of graph",
    ),
    (lambda: cavs.from_edges([2, 2], np.array([(0, 1), (1, 2)])), r"edges\[1\]: got \(1, 2\), from graph 0 to graph 1"),
    (lambda: cavs.from_edges([1, 2], [[], [(0, 1), (1, 0)]]), "a cycle in graph 1"),
    (lambda: cavs.interop.from_networkx(nx(cls=networkx.Graph)), r"graphs\[0\]: got a Graph; expected a networkx DiGraph"),
    (lambda: cavs.interop.from_networkx([nx(), 3]), r"graphs\[1\]: got a int; expected a networkx DiGraph"),
    (lambda: cavs.interop.from_networkx(nx(nodes=())), r"num_vertices: got 0 vertices for graph 0"),
    (lambda: cavs.interop.from_networkx(nx([(0, 0)])), "a cycle in graph 0"),
    (lambda: cavs.interop.from_networkx(nx(nodes=({"kind": 1}, {}))), "kind='kind': got int and null; expected on every node"),
    (
        lambda: cavs.interop.from_networkx(nx(nodes=({"label": 1}, {"label": "a"}))),
        "label='label': got int and str; expected only int",
    ),
    (lambda: cavs.interop.from_networkx(nx(nodes=({"label": -1},))), "got the integer -1"),
    (
        lambda: cavs.interop.from_networkx(nx([(0, 1)], order="first")),
        "an attribute 'order' on 1 of 1 edge .*; expected numbers",
    ),
    (
        lambda: cavs.interop.from_networkx(nx([(0, 2, {"order": np.nan}), (1, 2, {"order": 1})])),
        "'order' on 2 of 2 edges into node 2; expected numbers",
    ),
    (lambda: cavs.from_parents([[[0], [1, 2]]]), r"from_parents: parents\[0\]: got lists or arrays of different shapes"),
    (lambda: cavs.interop.from_networkx(nx([(0, 2, {"order": 1}), (1, 2)])), "'order' on 1 of 2 edges into node 2;"),
    (
        lambda: cavs.interop.from_networkx(nx([(0, 2, {"edge_attr": 1}), (1, 2)])),
        "edge_attr='edge_attr': got it on 1 of 2 edges; expected numbers, or arrays of numbers of one shape, on every edge",
    ),
    (lambda: cavs.interop.from_networkx(nx([(0, 1, {"w": "x"})]), edge_attr="w"), "edge_attr='w': got values that are not num"),
    (
        lambda: cavs.interop.from_networkx(nx([(0, 2, {"w": [1]}), (1, 2, {"w": [1, 2]})]), edge_attr="w"),
        "edge_attr='w': got values that are not numbers of one shape",
    ),
]


@pytest.mark.parametrize("make, message", WRONG, ids=range(len(WRONG)))
def test_converters_refuse_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_networkx_edges_have_values():
    weights = [(0, 2, {"order": 1, "weight": 5.5}), (1, 2, {"order": 0, "weight": 7.0}), (0, 1, {"weight": 9.0})]
    graph = nx(weights, nodes=({}, {}, {}))
    graphs = cavs.interop.from_networkx([graph, nx(), graph], edge_attr="weight")
    assert graphs.edge_attr.tolist() == [9, 7, 5.5, 9, 7, 5.5]  # of node 1, then of node 2 in the order of its children
    again = cavs.interop.from_networkx(cavs.interop.to_networkx(graphs))
    assert again.children.tolist() == graphs.children.tolist() and again.edge_attr.tolist() == graphs.edge_attr.tolist()
    rows = cavs.interop.from_networkx(nx([(0, 1, {"edge_attr": np.array([1, 2])})]))
    assert rows.edge_attr.tolist() == [[1, 2]] and cavs.interop.from_networkx(nx([(0, 1)])).edge_attr is None
    assert cavs.interop.to_networkx(rows)[0].edges[0, 1]["edge_attr"] == [1, 2]


def test_numbers_of_jax_are_numbers_in_networkx():
    graph = nx([(0, 1)], nodes=({"label": jnp.int32(3), "x": jnp.ones(2)}, {"label": 1, "x": [1, 2]}))
    graphs = cavs.interop.from_networkx(graph)
    assert graphs.label.tolist() == [3, 1] and graphs.x.tolist() == [[1, 1], [1, 2]]


@pytest.mark.parametrize("graphs", [None, 5])
def test_networkx_graphs_are_a_list(graphs):
    with pytest.raises(TypeError, match="from_networkx: graphs: got a .*; expected a networkx.DiGraph, or a list of them"):
        cavs.interop.from_networkx(graphs)


def test_netlists_are_paths():
    with pytest.raises(TypeError, match="read: path: got a NoneType; expected the path of a file"):
        cavs.io.read_netlist(None)


def test_data_without_a_number_of_nodes_is_refused():
    with pytest.raises(TypeError, match="from_edge_index: got none of num_nodes, batch and ptr"):
        cavs.interop.from_edge_index(SimpleNamespace(edge_index=np.array([[0], [1]])))


def test_a_list_of_edges_is_a_list():
    with pytest.raises(TypeError, match="from_edges: edges: got a NoneType; expected a list of arrays .*, one per graph"):
        cavs.from_edges([3], None)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="from_lengths: got unknown argument 'lable'; expected one of kind, label"):
        cavs.from_lengths([1], lable=[0])


def test_networkx_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    for convert in (cavs.interop.from_networkx, cavs.interop.to_networkx):
        with pytest.raises(ImportError, match="pip install networkx"):
            convert([])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, TypeError, "got none of num_nodes, batch and ptr; expected one of them"),
        ({"num_nodes": 2, "ptr": [0, 2]}, TypeError, "got num_nodes and ptr of"),
        ({"edge_index": np.zeros((3, 2), int), "num_nodes": 2}, ValueError, "got shape (3, 2); expected (2, E)"),
        ({"edge_index": ([0], [0, 1]), "num_nodes": 2}, ValueError, "got shape [(1,), (2,)]; expected (2, E)"),
        ({"ptr": [1, 2]}, ValueError, "ptr: got [1 2]; expected (G + 1,) integers from 0"),
        ({"batch": [0, 2]}, ValueError, "expected the graph of each vertex, ascending from 0"),
        (
            {"batch": [0.0, 1.0]},
            ValueError,
            "from_edge_index: batch: got dtype float64 and shape (2,); expected a 1-d array of",
        ),
        ({"ptr": np.array([0, 5, 3], np.uint8)}, ValueError, "from_edge_index: ptr: got -2 vertices for graph 1; expected at"),
        ({"edge_index": 5, "num_nodes": 2}, ValueError, "from_edge_index: edge_index: got shape (1,); expected (2, E)"),
        ({"edge_index": [[0, [1]], [1, 2]], "num_nodes": 2}, ValueError, "edge_index: got lists or arrays of different shapes"),
        ({"batch": [1, 1]}, ValueError, "expected the graph of each vertex, ascending from 0"),
        ({"edge_index": np.array([[0, 1], [1, 0]]), "num_nodes": 2}, ValueError, "cycle"),
        ({"edge_index": np.array([[0], [1]]), "num_nodes": [1, 1]}, ValueError, "edge_index[:, 0]: got (0, 1), from graph 0"),
        (
            {"edge_index": np.array([[0, 0], [1, 5]]), "num_nodes": 2},
            ValueError,
            "from_edge_index: edge_index[:, 1]: got (0, 5)",
        ),
        ({"num_nodes": [2, 0]}, ValueError, "from_edge_index: num_nodes: got 0 vertices for graph 1; expected at least 1"),
    ],
)
def test_invalid_edge_arrays_are_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        cavs.interop.from_edge_index(**{"edge_index": np.array([[0], [1]])} | arguments)


def test_a_data_object_of_pytorch_geometric():
    data = SimpleNamespace(edge_index=np.array([[0, 1], [2, 2]]), num_nodes=3, x=np.eye(3), edge_attr=np.array([5.0, 6.0]))
    graphs = cavs.interop.from_edge_index(data, label=[0, 1, 2])
    assert graphs.x.tolist() == np.eye(3).tolist() and graphs.edge_attr.tolist() == [5.0, 6.0]
    assert graphs.children.tolist() == [0, 1] and graphs.label.tolist() == [0, 1, 2]
    several = SimpleNamespace(edge_index=np.array([[0, 2], [1, 3]]), num_nodes=4, batch=np.array([0, 0, 1, 1]), ptr=None)
    for some in (several, SimpleNamespace(**vars(several) | {"ptr": [0, 2, 4]})):
        assert cavs.interop.from_edge_index(some).vertex_offsets.tolist() == [0, 2, 4]
        assert len(cavs.interop.from_edge_index(some, num_nodes=4)) == 1
