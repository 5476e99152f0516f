"""Trees in brackets, compared with a parser that uses a stack; and the cache."""

import io
import os

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cavs
from tests.graph_checks import check_graphs, check_trees
from tests.odd_graphs import children_of
from tests.sample_files import SST, names, write


def test_trees_are_numbered_in_post_order(tmp_path):
    graphs = cavs.read_trees(write(tmp_path, "a.txt", SST))
    assert np.diff(graphs.vertex_offsets).tolist() == [7, 3]
    assert children_of(graphs, 0) == [[], [], [], [1, 2], [], [3, 4], [0, 5]]
    assert children_of(graphs, 1) == [[], [], [0, 1]]
    assert graphs.label.tolist() == [2, 2, 4, 4, 2, 4, 3, 2, 1, 2]
    assert graphs.label_names is None
    assert graphs.vocab == ("It", "'s", "good", ".")
    assert graphs.input_id.tolist() == [0, 1, 2, -1, 3, -1, -1, 2, 0, -1]
    assert graphs.height.tolist() == [0, 0, 0, 1, 0, 2, 3, 0, 0, 1]


def test_trees_take_any_arity_layout_and_a_missing_label(tmp_path):
    text = "( (S (NP (DT The)\n (JJ fat) (NN cat))\r\n\t(VP (VBZ sits))\v(. .)) )(X y) (S\f(X z))"
    graphs = cavs.read_trees(write(tmp_path, "wsj.mrg", text))
    assert len(graphs) == 3
    assert children_of(graphs, 0) == [[], [], [], [0, 1, 2], [], [4], [], [3, 5, 6], [7]]
    assert children_of(graphs, 2) == [[], [0]]
    assert graphs.label_names == ("S", "NP", "DT", "JJ", "NN", "VP", "VBZ", ".", "X")
    assert names(graphs[0].label, graphs.label_names) == ["DT", "JJ", "NN", "NP", "VBZ", "VP", ".", "S", None]
    assert names(graphs[0].input_id, graphs.vocab) == ["The", "fat", "cat", None, "sits", None, ".", None, None]


def test_deep_trees_need_no_stack(tmp_path):
    depth = 20_000
    graphs = cavs.read_trees(write(tmp_path, "deep.txt", "(1 " * depth + "w" + ")" * depth))
    assert graphs.height.tolist() == list(range(depth))


def test_open_files_and_lines_are_read_as_the_file_is(tmp_path):
    path = write(tmp_path, "a.txt", "\ufeff" + SST)
    with open(path, encoding="utf-8") as file:
        check_trees(SST.encode(), cavs.read_trees(file))
    check_trees(SST.encode(), cavs.read_trees(io.StringIO(SST)))
    check_trees(SST.encode(), cavs.read_trees(SST.split("\n")))
    check_trees(SST.encode(), cavs.read_trees(line for line in SST.splitlines(keepends=True)))
    assert len(cavs.read_trees([])) == 0


def test_errors_in_open_files_and_lines_name_the_line(tmp_path):
    with open(write(tmp_path, "a.txt", "(1 a)\n(1 a"), encoding="utf-8") as file:
        with pytest.raises(cavs.io.FormatError, match="a.txt, line 2: got '.1 a'"):
            cavs.read_trees(file)
    with pytest.raises(cavs.io.FormatError, match="^lines, line 2: got '.1 a'"):
        cavs.read_trees(["(1 a)", "(1 a"])
    with pytest.raises(cavs.io.FormatError, match="^lines, line 2: got .*; expected text that UTF-8 can encode"):
        cavs.read_trees(["(1 a)", "(1 \ud800)"])


def test_other_sources_are_refused(tmp_path):
    expected = "expected a path, a file opened as text, or lines of type str"
    with open(write(tmp_path, "a.txt", SST), "rb") as file:
        with pytest.raises(TypeError, match=f"read_trees: source: got a line of type bytes; {expected}. Write open.path"):
            cavs.read_trees(file)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"read_trees: source: got int; {expected}"):
        cavs.read_trees(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"for a tree as text write cavs.read_trees\(\[text\]\): '\(3 a\)'"):
        cavs.read_trees("(3 a)")
    with pytest.raises(ValueError, match="read_trees: cache: got True for list; expected a path, .* Write cache=False"):
        cavs.read_trees([SST], cache=True)


