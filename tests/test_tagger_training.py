"""`cavs train --task tag`: batches, a run that finds names by their spelling, predictions, and messages for wrong arguments."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import cavs
from cavs import cli
from cavs.io import read_tagged
from cavs.recipes.tagging import Tagging, TaggingOptions
from tests.small_run import best_of


def corpus(path: Path, count: int, seed: int = 0) -> str:
    """Sentences with mostly unique names, whose kind only the spelling determines."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij"))
    lines = []
    for _ in range(count):
        words = []
        for _ in range(int(rng.integers(1, 6))):
            stem = "".join(rng.choice(letters, int(rng.integers(4, 9))))
            words += [["so|O"], ["a|O", f"{stem}x|B-PER", f"{stem}o|I-PER"], [f"{stem}y|B-LOC"]][int(rng.integers(3))]
        lines.append(" ".join(words))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_batches_have_few_shapes_and_contain_every_word_once(tmp_path):
    path = corpus(tmp_path / "t.txt", 400)
    options = TaggingOptions(train=(path,), batch=16, min_count=3)
    data = Tagging.read(options)
    train, words = data.parts["train"], data.facts["words"]
    recipe = Tagging(options, data.facts)
    sizes, seen, shapes = np.diff(train[0].vertex_offsets), 0, set()
    assert sorted(words) == ["<unk>", "a", "so"] and len(train) == 4
    loader = recipe.loader(train, 16, seed=0, steps=1)
    for _ in range(3):
        for sched, back, numbers, label, (chars, chars_back, _, place) in loader:
            shapes.add((sched.shape, chars.shape))
            assert back.shape == sched.shape and chars_back.shape == chars.shape
            has = label >= 0
            assert has.sum() in (sizes[numbers].sum(), sizes[numbers[np.unique(sched.graph[has])]].sum())
            seen += int(has.sum())
            one = (np.asarray(sched.input_id) >= 0).astype(int) + (np.asarray(place) >= 0)
            assert (one == np.asarray(sched.graph < 16)).all()
    assert seen == 3 * train[0].num_vertices and len(shapes) <= 4

    # Every vertex reads its word, from the table or letter by letter.
    order = np.random.default_rng([0, 1]).permutation(400)
    original = read_tagged(path)[np.sort(order[40:])]
    (sched, _, numbers, _, (chars, _, letters, place)), *_ = loader
    text = [original.vocab[i] for i in original[np.asarray(numbers)].input_id]
    for row, word in enumerate(text):
        at = int(place[row])
        spelled = np.asarray(letters)[np.asarray(chars.graph) == at]
        assert (words[int(sched.input_id[row])] if at < 0 else "".join(data.facts["letters"][c] for c in spelled)) == word
    assert train[2].vertex_offsets[1] == 1  # the placeholder of one character


