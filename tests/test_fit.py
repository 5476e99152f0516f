"""Parts of the recipes against naive references: softmax, word vectors, texts, dropout, and the choices by the data."""

import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs._feed.sampler import epoch_batches
from cavs._fit import softmax
from cavs.data import softmax_loss
from cavs.io import read_vectors
from cavs.recipes.language_model import LanguageModel, LanguageOptions, to_predict
from cavs.recipes.trees import TreeOptions, Trees
from tests.small_run import best_of

REVIEWS = Path(cli.__file__).parent / "data"


def trees(path: Path, count: int, start: int = 0) -> str:
    """Writes `count` of the shortest reviews, after the first `start`, to a file."""
    lines = sorted((REVIEWS / "reviews.train.txt").read_text().splitlines(), key=len)
    path.write_text("\n".join(lines[start : start + count]) + "\n")
    return str(path)


def sentences(path: Path, count: int) -> str:
    """Writes a text in which each word except the first determines the next one."""
    rng = np.random.default_rng(0)
    ring = [f"w{i}" for i in range(12)]
    lines = []
    for number in range(count):
        at = int(rng.integers(12))
        lines.append(" ".join(ring[(at + i) % 12] for i in range(3 + number % 5)))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# ---- parts ----


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 16 * 4 * 7, 8 * 4 * 7])
def test_softmax_loss_and_its_derivative_are_those_of_whole_logits(monkeypatch, chunk_bytes):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", chunk_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    h, w, b = (jax.random.normal(k, s) for k, s in zip(keys, [(37, 5), (5, 7), (7,)], strict=True))
    labels = jnp.arange(37, dtype=jnp.int32) % 8 - 1
    weight = jnp.where(labels >= 0, 0.1 * jnp.arange(37), 0)

    def naive(h, w, b, weight):
        weight = jnp.where(labels >= 0, weight, 0)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(h @ w + b), jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        return jnp.vdot(weight, nll)

    def chunked(h, w, b, weight):
        return 2 * softmax_loss(h, w, b, labels, weight)[0]

    args = h, w, b, weight
    np.testing.assert_allclose(chunked(*args), 2 * naive(*args), rtol=1e-12)
    for got, want in zip(jax.grad(chunked, (0, 1, 2, 3))(*args), jax.grad(naive, (0, 1, 2, 3))(*args), strict=True):
        np.testing.assert_allclose(got, 2 * want, rtol=1e-10, atol=1e-12)
    right = softmax_loss(h, w, b, labels, weight)[2]
    np.testing.assert_array_equal(right, jnp.argmax(h @ w + b, -1) == labels)  # never where there is no label
    nll = -jax.nn.log_softmax(h @ w + b)[jnp.arange(37), jnp.maximum(labels, 0)]
    np.testing.assert_allclose(softmax_loss(h, w, b, labels)[0], nll[labels >= 0].sum(), rtol=1e-12)


def test_chunks_of_the_softmax_add_up_narrow_numbers(monkeypatch):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", 4 * 8 * 2)
    h, labels = jnp.ones((4000, 1)), jnp.zeros(4000, jnp.int32)

    def gradients(h, *params):
        return jax.value_and_grad(lambda *args: softmax_loss(*args, labels)[0], (0, 1, 2))(h, *params)

    for kinds in [(jnp.bfloat16,) * 3, (jnp.float32, jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32, jnp.float32)]:
        loss, found = gradients(*(x.astype(kind) for x, kind in zip((h, jnp.zeros((1, 2)), jnp.zeros(2)), kinds, strict=True)))
        assert tuple(x.dtype for x in found) == kinds
        np.testing.assert_allclose(float(loss), 4000 * np.log(2), rtol=0.01)
        np.testing.assert_allclose(found[1].astype(np.float32), [[-2000, 2000]], rtol=0.01)
    assert softmax_loss(h[:0], jnp.ones((1, 2)), jnp.ones(2), labels[:0])[0] == 0


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16])
def test_a_vocabulary_may_have_more_words_than_narrow_numbers_count_to(kind):
    args = jnp.ones((3, 1), kind), jnp.zeros((1, 100_000), kind), jnp.zeros(100_000, kind)
    loss, found = jax.value_and_grad(lambda *args: softmax_loss(*args, jnp.arange(3))[0], 2)(*args)
    assert loss.dtype == found.dtype == kind
    np.testing.assert_allclose(float(loss), 3 * np.log(100_000), rtol=0.01)
    np.testing.assert_allclose(found[3:].astype(np.float32), 3e-5, rtol=0.01)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 8 * 4 * 3])
