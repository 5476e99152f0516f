"""Labels that are numbers: in `Graphs`, selected and joined, and in files; a regression in the command line."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs.io import FormatError
from cavs.recipes.netlists import NetlistOptions, Netlists
from cavs.recipes.regression import Regression, RegressionOptions, targets
from tests.schedule_checks import schedules
from tests.small_run import best_of


def graphs_with_targets(label=None, graph_label=None) -> cavs.Graphs:
    return cavs.from_parents([[2, 2, -1], [1, -1], [-1]], label=label, graph_label=graph_label)


@pytest.mark.parametrize("dtype, shape", [("f4", ()), ("f8", (2,)), ("i8", (2, 3)), ("?", ()), ("c8", ())])
def test_labels_of_any_dtype_and_shape_are_selected_with_their_graphs(dtype, shape):
    rng = np.random.default_rng(0)
    label, graph_label = (rng.normal(0, 9, (n, *shape)).astype(dtype) for n in (6, 3))
    graphs = graphs_with_targets(label, graph_label)
    assert graphs.label.dtype == graphs.graph_label.dtype == dtype and graphs.label.shape == (6, *shape)
    for index, rows, numbers in ((slice(1, 3), [3, 4, 5], [1, 2]), ([2, 0], [5, 0, 1, 2], [2, 0]), (1, [3, 4], [1])):
        part = graphs[index]
        np.testing.assert_array_equal(part.label, label[rows])
        np.testing.assert_array_equal(part.graph_label, graph_label[numbers])
    both = graphs[1] + graphs[0]
    np.testing.assert_array_equal(both.label, label[[3, 4, 0, 1, 2]])
    np.testing.assert_array_equal(both.graph_label, graph_label[[1, 0]])
    np.testing.assert_array_equal(graphs.reversed().label, label)
    for batch, sched in schedules(graphs, [[2, 1], [0, 2]]):
        assert sched.pad(batch.label, 0).shape == (sched.shape.vertices, *shape) and len(batch.graph_label) == 2


def test_integers_on_vertices_are_ids_as_before():
    assert graphs_with_targets(label=np.arange(6)).label.dtype == np.int32
    with pytest.raises(ValueError, match="label: got -2 at vertex 0 of graph 0; expected -1"):
        graphs_with_targets(label=[-2, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"label": [0.5] * 5}, r"label: got shape \(5,\); expected \(6, ...\), one row per vertex"),
        ({"graph_label": [0.5] * 6}, r"graph_label: got shape \(6,\); expected \(3, ...\), one row per graph"),
        ({"label": np.array(["a"] * 6)}, "label: got dtype <U1; expected numbers"),
        ({"label": [0.5] * 6, "label_names": ["a"]}, r"label_names: got names, but the labels are float64\[\]"),
    ],
)
def test_labels_of_wrong_shapes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        cavs.from_parents([[2, 2, -1], [1, -1], [-1]], **fields)


def test_a_schedule_carries_only_integer_labels():
    graphs = graphs_with_targets(label=[0.5] * 6)
    with pytest.raises(ValueError, match=r"the labels are float64\[\]; expected one int32 .* sched.pad\(batch.label\)"):
        cavs.schedule(graphs, fields=("label",))
    with pytest.raises(ValueError, match="label: got float64.* and int32.*; expected the same dtype and shape"):
        graphs + graphs_with_targets(label=np.arange(6))


LINES = ['{"children": [[], [0]], "labels": [1, null], "label": 3}', '{"children": [[]], "labels": [-0.5], "label": 4}']


def test_json_lines_and_npz_hold_targets(tmp_path):
    path = tmp_path / "g.jsonl"
    path.write_text("\n".join(LINES))
    graphs = cavs.read(path)
    np.testing.assert_array_equal(graphs.label, [1, np.nan, -0.5])
    assert graphs.label_names is None and graphs.graph_label.tolist() == [3, 4] and graphs.graph_label.dtype == np.int64
    wide = cavs.from_lengths([1, 2], label=np.array([[1.5, 2], [3, 4], [np.nan, 0]]), graph_label=np.array([[0.1], [0.2]]))
    for some in (graphs, wide):
        cavs.io.write_edges(some, tmp_path / "out.jsonl")
        cavs.io.save_npz(some, tmp_path / "out.npz")
        same = cavs.read(tmp_path / "out.npz")
        np.testing.assert_array_equal(same.label, some.label)
        np.testing.assert_array_equal(same.graph_label, some.graph_label)
        read = cavs.read(tmp_path / "out.jsonl")
        np.testing.assert_array_equal(read.graph_label, some.graph_label)
        np.testing.assert_array_equal(read.label, some.label)


@pytest.mark.parametrize(
    "second, message",
    [
        ('{"children": [[]], "labels": ["a"], "label": 1}', "line 2: .*'labels' to be of one type and shape"),
        ('{"children": [[]], "labels": [1], "label": Infinity}', "line 2: .*'label' to be a finite number"),
        ('{"children": [[]], "labels": [[1.0, 2.0]], "label": 1}', "line 2: .*'labels' to be of one type and shape"),
        ('{"children": [[]], "labels": [[[1], [2, 3]]], "label": 1}', "line 2: .*'labels' to be of one type and shape"),
        ('{"children": [[]], "labels": [1e999], "label": 1}', "line 2: .*'labels' to be of one type and shape"),
        ('{"children": [[]], "labels": [9007199254740993], "label": 1}', "line 2: .* must be exact in it"),
        ('{"children": [[]], "labels": [1], "label": [9007199254740993]}', "line 2: .* must be exact in it"),
        ('{"children": [[]], "labels": [true], "label": 1}', "line 2: .*'labels' to be of one type and shape"),
        ('{"children": [[]], "labels": [0.5]}', "line 2: .*'label' on every line or on none; the first has it"),
        (
            '{"children": [[]], "labels": [0.5], "label": [1, 2]}',
            "line 2: .*'label' to be a finite number, or lists of numbers of one shape",
        ),
        (
            '{"children": [[]], "labels": [0.5], "label": "x"}',
            "line 2: .*'label' to be a finite number, or lists of numbers of one shape",
        ),
    ],
)
def test_a_line_with_other_targets_is_named(second, message, tmp_path):
    path = tmp_path / "g.jsonl"
    path.write_text('{"children": [[]], "labels": [1.5], "label": 3}\n' + second)
    with pytest.raises(FormatError, match=message):
        cavs.read(path)


def test_networkx_nodes_have_targets():
    pytest.importorskip("networkx", reason="networkx is not installed")
    graphs = cavs.from_lengths([3], label=[0.5, np.nan, -2.0])
    (digraph,) = cavs.interop.to_networkx(graphs)
    assert dict(digraph.nodes(data="label")) == {0: 0.5, 1: None, 2: -2.0}
    np.testing.assert_array_equal(cavs.interop.from_networkx(digraph).label, graphs.label)
    json.dumps(dict(digraph.nodes(data="label")))


# ---- the command line ----


def a_file(path: Path, count: int, seed: int, on: str) -> str:
    """Chains of the words a and b; the target is the number of a's so far, at each vertex or of the graph."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        words = rng.choice(["a", "b"], rng.integers(2, 6)).tolist()
        sums = np.cumsum([w == "a" for w in words]).astype(float)
        graph = {"children": [[], *([i] for i in range(len(words) - 1))], "inputs": words}
        graph |= {"label": 0.5 + sums[-1], "x": [1] * len(words)} if on == "graph" else {"labels": (0.5 + sums).tolist()}
        graph |= {} if on == "graph" else {"edge_attr": [0.5] * sum(map(len, graph["children"]))}
        lines.append(json.dumps(graph))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("on", ["graph", "vertex"])
