"""Every format read as its docstring says; every malformed file refused with its line and what was expected.

Long for its tables: one of what is refused stands for five test files of the same body.
"""

import gzip
import os
import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cavs
from cavs._readers import FormatError, write_edges

FUZZ = runpy.run_path(str(Path(__file__).with_name("fuzz_readers.py")))


def write(tmp_path, name, text):
    path = tmp_path / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def kids(graphs, graph=0):
    """Each vertex's children, as lists."""
    one = graphs[graph]
    return [k.tolist() for k in np.split(one.children, one.child_offsets[1:-1])]


def names(ids, table):
    return [None if i < 0 else table[i] for i in ids.tolist()]


# ---- trees ----

SST = "(3 (2 It) (4 (4 (2 's) (4 good)) (2 .)))\n(2 (2 good) (1 It))\n"


def test_trees_are_numbered_in_post_order(tmp_path):
    graphs = cavs.read_trees(write(tmp_path, "a.txt", SST))
    assert np.diff(graphs.vertex_offsets).tolist() == [7, 3]
    assert kids(graphs, 0) == [[], [], [], [1, 2], [], [3, 4], [0, 5]]
    assert kids(graphs, 1) == [[], [], [0, 1]]
    assert graphs.label.tolist() == [2, 2, 4, 4, 2, 4, 3, 2, 1, 2]
    assert graphs.label_names is None
    assert graphs.vocab == ("It", "'s", "good", ".")
    assert graphs.input_id.tolist() == [0, 1, 2, -1, 3, -1, -1, 2, 0, -1]
    assert graphs.height.tolist() == [0, 0, 0, 1, 0, 2, 3, 0, 0, 1]


def test_trees_take_any_arity_layout_and_a_missing_label(tmp_path):
    text = "( (S (NP (DT The)\n (JJ fat) (NN cat))\r\n\t(VP (VBZ sits))\v(. .)) )(X y) (S\f(X z))"
    graphs = cavs.read_trees(write(tmp_path, "wsj.mrg", text))
    assert len(graphs) == 3
    assert kids(graphs, 0) == [[], [], [], [0, 1, 2], [], [4], [], [3, 5, 6], [7]]
    assert kids(graphs, 2) == [[], [0]]
    assert graphs.label_names == ("S", "NP", "DT", "JJ", "NN", "VP", "VBZ", ".", "X")
    assert names(graphs[0].label, graphs.label_names) == ["DT", "JJ", "NN", "NP", "VBZ", "VP", ".", "S", None]
    assert names(graphs[0].input_id, graphs.vocab) == ["The", "fat", "cat", None, "sits", None, ".", None, None]


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u2028", "\u0085", "\u3000", "\x1c", "\x1f", "\ufeff"])
def test_unicode_space_stays_inside_a_word(tmp_path, space):
    word = f"8{space}1\\/2"
    assert cavs.read_trees(write(tmp_path, "a.txt", f"(2 (2 {word}) (3 x))")).vocab == (word, "x")
    line = f"1\t{word}\t_\tX\t_\t_\t0\troot\t_\t_\n"
    assert cavs.read_conllu(write(tmp_path, "a.conllu", line)).vocab == (word,)
    blif = f".inputs {word}\n.outputs y\n.names {word} y\n1 1\n"
    assert cavs.read_netlist(write(tmp_path, "a.blif", blif)).num_edges == 1
    bench = f"INPUT({word})\ny = NOT({word})\n"
    assert cavs.read_netlist(write(tmp_path, "a.bench", bench)).num_edges == 1


def test_deep_trees_need_no_stack(tmp_path):
    depth = 20_000
    graphs = cavs.read_trees(write(tmp_path, "deep.txt", "(1 " * depth + "w" + ")" * depth))
    assert graphs.height.tolist() == list(range(depth))


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
    FUZZ["_check"](graphs)
    FUZZ["_check_trees"](data, graphs)