def test_rows_without_a_label_count_for_nothing_if_a_class_is_masked(monkeypatch, chunk_bytes):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", chunk_bytes)
    b, labels = jnp.array([-jnp.inf, 0, 0]), jnp.where(jnp.arange(9) % 2, 1, -1)
    loss, found = jax.value_and_grad(lambda h: softmax_loss(h, jnp.ones((2, 3)), b, labels)[0])(jnp.ones((9, 2)))
    np.testing.assert_allclose(loss, 4 * np.log(2))
    np.testing.assert_allclose(found, 0, atol=1e-12)


def test_rows_without_a_label_may_have_infinite_logits():
    h, labels = jnp.ones((3, 2), jnp.float32).at[1].set(3e38), jnp.array([0, -1, 1])
    args = jnp.ones((2, 4), jnp.float32), jnp.zeros(4, jnp.float32)
    found = jax.grad(lambda *args: softmax_loss(*args, labels)[0], (0, 1, 2))(h, *args)
    want = jax.grad(lambda *args: softmax_loss(*args, labels)[0], (0, 1, 2))(h.at[1].set(0), *args)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_of_a_softmax_keep_their_fractions_if_features_are_integers():
    args = jnp.ones((3, 2), int), jnp.zeros((2, 4)), jnp.zeros(4), jnp.arange(3), 0.5 * jnp.ones(3)
    np.testing.assert_allclose(softmax_loss(*args)[0], 1.5 * np.log(4))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("h", (1, 5, 3)), ("w", (2, 4)), ("b", (1, 4)), ("labels", (5, 1)), ("weight", (5, 1)), ("weight", (1,))],
)
def test_softmax_loss_refuses_shapes_that_do_not_fit(name, shape):
    shapes = {"h": (5, 3), "w": (3, 4), "b": (4,), "labels": (5,), "weight": (5,)}
    args = {key: jnp.zeros(shapes[key] if key != name else shape, int if key == "labels" else float) for key in shapes}
    with pytest.raises(ValueError, match=rf"softmax_loss: (h|{name}): got \w+\[.*\]; expected \[.*\], as features h"):
        softmax_loss(**args)
    with pytest.raises(ValueError, match=r"labels: got float64\[5\]; expected \[5\] integers"):
        softmax_loss(**args | {key: jnp.zeros(shapes[key]) for key in shapes})