@pytest.mark.slow
def test_a_regression_is_learned_evaluated_and_predicted(on, tmp_path, capsys):
    train, more, test = (a_file(tmp_path / f"{name}.jsonl", 40, i, on) for i, name in enumerate(("train", "more", "test")))
    out, flags = str(tmp_path / "run"), "--program elman --hidden 12 --epochs 25 --lr 0.1 --dropout 0 --batch 20".split()
    assert cli.main(["train", "--task", "regress", train, more, "--dev", test, *flags, "--out", out]) == 0
    text = capsys.readouterr().out
    assert "graphs: 80 train" in text and ("numbers of edges, which no --program reads" in text) == (on == "vertex")
    assert ("features of vertices, which no --program reads" in text) == (on == "graph")
    assert cli.main(["train", "--resume", out, "--epochs", "26"]) == 0
    assert cli.main(["train", "--resume", out]) == 0
    assert "nothing is left to train within --epochs 26" in capsys.readouterr().out
    picture = str(tmp_path / "scatter.png")
    assert cli.main(["evaluate", out, test, "--json", "--out", picture]) == 0
    values = json.loads(capsys.readouterr().out)
    assert Path(picture).read_bytes().startswith(b"\x89PNG") and values["r2"] > 0.8

    graphs = cavs.read(test)
    words = ["--vertices"] if on == "vertex" else []
    assert cli.main(["predict", out, test, "--json", *words]) == 0
    predictions = np.array([json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines()])
    true = graphs.graph_label if on == "graph" else graphs.label
    assert values["rmse"] == pytest.approx(np.sqrt(np.mean((predictions - true) ** 2)))
    assert values["r2"] == pytest.approx(1 - np.mean((predictions - true) ** 2) / np.var(true))
    best, facts = best_of(out), json.loads((tmp_path / "run" / "model.json").read_text())["facts"]  # training and evaluation
    error = facts["scale"] * (best["loss"] / best["count"]) ** 0.5
    assert best["count"] == values["count"] and error == pytest.approx(values["rmse"], rel=1e-4)


