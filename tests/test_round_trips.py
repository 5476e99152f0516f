"""Writing and reading graphs gives the same graphs: `.npz`, JSON lines, networkx, lists of edges."""

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


@pytest.mark.parametrize("field", ["label", "graph_label"])
@pytest.mark.parametrize("values", [[np.inf, 1, 2], [1j, 2, 3]])
def test_labels_that_no_reader_takes_are_not_written(tmp_path, field, values):
    graphs = cavs.from_lengths([1, 1, 1], **{field: np.array(values)})
    with pytest.raises(ValueError, match=f"write_edges: {field}: got .* not finite real numbers; expected such numbers, or"):
        write_edges(graphs, tmp_path / "a.jsonl")


@pytest.mark.parametrize("field", ["graph_label", "x", "label"])
def test_integers_that_no_reader_takes_are_not_written(tmp_path, field):
    for largest in (2**63 - 1, 2**63):
        graphs = cavs.from_lengths([1, 1], **{field: np.array([[0], [largest]], np.uint64)})
        if largest < 2**63:
            write_edges(graphs, tmp_path / "a.jsonl")
            np.testing.assert_array_equal(getattr(cavs.io.read_edges(tmp_path / "a.jsonl"), field), [[0], [largest]])
            continue
        with pytest.raises(ValueError, match=f"write_edges: {field}: got the integer {largest}; expected .* cavs.io.save_npz"):
            write_edges(graphs, tmp_path / "b.jsonl")
