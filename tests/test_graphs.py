"""`Graphs` by property, held against plain loops; the converters; and round trips through every way out and back."""

import sys

import networkx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cavs
from cavs._readers import write_edges

ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id")
NAMES = ("vocab", "kind_names", "label_names")


@st.composite
def forests(draw, min_graphs=0):
    """Lists of graphs, each the children of its vertices; children have any number, also a higher one than the parent."""
    out = []
    for _ in range(draw(st.integers(min_graphs, 4))):
        n = draw(st.integers(1, 7))
        number = draw(st.permutations(range(n)))
        rows = [[] for _ in range(n)]
        for i in range(1, n):
            rows[number[i]] = [number[j] for j in draw(st.lists(st.integers(0, i - 1), max_size=4))]
        out.append(rows)
    return out


@st.composite
def graphs(draw, min_graphs=0):
    """`Graphs` of `forests`, with any of the optional fields, as ids or by name."""
    forest = draw(forests(min_graphs))
    rows = [row for graph in forest for row in graph]
    fields = {}
    for ids, names in (("kind", "kind_names"), ("label", "label_names"), ("input_id", "vocab")):
        what = draw(st.sampled_from(["none", "ids", "names"]))
        if what != "none":
            low = 0 if ids == "kind" else -1
            fields[ids] = draw(st.lists(st.integers(low, 3), min_size=len(rows), max_size=len(rows)))
        if what == "names":
            words = st.text(st.characters(exclude_categories=[]), max_size=3)  # half surrogate pairs too
            fields[names] = draw(st.lists(words, min_size=4, max_size=4, unique=True))
    flat = [child for row in rows for child in row]
    return cavs.Graphs.build([len(graph) for graph in forest], [len(row) for row in rows], flat, **fields)


def kids(graphs, g):
    one = graphs[g]
    return [k.tolist() for k in np.split(one.children, one.child_offsets[1:-1])]


def build(forest, **fields):
    rows = [row for graph in forest for row in graph]
    flat = [child for row in rows for child in row]
    return cavs.Graphs.build([len(graph) for graph in forest], [len(row) for row in rows], flat, **fields)


def assert_same(a, b):
    for field in ARRAYS:
        x, y = getattr(a, field), getattr(b, field)
        assert (x is None) == (y is None), field
        assert x is None or x.dtype == y.dtype and x.tolist() == y.tolist(), field
    for field in NAMES:
        assert getattr(a, field) == getattr(b, field), field


def values(ids, names):
    """What ids stand for; `None` where they say nothing at all."""
    if ids is None or (ids < 0).all():
        return None
    return [None if i < 0 else i if names is None else names[i] for i in ids.tolist()]


def assert_same_by_name(a, b):
    for field in ("vertex_offsets", "child_offsets", "children", "height"):
        assert getattr(a, field).tolist() == getattr(b, field).tolist(), field
    for ids, names in (("kind", "kind_names"), ("label", "label_names"), ("input_id", "vocab")):
        assert values(getattr(a, ids), getattr(a, names)) == values(getattr(b, ids), getattr(b, names)), ids


# ---- Graphs ----


def height_by_recursion(rows, v):
    return max((1 + height_by_recursion(rows, child) for child in rows[v]), default=0)


@settings(deadline=None)
@given(forests())
def test_height_is_the_longest_path_to_a_leaf(forest):
    graphs = build(forest)
    assert graphs.height.tolist() == [height_by_recursion(rows, v) for rows in forest for v in range(len(rows))]
    assert len(graphs) == len(forest) and graphs.num_vertices == sum(map(len, forest))
    assert graphs.num_edges == sum(len(row) for rows in forest for row in rows)
    assert graphs.max_fan_in == max((len(row) for rows in forest for row in rows), default=0)
    assert [kids(graphs, g) for g in range(len(forest))] == forest


@settings(deadline=None)
@given(graphs(min_graphs=1), st.data())
def test_any_index_equals_picking_graphs_one_by_one(graphs, data):
    some = data.draw(st.lists(st.integers(-len(graphs), len(graphs) - 1), max_size=6))
    mask = data.draw(st.lists(st.booleans(), min_size=len(graphs), max_size=len(graphs)))
    cut = slice(*data.draw(st.tuples(*[st.none() | st.integers(-5, 5)] * 2, st.sampled_from([None, 1, 2, -1, -2]))))
    for index, wanted in (
        (some, some),
        (np.array(some, np.int16), some),
        (np.array(mask), np.flatnonzero(mask)),
        (cut, range(len(graphs))[cut]),
    ):
        expected = graphs[0:0]
        for g in wanted:
            expected = expected + graphs[int(g)]
        assert_same(graphs[index], expected)


