"""Properties of `Graphs`, compared with plain loops."""

import copy
import dataclasses
import pickle
import weakref
from itertools import pairwise
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cavs
from cavs._graphs import flat
from tests.odd_graphs import children_of, from_children
from tests.random_graphs import assert_same, build, forests, graphs


def height_by_recursion(rows, v):
    return max((1 + height_by_recursion(rows, child) for child in rows[v]), default=0)


@pytest.mark.parametrize("round_", [0, 10**9])  # all levels by NumPy; all levels but the leaves in the loop over vertices
@settings(deadline=None)
@given(forest=forests())
def test_height_is_the_longest_path_to_a_leaf(round_, forest):
    with mock.patch.object(flat, "VERTICES_PER_ROUND", round_):
        graphs = build(forest)
    assert graphs.height.tolist() == [height_by_recursion(rows, v) for rows in forest for v in range(len(rows))]
    assert len(graphs) == len(forest) and graphs.num_vertices == sum(map(len, forest))
    assert graphs.num_edges == sum(len(row) for rows in forest for row in rows)
    assert graphs.max_fan_in == max((len(row) for rows in forest for row in rows), default=0)
    assert [children_of(graphs, g) for g in range(len(forest))] == forest


@pytest.mark.parametrize("round_", [0, 10**9])
def test_a_cycle_is_found_in_either_way(round_):
    with (
        mock.patch.object(flat, "VERTICES_PER_ROUND", round_),
        pytest.raises(ValueError, match="a cycle in graph 0, through vertex 2"),
    ):
        build([[[], [0], [1, 3], [2], [3]]])


def test_deep_graphs_take_no_rounds_of_numpy(monkeypatch):
    """Otherwise a tree of a million levels would take a minute."""
    rounds = []
    real = flat.offsets
    monkeypatch.setattr(flat, "offsets", lambda counts: (rounds.append(1), real(counts))[1])
    parents = np.append(np.arange(1, 20_000), -1)
    graphs = cavs.from_parents([parents])
    assert graphs.height.tolist() == list(range(20_000)) and graphs.reversed().height.tolist() == list(range(19_999, -1, -1))
    assert len(rounds) <= 2 * (1 + 40_000 / flat.VERTICES_PER_ROUND)
    found = len(rounds)
    assert cavs.from_lengths([20_000]).height.tolist() == list(range(20_000)) and len(rounds) == found


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


def test_the_arrays_of_the_caller_are_copied_unless_they_cannot_change(tmp_path):
    values = {"label": np.zeros(2), "graph_label": np.zeros(1), "edge_attr": np.zeros(1), "x": {"a": np.zeros((2, 3))}}
    values |= {"kind": np.zeros(2, np.int32), "input_id": np.zeros(2, np.int32)}
    children = np.zeros(1, np.int32)
    window = values["x"]["a"][:, :2]
    window.flags.writeable = False
    frozen = np.zeros((2, 3))
    frozen.flags.writeable = False
    np.save(tmp_path / "x.npy", frozen)
    fixed = [frozen, jax.numpy.zeros((2, 3)), np.load(tmp_path / "x.npy", mmap_mode="r")]
    graphs = cavs.Graphs.build([2], [0, 1], children, **values)
    replaced = cavs.from_lengths([2]).replace(**values | {"x": [values["x"]["a"], window, *fixed]})
    for array in jax.tree.leaves((values, children)):
        array[...] = 7
    for one in (graphs, replaced):
        assert not any(x.any() for x in jax.tree.leaves([getattr(one, name) for name in ("children", *values)]))
    assert [np.shares_memory(a, b) for a, b in zip(replaced.x[2:], fixed, strict=True)] == [True] * 3
    assert replaced.replace(label=[1, 2]).x is replaced.x  # large features are copied once


@pytest.mark.parametrize("index", [4, -5, [4], [0, -5], [0.5], "a", [[0]], [True], True, None])
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
        ({"input_id": [0], "vocab": ["a"]}, {"input_id": [0], "vocab": ["b"]}, r"different vocab.*other\.with_vocab"),
        ({"kind": [0], "kind_names": ["a"]}, {"kind": [0], "kind_names": ["b"]}, r"different kind_names.*Graphs\.concat"),
        ({"label": [0]}, {}, r"got label in some graphs only; .* Write graphs\.replace\(label=None\)"),
    ],
)
def test_unlike_graphs_do_not_add(left, right, message):
    with pytest.raises(ValueError, match=message):
        cavs.from_lengths([1], **left) + cavs.from_lengths([1], **right)