def test_cache_is_reused_until_the_source_changes(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", SST)
    first = cavs.read_trees(path, cache=True)
    assert (tmp_path / "a.txt.npz").exists()
    with monkeypatch.context() as patched:
        patched.setattr("cavs._readers.trees._parse", None)
        again = cavs.read_trees(path, cache=True)
    assert again.vocab == first.vocab and again.label.tolist() == first.label.tolist() and kids(again) == kids(first)

    stat = os.stat(path)
    path.write_text("(1 w)\n")
    assert cavs.read_trees(path, cache=True).num_vertices == 1  # another size
    path.write_text("(1 v)\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    assert cavs.read_trees(path, cache=True).vocab == ("v",)  # another time
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.npz"]


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None, "version"])
def test_a_cache_that_cannot_be_used_is_written_anew(tmp_path, damage, monkeypatch):
    path = write(tmp_path, "a.txt", SST)
    if damage == "version":
        with monkeypatch.context() as patched:
            patched.setattr("cavs._readers.npz._VERSION", 0)
            cavs.read_trees(path, cache=True)
    else:
        cavs.read_trees(path, cache=True)
        cached = tmp_path / "a.txt.npz"
        cached.write_bytes(cached.read_bytes()[:-100] if damage is None else damage)
    assert cavs.read_trees(path, cache=True).num_vertices == 10
    assert cavs.load_npz(tmp_path / "a.txt.npz").num_vertices == 10


def test_a_cache_that_cannot_be_written_warns(tmp_path):
    path = write(tmp_path, "a.txt", SST)
    (tmp_path / "a.txt.npz").mkdir()  # a folder cannot be replaced by a file
    with pytest.warns(UserWarning, match="no cache was written"):
        assert cavs.read_trees(path, cache=True).num_vertices == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "a.txt.npz"]


# ---- CoNLL-U ----

CONLLU = """# sent_id = 1
# text = They buy du pain
1\tThey\tthey\tPRON\tPRP\t_\t2\tnsubj\t2:nsubj\t_
2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t0:root\t_
3-4\tdu\t_\t_\t_\t_\t_\t_\t_\t_
3\tde\tde\tADP\tIN\t_\t5\tcase\t_\t_
4\tle\tle\tDET\tDT\t_\t5\tdet\t_\t_
4.1\tnone\t_\t_\t_\t_\t_\t_\t_\t_
5\tpain\tpain\tNOUN\tNN\t_\t2\tobj\t_\t_

1\t_\t_\t_\t_\t_\t0\troot\t_\t_
2\tbuy\tbuy\tVERB\tVBP\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize(
    "label, expected",
    [
        ("upos", ["PRON", "VERB", "ADP", "DET", "NOUN", None, "VERB"]),
        ("xpos", ["PRP", "VBP", "IN", "DT", "NN", None, "VBP"]),
        ("deprel", ["nsubj", "root", "case", "det", "obj", "root", "root"]),
    ],
)
def test_conllu_children_are_in_word_order(tmp_path, label, expected):
    for text in (CONLLU, CONLLU.replace("\n", "\r\n"), CONLLU.removesuffix("\n"), "\n\n" + CONLLU + "\n \n"):
        graphs = cavs.read_conllu(write(tmp_path, "a.conllu", text), label=label)
        assert kids(graphs, 0) == [[], [0, 4], [], [], [2, 3]]
        assert kids(graphs, 1) == [[], []]  # two roots
        assert names(graphs.input_id, graphs.vocab) == ["They", "buy", "de", "le", "pain", "_", "buy"]
        assert names(graphs.label, graphs.label_names) == expected


def test_conllu_names_an_unknown_column(tmp_path):
    with pytest.raises(ValueError, match="label='pos', wanted one of 'upos', 'xpos', 'deprel'"):
        cavs.read_conllu(tmp_path / "none", label="pos")


# ---- JSON lines ----


def test_edges_as_children_or_as_pairs(tmp_path):
    text = (
        '{"children": [[], [], [1, 0]], "inputs": ["not", "bad", null], "labels": [1, 0, 3], '
        '"kinds": ["leaf", "leaf", "inner"]}\n'
        "\n"
        '{"num_vertices": 3, "edges": [[0, 2], [1, 2], [0, 1], [0, 2]], "inputs": [null, null, "bad"], "labels": [null, 0, 0], '
        '"kinds": ["root", "inner", "leaf"]}'
    )
    graphs = cavs.read_edges(write(tmp_path, "a.jsonl", text))
    assert kids(graphs, 0) == [[], [], [1, 0]]
    assert kids(graphs, 1) == [[2, 1, 2], [2], []]
    assert names(graphs.input_id, graphs.vocab) == ["not", "bad", None, None, None, "bad"]
    assert graphs.label.tolist() == [1, 0, 3, -1, 0, 0] and graphs.label_names is None
    assert graphs.kind.tolist() == [0, 0, 1, 2, 1, 0] and graphs.kind_names == ("leaf", "inner", "root")


def test_edges_without_a_single_label_have_none(tmp_path):
    graphs = cavs.read_edges(write(tmp_path, "a.jsonl", '{"children": [[]], "labels": [null], "inputs": [7]}'))
    assert graphs.label.tolist() == [-1] and graphs.input_id.tolist() == [7] and graphs.vocab is None


# ---- netlists ----

BENCH = """# c17, more or less
INPUT(G1)
 input ( G2 )