trees = st.recursive(
    st.tuples(st.text("ab1(", min_size=1, max_size=2), st.text("xy\u00a0é", min_size=1, max_size=3)),
    lambda inner: st.tuples(st.sampled_from(["", "3", "-1", "S"]), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=12,
)


def show(tree, space):
    label, rest = tree
    if isinstance(rest, str):
        return f"({label.replace('(', '-')}{space}{rest})"
    return f"({label}{space}{space.join(show(child, space) for child in rest)})"


@settings(deadline=None, max_examples=150)
@given(forest=st.lists(trees, max_size=4), space=st.sampled_from([" ", "\n", " \t "]))
def test_trees_equal_a_plain_parser(tmp_path_factory, forest, space):
    data = "\n".join(show(tree, space) for tree in forest).encode()
    path = tmp_path_factory.getbasetemp() / "plain.txt"
    path.write_bytes(data)
    graphs = cavs.read_trees(path)
    check_graphs(graphs)
    check_trees(data, graphs)


# ---- the cache ----


def test_cache_is_reused_until_the_source_changes(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", SST)
    first = cavs.read_trees(path, cache=True)
    assert (tmp_path / "a.txt.npz").exists()
    with monkeypatch.context() as patched:
        patched.setattr("cavs._readers.trees._parse", None)
        again = cavs.read_trees(path, cache=True)
    assert (
        again.vocab == first.vocab and again.label.tolist() == first.label.tolist() and children_of(again) == children_of(first)
    )

    stat = os.stat(path)
    path.write_text("(1 w)\n")
    assert cavs.read_trees(path, cache=True).num_vertices == 1  # another size
    path.write_text("(1 v)\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert cavs.read_trees(path, cache=True).vocab == ("v",)  # another time
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.npz"]


def test_a_cache_of_another_version_is_written_anew(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", SST)
    with monkeypatch.context() as patched:
        patched.setattr("cavs._readers.npz._VERSION", 0)
        cavs.read_trees(path, cache=True)
    assert cavs.read_trees(path, cache=True).num_vertices == 10
    assert cavs.io.load_npz(tmp_path / "a.txt.npz").num_vertices == 10


def test_a_cache_is_written_through_a_link(tmp_path):
    path = write(tmp_path, "a.txt", SST)
    (tmp_path / "a.txt.npz").symlink_to("elsewhere")
    cavs.read_trees(path, cache=True)
    assert (tmp_path / "a.txt.npz").is_symlink() and (tmp_path / "elsewhere").stat().st_size


@pytest.mark.parametrize("other", [b"", b"PK\x03\x04 no zip", "damaged", "save_npz", "numpy"])
def test_a_file_that_is_no_cache_is_never_replaced(tmp_path, other):
    path, cached = write(tmp_path, "a.txt", SST), tmp_path / "a.txt.npz"
    if other == "save_npz":
        cavs.io.save_npz(cavs.read_trees(["(1 mine)"]), cached)
    elif other == "numpy":
        np.savez(cached, stamp=np.arange(2))
    else:
        cavs.read_trees(path, cache=True)
        cached.write_bytes(cached.read_bytes()[:-100] if other == "damaged" else other)
    before = cached.read_bytes()
    with pytest.warns(UserWarning, match="no cache was written.*a.txt.npz.*Rename or delete that, or write cache=False"):
        assert cavs.read_trees(path, cache=True).num_vertices == 10
    assert cached.read_bytes() == before


def test_a_cache_that_cannot_be_written_warns(tmp_path):
    path = write(tmp_path, "a.txt", SST)
    (tmp_path / "a.txt.npz").mkdir()  # a folder cannot be replaced by a file
    with pytest.warns(UserWarning, match="no cache was written"):
        assert cavs.read_trees(path, cache=True).num_vertices == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.npz"]
