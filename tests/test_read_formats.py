"""The readers of CoNLL-U, JSON lines, netlists and `.npz` follow their docstrings."""

import pytest

import cavs
from tests.odd_graphs import children_of
from tests.sample_files import BENCH, BLIF, CONLLU, names, write

# ---- CoNLL-U ----


@pytest.mark.parametrize(
    "label, expected",
    [
        ("upos", ["PRON", "VERB", "ADP", "DET", "NOUN", None, "VERB"]),
        ("xpos", ["PRP", "VBP", "IN", "DT", "NN", None, "VBP"]),
        ("deprel", ["nsubj", "root", "case", "det", "obj", "root", "root"]),
    ],
)
def test_conllu_children_are_in_word_order(tmp_path, label, expected):
    for text in (
        CONLLU,
        CONLLU.replace("\n", "\r\n"),
        CONLLU.replace("\n", "\r"),
        CONLLU.removesuffix("\n"),
        "\n\n" + CONLLU + "\n \n",
    ):
        graphs = cavs.io.read_conllu(write(tmp_path, "a.conllu", text), label=label)
        assert children_of(graphs, 0) == [[], [0, 4], [], [], [2, 3]]
        assert children_of(graphs, 1) == [[], []]  # two roots
        assert names(graphs.input_id, graphs.vocab) == ["They", "buy", "de", "le", "pain", "_", "buy"]
        assert names(graphs.label, graphs.label_names) == expected


def test_conllu_names_an_unknown_column(tmp_path):
    with pytest.raises(ValueError, match="label: got 'pos'; expected one of 'upos', 'xpos', 'deprel'"):
        cavs.io.read_conllu(tmp_path / "none", label="pos")


# ---- JSON lines ----


def test_edges_as_children_or_as_pairs(tmp_path):
    text = (
        '{"children": [[], [], [1, 0]], "inputs": ["not", "bad", null], "labels": [1, 0, 3], '
        '"kinds": ["leaf", "leaf", "inner"]}\n'
        "\n"
        '{"num_vertices": 3, "edges": [[0, 2], [1, 2], [0, 1], [0, 2]], "inputs": [null, null, "bad"], "labels": [null, 0, 0], '
        '"kinds": ["root", "inner", "leaf"]}'
    )
    graphs = cavs.io.read_edges(write(tmp_path, "a.jsonl", text))
    assert children_of(graphs, 0) == [[], [], [1, 0]]
    assert children_of(graphs, 1) == [[2, 1, 2], [2], []]
    assert names(graphs.input_id, graphs.vocab) == ["not", "bad", None, None, None, "bad"]
    assert graphs.label.tolist() == [1, 0, 3, -1, 0, 0] and graphs.label_names is None
    assert graphs.kind.tolist() == [0, 0, 1, 2, 1, 0] and graphs.kind_names == ("leaf", "inner", "root")


def test_edges_without_a_single_label_have_none(tmp_path):
    graphs = cavs.io.read_edges(write(tmp_path, "a.jsonl", '{"children": [[]], "labels": [null], "inputs": [7]}'))
    assert graphs.label.tolist() == [-1] and graphs.input_id.tolist() == [7] and graphs.vocab is None


# ---- netlists ----


def test_bench_gates_keep_their_fan_in_order(tmp_path):
    graphs = cavs.io.read_netlist(write(tmp_path, "c.bench", BENCH))
    assert children_of(graphs) == [[], [], [], [4, 1], [0, 2, 0], [4]]
    assert graphs.kind_names == ("INPUT", "AND", "NAND", "OR", "NOR", "XOR", "XNOR", "NOT", "BUF")
    assert names(graphs.kind, graphs.kind_names) == ["INPUT", "INPUT", "INPUT", "NAND", "AND", "BUF"]
    assert graphs.label.tolist() == [0, 1, 0, 1, 0, 0] and graphs.label_names is None and graphs.input_id is None


SAME_NETLISTS = {  # as ABC and Yosys write them, and in other words
    "lut": ("a.bench", "y = LUT 0x2 ( a, b )", "n = NOT(b)\ny = AND(a, n)"),
    "large lut": ("a.bench", "y = lut 0xe8 (a, b, c)", "p = AND(a, b)\nq = OR(a, b)\nr = AND(q, c)\ny = OR(p, r)"),
    "never": ("a.bench", "y = LUT 0x0 (a)", "n = NOT(a)\ny = AND(a, n)"),
    "constants": ("a.bench", "z = gnd\nt = VDD\nu = XOR(z, t)\ny = AND(a, u)", "y = BUF(a)"),
    "attributes": ("a.blif", ".default_input_arrival 0 0\n.names a b y\n.attr src 1\n11 1\n.cname g", ".names a b y\n11 1"),
}


@pytest.mark.parametrize("case", SAME_NETLISTS)
def test_netlists_as_other_tools_write_them(tmp_path, case):
    name, *bodies = SAME_NETLISTS[case]
    start = "INPUT(a)\nINPUT(b)\nINPUT(c)\n" if name == "a.bench" else ".model m\n.inputs a b c\n"
    means = []
    for body in bodies:
        path = write(tmp_path, name, f"{start}{body}\n")
        means.append(cavs.io.simulate_netlist(cavs.io.read_netlist(path))[cavs.io.read_signals(path).index("y")])
    assert means[0] == means[1]


def test_blif_kinds_are_covers(tmp_path):
    graphs = cavs.io.read_netlist(write(tmp_path, "c.blif", BLIF))
    assert children_of(graphs) == [[], [], [], [4, 2], [0, 1], [0, 2], [], [0], [1, 0]]
    assert names(graphs.kind, graphs.kind_names) == [
        *["INPUT"] * 3,
        *("names:-1 1|1- 1", "names:11 1", "names:-1 1|1- 1", "names:1", "names:- 0", "names:11 1"),
    ]
    assert graphs.label.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_several_netlists_share_their_kinds(tmp_path):
    paths = [write(tmp_path, name, text) for name, text in (("a.blif", BLIF), ("b.bench.gz", BENCH), ("c.blif.gz", BLIF))]
    graphs = cavs.io.read_netlist(paths)
    assert len(graphs) == 3
    assert graphs[0].kind.tolist() == graphs[2].kind.tolist()
    assert children_of(graphs, 1) == children_of(cavs.io.read_netlist(paths[1]))
    with pytest.raises(ValueError, match=r"read_netlist: .*a\.v', which ends in '\.v'; expected \.bench or \.blif"):
        cavs.io.read_netlist([paths[0], tmp_path / "a.v"])


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
        cavs.io.save_npz(graphs, tmp_path / name)
        again = cavs.io.load_npz(tmp_path / name)
        for field in ("vertex_offsets", "child_offsets", "children", "height", "kind", "label", "input_id"):
            assert getattr(again, field).tolist() == getattr(graphs, field).tolist(), field
            assert getattr(again, field).dtype == getattr(graphs, field).dtype
        assert (again.vocab, again.kind_names, again.label_names) == (graphs.vocab, graphs.kind_names, None)
    cavs.io.save_npz(graphs[1:], tmp_path / "slice.npz")
    assert cavs.io.load_npz(tmp_path / "slice.npz").label.tolist() == [5]