@pytest.mark.parametrize("rows", [8, 37, 65, 72, 100])
def test_chunks_of_the_softmax_have_few_rows_of_padding(monkeypatch, rows):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", 64 * 4 * 7)  # 64 rows
    args = jnp.ones((rows, 5)), jnp.ones((5, 7)), jnp.ones(7), jnp.zeros(rows, jnp.int32), jnp.ones(rows)
    text = jax.jit(softmax_loss).lower(*args).as_text()
    logits = [int(n) for n in re.findall(r"stablehlo.dot_general.*-> tensor<(\d+)x7xf\d+>", text)]
    chunks = -(-rows // 64)
    assert logits and rows <= chunks * logits[0] < rows + 8 * chunks and logits[0] <= 64


def test_an_epoch_contains_every_graph_once_in_batches_of_similar_size():
    sizes = np.random.default_rng(0).integers(1, 100, 203)
    grid = epoch_batches(sizes, 25, "balanced", 0, 1)
    assert grid.shape == (9, 25)
    np.testing.assert_array_equal(np.sort(grid[grid >= 0]), np.arange(203))
    totals = sizes[grid[:-1]].sum(1)
    assert totals.max() < 1.02 * totals.min()
    assert not np.array_equal(grid, epoch_batches(sizes, 25, "balanced", 0, 2))


def test_vectors_are_found_as_written_or_in_lower_case(tmp_path):
    path = tmp_path / "glove.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("4 2\nthe 1 2\nbad 3 4\nBad 5 6\n. . . 7 8\n")
    found, rows = read_vectors(str(path), ["The", "Bad", "nowhere", "the"])
    np.testing.assert_array_equal(found, [True, True, False, True])
    np.testing.assert_array_equal(rows, [[1, 2], [5, 6], [0, 0], [1, 2]])


@pytest.mark.parametrize("text", ["the\t1 2\nof\t3 4\n", "the\t1\t2\nof\t3\t4\n", "the 1\t2\r\nof 3\t4\r\n"])
def test_words_of_vectors_end_at_a_tab_or_space(tmp_path, text):
    """No word was found where only it ends with a tab, and the vectors lacked their first value."""
    (tmp_path / "glove.txt").write_bytes(text.encode())
    found, rows = read_vectors(str(tmp_path / "glove.txt"), ["of", "the"])
    assert found.all() and rows.tolist() == [[3, 4], [1, 2]]


@pytest.mark.parametrize("words", ["the", {"the"}, None, 3, [b"the"], ["the", 3]])
def test_vectors_are_of_a_list_of_words(tmp_path, words):
    (tmp_path / "glove.txt").write_text("the 1 2\n")
    with pytest.raises(TypeError, match="read_vectors: words: got .*; expected a list of words. Write read_vectors"):
        read_vectors(str(tmp_path / "glove.txt"), words)


def test_the_first_line_of_vectors_may_begin_with_a_mark_and_be_counts(tmp_path):
    path = tmp_path / "glove.txt"
    for first in (b"", b"20 2\n"):  # which is also a word
        path.write_bytes(b"\xef\xbb\xbf" + first + b"the 1 2\n20 3 4\n")
        found, rows = read_vectors(str(path), ["the", "20"])
        assert found.all() and rows.tolist() == [[1, 2], [3, 4]]


def test_words_and_lines_of_vectors_may_occur_twice(tmp_path):
    """Only the last place of a word was filled, by the last line with it."""
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2\nthe 3 4\nbad 5 6\n")
    found, rows = read_vectors(str(path), ["the", "bad", "the", "The"])
    assert found.all() and rows.tolist() == [[1, 2], [5, 6], [1, 2], [1, 2]]


def test_a_broken_line_of_vectors_is_named(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2\nbad 3\n")
    with pytest.raises(cavs.io.FormatError, match="line 2: got .*; expected a word and then 2 finite values"):
        read_vectors(str(path), ["bad"])


def test_a_word_with_a_space_before_a_number_is_skipped_and_infinity_named(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2\nat 26 3 4\nbad 5 6\n")
    found, rows = read_vectors(str(path), ["the", "at", "bad"])
    assert found.tolist() == [True, False, True] and rows[2].tolist() == [5, 6]
    path.write_text("the 1 2\nbad nan 3\n")
    with pytest.raises(cavs.io.FormatError, match="line 2: got 'bad nan"):
        read_vectors(str(path), ["bad"])


def test_a_line_of_vectors_without_an_end_is_refused(tmp_path):
    path = tmp_path / "glove.txt.gz"
    path.write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(cavs.io.FormatError, match="line 1: got .*; expected a word and then its values in less than 1048576"):
        read_vectors(str(path), ["bad"])


def test_a_text_becomes_chains_that_predict_the_next_word(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a b\n\n  b c c \n")
    graphs = cavs.io.read_text(str(path))
    assert [graphs.vocab[i] for i in graphs.input_id] == ["a", "b", "b", "c", "c"] and len(graphs) == 2
    known = to_predict(graphs, words := ["<unk>", "<s>", "</s>", "b"])
    assert [words[i] for i in known.input_id] == ["<s>", "<unk>", "b", "<s>", "b", "<unk>", "<unk>"]
    assert [words[i] for i in known.label] == ["<unk>", "b", "</s>", "b", "<unk>", "<unk>", "</s>"]


@pytest.mark.parametrize(
    "line, program, loss, score",
    [
        ('{"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [0, 1, 1]}', "binary-tree-lstm", "all", "root"),
        (
            '{"children": [[], [], [0, 1]], "inputs": ["a", "b", null], "labels": [null, null, 1]}',
            "binary-tree-lstm",
            "root",
            "root",
        ),
        ('{"children": [[], [0]], "inputs": ["a", "b"], "labels": [0, 1]}', "lstm", "all", "all"),
        ('{"children": [[], [], [], [0, 1, 2]], "labels": [0, 1, 1, null]}', "child-sum-tree-lstm", "all", "all"),
    ],
)
def test_the_data_completes_the_configuration(tmp_path, line, program, loss, score):
    path = tmp_path / "graphs.jsonl"
    path.write_text(f"{line}\n" * 3)
    data = Trees.read(TreeOptions(train=(str(path),)))
    facts = data.facts
    assert (facts["program"], facts["loss"], facts["score"], facts["size"]) == (program, loss, score, 100)
    assert len(data.parts["train"]) == 2 and len(data.parts["dev"]) == 1 and facts["words"][0] == "<unk>"


def test_labels_of_minus_one_are_no_labels(tmp_path):
    """Vertices without a label must not be trained as the last class."""
    path = tmp_path / "graphs.jsonl"
    lines = ['{"children": [[], [0]], "inputs": ["a", "b"], "labels": [null, 1]}'] * 9
    path.write_text("\n".join([*lines, '{"children": [[]], "inputs": ["a"], "labels": [0]}']))
    data = Trees.read(options := TreeOptions(train=(str(path),), dev=str(path), hidden=4, loss="all", batch=4))
    recipe = Trees(options, data.facts)
    params = recipe.init(jax.random.key(0))
    for batch in recipe.loader(data.parts["train"], 4, steps=1):
        grads = jax.grad(lambda p, batch=batch: recipe.loss(p, batch)[0])(params)
        label, p = np.asarray(batch[2]), jax.nn.softmax(recipe.hidden(params, batch) @ params["w"] + params["b"])
        has = label >= 0
        np.testing.assert_allclose(grads["b"], (p[has] - np.eye(2)[label[has]]).sum(0), atol=1e-6)
        assert recipe.sums(params, batch)["count"] == has.sum() < has.size


@pytest.mark.slow
def test_padding_graphs_do_not_count_and_the_key_determines_dropout(tmp_path):
    options = TreeOptions(train=(trees(tmp_path / "t.txt", 22),), hidden=4, program="tree-fc", dropout=0.5, batch=4)
    data = Trees.read(options)
    recipe, train = Trees(options, data.facts), data.parts["train"]
    params = recipe.init(jax.random.key(0))
    whole = cavs.data.evaluate(recipe.sums, params, recipe.in_order(train, 16))
    assert whole["roots"] == len(train) == 20 and whole["vertices"] == train.num_vertices
    (_, batch) = recipe.in_order(train[:6], 4)
    loss = jax.jit(lambda params, key: recipe.loss(params, batch, jax.random.key(key))[0])
    sums = recipe.loss(params, batch, jax.random.key(0))[1]
    assert sums["roots"] == 2 and sums["vertices"] == sums["count"] < train[:6].num_vertices
    assert loss(params, 0) == loss(params, 0) and abs(loss(params, 1) - loss(params, 0)) > 1e-4

    # Forward and backward use the same masks: the derivative is that of the loss with this key.
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    along = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), wide)
    gradient = jax.grad(lambda p: loss(p, 5))(wide)
    slope = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, along)), strict=True))
    up, down = (loss(jax.tree.map(lambda x, d, e=e: x + e * d, wide, along), 5) for e in (1e-5, -1e-5))
    np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-6)