FAST = "--hidden 12 --embedding-size 16 --char-size 8 --lr 0.02 --batch 50 --seed 1 --min-count 3".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with a tagger that was trained to find names."""
    folder = tmp_path_factory.mktemp("tags")
    train, dev = corpus(folder / "train.txt", 200), corpus(folder / "dev.txt", 40, seed=9)
    flags = ["--epochs", "7", "--out", str(folder / "run"), *FAST]
    assert cli.main(["train", "--task", "tag", train, "--dev", dev, "--test", dev, *flags]) == 0
    return folder


@pytest.mark.slow
def test_a_tagger_learns_names_from_their_spelling(run):
    best = best_of(run / "run")
    assert best["true"] > 50 and cavs.data.Found(*(int(best[n]) for n in ("true", "predicted", "both"))).f1 > 0.9
    assert json.loads((run / "run" / "test.json").read_text())["test"] == best
    assert (run / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_have_the_accuracy_that_training_reported(run, capsys):
    capsys.readouterr()
    assert cli.main(["predict", str(run / "run"), str(run / "dev.txt")]) == 0
    lines = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()[1:]]
    want = (run / "dev.txt").read_text().splitlines()
    pairs = [(w.split("|"), g.split("|")) for w, g in zip(" ".join(want).split(), " ".join(lines).split(), strict=True)]
    assert all(w[0] == g[0] for w, g in pairs)
    best = best_of(run / "run")
    assert sum(w[1] == g[1] for w, g in pairs) == best["right"] and len(pairs) == best["count"]


def test_prediction_accepts_plain_text_and_unseen_letters(run, capsys):
    (run / "new.txt").write_text("so a bagx bago\nZzy\n")
    capsys.readouterr()
    assert cli.main(["predict", str(run / "run"), str(run / "new.txt"), "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[1], line[4]) for line in lines] == [
        ("0", "0", "so"),
        ("0", "1", "a"),
        ("0", "2", "bagx"),
        ("0", "3", "bago"),
        ("1", "0", "Zzy"),
    ]
    assert [line[2] for line in lines[:4]] == ["O", "O", "B-PER", "I-PER"]


def test_words_of_plain_text_are_not_lost_as_tags(run, capsys):
    """Lines of equally many words with a blank line between them look like columns: the last words were taken for tags."""
    path = run / "pairs.txt"
    path.write_text("New York\n\nSan Francisco\n")
    assert cli.main(["predict", str(run / "run"), str(path)]) == 2
    assert "with the tags 'York', 'Francisco', none of which the model has; expected" in capsys.readouterr().err
    path.write_text("York NNP O\n\nParis NNP B-LOC\n")
    assert cli.main(["predict", str(run / "run"), str(path)]) == 0
    assert [line.split("|")[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["0\tYork", "1\tParis"]


def test_files_without_the_column_of_the_training_data_are_tagged(tmp_path, capsys):
    columns, parsed = tmp_path / "a.tsv", tmp_path / "a.conllu"
    columns.write_text("York\tNNP\tO\n\n" * 4)
    parsed.write_text("1\tYork\t_\tPROPN\tNNP\t_\t0\troot\t_\t_\n\n" * 4)
    small = ["--program", "bilstm", "--hidden", "4", "--embedding-size", "4", "--epochs", "1"]
    for path, column, other in ((columns, "2", parsed), (parsed, "xpos", columns)):
        folder = str(tmp_path / column)
        assert cli.main(["train", "--task", "tag", str(path), "--column", column, *small, "--out", folder]) == 0
        capsys.readouterr()
        assert cli.main(["predict", folder, str(other)]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [f"{i}\tYork|NNP" for i in range(4)]


@pytest.mark.parametrize(
    ("size", "given", "message"), [(4, None, ""), (4, 4, ""), (3, None, "--embeddings: got vectors of size 3")]
)
def test_vectors_have_the_size_of_their_file(size, given, message, tmp_path):
    (tmp_path / "vectors.txt").write_text(f"so {' '.join(['0.5'] * size)}\n")
    path, vectors = corpus(tmp_path / "t.txt", 20), str(tmp_path / "vectors.txt")
    options = TaggingOptions(train=(path,), embeddings=vectors, embedding_size=given)
    with pytest.raises(cavs.recipes.Mistake, match=message) if message else contextlib.nullcontext():
        assert Tagging.read(options).facts["size"] == size
    assert Tagging.read(TaggingOptions(train=(path,))).facts["size"] == 128


def test_parts_of_speech_without_spelling(tmp_path, capsys):
    path = tmp_path / "t.conllu"
    words = [("the", "DET"), ("cat", "NOUN"), ("sees", "VERB"), ("it", "PRON")]
    lines = "".join(f"{i}\t{w}\t_\t{t}\t_\t_\t{i - 1}\tdep\t_\t_\n" for i, (w, t) in enumerate(words, 1))
    path.write_text(f"{lines}\n" * 40)
    flags = ["--program", "bilstm", "--epochs", "4", "--out", str(tmp_path / "run"), *FAST, "--batch", "8"]
    assert cli.main(["train", "--task", "tag", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert " accuracy 1 " in out and "F1" not in out


MISTAKES = {
    "train --task tag PLAIN": "plain.txt, line 1: got 'some words'; expected tags: CoNLL-U",
    "train --task tag TAGS --column 2": "--column: got '2', but .* contains word.TAG, not columns",
    "train --task tag COLUMNS --column 4": "line 1: got 'a B-X'; expected at least 4 cells",
    "train --task tag BROKEN": r"line 2: got 'b\|'; expected word\|TAG",
    "train --task tag TAGS --embedding-size 7": "--embedding-size: got vectors of size 7; expected an even number",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_the_message_of_a_wrong_argument_is_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "TAGS": ("tags.txt", "a|O b|B-X\nc|O\n"),
        "PLAIN": ("plain.txt", "some words\nand more words\n"),
        "COLUMNS": ("columns.conll", "a B-X\nb O\n\nc O\n"),
        "BROKEN": ("broken.txt", "a|O\nb| c|O\n"),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(content)
    assert cli.main([files.get(word, (word,))[0] for word in line.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(MISTAKES[line], error), error
    assert error.count("\n") == 1