@settings(deadline=None)
@given(graphs(), st.data())
def test_concat_keeps_every_name(graphs, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(graphs)), max_size=3)))
    parts = [graphs[a:b] for a, b in pairwise([0, *cuts, len(graphs)])]
    assert_same(cavs.Graphs.concat(parts), graphs)
    assert (
        cavs.Graphs.concat(parts).equals(graphs)
        and not graphs.equals(parts)
        and not graphs.equals(graphs[:0] if len(graphs) else cavs.from_lengths([1]))
    )
    words = [["x", "y"], ["z", "x"]]
    some = [cavs.from_lengths([3], input_id=[0, -1, 1], vocab=own, kind=[0, 1, 1], kind_names=own) for own in words]
    joined = cavs.Graphs.concat(some)
    assert [[*joined.vocab, None][i] for i in joined.input_id] == ["x", None, "y", "z", None, "x"]
    assert [joined.kind_names[i] for i in joined.kind] == ["x", "y", "y", "z", "x", "x"]


@settings(deadline=None)
@given(graphs(min_graphs=1))
def test_loaders_carry_features(graphs):
    fields = [name for name in ("input_id", "label") if getattr(graphs, name) is not None]
    loader = cavs.data.Loader(graphs, 3, steps=1, last="drop" if graphs.label is None else "pad", fields=fields)
    for batch in loader:
        assert isinstance(batch, cavs.Schedule) == (graphs.x is None)
        if graphs.x is not None:
            sched, x = batch
            assert {leaf.shape[0] for leaf in jax.tree.leaves(x)} == {sched.shape.vertices}


@given(graphs())
def test_replaced_fields_are_those_of_graphs_that_were_built_with_them(one):
    rows = np.arange(one.num_vertices)
    fields = {"input_id": rows % 3, "vocab": ["a", "b", "c"], "label": None, "label_names": None, "x": {"at": rows / 2}}
    fields |= {"graph_label": np.arange(len(one)), "edge_attr": np.arange(one.num_edges)[:, None]}
    kept = {"kind": one.kind, "kind_names": one.kind_names}
    sizes, num_children = np.diff(one.vertex_offsets), np.diff(one.child_offsets)
    assert_same(one.replace(**fields), cavs.Graphs.build(sizes, num_children, one.children, **fields, **kept))
    assert_same(one.replace(), one)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"labels": [0, 1]}, TypeError, "replace: got 'labels'; expected one of kind, label, .* Did you mean label?"),
        ({"label": [0]}, ValueError, "label: got 1 value; expected 2, one per vertex"),
        ({"input_id": [0, 5]}, ValueError, "input_id: got 5 at vertex 1 of graph 0; expected -1 to 1"),
    ],
)
def test_wrong_replacements_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        cavs.from_lengths([2], input_id=[0, 1], vocab=["a", "b"]).replace(**fields)


def test_only_graphs_add_and_names_are_lists():
    graphs = cavs.from_lengths([2], input_id=[0, 1])
    with pytest.raises(
        TypeError, match=r"graphs \+ other: got a list; expected cavs.Graphs. For a list write cavs.Graphs.concat"
    ):
        graphs + [graphs]
    for name in ("vocab", "kind_names", "label_names"):
        with pytest.raises(TypeError, match=rf"{name}: got 'ab'; expected a list of names. Write {name}=\['ab'\]"):
            cavs.from_lengths([2], **{"input_id": [0, 1], name: "ab"})
        with pytest.raises(TypeError, match=rf"{name}: got 1 among the names; expected str. Write {name}=\[str\(x\) for"):
            cavs.from_lengths([2], **{"input_id": [0, 1], name: ["a", 1]})
        with pytest.raises(TypeError, match=f"{name}: got a set, whose order is another one in each process; expected a list"):
            cavs.from_lengths([2], **{"input_id": [0, 1], name: {"a", "b"}})


