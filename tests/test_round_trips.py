"""Writing and reading graphs gives the same graphs: `.npz`, JSON lines, networkx, lists of edges."""

import io

import jax.numpy as jnp
import networkx
import numpy as np
import pytest
from hypothesis import given, settings

import cavs
from cavs.io import write_edges
from tests.odd_graphs import children_of
from tests.random_graphs import assert_same, assert_same_features, build, forests, graphs


def values(ids, names):
    """The names of ids; `None` if all ids are -1."""
    if ids is None or (ids < 0).all():
        return None
    return [None if i < 0 else i if names is None else names[i] for i in ids.tolist()]


def assert_same_by_name(a, b):
    for field in ("vertex_offsets", "child_offsets", "children", "height"):
        assert getattr(a, field).tolist() == getattr(b, field).tolist(), field
    for ids, names in (("kind", "kind_names"), ("label", "label_names"), ("input_id", "vocab")):
        assert values(getattr(a, ids), getattr(a, names)) == values(getattr(b, ids), getattr(b, names)), ids


@settings(deadline=None)
@given(graphs())
def test_npz_round_trip_is_exact(tmp_path_factory, graphs):
    path = tmp_path_factory.getbasetemp() / "round.npz"
    cavs.io.save_npz(graphs, path)
    assert_same(cavs.io.load_npz(path), graphs)


@settings(deadline=None)
@given(graphs())
def test_edges_round_trip(tmp_path_factory, graphs):
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    write_edges(graphs, path)
    once = cavs.io.read_edges(path)
    assert_same_by_name(once, graphs)
    write_edges(once, path)
    assert_same(cavs.io.read_edges(path), once)


@settings(deadline=None)
@given(graphs())
def test_networkx_round_trip(graphs):
    out = cavs.interop.to_networkx(graphs)
    assert all(networkx.is_directed_acyclic_graph(graph) for graph in out)
    assert [sorted(graph.in_degree(v) for v in graph) for graph in out] == [
        sorted(map(len, children_of(graphs, g))) for g in range(len(graphs))
    ]
    again = cavs.interop.from_networkx(out)
    assert_same_by_name(again, graphs)
    if graphs.num_vertices:
        assert_same_features(again, graphs)


@settings(deadline=None)
@given(forests())
def test_edge_lists_round_trip(forest):
    edges = [[(v, child) for v, row in enumerate(rows) for child in row] for rows in forest]
    assert_same(cavs.from_edges([len(rows) for rows in forest], edges), build(forest))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
def test_bfloat16_is_compared_and_not_saved(dtype, tmp_path):
    rows = np.array([np.nan, 1, 2], dtype)
    graphs = cavs.from_lengths([2, 1]).replace(x={"a": rows})
    assert graphs.equals(graphs.replace(x={"a": rows.copy()})) and not graphs.equals(graphs.replace(x={"a": rows[::-1]}))
    with pytest.raises(ValueError, match=r"save_npz: x/a: got dtype \w+, which NumPy's files do not store; expected"):
        cavs.io.save_npz(graphs, tmp_path / "a.npz")


def test_targets_of_which_some_are_missing(tmp_path):
    """A row of several targets keeps those that it has."""
    label, graph_label = np.array([[1, np.nan], [np.nan, np.nan], [3, 4]]), np.array([[np.nan, 5, 6], [np.nan] * 3])
    graphs = cavs.from_lengths([2, 1], label=label, graph_label=graph_label)
    write_edges(graphs, tmp_path / "a.jsonl")
    assert "NaN" not in (tmp_path / "a.jsonl").read_text()
    again = cavs.io.read_edges(tmp_path / "a.jsonl")
    np.testing.assert_array_equal(again.label, label)
    np.testing.assert_array_equal(again.graph_label, graph_label)
    np.testing.assert_array_equal(cavs.interop.from_networkx(cavs.interop.to_networkx(graphs)).label, label)