def test_a_language_model_beats_the_frequencies_of_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = sentences(tmp_path / "t.txt", 200)
    flags = "--program elman --hidden 16 --epochs 6 --lr 0.02 --dropout 0 --min-count 1 --batch 10 --out run".split()
    assert cli.main(["train", "--task", "lm", path, *flags]) == 0
    assert "unigram perplexity" in capsys.readouterr().out
    data = LanguageModel.read(options := LanguageOptions(train=(path,), min_count=1))
    recipe, best = LanguageModel(options, data.facts), best_of("run")
    base = recipe.baseline(data.parts["train"], data.parts["dev"])["unigram perplexity"]
    assert recipe.scores(best)["perplexity"] < 0.5 * base

    Path("new.txt").write_text("w3 w4 w5\n\nw3 w5 w4\nnever seen\n")
    assert cli.main(["predict", "run", "new.txt"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[3]) for line in lines] == [("0", "w3 w4 w5"), ("1", ""), ("2", "w3 w5 w4"), ("3", "never seen")]
    assert float(lines[0][1]) > float(lines[2][1]) and lines[1][1] == "0.000"

    assert cli.main(["evaluate", "run", "new.txt", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["sentences"], values["words"], values["unknown_words"]) == (3, 11, 2)
    assert cli.main(["predict", "run", "new.txt", "--vertices", "--json"]) == 0
    words = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [w["text"] for w in words[:4]] == ["w3", "w4", "w5", "</s>"]
    assert sum(w["log_probability"] for w in words[:4]) == pytest.approx(float(lines[0][1]), abs=1e-3)
    assert values["nll"] == pytest.approx(-sum(w["log_probability"] for w in words) / 11)