def test_a_dict_of_names_numbers_them_in_its_order_or_is_refused():
    """Its numbers were ignored, and each name got its place."""
    graphs = cavs.from_lengths([2], input_id=[0, 1], vocab=["a", "b"], label=[1, 0], label_names={"x": 0, "y": 1})
    assert graphs.label_names == ("x", "y") and graphs.with_vocab({"b": 0, "a": 1}).input_id.tolist() == [1, 0]
    assert graphs.with_vocab(dict.fromkeys("ba")).vocab == ("b", "a")
    wrong = {"b": 1, "a": 0}
    for use, argument in (
        (graphs.with_vocab, "vocab"),
        (lambda names: graphs.replace(vocab=names), "vocab"),
        (lambda names: cavs.data.with_labels(graphs, names), "labels"),
        (lambda names: cavs.data.ConfusionMatrix.of(names, [0], [0]), "labels"),
    ):
        with pytest.raises(ValueError, match=rf"{argument}: got a dict whose .* sorted\({argument}, key={argument}.get\)"):
            use(wrong)


def test_an_empty_file_among_others_changes_nothing():
    """Such as an empty shard, which has no labels or other names."""
    empty, named = cavs.read_trees([]), cavs.read_trees(["(good a)", "(bad b)"])
    numbers = cavs.from_lengths([2], label=[0.5, 1.5], graph_label=[1.0], x=np.ones((2, 3)))
    for some in (named, numbers):
        for parts in ([empty, some], [some, empty], [empty, some, empty]):
            assert cavs.Graphs.concat(parts).equals(some)
    assert not len(cavs.Graphs.concat([empty, empty]))


def test_numbers_and_names_are_joined_once_the_numbers_have_names():
    parts = [cavs.read_trees(["(1 (2 a) (1 b))"]), cavs.read_trees(["(good b)"])]
    with pytest.raises(ValueError, match=r"concat: got different label_names; .* Write graphs.replace\(label_names=.*named"):
        cavs.Graphs.concat(parts)
    joined = cavs.Graphs.concat(map(cavs.data.named, parts))
    assert [joined.label_names[i] for i in joined.label] == ["2", "1", "1", "good"]


def test_lists_of_different_lengths_are_named():
    for use, name in (
        (lambda: cavs.from_lengths([2, 1], label=[[0.5, 1], [2.5]]), "label"),
        (lambda: cavs.from_edges([2, 3], [[(1, 0)], [(1, 0), (2, 0)]], edge_attr=[[1], [2, 3]]), "edge_attr"),
        (lambda: cavs.from_lengths([2, 1], graph_label=[[0.5, 1], [2.5]]), "graph_label"),
    ):
        with pytest.raises(ValueError, match=rf"{name}: got lists or arrays of .* write np.concatenate\({name}\)"):
            use()


def test_with_vocab_renumbers_words():
    graphs = cavs.from_lengths([4], input_id=[2, -1, 0, 1], vocab=["a", "b", "c"])
    assert graphs.with_vocab(["c", "<unk>", "a"]).input_id.tolist() == [0, -1, 2, -1]
    again = graphs.with_vocab(["c", "<unk>", "a"], unknown="<unk>")
    assert again.input_id.tolist() == [0, -1, 2, 1] and again.vocab == ("c", "<unk>", "a")
    assert_same(again.with_vocab(again.vocab), again)
    assert graphs.with_vocab(dict.fromkeys("cba").keys()).vocab == ("c", "b", "a")
    for vocab in ("abc", None, 3, {"a", "b"}, frozenset("a"), graphs):
        with pytest.raises(TypeError, match="with_vocab: vocab: got .*; expected a list of words. Write with_vocab"):
            graphs.with_vocab(vocab)
    with pytest.raises(TypeError, match="with_vocab: vocab: got a int among the words; expected str. Write with_vocab"):
        graphs.with_vocab(["a", 3])
    with pytest.raises(ValueError, match="unknown: got 'b'; expected a word of vocab"):
        graphs.with_vocab(["a"], unknown="b")
    with pytest.raises(ValueError, match="without a vocab"):
        cavs.from_lengths([4]).with_vocab(["a"])