INPUT(G3)
OUTPUT(G7)
OUTPUT(G2)

G7 = nand(G6, G2)   # defined after use
G6 = AND(G1,G3 , G1)
G8 = BUFF(G6)
"""

BLIF = """# a comment
.model top
.inputs a b \\
  c
.outputs y one
.names n1 c y
1- 1
-1 1
.names a b n1
11 1
.names a c n2
-1 1
1- 1
.names one
1
.names a never
.names b a n3
11 1
.end
"""


def test_bench_gates_keep_their_fan_in_order(tmp_path):
    graphs = cavs.read_netlist(write(tmp_path, "c.bench", BENCH))
    assert kids(graphs) == [[], [], [], [4, 1], [0, 2, 0], [4]]
    assert graphs.kind_names == ("INPUT", "AND", "NAND", "OR", "NOR", "XOR", "XNOR", "NOT", "BUF")
    assert names(graphs.kind, graphs.kind_names) == ["INPUT", "INPUT", "INPUT", "NAND", "AND", "BUF"]
    assert graphs.label.tolist() == [0, 1, 0, 1, 0, 0] and graphs.label_names is None and graphs.input_id is None


def test_blif_kinds_are_covers(tmp_path):
    graphs = cavs.read_netlist(write(tmp_path, "c.blif", BLIF))
    assert kids(graphs) == [[], [], [], [4, 2], [0, 1], [0, 2], [], [0], [1, 0]]
    assert names(graphs.kind, graphs.kind_names) == [
        *["INPUT"] * 3,
        *("names:-1 1|1- 1", "names:11 1", "names:-1 1|1- 1", "names:1", "names:- 0", "names:11 1"),
    ]
    assert graphs.label.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_several_netlists_share_their_kinds(tmp_path):
    paths = [write(tmp_path, name, text) for name, text in (("a.blif", BLIF), ("b.bench.gz", BENCH), ("c.blif.gz", BLIF))]
    graphs = cavs.read_netlist(paths)
    assert len(graphs) == 3
    assert graphs[0].kind.tolist() == graphs[2].kind.tolist()
    assert kids(graphs, 1) == kids(cavs.read_netlist(paths[1]))
    with pytest.raises(ValueError, match=r"read_netlist: .*a\.v ends in '\.v', wanted \.bench or \.blif"):
        cavs.read_netlist([paths[0], tmp_path / "a.v"])


# ---- .npz ----


def test_npz_keeps_every_field(tmp_path):
    graphs = cavs.Graphs.build(
        [2, 1],
        [0, 1, 0],
        [0],
        kind=[0, 1, 0],
        label=[-1, 2, 5],
        input_id=[0, -1, 3],
        vocab=["é", "", "x\0", "\ud800"],
        kind_names=["a", "unused"],
    )
    for name in ("a.npz", "a.npz.gz", "no_suffix"):
        cavs.save_npz(graphs, tmp_path / name)
        again = cavs.load_npz(tmp_path / name)
        for field in ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id"):
            assert getattr(again, field).tolist() == getattr(graphs, field).tolist(), field
            assert getattr(again, field).dtype == getattr(graphs, field).dtype
        assert (again.vocab, again.kind_names, again.label_names) == (graphs.vocab, graphs.kind_names, None)
    cavs.save_npz(graphs[1:], tmp_path / "slice.npz")
    assert cavs.load_npz(tmp_path / "slice.npz").label.tolist() == [5]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"children": np.array([5])}, "vertex 1 of graph 0 has child 5"),
        ({"children": np.array([1])}, "graph 0 has a cycle"),
        ({"children": np.array([2**32])}, "children"),
        ({"children": np.array([0.0])}, "children has dtype float64"),
        ({"children": None}, "children is missing"),
        ({"children": np.array([{}], object)}, "a whole .npz file"),
        ({"vertex_offsets": np.array([0, 2**62, 3])}, "vertex_offsets are no offsets"),
        ({"child_offsets": np.array([0, 2, -1, 1])}, "child_offsets are no offsets"),
        ({"label": np.array([0])}, "label has 1 entries, wanted 3"),
        ({"input_id": np.array([0, 0, 9])}, "input_id of vertex 0 of graph 1 is 9"),
        ({"vocab.lengths": np.array([1, -1, 2])}, "vocab.lengths do not add up"),
        ({"vocab.bytes": np.array([65, 255], np.uint8)}, "can't decode byte 0xff"),
        ({"cavs_version": np.int64(99)}, "version 1 of what cavs.save_npz writes"),
        ({"cavs_version": None}, "no cavs_version"),
    ],
)
def test_npz_is_not_trusted(tmp_path, change, message):
    path = tmp_path / "a.npz"
    cavs.save_npz(cavs.Graphs.build([2, 1], [0, 1, 0], [0], input_id=[0, 1, 1], vocab=["a", "b"]), path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(FormatError, match=message) as caught:
        cavs.load_npz(path)
    assert str(path) in str(caught.value)


# ---- all formats ----

GOOD = {
    ".txt": SST,
    ".ptb": SST,
    ".trees": SST,
    ".mrg": SST,
    ".conllu": CONLLU,
    ".jsonl": '{"children": [[], [0]]}\n',
    ".bench": BENCH,
    ".blif": BLIF,
}


@pytest.mark.parametrize("suffix", GOOD)
def test_read_goes_by_suffix_with_and_without_gz(tmp_path, suffix):
    plain = cavs.read(write(tmp_path, "a" + suffix, GOOD[suffix]))
    for name, text in (
        ("A" + suffix.upper(), GOOD[suffix]),
        ("b" + suffix + ".gz", GOOD[suffix]),
        ("c" + suffix, "\ufeff" + GOOD[suffix]),
    ):
        again = cavs.read(str(write(tmp_path, name, text)))
        assert again.children.tolist() == plain.children.tolist() and again.num_vertices == plain.num_vertices > 1
    cavs.save_npz(plain, tmp_path / "a.npz.gz")
    assert cavs.read(tmp_path / "a.npz.gz").children.tolist() == plain.children.tolist()


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.txt.bz2"])
def test_read_lists_the_suffixes_it_knows(tmp_path, name):
    with pytest.raises(ValueError, match=r"wanted one of \.txt, .*\.conllu, \.jsonl, \.bench, \.blif, \.npz"):
        cavs.read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt", "a.conllu", "a.jsonl"])
@pytest.mark.parametrize("text", ["", "\n", " \r\n\n"])
def test_a_file_without_graphs_gives_none(tmp_path, name, text):
    graphs = cavs.read(write(tmp_path, name, text))
    assert len(graphs) == graphs.num_vertices == graphs.num_edges == 0
    write_edges(graphs, tmp_path / "b.jsonl")
    cavs.save_npz(graphs, tmp_path / "b.npz")
    assert len(cavs.read(tmp_path / "b.jsonl")) == len(cavs.read(tmp_path / "b.npz")) == 0


def test_a_missing_file_is_an_os_error(tmp_path):
    for suffix in (*GOOD, ".npz", ".txt.gz"):
        with pytest.raises(FileNotFoundError):
            cavs.read(tmp_path / f"none{suffix}")


def word(n, head, form="w", label="X"):
    return f"{n}\t{form}\t_\t{label}\t_\t_\t{head}\tdep\t_\t_\n"


MALFORMED = [
    # name, content, line, what was read, what was expected
    ("a.txt", "(2 w)\nword (2 w)", 2, "'word", "a tree, which starts with '\\('"),
    ("a.txt", "(2 w)\n\n(2 w))", 3, r"'\)\)'", "a '\\(' for each '\\)'"),
    ("a.txt", "(2 w) )(", 1, r"'\) \)\('", "a '\\(' for each '\\)'"),
    ("a.txt", "(2 w)\n(2 (2 w)\n(2 v)\n", 2, r"'\(2 \(2 w\)'", r"a '\)' for each '\(' of this tree \(1 missing"),
    ("a.txt", "()", 1, r"'\(\)'", "a label and a word, or children"),
    ("a.txt", "(2)", 1, r"'2\)'", "a word or children after the label"),
    ("a.txt", "(2 v w)", 1, r"'v w\)'", "a leaf has one word"),
    ("a.txt", "(2 (2 v)\nw)", 2, r"'\)'", "a vertex has a word or children, not both"),
    ("a.txt", "(2 w (2 v))", 1, r"'w \(2 v\)\)'", "a vertex has a word or children, not both"),
    ("a.txt", b"(2 w)\n(2 caf\xe9)\n", 2, r"'\\\\xe9\)", r"UTF-8 text \(invalid continuation byte\)"),
    ("a.txt", "(2 " + "w" * 1000, 1, r"'\(2 w{54}\.\.\.'", "a '\\)' for each"),
    ("a.conllu", word(1, 0) + "2\tw\n", 2, r"'2\\tw'", "ten columns with a tab between, none empty"),
    ("a.conllu", word(1, 0, form=""), 1, "'1", "ten columns with a tab between, none empty"),
    ("a.conllu", word(1, 0) + word(3, 1), 2, "'3", "the ID 2 in the first column"),
    ("a.conllu", word("x", 0), 1, "'x", "the ID 1 in the first column"),
    ("a.conllu", word(1, "_"), 1, "'1", "a HEAD, 0 or a word's ID, in column 7, not '_'"),
    ("a.conllu", word(1, "²"), 1, "'1", "a HEAD, 0 or a word's ID, in column 7, not '²'"),
    ("a.conllu", word(1, "9" * 5000), 1, "'1", "a HEAD, 0 or a word's ID, in column 7, not '9{20}'"),
    ("a.conllu", word(1, 3) + word(2, 0), 1, "'1", "a HEAD from 0 to 2"),
    ("a.conllu", word(1, 0) + "\n# c\n" + word(1, 2) + word(2, 3) + word(3, 2), 5, "'2", "word 2 depends on itself"),
    ("a.conllu", word(1, 1), 1, "'1", "word 1 depends on itself"),
    ("a.jsonl", "\n{", 2, "'{'", r"a JSON object \(Expecting property name"),
    ("a.jsonl", "[1]", 1, r"'\[1\]'", "a JSON object: {...}"),
    ("a.jsonl", "[" * 100_000, 1, r"'\[{57}\.\.\.'", r"a JSON object \(maximum recursion depth"),
    ("a.jsonl", '{"children": [' + "9" * 5000 + "]}", 1, "'{", "a JSON object"),
    ("a.jsonl", '{"children": [[]], "words": []}', 1, "'{", "only the keys children, edges, .*, not 'words'"),
    ("a.jsonl", '{"inputs": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"children": [[]], "edges": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"edges": []}', 1, "'{", "either 'children', or 'edges' with 'num_vertices'"),
    ("a.jsonl", '{"children": []}', 1, "'{", "at least one list"),
    ("a.jsonl", '{"children": [[true], []]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[1.0], []]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[1], {}]}', 1, "'{", "a list of lists of integers"),
    ("a.jsonl", '{"children": [[]]}\n{"children": [[2], []]}', 2, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[-1], []]}', 1, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[1180591620717411303424], []]}', 1, "'{", "vertex numbers from 0 to 1"),
    ("a.jsonl", '{"children": [[]]}\n\n{"children": [[1], [2], [1]]}', 3, "'{", "vertex [12] depends on itself"),
    ("a.jsonl", '{"edges": [[0, 1, 2]], "num_vertices": 3}', 1, "'{", r"pairs \[parent, child\]"),
    ("a.jsonl", '{"edges": [[0, 1]], "num_vertices": 1}', 1, "'{", "vertex numbers from 0 to 0"),
    ("a.jsonl", '{"edges": [], "num_vertices": 0}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"edges": [], "num_vertices": true}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"edges": [], "num_vertices": 1000000000}', 1, "'{", "an integer from 1 to 1000"),
    ("a.jsonl", '{"children": [[]], "labels": [1, 2]}', 1, "'{", "'labels' to be a list of 1 entries"),
    ("a.jsonl", '{"children": [[]], "labels": "x"}', 1, "'{", "'labels' to be a list of 1 entries"),
    ("a.jsonl", '{"children": [[]], "labels": [-1]}', 1, "'{", "'labels' to be all int or str .*, or null, not the integer -1"),
    ("a.jsonl", '{"children": [[]], "labels": [4294967296]}', 1, "'{", "not the integer 4294967296"),
    ("a.jsonl", '{"children": [[]], "labels": [true]}', 1, "'{", "not bool"),
    ("a.jsonl", '{"children": [[]], "kinds": [null]}', 1, "'{", "'kinds' to be all int or str .*, not null"),
    ("a.jsonl", '{"children": [[], []], "inputs": [1, "a"]}', 1, "'{", "not int and str"),
    ("a.jsonl", '{"children": [[]], "inputs": [1]}\n{"children": [[]], "inputs": ["a"]}', 2, "'{", "to be all int .*, not str"),
    (
        "a.jsonl",
        '{"children": [[]], "inputs": [1]}\n{"children": [[]]}',
        2,
        "'{",
        "'inputs' on every line or on none; the first has it",
    ),
    (
        "a.jsonl",
        '{"children": [[]]}\n{"children": [[]], "inputs": [1]}',
        2,
        "'{",
        "on every line or on none; the first lacks it",
    ),
    ("a.bench", "INPUT(a)\nb", 2, "'b'", r"INPUT\(a\), OUTPUT\(y\) or y = GATE\(a, b\)"),
    ("a.bench", "INPUT(a, b)", 1, "'INPUT", r"INPUT\(a\), OUTPUT\(y\)"),
    ("a.bench", "AND(a, b)", 1, "'AND", r"INPUT\(a\), OUTPUT\(y\)"),
    ("a.bench", "INPUT(a)\ny = AND(a,)", 2, "'y = ", "signal names with a comma between"),
    ("a.bench", "INPUT(a)\ny = AND(a a)", 2, "'y = ", "signal names with a comma between"),
    ("a.bench", "INPUT(a)\ny = NAN(a)", 2, "'y = ", "a gate of AND, NAND, OR"),
    ("a.bench", "INPUT(a)\ny = INPUT(a)", 2, "'y = ", "a gate of AND, NAND, OR"),
    ("a.bench", "INPUT(a)\ny = NOT(a, a)", 2, "'y = ", "one signal in the brackets of NOT"),
    ("a.bench", "INPUT(a)\ny = dff(a)", 2, "'y = dff", "only flat, combinational netlists are read"),
    ("a.bench", "INPUT(a)\n\na = NOT(a)", 3, "'a'", "each signal to be defined once; line 1 defines it too"),
    ("a.bench", "INPUT(a)\ny = AND(a, b)", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.bench", "INPUT(a)\nOUTPUT(b)", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.bench", "INPUT(a)\nx = NOT(z)\ny = AND(a, z)\nz = OR(a, y)", 4, "'z'", r"does not depend on itself \(a cycle\)"),
    ("a.blif", ".inputs a\n.latch a b", 2, "'.latch a b'", "only flat, combinational netlists are read"),
    ("a.blif", ".inputs a\n.subckt m a=b", 2, "'.subckt", "only flat, combinational netlists are read"),
    ("a.blif", ".inputs a\n.area 3", 2, "'.area 3'", "one of .model, .inputs, .outputs, .names, .end"),
    ("a.blif", ".model a\n.model b", 2, "'.model b'", "one .model a file"),
    ("a.blif", ".inputs a\n.end\n.names x", 3, "'.names x'", "nothing after .end"),
    ("a.blif", ".inputs a\n.names", 2, "'.names'", "the gate's output after .names"),
    ("a.blif", ".inputs a\n11 1", 2, "'11 1'", "only below .names"),
    ("a.blif", ".inputs a b\n.names a b \\\n y\n1 1", 4, "'1 1'", "a row of the cover: 2 of 0, 1 and -, then 0 or 1"),
    ("a.blif", ".inputs a\n.names a y\n2 1", 3, "'2 1'", "a row of the cover: 1 of 0, 1 and -"),
    ("a.blif", ".inputs a\n.names a y\n1 -", 3, "'1 -'", "a row of the cover: 1 of 0, 1 and -"),
    ("a.blif", ".inputs a\n.names y\n1 1", 3, "'1 1'", "0 or 1 alone, as this gate has no fan-in"),
    ("a.blif", ".inputs a\n.names a y\n1 1\n0 0", 2, "'1 1 0 0'", "all rows of y to end in 1, or all in 0"),
    ("a.blif", ".inputs a \\\n a", 1, "'a'", "each signal to be defined once; line 1"),
    ("a.blif", ".inputs a\n.outputs b", 2, "'b'", "a signal that is an input or the output of a gate"),
    ("a.blif", ".inputs a\n.names a z y\n11 1\n.names y z\n1 1\n.outputs y", 2, "'y'", "does not depend on itself"),
    ("a.blif", ".inputs a\n.outputs \\", 2, "'.outputs '", "a line after the .* that continues this one"),
]


@pytest.mark.parametrize("name, text, line, got, wanted", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_refused_with_its_line(tmp_path, name, text, line, got, wanted):
    for suffix in ("", ".gz"):
        path = write(tmp_path, name + suffix, text)
        with pytest.raises(FormatError, match=f"line {line}: read {got}.*, expected .*{wanted}") as caught:
            cavs.read(path)
        assert str(caught.value).startswith(f"{path}, line ") and len(str(caught.value)) < 500
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as a worker process hands it on


@pytest.mark.parametrize("name", ["a.bench", "a.blif"])
def test_a_netlist_has_a_vertex(tmp_path, name):
    with pytest.raises(FormatError, match="no input and no gate.*expected a netlist of at least one"):
        cavs.read(write(tmp_path, name, "# nothing\n"))


@pytest.mark.parametrize("suffix", [".txt", ".npz"])
def test_damaged_files_are_refused(tmp_path, suffix):
    write(tmp_path, "a.txt", SST)
    cavs.save_npz(cavs.read(tmp_path / "a.txt"), tmp_path / "a.npz")
    whole = gzip.compress((tmp_path / f"a{suffix}").read_bytes())
    for data in (b"", whole[:-9], whole[:20], whole[:30] + bytes(8) + whole[38:], b"(2 w)", whole + b"more"):
        if data:  # an empty file is an empty gzip file
            (tmp_path / f"b{suffix}.gz").write_bytes(data)
            with pytest.raises(FormatError, match="expected a whole gzip file, as the name ends in .gz"):
                cavs.read(tmp_path / f"b{suffix}.gz")
    for data in (b"", b"PK", (tmp_path / "a.npz").read_bytes()[:-50], b"\x93NUMPY"):
        (tmp_path / "b.npz").write_bytes(data)
        with pytest.raises(FormatError, match="expected a whole .npz file"):
            cavs.read(tmp_path / "b.npz")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_edges(cavs.from_lengths([2]), path)
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _no_space)
        with pytest.raises(OSError, match="no space"):
            write_edges(cavs.from_lengths([3]), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def _no_space(*_):
    raise OSError("no space")


def test_fuzzed_files_give_graphs_or_format_errors():
    counts = FUZZ["fuzz"](seconds=2.0, seed=1)
    assert all(counts[suffix] > 0 and counts[f"{suffix} valid"] > 0 for suffix in (".txt", ".conllu", ".jsonl", ".npz"))