@pytest.mark.parametrize("key, whole, part", [("label", 1, 0.5), ("labels", [1, None], [0.5, 2])])
def test_files_with_and_without_fractions_are_joined(key, whole, part, tmp_path):
    files = []
    for name, value in (("whole", whole), ("part", part)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"children": [[], [0]], "inputs": ["a", "b"], key: value}))
        files.append(str(tmp_path / f"{name}.jsonl"))
    data = Regression.read(RegressionOptions(train=tuple(files), dev=files[0]))
    at = "graph" if key == "label" else "all"
    np.testing.assert_array_equal(targets(data.parts["train"], at), [1, 0.5] if key == "label" else [1, np.nan, 0.5, 2])


def test_targets_far_from_zero_keep_their_differences(tmp_path):
    """Such as times in seconds. Rounded to 32 bits before their mean was subtracted, all were equal, and their RMSE 0."""
    sums = []
    for shift in (0, 1.75e9):
        lines = [{"children": [[], [0]], "label": shift + i} for i in range(8)]
        (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
        options = RegressionOptions(train=(str(tmp_path / "t.jsonl"),), hidden=4)
        data = Regression.read(options)
        recipe = Regression(options, data.facts)
        batch = next(iter(recipe.in_order(data.parts["train"])))
        sums.append({k: float(x) for k, x in recipe.sums(recipe.init(jax.random.key(0)), batch).items()})
    assert sums[1] == pytest.approx(sums[0]) and sums[0]["square"] > 1


def test_equal_targets_have_no_r2(tmp_path, capsys):
    train = a_file(tmp_path / "t.jsonl", 20, 0, "graph")
    line = '{"children": [[], [0]], "inputs": ["a", "b"], "label": 0.1}'
    (tmp_path / "same.jsonl").write_text(f"{line}\n" * 5)
    out = str(tmp_path / "run")
    flags = ["--dev", str(tmp_path / "same.jsonl"), "--hidden", "4", "--epochs", "1", "--out", out]
    assert cli.main(["train", "--task", "regress", train, *flags]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", out, str(tmp_path / "same.jsonl"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert values["r2"] is None and values["standard_deviation"] == 0 and values["rmse"] > 0


@pytest.mark.parametrize("labels", ['"labels": [[0.5, 1], [1, 2]]', '"label": [0.5, 1]', '"labels": [[0, 1], [1, 2]]'])
def test_no_task_is_recommended_for_several_numbers_per_label(labels, tmp_path, capsys):
    """The classifier recommended the regression, which refused them."""
    (tmp_path / "t.jsonl").write_text(f'{{"children": [[], [0]], {labels}}}\n' * 4)
    for task in ("trees", "regression"):
        assert cli.main(["train", "--task", task, str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert "shape (2,); expected one" in error and "write a loop with cavs.data.Loader" in error and "Write: " not in error


# ---- netlists ----

BENCH = """INPUT(a)\nINPUT(b)\nINPUT(c)\nOUTPUT(y)
n = NAND(a, b)\nx = XOR(n, c)\no = NOR(a, b, c)\nnot = NOT(o)\ny = AND(x, not)\nsame = BUFF(y)\n"""
BLIF = """.model m\n.inputs a b c\n.outputs y
.names a b n\n0- 1\n-0 1\n.names n c x\n10 1\n01 1\n.names a b c o\n000 1\n.names o not\n1 0\n.names x not y\n11 1
.names y same\n1 1\n.end\n"""


def test_simulated_probabilities_are_those_of_the_truth_table(tmp_path):
    (tmp_path / "c.bench").write_text(BENCH)
    (tmp_path / "c.blif").write_text(BLIF)
    a, b, c = (np.arange(8) >> k & 1 for k in range(3))
    n, o = 1 - (a & b), 1 - (a | b | c)
    x, inverse = n ^ c, 1 - o
    y = x & inverse
    exact = [v.mean() for v in (a, b, c, n, x, o, inverse, y, y)]
    for name in ("c.bench", "c.blif"):
        share = cavs.io.simulate_netlist(cavs.read(tmp_path / name))
        np.testing.assert_allclose(share, exact, atol=0.04)  # 4,096 samples
        np.testing.assert_array_equal(share, cavs.io.simulate_netlist(cavs.read(tmp_path / name)))
        assert cavs.io.read_signals(tmp_path / name)[:4] == ["a", "b", "c", "n"]


def test_graphs_that_are_no_netlists_are_not_simulated():
    for graphs, got in (
        (cavs.from_lengths([2]), "without named kinds"),
        (cavs.from_lengths([2], kind=[0, 1], kind_names=["INPUT", "nand"]), "of kind 'nand'"),
    ):
        with pytest.raises(ValueError, match=f"simulate_netlist: netlists: got graphs {got}; expected inputs and gates. Write"):
            cavs.io.simulate_netlist(graphs)
    with pytest.raises(ValueError, match="read_signals: path: got 'a.txt', which ends in '.txt'; expected .bench or .blif"):
        cavs.io.read_signals("a.txt")


def test_netlists_are_simulated_varied_and_their_signals_named(tmp_path, capsys):
    paths = []
    for name in ("c.bench", "d.bench"):
        (tmp_path / name).write_text(BENCH)
        paths.append(str(tmp_path / name))
    data = Netlists.read(NetlistOptions(train=(*paths,), dev=paths[0]))
    train, dev = data.parts["train"], data.parts["dev"]
    assert len(train) == 2 * 9 and len(dev) == 1  # eight variants of each circuit, with other gates
    assert set(data.facts["words"]) > {"INPUT", "NOT", "NAND2", "NOR3"} and "XOR" not in data.facts["words"]
    assert not np.array_equal(train[0].label, train[1].label)
    np.testing.assert_allclose(train[9].label, cavs.io.simulate_netlist(cavs.read(paths[1])))

    out = str(tmp_path / "run")
    assert cli.main(["train", "--task", "dag", *paths, "--dev", paths[0], "--epochs", "1", "--out", out]) == 0
    capsys.readouterr()
    assert cli.main(["predict", out, paths[0], "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[3] for line in lines] == ["text", "a", "b", "c", "n", "x", "o", "not", "y", "same"]

    two = tmp_path / "two.bench"
    two.write_text("INPUT(a)\nINPUT(b)\nOUTPUT(sum)\nOUTPUT(carry)\nsum = XOR(a, b)\ncarry = AND(a, b)\n")
    assert cli.main(["predict", out, str(two)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [[line[1], line[3]] for line in lines] == [["vertex", "text"], ["2", "sum"], ["3", "carry"]]
