"""`cavs evaluate` and `cavs predict`: scores of known answers, tables, JSON, distributions, phrases and standard input."""

import dataclasses
import gc
import io
import json
import re
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs._graphs.converters import from_edges, from_parents
from cavs.data import ConfusionMatrix, phrases_of
from cavs.recipes._command import given_file
from tests.small_run import best_of

DATA = Path(cli.__file__).parent / "data"
TREES = ["(3 (1 (2 not) (1 bad)) (2 .))", "(1 bad)", "(3 (3 good) (2 .))"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a classifier that was trained for a moment, beside its data `t.txt`."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "t.txt").write_text("\n".join(TREES * 4))
    flags = ["--hidden", "4", "--batch", "4", "--epochs", "3", "--out", str(folder / "run")]
    assert cli.main(["train", str(folder / "t.txt"), "--dev", str(folder / "t.txt"), *flags]) == 0
    return folder


def printed(capsys, *words: str) -> str:
    capsys.readouterr()
    assert cli.main(words) == 0
    return capsys.readouterr().out


def stdin(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# ---- scores ----


def test_scores_of_known_labels():
    true, predicted = np.array([0, 0, 0, 1, 1, -1]), np.array([0, 0, 1, 1, 0, 1])
    for name, rows in (("true", ([0, 2], [0, 0])), ("predicted", ([0, 1], [2, 0])), ("predicted", ([0, 1], [-1, 0]))):
        with pytest.raises(ValueError, match=rf"ConfusionMatrix.of: {name}: got (2|-1); expected an index of the 2 labels"):
            ConfusionMatrix.of(("a", "b"), *rows)
    with pytest.raises(ValueError, match=r"predicted: got shape \(1,\), and true of \(2,\); expected \(N,\) for both"):
        ConfusionMatrix.of(("a", "b"), [0, 1], [0])
    assert ConfusionMatrix.of(("a", "b"), [], []).count == 0
    scores = ConfusionMatrix.of(("a", "b", "unseen"), true, predicted)
    assert scores.counts.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert (scores.count, scores.accuracy, scores.majority) == (5, 3 / 5, 3 / 5)
    a, b = (scores.found()[name] for name in "ab")
    assert (a.precision, a.recall, a.f1) == (2 / 3, 2 / 3, 2 / 3)
    assert (b.precision, b.recall, b.f1) == (1 / 2, 1 / 2, 1 / 2)
    assert scores.macro_f1 == pytest.approx((2 / 3 + 1 / 2) / 2)  # a label that never occurs does not count
    assert scores.as_json()["labels"]["a"]["f1"] == scores.f1["a"] and scores.as_json()["confusion"][0] == [2, 1, 0]


MASKED = np.ma.array([1.0, 0.0], mask=[0, 1])


def test_errors_of_known_numbers():
    found = cavs.data.errors([1.0, 2.0, 3.0, np.nan], [1.0, 2.0, 5.0, 9.0])
    assert found["count"] == 3 and found["rmse"] == pytest.approx((4 / 3) ** 0.5) and found["mae"] == pytest.approx(2 / 3)
    assert found["r2"] == pytest.approx(1 - 4 / 2)  # squared errors 4, squared distances from the mean 2
    assert cavs.data.errors([0.1] * 3, [0.1, 0.2, 0.1])["r2"] is None
    nothing = cavs.data.json_of(cavs.data.errors([np.nan], [1.0]))
    assert json.loads(json.dumps(nothing, allow_nan=False))["rmse"] is None and nothing["r2"] is None
    arrays = {"jax": jnp.float32(0.5), "none": jnp.array([jnp.nan, 1], jnp.bfloat16), "no axis": np.array(3)}
    assert cavs.data.json_of(arrays) == {"jax": 0.5, "none": [None, 1.0], "no axis": 3}
    with pytest.raises(ValueError, match="draw_history: history: got no evaluations; expected"):
        cavs.data.draw_history([], "curve.png", dict)


def test_bleu_and_chrf_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    said, want = ["a b c d e", "the cat sat on it"], ["a b c d e", "the cat sat on the mat"]
    found = cavs.data.bleu(said, want)
    assert found["bleu"] == sacrebleu.corpus_bleu(said, [want], tokenize="none").score < 100
    assert found["chrf"] == sacrebleu.corpus_chrf(said, [want]).score
    assert cavs.data.bleu(want, want)["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError, match="bleu: translations: got no texts; expected at least one"):
        cavs.data.bleu([], [])


def with_words(graphs, words):
    return cavs.data.named(dataclasses.replace(graphs, input_id=np.array([w - 1 for w in words]), vocab=("a", "b", "c", "d")))


def test_phrases_of_trees_and_of_other_graphs():
    tree = with_words(from_parents([[2, 2, 4, 4, -1], [-1]]), [1, 2, 0, 3, 0, 4])
    assert phrases_of(tree) == ["a", "b", "a b", "c", "a b c", "d"]
    assert cavs.data.sentences_of(tree) == ["a b c", "d"] and cavs.data.is_root(tree).tolist() == [False] * 4 + [True] * 2
    assert phrases_of(with_words(tree, [1, 2, 4, 3, 0, 1]))[2:5] == ["d", "c", "d c"]
    diamond = with_words(from_edges(4, [[1, 0], [2, 0], [3, 1], [3, 2]]), [1, 0, 0, 0])
    assert phrases_of(diamond) == ["a", "", "", ""]


@pytest.mark.parametrize("how", [{"steps": 1}, {"seed": 5, "last": "pad", "steps": 3}, {"last": "drop"}, {"seed": None}])
def test_predictions_are_in_the_order_of_the_data_and_sums_are_those_of_all_graphs(how):
    graphs = cavs.from_lengths([1, 5, 2, 7, 3, 1, 4], label=np.arange(23) % 5)
    loader = cavs.data.Loader(graphs, 3, **how)
    numbers = lambda params, sched: {"twice": params * sched.label, "both": jnp.stack([sched.label, sched.graph], 1)}  # noqa: E731
    count = lambda params, sched: {"sum": cavs.data.total(jnp.maximum(sched.label, 0))}  # noqa: E731
    for _ in range(2):  # two epochs of a shuffled loader
        found = cavs.data.predict(numbers, 2, loader)
        seen = np.ones(23, bool) if how.get("last") != "drop" else found["twice"] != 0
        np.testing.assert_array_equal(found["twice"][seen], 2 * graphs.label[seen])
        np.testing.assert_array_equal(found["both"][seen, 0], graphs.label[seen])
        assert how.get("last") == "drop" or cavs.data.evaluate(count, 0, loader) == {"sum": graphs.label.sum()}
    roots = cavs.data.predict(lambda _, sched: sched.label[sched.roots], 0, loader, "graphs")
    assert roots.shape == (7,) and (roots == graphs.label[graphs.vertex_offsets[1:] - 1]).sum() >= 6


def test_predictions_of_picked_graphs_have_the_order_of_their_data():
    words = cavs.from_lengths([1, 5, 2, 7, 3, 1, 4, 2], input_id=np.arange(25))
    letters = cavs.from_lengths([2, 3, 1, 4], input_id=np.arange(10))
    loader = cavs.data.Loader([(letters, lambda samples: np.sort(samples)[::-1] % 4), words], 3, seed=3, last="drop")
    found = cavs.data.predict(lambda _, scheds: 10 * scheds[0].input_id, 0, loader)
    np.testing.assert_array_equal(found[found > 0], 10 * np.flatnonzero(found > 0))
    assert found.shape == (10,) and (found > 0).sum() >= 5


class Predictor:
    """A model, with its parameters in it."""

    def __init__(self) -> None:
        self.w, self.traced = jnp.arange(3.0), 0

    def numbers(self, _, sched):
        self.traced += 1
        return sched.label * self.w.sum()


def test_functions_are_compiled_once_and_not_kept_alive():
    """The last sixteen were, and the models to which they refer."""
    loader = cavs.data.Loader(cavs.from_lengths([1, 5, 2], label=np.arange(8)), 3, steps=1)
    model = Predictor()

    def sums(_, sched, model=model):
        return {"sum": cavs.data.total(model.numbers(_, sched))}

    for _ in range(2):
        np.testing.assert_array_equal(cavs.data.predict(model.numbers, 0, loader), 3 * np.arange(8))
        cavs.data.evaluate(sums, 0, loader)
    assert model.traced == 2
    alive = weakref.ref(model.w)
    del model, sums
    gc.collect()
    assert alive() is None


def test_what_cannot_be_predicted_is_named():
    graphs = cavs.from_lengths([1, 2, 3])
    for loader, rows, text in (
        (cavs.data.Loader(graphs, 2), "roots", "rows: got 'roots'; expected one of 'vertices', 'graphs'"),
        (cavs.data.Loader(graphs, iter([[0]])), "graphs", "loader: got a mesh, parts, or an iterator of batches"),
        (
            cavs.data.Loader(graphs, 3),
            "vertices",
            r"fun: got an array of shape \(2,\) of a batch of 3 graphs; .* a row for each of the vertices. Write rows='graphs'",
        ),
        (
            cavs.data.Loader(graphs, 1),
            "graphs",
            r"fun: got an array of shape \(2,\) of a batch of 1 graph; .* a row for each of the graphs. Write rows='vertices'",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            cavs.data.predict(lambda *_: jnp.zeros(2), 0, loader, rows)


def test_rows_of_edges_and_of_another_data_set_are_no_rows_of_vertices():
    """As many of them as there are vertices were returned."""
    chains, longer = cavs.from_lengths([1, 2, 3], label=np.arange(6)), cavs.from_lengths([9, 8, 7], label=np.arange(24))
    dag = cavs.from_edges(8, [(i, j) for i in range(8) for j in range(i)])
    both = cavs.data.Loader([chains, longer], 2)
    for loader, fun in (
        (both, lambda _, scheds: scheds[1].label),
        (cavs.data.Loader(dag, 1, collate=lambda s: s.sched.pad_edges(np.arange(28))), lambda _, edges: edges),
    ):
        with pytest.raises(ValueError, match=r"predict: fun: got an array of shape \(\d+,\) of .* for each of the vertices"):
            cavs.data.predict(fun, 0, loader)
    np.testing.assert_array_equal(cavs.data.predict(lambda _, scheds: scheds[0].label, 0, both), chains.label)


@pytest.mark.parametrize(
    ("score", "error", "message"),
    [
        (lambda: cavs.data.span_scores(["BO"], [["O"]]), TypeError, "span_scores: true: got a str in place of a sentence"),
        (lambda: cavs.data.span_scores([[0]], [["O"]]), TypeError, "span_scores: true: got 0 among the tags; expected str"),
        (lambda: cavs.data.span_scores([["O"]], [0]), TypeError, "span_scores: predicted: got a int in place of a sentence"),
        (lambda: cavs.data.span_scores([["O"]], ["O"]), TypeError, "span_scores: predicted: got a str in place of a sentence"),
        (lambda: cavs.data.span_scores([iter("O")], [["O"]]), TypeError, "true: got a .* in place of a sentence"),
        (lambda: cavs.data.span_scores([["O", "B_X"]], [["O"] * 2]), ValueError, "true: got 'B_X' and no tag that marks"),
        (lambda: cavs.data.span_scores([["O"]], []), ValueError, r"predicted: got sentences of \[\] tags; expected \[1\]"),
        (lambda: cavs.data.span_scores([["O"]], [["O", "O"]]), ValueError, r"predicted: got sentences of \[2\] tags; expected"),
        (lambda: cavs.data.errors([1.0], [1.0, 2.0]), ValueError, r"errors: predicted: got shape \(2,\), and true of \(1,\)"),
        (lambda: cavs.data.errors(MASKED, [1.0, 2.0]), ValueError, "errors: true: got an array with masked values"),
        (lambda: cavs.data.ConfusionMatrix.of("ab", [0, 1], MASKED), ValueError, "of: predicted: got an array with masked"),
        (lambda: cavs.data.errors([1.0], [[1.0]]), ValueError, r"errors: predicted: got shape \(1, 1\), and true of \(1,\)"),
        (lambda: cavs.data.bleu("a", ["a"]), TypeError, "bleu: translations: got a str; expected one text per sentence"),
        (lambda: cavs.data.bleu(["a"], ["a", "b"]), ValueError, "bleu: references: got 2 texts; expected 1"),
        (lambda: cavs.data.json_lines(None), TypeError, "json_lines: path: got a NoneType; expected the path of a file"),
        (
            lambda: cavs.io.restore_checkpoint({}, "a.npz"),
            TypeError,
            "path: got a dict; .* Write restore_checkpoint.path, state",
        ),
        (
            lambda: cavs.io.save_params({"a": "b"}, "a"),
            TypeError,
            "save_params: params: got a str at 'a'; expected only arrays",
        ),
        (lambda: cavs.data.total(None), TypeError, "total: x: got a NoneType; expected an array of numbers"),
        (lambda: cavs.data.mean({"a": 1.0}), TypeError, "mean: x: got a dict; expected an array of numbers"),
        (lambda: cavs.data.rows(np.ones((2, 2)), None), TypeError, "rows: ids: got a NoneType; expected an array of numbers"),
        (lambda: cavs.data.rows(1.0, np.array([0])), ValueError, r"rows: table: got shape \(\); expected \(N, \.\.\.\), one"),
        (lambda: cavs.data.rows(np.ones((0, 2)), np.array([-1])), ValueError, r"rows: table: got shape \(0, 2\); expected"),
    ],
)
def test_wrong_arguments_of_scores_and_files_are_named(score, error, message):
    with pytest.raises(error, match=message):
        score()


def test_swapped_arguments_and_metrics_that_are_no_scalars_are_named():
    loader = cavs.data.Loader(cavs.from_lengths([1, 2, 3]), 1, steps=2)
    for use in (cavs.data.evaluate, cavs.data.predict):
        with pytest.raises(TypeError, match=f"{use.__name__}: loader: got a int; expected a cavs.data.Loader. Write"):
            use(lambda params, sched: {}, loader, 0)
        with pytest.raises(TypeError, match=f"{use.__name__}: fun: got a int; expected a function of 2 arguments, .* Write"):
            use(0, lambda params, sched: {}, loader)
        with pytest.raises(
            TypeError, match=r"fun: got <lambda>\(sched\); expected a function of 2 arguments, \(params, batch\)"
        ):
            use(lambda sched: {}, 0, loader)
    zero = jnp.zeros((), np.float32)
    wrong = {r"float32\[\]": zero, r"{'a': 'float32\[3\]'}": {"a": jnp.zeros(3, np.float32)}}
    wrong |= {r"{'a': {'b': 'float32\[\]'}}": {"a": {"b": zero}}, r"{'a': 'complex64\[\]'}": {"a": zero + jnp.complex64(1j)}}
    wrong |= {r"{'a': 'key<fry>\[\]'}": {"a": jax.random.key(0)}}
    for told, metrics in wrong.items():
        with pytest.raises(TypeError, match=f"evaluate: fun: returned {told}; expected a dict of real scalars. Write"):
            cavs.data.evaluate(lambda params, sched, m=metrics: m, 0, loader)


def test_keys_are_refused_by_name():
    loader = cavs.data.Loader(cavs.from_lengths([1, 2, 3]), 1, steps=2)
    with pytest.raises(ValueError, match="predict: fun: got an array of key<fry>; expected numbers. Write jax.random.key_data"):
        cavs.data.predict(lambda params, sched: jax.random.split(jax.random.key(0), sched.shape.vertices), 0, loader)


def test_a_loader_restored_within_an_epoch_is_refused_as_it_lacks_data():
    loader, other = (cavs.data.Loader(cavs.from_lengths([1, 2, 3]), 1, steps=1) for _ in range(2))
    next(iter(loader))
    other.restore(loader.state())
    for use in (cavs.data.evaluate, cavs.data.predict):
        with pytest.raises(ValueError, match=f"{use.__name__}: loader: got one that was restored to batch 1 of an epoch"):
            use(lambda p, s: {}, 0, other)
    list(other)
    assert cavs.data.evaluate(lambda p, s: {"count": s.num_vertices}, 0, other) == {"count": 6}


def test_sums_of_one_device_and_parts_of_a_batch_are_named():
    graphs = cavs.from_lengths([1, 2, 3, 4], label=np.arange(10))
    count = lambda params, sched: {"count": jnp.sum(sched.label >= 0)}  # noqa: E731
    whole = lambda params, sched: {"count": cavs.data.total(sched.label >= 0)}  # noqa: E731
    for steps in (1, 2):
        loader = cavs.data.Loader(graphs, 2, mesh=jax.make_mesh((1,), ("data",)), steps=steps)
        assert cavs.data.evaluate(whole, 0, loader) == {"count": 10}
        with pytest.raises(ValueError, match="evaluate: fun: got metrics that differ between devices; .* cavs.data.total"):
            cavs.data.evaluate(count, 0, loader)
    with pytest.raises(ValueError, match=r"Schedule.label: got a stack of schedules, \[2\], such as the parts of a batch; exp"):
        cavs.data.evaluate(count, 0, cavs.data.Loader(graphs, 2, parts=2))


# ---- commands ----


def test_evaluation_has_the_figures_that_training_reported(run, capsys):
    best = best_of(run / "run")
    values = json.loads(printed(capsys, "evaluate", str(run / "run"), str(run / "t.txt"), "--json"))
    assert values["graphs"] == 12 and values["task"] == "trees"
    for where, right in (("roots", "root_right"), ("vertices", "right")):
        assert values[where]["count"] == best[where]
        assert np.trace(values[where]["confusion"]) == best[right] == round(values[where]["accuracy"] * best[where])


def test_labels_that_the_model_does_not_know_are_errors_of_the_model(run, tmp_path, capsys):
    (tmp_path / "new.txt").write_text("(7 (1 bad) (2 .))")
    values = json.loads(printed(capsys, "evaluate", str(run / "run"), str(tmp_path / "new.txt"), "--json"))
    assert values["roots"]["accuracy"] == 0 and values["roots"]["labels"]["7"]["count"] == 1
    (tmp_path / "other.txt").write_text("(x (y bad) (z .))")
    assert cli.main(["evaluate", str(run / "run"), str(tmp_path / "other.txt")]) == 2
    assert "with the labels x, y, z; expected some of 1, 2, 3" in capsys.readouterr().err


def test_prediction_of_phrases_distributions_and_standard_input(run, monkeypatch, capsys):
    stdin(monkeypatch, TREES[0])
    lines = [line.split("\t") for line in printed(capsys, "predict", str(run / "run"), "-", "--vertices").splitlines()]
    assert lines[0] == ["graph", "vertex", "label", "probability", "text"]
    assert [line[4] for line in lines[1:]] == ["not", "bad", "not bad", ".", "not bad ."]
    stdin(monkeypatch, '{"children": [[], [0]], "inputs": ["bad", null]}')
    (line,) = printed(capsys, "predict", str(run / "run"), "-", "--json", "--probabilities").splitlines()
    value = json.loads(line)
    assert value.keys() == {"graph", "label", "probability", "text", "probabilities"} and value["text"] == "bad"
    p = value["probabilities"]
    assert p[value["label"]] == max(p.values()) == value["probability"] and sum(p.values()) == pytest.approx(1)
    stdin(monkeypatch, "# sent_id = 1\n1\tbad\t_\tA\t_\t_\t0\troot\t_\t_\n")  # a comment is not a netlist
    assert printed(capsys, "predict", str(run / "run"), "-", "--no-header").endswith("\tbad\n")
    stdin(monkeypatch, TREES[1])
    (line,) = printed(capsys, "predict", str(run / "run"), "-", "--no-header", "--probabilities").splitlines()
    assert len(line.split("\t")) == 4 + 3


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "text, suffix",
    [
        ("(1 bad)", ".txt"),
        ('{"children": [[]]}', ".jsonl"),
        ("# c17\r\nINPUT(a)\r\n", ".bench"),
        ("# c17\n.model c17\n.inputs a\n", ".blif"),
        ("# text = bad\n1\tbad\t_\tA\t_\t_\t0\troot\t_\t_\n", ".conllu"),
        ("", ".txt"),
    ],
)
def test_the_content_of_standard_input_chooses_its_reader(text: str, suffix: str, mark: str, monkeypatch) -> None:
    stdin(monkeypatch, mark + text)
    with given_file("-") as path:
        assert Path(path).suffix == suffix and Path(path).read_bytes() == (mark + text).encode()


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_words_that_the_model_does_not_read_are_named(command, run, tmp_path, capsys):
    """A binary Tree-LSTM that was trained on words at leaves ignored those of other vertices."""
    line = '{"children": [[], [], [0, 1]], "inputs": ["not", "bad", "good"], "labels": [null, null, 1]}'
    (tmp_path / "inner.jsonl").write_text(line)
    assert cli.main([command, str(run / "run"), str(tmp_path / "inner.jsonl")]) == 2
    assert re.search(r"got an input at vertex 2 .* leaves for program binary-tree-lstm. .* fit: nary", capsys.readouterr().err)
    (tmp_path / "leaves.jsonl").write_text(line.replace('"good"', "null"))
    assert cli.main([command, str(run / "run"), str(tmp_path / "leaves.jsonl")]) == 0


def test_a_model_of_chains_reads_plain_sentences(tmp_path, monkeypatch, capsys):
    line = '{"children": [[], [0]], "inputs": ["not", "bad"], "labels": [null, "good"]}'
    (tmp_path / "t.jsonl").write_text(f"{line}\n" * 4)
    flags = ["--program", "elman", "--hidden", "4", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert cli.main(["train", str(tmp_path / "t.jsonl"), *flags]) == 0
    stdin(monkeypatch, "bad\n\nnot very bad\n")
    lines = printed(capsys, "predict", str(tmp_path / "run"), "-").splitlines()
    cells = [line.split("\t") for line in lines]
    assert [(cell[0], cell[3]) for cell in cells] == [("graph", "text"), ("0", "bad"), ("2", "not very bad")]