@settings(deadline=None)
@given(graphs())
def test_reversed_twice_sorts_the_children(graphs):
    backward = graphs.reversed()
    for g in range(len(graphs)):
        rows = children_of(graphs, g)
        assert children_of(backward, g) == [
            sorted(p for p, row in enumerate(rows) for c in row if c == v) for v in range(len(rows))
        ]
    forward = backward.reversed()
    assert [children_of(forward, g) for g in range(len(graphs))] == [
        [sorted(row) for row in children_of(graphs, g)] for g in range(len(graphs))
    ]
    assert forward.height.tolist() == graphs.height.tolist()
    assert_same(forward.reversed(), backward)


@pytest.mark.parametrize(
    "num_vertices, num_children, children, fields, message",
    [
        ([2, 0], [0, 0], [], {}, r"num_vertices: got 0 vertices for graph 1; expected at least 1"),
        ([1, 2], [0, 0, 1], [2], {}, "got child 2 of vertex 1 of graph 1; expected .* 0 to 1"),
        ([1], [1], [-1], {}, "child -1 of vertex 0 of graph 0"),
        ([1, 1], [0, 1], [0], {}, "a cycle in graph 1, through vertex 0"),
        ([1, 3], [0, 1, 1, 1], [1, 2, 1], {}, "a cycle in graph 1"),
        # Sums that overflow int64, or rows that overflow int32: NumPy would write outside its arrays.
        (
            [1, 2**63 - 1, 2**63 - 1, 1, 1],
            [0] * 3,
            [],
            {},
            r"num_vertices\[1\]: got 9223372036854775807; expected a sum below 2\*\*31",
        ),
        ([2**31], [0], [], {}, r"num_vertices\[0\]: got 2147483648; expected a sum below 2\*\*31"),
        ([2**30] * 2, [0], [], {}, "num_vertices: got a sum of 2147483648; expected"),
        ([5], [1, 2**63 - 1, 2**63 - 1, 1, 1], [0], {}, r"num_children\[1\]: got 9223372036854775807; expected"),
        ([2], [2**30] * 2, [0], {}, "num_children: got a sum of 2147483648"),
        ([2], [0], [], {}, "num_children: got 1 value, .* expected 2 values"),
        ([2], [0, -1], [], {}, "num_children: got 2 values, the smallest -1"),
        ([2], [0, 1], [], {}, "children: got 0 values; expected 1"),
        ([2], [0, 1], [0.0], {}, "children: got dtype float64"),
        ([2], [0, 1], [2**32], {}, r"children\[0\]: got 4294967296; expected an integer that fits int32"),
        ([2], [0, 1], [0], {"label": [2**31, 0]}, r"label\[0\]: got 2147483648; expected an integer that fits int32"),
        ([2], [0, 1], [0], {"label": [0]}, "label: got 1 value; expected 2"),
        ([2], [0, 1], [0], {"label": [0, -2]}, "label: got -2 at vertex 1 of graph 0; expected -1 to"),
        ([2], [0, 1], [0], {"kind": [0, -1]}, "kind: got -1 at vertex 1 of graph 0; expected 0 to"),
        ([1, 1], [0, 0], [], {"input_id": [0, 2], "vocab": ["a", "b"]}, "got 2 at vertex 0 of graph 1; expected -1 to 1"),
    ],
)
def test_wrong_arrays_are_refused(num_vertices, num_children, children, fields, message):
    with pytest.raises(ValueError, match=message):
        cavs.Graphs.build(num_vertices, num_children, children, **fields)