def test_slices_share_memory():
    graphs = cavs.from_lengths([3, 4, 5, 6], input_id=np.arange(18), label=np.arange(18))
    part = graphs[1:3]
    for field in ("children", "height", "label", "input_id"):
        assert np.shares_memory(getattr(part, field), getattr(graphs, field)), field
    assert part.input_id.tolist() == list(range(3, 12))
    assert part.vertex_offsets.tolist() == [0, 4, 9] and part.child_offsets[0] == 0
    assert graphs.vertex_offsets.tolist() == [0, 3, 7, 12, 18]  # not shifted in place


@pytest.mark.parametrize("index", [4, -5, [4], [0, -5], [0.5], "a", [[0]], [True], None])
def test_a_bad_index_is_refused(index):
    with pytest.raises(IndexError):
        cavs.from_lengths([1, 2, 3, 4])[index]


@settings(deadline=None)
@given(graphs(), st.data())
def test_sum_of_parts_is_the_whole(graphs, data):
    cut = data.draw(st.integers(0, len(graphs)))
    assert_same(graphs[:cut] + graphs[cut:], graphs)


@pytest.mark.parametrize(
    "left, right, message",
    [
        ({"input_id": [0], "vocab": ["a"]}, {"input_id": [0], "vocab": ["b"]}, r"vocab differ.*other\.with_vocab"),
        ({"kind": [0], "kind_names": ["a"]}, {"kind": [0]}, "kind_names differ"),
        ({"label": [0]}, {}, "one side has label"),
    ],
)
def test_unlike_graphs_do_not_add(left, right, message):
    with pytest.raises(ValueError, match=message):
        cavs.from_lengths([1], **left) + cavs.from_lengths([1], **right)


def test_with_vocab_renumbers_words():
    graphs = cavs.from_lengths([4], input_id=[2, -1, 0, 1], vocab=["a", "b", "c"])
    assert graphs.with_vocab(["c", "<unk>", "a"]).input_id.tolist() == [0, -1, 2, -1]
    again = graphs.with_vocab(["c", "<unk>", "a"], unknown="<unk>")
    assert again.input_id.tolist() == [0, -1, 2, 1] and again.vocab == ("c", "<unk>", "a")
    assert_same(again.with_vocab(again.vocab), again)
    with pytest.raises(ValueError, match="unknown='b' is not in vocab"):
        graphs.with_vocab(["a"], unknown="b")
    with pytest.raises(ValueError, match="have no vocab"):
        cavs.from_lengths([4]).with_vocab(["a"])


@settings(deadline=None)
@given(graphs())
def test_reversed_twice_sorts_the_children(graphs):
    backward = graphs.reversed()
    for g in range(len(graphs)):
        rows = kids(graphs, g)
        assert kids(backward, g) == [sorted(p for p, row in enumerate(rows) for c in row if c == v) for v in range(len(rows))]
    forward = backward.reversed()
    assert [kids(forward, g) for g in range(len(graphs))] == [
        [sorted(row) for row in kids(graphs, g)] for g in range(len(graphs))
    ]
    assert forward.height.tolist() == graphs.height.tolist()
    assert_same(forward.reversed(), backward)


@pytest.mark.parametrize(
    "num_vertices, num_children, children, fields, message",
    [
        ([2, 0], [0, 0], [], {}, r"num_vertices\[1\] is 0: graph 1 is empty"),
        ([1, 2], [0, 0, 1], [2], {}, "vertex 1 of graph 1 has child 2, wanted .* 0 to 1"),
        ([1], [1], [-1], {}, "vertex 0 of graph 0 has child -1"),
        ([1, 1], [0, 1], [0], {}, "graph 1 has a cycle through or below vertex 0"),
        ([1, 3], [0, 1, 1, 1], [1, 2, 1], {}, "graph 1 has a cycle"),
        ([2], [0], [], {}, "num_children has 1 entries .* wanted 2"),
        ([2], [0, -1], [], {}, r"num_children has 2 entries \(least -1\)"),
        ([2], [0, 1], [], {}, "children has 0 entries, wanted 1"),
        ([2], [0, 1], [0.0], {}, "children has dtype float64"),
        ([2], [0, 1], [2**32], {}, r"children\[0\] is 4294967296, wanted integers that fit int32"),
        ([2], [0, 1], [0], {"label": [2**31, 0]}, r"label\[0\] is 2147483648, wanted integers that fit int32"),
        ([2], [0, 1], [0], {"label": [0]}, "label has 1 entries, wanted 2"),
        ([2], [0, 1], [0], {"label": [0, -2]}, "label of vertex 1 of graph 0 is -2, wanted -1 to"),
        ([2], [0, 1], [0], {"kind": [0, -1]}, "kind of vertex 1 of graph 0 is -1, wanted 0 to"),
        ([1, 1], [0, 0], [], {"input_id": [0, 2], "vocab": ["a", "b"]}, "input_id of vertex 0 of graph 1 is 2, wanted -1 to 1"),
    ],
)
def test_wrong_arrays_are_refused(num_vertices, num_children, children, fields, message):
    with pytest.raises(ValueError, match=message):
        cavs.Graphs.build(num_vertices, num_children, children, **fields)