def test_the_shape_of_edge_attr_without_edges(tmp_path):
    """It was lost, and with networkx all of it; files without edges could not be joined with others."""
    for rows in (np.zeros((0, 2)), np.zeros(0, np.int32)):
        lone = cavs.from_edges([1, 1], [[], []], edge_attr=rows)
        assert cavs.interop.from_networkx(cavs.interop.to_networkx(lone)).equals(lone)
        assert cavs.interop.from_networkx(cavs.interop.to_networkx(lone)[0]).equals(lone[0])
        assert cavs.interop.from_networkx(cavs.interop.to_networkx(lone), edge_attr="weight").edge_attr is None
    path = tmp_path / "a.jsonl"
    with pytest.raises(
        ValueError, match=r"write_edges: edge_attr: got shape \(0, 2\); expected values.* Write graphs.replace\("
    ):
        write_edges(lone.replace(edge_attr=np.zeros((0, 2))), path)
    with pytest.raises(ValueError, match=r"write_edges: x/a: got shape \(2, 0, 3\); .* Write graphs.replace\(x=None\)"):
        write_edges(lone.replace(x={"a": np.zeros((2, 0, 3))}), path)
    write_edges(lone, path)
    pair = cavs.from_edges([2], [[(1, 0)]], edge_attr=[[1.0, 2]])
    for other in (lone, cavs.io.read_edges(path), lone.replace(edge_attr=None)):
        for parts in ([other, pair], [pair, other]):
            joined = cavs.Graphs.concat(parts)
            assert joined.edge_attr is not None and joined.edge_attr.tolist() == [[1, 2]] and len(joined) == 3
    assert (lone + lone).equals(lone[[0, 1, 0, 1]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.int4, np.longdouble, bool])
def test_json_lines_hold_numbers_of_all_dtypes(dtype, tmp_path):
    """NaN of bfloat16 was written as NaN, which is no JSON, and long numbers raised an error of `json`."""
    rows = np.array([1, 0], dtype)
    missing = [None] if jnp.issubdtype(dtype, np.floating) else []
    label = np.concatenate([np.full(len(missing), np.nan).astype(dtype), rows])
    graphs = cavs.from_lengths([len(label)], label=label[:, None], x=np.resize(rows, len(label)), graph_label=rows[:1])
    write_edges(graphs, tmp_path / "a.jsonl")
    assert "NaN" not in (tmp_path / "a.jsonl").read_text()
    again = cavs.io.read_edges(tmp_path / "a.jsonl")
    np.testing.assert_array_equal(again.label, label[:, None].astype(float))
    np.testing.assert_array_equal(again.x, graphs.x.astype(float))
    assert again.graph_label.tolist() == [1]


@pytest.mark.parametrize("write", [cavs.io.save_npz, write_edges])
@pytest.mark.parametrize("path", [None, 3, b"a.npz", io.BytesIO()])
def test_a_path_is_a_path(write, path):
    name = write.__name__
    with pytest.raises(TypeError, match=rf"{name}: path: got a \w+; expected the path of .* Write {name}\(graphs, path\)"):
        write(cavs.from_lengths([1]), path)


@pytest.mark.parametrize("field", ["label", "graph_label"])
@pytest.mark.parametrize("values", [[np.inf, 1, 2], [1j, 2, 3]])
def test_labels_that_no_reader_takes_are_not_written(tmp_path, field, values):
    graphs = cavs.from_lengths([1, 1, 1], **{field: np.array(values)})
    with pytest.raises(ValueError, match=f"write_edges: {field}: got .* not finite real numbers; expected such numbers, or"):
        write_edges(graphs, tmp_path / "a.jsonl")


@pytest.mark.parametrize("field", ["graph_label", "x", "label"])
def test_integers_that_no_reader_takes_are_not_written(tmp_path, field):
    most = 2**63 - 1 if field == "x" else 2**53
    for largest in (most, most + 1):
        graphs = cavs.from_lengths([1, 1], **{field: np.array([[0], [largest]], np.uint64)})
        if largest == most:
            write_edges(graphs, tmp_path / "a.jsonl")
            np.testing.assert_array_equal(getattr(cavs.io.read_edges(tmp_path / "a.jsonl"), field), [[0], [largest]])
            continue
        with pytest.raises(ValueError, match=f"write_edges: {field}: got the integer {largest}; expected .* cavs.io.save_npz"):
            write_edges(graphs, tmp_path / "b.jsonl")