@pytest.mark.parametrize(
    ("children", "match"),
    [
        ([[1], [2], [0]], "a cycle in graph 0, through vertex 0"),
        ([[0]], "a cycle in graph 0"),
        ([[], [0, 7]], "child 7 of vertex 1 of graph 0; expected a vertex number within the graph, 0 to 1"),
        ([[], [-1]], "child -1 of vertex 1 of graph 0"),
    ],
)
def test_invalid_graphs_are_refused(children: list[list[int]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        from_children(children)


def test_repr_says_the_sizes():
    graphs = cavs.from_lengths([3, 1], input_id=[0, 0, 0, 0], vocab=["a"])
    assert repr(graphs) == "Graphs(2 graphs, 4 vertices, 2 edges, 3 levels, vocab=1)"
    assert repr(graphs[:0]) == "Graphs(0 graphs, 0 vertices, 0 edges, 0 levels, vocab=1)"


@pytest.mark.parametrize("index", [slice(1, 3), [7, 2], np.arange(9) % 2 == 0])
def test_a_selection_stands_alone(index):
    """Copies do not include the data set, a selection does not keep it alive, and the schedule is the same without it."""
    all_graphs = cavs.Graphs.build([3] * 9, [0, 0, 2] * 9, [0, 1] * 9)
    some = all_graphs[index]
    before = cavs.schedule(some)
    alone = cavs.Graphs(*(getattr(some, field.name) for field in dataclasses.fields(some)))
    assert pickle.dumps(some) == pickle.dumps(alone)
    gone = weakref.ref(all_graphs)
    del all_graphs
    assert gone() is None
    for other in (some, alone, pickle.loads(pickle.dumps(some)), copy.deepcopy(some)):
        after = cavs.schedule(other)
        assert after.shape == before.shape
        np.testing.assert_array_equal(after.data, before.data)


def test_a_selection_keeps_the_shapes_of_its_data_set_with_other_words_and_labels():
    """A few graphs may have one arity, or few kinds, by chance: their schedule had another shape."""
    graphs = cavs.from_parents([[2, 2, -1], [1, -1]], input_id=[0] * 5, vocab=["a"], kind=[0, 0, 1, 0, 2])
    some, want = graphs[:1], cavs.schedule(graphs[:1], kinds="mixed").shape
    for other in (some.replace(label=[1, 2, 3]), some.with_vocab(["b", "a"])):
        assert cavs.schedule(other, kinds="mixed").shape == want
    assert cavs.schedule(some.replace(kind=[0, 0, 0]), kinds="mixed").shape.mixed == (0,)


def test_a_number_of_numpy_or_jax_selects_a_graph():
    graphs = cavs.from_lengths([1, 2, 3])
    for index in (np.array(-1), np.uint8(2), jax.numpy.int32(2)):
        assert_same(graphs[index], graphs[2])
    for index, got in ((np.array([2**64 - 1], np.uint64), "graphs 18446744073709551615 to"), (np.array(3), "graph 3;")):
        with pytest.raises(IndexError, match=f"index: got {got}"):  # as a signed integer, the first is -1
            graphs[index]


def test_numbers_are_stored_as_this_machine_has_them(tmp_path):
    """JAX refuses arrays of another byte order."""
    swapped = {name: np.arange(3.0).astype(">f4") for name in ("label", "x")}
    graphs = cavs.from_lengths([3], **swapped)
    assert graphs.label.dtype == graphs.x.dtype == np.float32 and graphs.label.tolist() == graphs.x.tolist() == [0, 1, 2]
    assert jax.numpy.asarray(cavs.schedule(graphs).pad(swapped["x"]))[:3].tolist() == [0, 1, 2]


def test_values_that_are_no_array_are_named():
    masked = np.ma.masked_array([1.0, 2, 3], [0, 1, 0])
    for field in ("label", "x"):  # the number below the mask was taken
        with pytest.raises(ValueError, match=rf"{field}: got an array with masked values; .* Write {field}.filled\(np.nan\)"):
            cavs.from_lengths([3], **{field: masked})
    assert cavs.from_lengths([3], x=masked.filled(0)).x.tolist() == [1, 0, 3]
    with pytest.raises(TypeError, match=r"x: got a PRNGKeyArray \(.*key_data.*\); expected an array of numbers"):
        cavs.from_lengths([2], x=jax.random.split(jax.random.key(0), 2))
    with pytest.raises(TypeError, match="vocab: got a int; expected a list of names"):
        cavs.from_lengths([2], input_id=[0, 1], vocab=5)
    for parts in (None, 5):
        with pytest.raises(TypeError, match="Graphs.concat: parts: got a .*; expected cavs.Graphs, at least one"):
            cavs.Graphs.concat(parts)
    for fractions in (iter([0.5, 0.5]), "ab", [0.5, None], [0.5, [0.5]]):
        with pytest.raises(ValueError, match="Graphs.split: fractions: got "):
            cavs.from_lengths([1] * 4).split(fractions)