def test_repr_says_the_sizes():
    graphs = cavs.from_lengths([3, 1], input_id=[0, 0, 0, 0], vocab=["a"])
    assert repr(graphs) == "Graphs(2 graphs, 4 vertices, 2 edges, 3 levels, vocab=1)"
    assert repr(graphs[:0]) == "Graphs(0 graphs, 0 vertices, 0 edges, 0 levels, vocab=1)"


# ---- converters ----


def test_lengths_make_chains():
    graphs = cavs.from_lengths([3, 1], input_id=[[7, 8, 9], [5]], label=np.array([0, 1, 2, 3]), kind=[0, 0, 1, 0])
    assert kids(graphs, 0) == [[], [0], [1]] and kids(graphs, 1) == [[]]
    assert graphs.input_id.tolist() == [7, 8, 9, 5] and graphs.label.tolist() == [0, 1, 2, 3]
    assert len(cavs.from_lengths([])) == 0


def test_parents_order_children_by_number():
    graphs = cavs.from_parents([[3, 3, 1, -1], np.array([-1, 0, 0]), (-1, -1)], label=[[0, 1, 2, 3], [4, 5, 6], [7, 8]])
    assert [kids(graphs, g) for g in range(3)] == [[[], [2], [], [0, 1]], [[1, 2], [], []], [[], []]]
    assert graphs.label.tolist() == list(range(9))
    assert len(cavs.from_parents([])) == 0


def test_edges_three_ways_are_one():
    one = cavs.from_edges(3, [(2, 1), (2, 0), (1, 0)])
    assert kids(one, 0) == [[], [0], [1, 0]]
    batch = [np.array([[2, 1], [2, 0], [1, 0]]), [], [[0, 1], [0, 1]]]
    local = cavs.from_edges([3, 1, 2], batch)
    flat = cavs.from_edges([3, 1, 2], np.array([[4, 5], [2, 1], [4, 5], [2, 0], [1, 0]]))
    assert_same(local, flat)
    assert_same(local[0], one)
    assert kids(local, 1) == [[]] and kids(local, 2) == [[1, 1], []]
    # PyG's (source, target): the source is the child.
    edge_index = np.array([[1, 0, 0], [2, 2, 1]])
    assert_same(cavs.from_edges(3, edge_index.T[:, ::-1]), one)
    assert_same(cavs.from_edges(2, []), cavs.from_parents([[-1, -1]]))


def test_networkx_arrows_lead_from_child_to_parent():
    graph = networkx.DiGraph()
    graph.add_node("root", kind="inner", label=4)
    graph.add_node("a", kind="leaf", input="x", label=np.int64(1))
    graph.add_node("b", kind="leaf", input="y")
    graph.add_edges_from([("b", "root"), ("a", "root")])
    graphs = cavs.from_networkx(graph)
    assert kids(graphs, 0) == [[2, 1], [], []]  # as added
    assert graphs.label.tolist() == [4, 1, -1] and graphs.label_names is None
    assert graphs.kind_names == ("inner", "leaf") and graphs.vocab == ("x", "y") and graphs.input_id.tolist() == [-1, 0, 1]
    graph.edges["b", "root"]["order"], graph.edges["a", "root"]["order"] = 2, 0.5
    assert kids(cavs.from_networkx([graph, graph]), 1) == [[1, 2], [], []]
    other = cavs.from_networkx(graph, kind="none", label="kind", input="none")
    assert other.kind is None and other.input_id is None and other.label_names == ("inner", "leaf")


def nx(edges=(), cls=networkx.DiGraph, nodes=({},), **attributes):
    graph = cls()
    graph.add_nodes_from(enumerate(nodes))
    graph.add_edges_from(edges, **attributes)
    return graph


