"""`cavs evaluate` and `cavs predict`: scores of known answers, tables, JSON, distributions, phrases and standard input."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cavs import cli
from cavs._graphs.converters import from_edges, from_parents
from cavs._train import bleu
from cavs._train.chunks import Chunks, Found
from cavs._train.phrases import phrases_of
from cavs._train.scores import Scores, with_unseen

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
    scores = Scores.of("root", ("a", "b", "unseen"), true, predicted)
    assert scores.confusion.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert (scores.count, scores.accuracy, scores.majority) == (5, 3 / 5, 3 / 5)
    a, b = (scores.as_json()["labels"][name] for name in "ab")
    assert (a["precision"], a["recall"], a["f1"]) == (2 / 3, 2 / 3, 2 / 3)
    assert (b["precision"], b["recall"], b["f1"]) == (1 / 2, 1 / 2, 1 / 2)
    assert scores.macro_f1 == pytest.approx((2 / 3 + 1 / 2) / 2)  # a label that never occurs does not count
    assert with_unseen(("a", "b"), ("b", "c")) == ("a", "b", "c")


def test_columns_of_the_matrix_are_labels_or_their_numbers():
    for labels, columns, rows in (
        (("0", "1"), ["", "0", "1"], ["0", "1"]),  # labels that are numbers keep them
        (("0", "very negative"), ["", "1", "2"], ["1 0", "2 very negative"]),
    ):
        matrix = Scores("root", labels, np.array([[5, 1], [2, 3]])).tables()[1]
        assert [column.header for column in matrix.columns] == columns and [*matrix.columns[0].cells] == rows


def test_entities_of_each_type_are_counted():
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    chunks = Chunks.of(labels)
    assert chunks is not None
    true = np.array([1, 2, 3, 0, 3, 4, 1])  # PER LOC | LOC PER
    best = np.array([1, 2, 3, 0, 3, 0, 1])  # the second LOC is too short
    found = chunks.scores(true, best, np.array([0, 0, 0, 0, 1, 1, 1]))
    assert found == {"all": Found(4, 4, 3), "PER": Found(2, 2, 2), "LOC": Found(2, 2, 1)}
    assert found["PER"].f1 == 1 and found["LOC"].f1 == 0.5


def test_bleu_and_chrf_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    said, want = ["a b c d e", "the cat sat on it"], ["a b c d e", "the cat sat on the mat"]
    found = bleu.score(said, want)
    assert found["BLEU"][0] == sacrebleu.corpus_bleu(said, [want], tokenize="none").score < 100
    assert found["chrF"][0] == sacrebleu.corpus_chrf(said, [want]).score
    assert bleu.score(want, want)["BLEU"][0] == pytest.approx(100)


def test_phrases_of_trees_and_of_other_graphs():
    tree = from_parents([[2, 2, 4, 4, -1], [-1]])
    assert phrases_of(tree, ["not", "bad", "", ".", "", "x"]) == ["not", "bad", "not bad", ".", "not bad .", "x"]
    assert phrases_of(tree, ["a", "b", "own", "c", "", "x"])[2] == "own"
    diamond = from_edges(4, [[1, 0], [2, 0], [3, 1], [3, 2]])
    assert phrases_of(diamond, ["a", "", "", ""]) == ["a", "", "", ""]


# ---- commands ----


def test_evaluation_has_the_figures_that_training_reported(run, capsys):
    best = json.loads((run / "run" / "best.json").read_text())["dev"]
    values = json.loads(printed(capsys, "evaluate", str(run / "run"), str(run / "t.txt"), "--json"))
    assert values["graphs"] == 12 and values["task"] == "classify"
    for where in ("roots", "vertices"):
        assert values[where]["count"] == best[where]
        assert np.trace(values[where]["confusion"]) == best[f"{where}_right"] == round(values[where]["accuracy"] * best[where])


def test_evaluation_prints_tables_and_draws_the_confusion_matrix(run, tmp_path, capsys):
    out = printed(capsys, "evaluate", str(run / "run"), str(run / "t.txt"), "--out", str(tmp_path / "m.png"))
    assert "macro F1" in out and "accuracy, all vertices" in out and "predicted" in out
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["evaluate", str(run / "run"), str(run / "t.txt"), "--out", "m.doc"]) == 2
    assert "--out: got m.doc; expected a name that ends in .png, .pdf, .svg" in capsys.readouterr().err


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
    stdin(monkeypatch, TREES[1])
    (line,) = printed(capsys, "predict", str(run / "run"), "-", "--no-header", "--probabilities").splitlines()
    assert len(line.split("\t")) == 4 + 3


def test_a_model_of_trees_says_how_to_write_sentences(run, monkeypatch, capsys):
    stdin(monkeypatch, "not bad\n")
    assert cli.main(["predict", str(run / "run"), "-"]) == 2
    error = capsys.readouterr().err
    assert "got standard input, plain text that begins with 'not bad'" in error and "Write each sentence as a tree" in error
    assert "--task lm" not in error


def test_a_model_of_chains_reads_plain_sentences(tmp_path, monkeypatch, capsys):
    line = '{"children": [[], [0]], "inputs": ["not", "bad"], "labels": [null, "good"]}'
    (tmp_path / "t.jsonl").write_text(f"{line}\n" * 4)
    flags = ["--program", "elman", "--hidden", "4", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert cli.main(["train", str(tmp_path / "t.jsonl"), *flags]) == 0
    stdin(monkeypatch, "bad\nnot very bad\n")
    lines = printed(capsys, "predict", str(tmp_path / "run"), "-").splitlines()
    assert [line.split("\t")[3] for line in lines] == ["text", "bad", "not very bad"]
