"""Random graphs for hypothesis, as lists of children and as `Graphs`, and when two `Graphs` are the same."""

import jax
import numpy as np
from hypothesis import strategies as st

import cavs

ARRAYS = ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id")
NAMES = ("vocab", "kind_names", "label_names")


def build(forest, **fields):
    """Returns `Graphs` of a list of graphs, each given by the children of its vertices."""
    rows = [row for graph in forest for row in graph]
    flat = [child for row in rows for child in row]
    return cavs.Graphs.build([len(graph) for graph in forest], [len(row) for row in rows], flat, **fields)


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
    rows = np.arange(2.0 * len(rows)).reshape(-1, 2)
    fields["x"] = draw(st.sampled_from([None, rows, {"a": rows, "b": {"c": rows[:, 0].astype(int)}}]))
    return build(forest, **fields)


def assert_same(a, b):
    """Asserts that every field is equal and has the same dtype, or is None in both."""
    assert_same_features(a, b)
    for field in ARRAYS:
        x, y = getattr(a, field), getattr(b, field)
        assert (x is None) == (y is None), field
        assert x is None or x.dtype == y.dtype and x.tolist() == y.tolist(), field
    for field in NAMES:
        assert getattr(a, field) == getattr(b, field), field


def assert_same_features(a, b):
    """Asserts that the features of all vertices are equal."""
    assert jax.tree.structure(a.x) == jax.tree.structure(b.x)
    for x, y in zip(jax.tree.leaves(a.x), jax.tree.leaves(b.x), strict=True):
        assert x.dtype == y.dtype and x.tolist() == y.tolist()