WRONG = [
    (lambda: cavs.from_lengths([2, 0]), r"from_lengths: lengths\[1\] is 0, wanted at least 1"),
    (lambda: cavs.from_lengths(5), "from_lengths: lengths has dtype int64 and shape ()"),
    (lambda: cavs.from_lengths([1.5]), "from_lengths: lengths has dtype float64"),
    (lambda: cavs.from_lengths([2, 1], label=[[1], [1, 2]]), r"got label\[0\] of length 1, wanted 2: one per vertex"),
    (lambda: cavs.from_lengths([2, 1], label=[[1, 2]]), "got 1 arrays in label, wanted 2: one a graph"),
    (lambda: cavs.from_lengths([2, 1], label=[1, 2]), "label has 2 entries, wanted 3"),
    (lambda: cavs.from_parents([1, -1]), r"wanted a list of arrays.*from_parents\(\[parents\]\)"),
    (lambda: cavs.from_parents(np.array([1, -1])), r"from_parents\(\[parents\]\)"),
    (lambda: cavs.from_parents([[-1], [0, 2]]), r"parents\[1\]\[1\] is 2, wanted -1 \(a root\) or .* 0 to 1"),
    (lambda: cavs.from_parents([[-2]]), r"parents\[0\]\[0\] is -2"),
    (lambda: cavs.from_parents([[-1], [1, 0]]), "graph 1 has a cycle"),
    (lambda: cavs.from_parents([[-1], []]), "graph 1 is empty"),
    (lambda: cavs.from_edges(2, [(0, 2)]), r"edges\[0\] is \(0, 2\), wanted vertices 0 to 1"),
    (lambda: cavs.from_edges(0, []), "graph 0 has 0 vertices"),
    (
        lambda: cavs.from_edges(3, np.zeros((2, 3), int)),
        r"wanted integers \(E, 2\): \(parent, child\) a row. Pass the transpose",
    ),
    (lambda: cavs.from_edges([2, 2], [[(0, 1)]]), "edges has 1 arrays, wanted 2"),
    (lambda: cavs.from_edges([2, 2], [[(0, 1)], [(0, 1), (3, 0)]]), r"edges\[1\]\[1\] is \(3, 0\), wanted vertices of graph 1"),
    (lambda: cavs.from_edges([2, 2], np.array([(0, 1), (1, 2)])), r"edges\[1\] is \(1, 2\), from graph 0 to graph 1"),
    (lambda: cavs.from_edges([1, 2], [[], [(0, 1), (1, 0)]]), "graph 1 has a cycle"),
    (lambda: cavs.from_networkx(nx(cls=networkx.Graph)), "graph 0 is a Graph, wanted a networkx DiGraph"),
    (lambda: cavs.from_networkx([nx(), 3]), "graph 1 is a int, wanted a networkx DiGraph"),
    (lambda: cavs.from_networkx(nx(nodes=())), "graph 0 is empty"),
    (lambda: cavs.from_networkx(nx([(0, 0)])), "graph 0 has a cycle"),
    (lambda: cavs.from_networkx(nx(nodes=({"kind": 1}, {}))), "kind='kind': got int and null, wanted on every node"),
    (lambda: cavs.from_networkx(nx(nodes=({"label": 1}, {"label": "a"}))), "label='label': got int and str, wanted all int"),
    (lambda: cavs.from_networkx(nx(nodes=({"label": -1},))), "got the integer -1"),
    (lambda: cavs.from_networkx(nx([(0, 1)], order="first")), "have an attribute 'order'; wanted numbers"),
    (lambda: cavs.from_networkx(nx([(0, 2, {"order": 1}), (1, 2)])), "into node 2 of graph 0 1 of 2 have .* 'order'"),
]


@pytest.mark.parametrize("make, message", WRONG, ids=range(len(WRONG)))
def test_converters_refuse_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="from_lengths: unknown argument 'lable', wanted one of kind, label"):
        cavs.from_lengths([1], lable=[0])


def test_networkx_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    for convert in (cavs.from_networkx, cavs.to_networkx):
        with pytest.raises(ImportError, match="pip install networkx"):
            convert([])


# ---- round trips ----


@settings(deadline=None)
@given(graphs())
def test_npz_round_trip_is_exact(tmp_path_factory, graphs):
    path = tmp_path_factory.getbasetemp() / "round.npz"
    cavs.save_npz(graphs, path)
    assert_same(cavs.load_npz(path), graphs)


@settings(deadline=None)
@given(graphs())
def test_edges_round_trip(tmp_path_factory, graphs):
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    write_edges(graphs, path)
    once = cavs.read_edges(path)
    assert_same_by_name(once, graphs)
    write_edges(once, path)
    assert_same(cavs.read_edges(path), once)


@settings(deadline=None)
@given(graphs())
def test_networkx_round_trip(graphs):
    out = cavs.to_networkx(graphs)
    assert all(networkx.is_directed_acyclic_graph(graph) for graph in out)
    assert [sorted(graph.in_degree(v) for v in graph) for graph in out] == [
        sorted(map(len, kids(graphs, g))) for g in range(len(graphs))
    ]
    assert_same_by_name(cavs.from_networkx(out), graphs)


@settings(deadline=None)
@given(forests())
def test_edge_lists_round_trip(forest):
    edges = [[(v, child) for v, row in enumerate(rows) for child in row] for rows in forest]
    assert_same(cavs.from_edges([len(rows) for rows in forest], edges), build(forest))
