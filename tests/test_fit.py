"""Training: its parts against dense or naive references, then whole runs of `cavs train` on small data."""

import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cavs import cli
from cavs._feed.epochs import strata
from cavs._train import batches, optimiser, report, softmax, text
from cavs._train.config import Config, TrainError
from cavs._train.data import Data
from cavs._train.embeddings import read_vectors
from cavs._train.loop import Progress, Trainer
from cavs._train.step import State, begin
from cavs._train.task import configure, find_task

REVIEWS = Path(cli.__file__).parent / "data"
SMALL = {"hidden": 8, "batch": 4, "epochs": 2, "dropout": 0.5, "seed": 3}


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


def read_data(config: Config) -> tuple[Config, Data]:
    """Reads the data of the task."""
    return find_task(config.task).read(config)


# ---- parts ----


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 16 * 4 * 7, 8 * 4 * 7])
def test_softmax_loss_and_its_derivative_are_those_of_whole_logits(monkeypatch, chunk_bytes):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", chunk_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    h, w, b = (jax.random.normal(k, s) for k, s in zip(keys, [(37, 5), (5, 7), (7,)], strict=True))
    labels = jnp.arange(37, dtype=jnp.int32) % 8 - 1
    weight = jnp.where(labels >= 0, 0.1 * jnp.arange(37), 0)

    def naive(h, w, b):
        nll = -jnp.take_along_axis(jax.nn.log_softmax(h @ w + b), jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        return jnp.vdot(weight, nll)

    def chunked(h, w, b):
        return 2 * softmax.softmax_loss(h, w, b, labels, weight)[0]

    np.testing.assert_allclose(chunked(h, w, b), 2 * naive(h, w, b), rtol=1e-12)
    for got, want in zip(jax.grad(chunked, (0, 1, 2))(h, w, b), jax.grad(naive, (0, 1, 2))(h, w, b), strict=True):
        np.testing.assert_allclose(got, 2 * want, rtol=1e-10, atol=1e-12)
    right = softmax.softmax_loss(h, w, b, labels, weight)[2]
    np.testing.assert_array_equal(right, jnp.argmax(h @ w + b, -1) == jnp.maximum(labels, 0))


@pytest.mark.parametrize("rows", [8, 37, 65, 72, 100])
def test_chunks_of_the_softmax_have_few_rows_of_padding(monkeypatch, rows):
    monkeypatch.setattr(softmax, "CHUNK_BYTES", 64 * 4 * 7)  # 64 rows
    args = jnp.ones((rows, 5)), jnp.ones((5, 7)), jnp.ones(7), jnp.zeros(rows, jnp.int32), jnp.ones(rows)
    text = jax.jit(softmax.softmax_loss).lower(*args).as_text()
    logits = [int(n) for n in re.findall(r"stablehlo.dot_general.*-> tensor<(\d+)x7xf\d+>", text)]
    chunks = -(-rows // 64)
    assert logits and rows <= chunks * logits[0] < rows + 8 * chunks and logits[0] <= 64


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_row_updates_are_the_dense_ones_where_every_row_is_read(name):
    config = Config(optimizer=name, lr=0.1, weight_decay=0.0)
    dense = optimiser.dense(config)
    table = jax.random.normal(jax.random.key(0), (4, 3))
    whole, state = table, dense.init(table)
    slots = optimiser.init_rows(config, table)
    index = jnp.array([2, 0, 3, 1, 4, 5])  # the last two are padding
    for count in range(1, 4):
        gradient = jax.random.normal(jax.random.key(count), (4, 3))
        updates, state = dense.update(gradient, state, whole)
        whole = optax.apply_updates(whole, updates)
        rows = table.at[index].get(mode="fill", fill_value=0)
        padded = jnp.pad(gradient[index[:4]], ((0, 2), (0, 0)))
        table, slots = optimiser.update_rows(config, table, slots, index, rows, padded, jnp.int32(count))
    np.testing.assert_allclose(table, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw"])
def test_rows_that_a_batch_does_not_read_do_not_change(name):
    config = Config(optimizer=name, lr=0.1)
    table = jnp.ones((5, 2))
    slots = jax.tree.map(lambda x: x + 1, optimiser.init_rows(config, table))
    index = jnp.array([3])
    new, changed = optimiser.update_rows(config, table, slots, index, table[index], 3 * table[index], jnp.int32(1))
    for before, after in [(table, new), *((slots[k], changed[k]) for k in slots)]:
        np.testing.assert_array_equal(np.flatnonzero((before != after).any(1)), [3])


def test_the_learning_rate_rises_and_falls():
    steps = jnp.arange(12)
    linear = [float(optimiser.factor(Config(schedule="linear", warmup=2), n, 12)) for n in steps]
    np.testing.assert_allclose(linear, [0.5, 1, *(1 - np.arange(10) / 10)], rtol=1e-6)
    cosine = [float(optimiser.factor(Config(schedule="cosine"), n, 12)) for n in steps]
    np.testing.assert_allclose(cosine, (1 + np.cos(np.pi * np.arange(12) / 12)) / 2, rtol=1e-5)
    rising = [float(optimiser.factor(Config(warmup=4), n, 12)) for n in steps]
    np.testing.assert_allclose(rising, [0.25, 0.5, 0.75, *[1] * 9])
    assert optimiser.factor(Config(), steps[3], 12) == 1.0


def test_clipping_bounds_the_common_norm():
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    assert float(optimiser.global_norm(optimiser.clip(gradients, 1.0))) == pytest.approx(1)
    assert optimiser.clip(gradients, 0) is gradients
    assert float(optimiser.clip(gradients, 9.0)["b"][0, 0]) == 4


def test_an_epoch_contains_every_graph_once_in_batches_of_similar_size():
    sizes = np.random.default_rng(0).integers(1, 100, 203)
    grid = strata(sizes, 25, np.random.default_rng(1))
    assert grid.shape == (9, 25)
    np.testing.assert_array_equal(np.sort(grid[grid >= 0]), np.arange(203))
    totals = np.where(grid >= 0, sizes[grid], 0).sum(1)
    assert totals.max() < 1.02 * totals.min()
    assert not np.array_equal(grid, strata(sizes, 25, np.random.default_rng(2)))


def test_vectors_are_found_as_written_or_in_lower_case(tmp_path):
    path = tmp_path / "glove.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("4 2\nthe 1 2\nbad 3 4\nBad 5 6\n. . . 7 8\n")
    found, rows = read_vectors(str(path), ["The", "Bad", "nowhere", "the"])
    np.testing.assert_array_equal(found, [True, True, False, True])
    np.testing.assert_array_equal(rows, [[1, 2], [5, 6], [0, 0], [1, 2]])


def test_a_broken_line_of_vectors_is_named(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2\nbad 3\n")
    with pytest.raises(TrainError, match="line 2: got .*; expected a word and then 2 values"):
        read_vectors(str(path), ["bad"])


def test_a_line_of_vectors_without_an_end_is_refused(tmp_path):
    path = tmp_path / "glove.txt.gz"
    path.write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(TrainError, match="line 1: got over 1048576 bytes; expected a word"):
        read_vectors(str(path), ["bad"])


def test_a_text_becomes_chains_that_predict_the_next_word(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a b\n\n  b c c \n")
    graphs = text.read_text(str(path))
    read = [graphs.vocab[i] for i in graphs.input_id]
    assert read == ["<s>", "a", "b", "<s>", "b", "c", "c"]
    assert [graphs.label_names[i] for i in graphs.label] == ["a", "b", "</s>", "b", "c", "c", "</s>"]
    known = text.relabel(graphs, ("<unk>", "<s>", "</s>", "b"))
    assert known.label.tolist() == [0, 3, 2, 3, 0, 0, 2]


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
    config, data = read_data(configure({"train": str(path)}))
    assert (config.program, config.loss, config.score, config.embedding_size) == (program, loss, score, config.hidden)
    assert len(data.train) == 2 and len(data.dev) == 1 and data.words[0] == "<unk>"


# ---- runs ----


class StopAfter:
    """Requests a stop after some steps."""

    def __init__(self, steps: int):
        self.left = steps

    def __bool__(self) -> bool:
        return self.left <= 0

    def step(self, *_) -> None:
        self.left -= 1

    def epoch(self, *_) -> None:
        pass


def trainer_of(given: dict, folder: Path) -> tuple[Trainer, State]:
    config, data = read_data(configure(given))
    model = find_task(config.task).model(config, data)
    folder.mkdir()
    return Trainer(config, data, model, folder), begin(model, config, None)[1]()


MORE = {"schedule": "cosine", "warmup": 3, "weight_decay": 0.1, "save_every": 3}


ONE_BY_ONE = ((2, 0, 2), (3, 1, 0), (4, 1, 4), (9, 2, 0))  # dispatches, and the epoch and step at which they end
PAIRS = ((1, 0, 2), (2, 1, 0), (2, 1, 4), (9, 2, 0))


@pytest.mark.parametrize(
    "task, optimizer, more, stops", [("classify", "adagrad", {}, PAIRS), ("lm", "adamw", MORE, ONE_BY_ONE)]
)
def test_stopping_and_resuming_changes_no_bit(tmp_path, monkeypatch, task, optimizer, more, stops):
    monkeypatch.setattr("cavs._feed.settings.STEPS_ON_CPU", 2)
    path = trees(tmp_path / "t.txt", 22) if task == "classify" else sentences(tmp_path / "t.txt", 22)
    given = SMALL | {"train": path, "task": task, "optimizer": optimizer, "min_count": 1} | more
    trainer, state = trainer_of(given, tmp_path / "straight")
    never = StopAfter(10**9)
    straight, progress = trainer.fit(state, done := Progress(), never, never), done
    assert trainer.steps == 5 and progress.epoch == 2 and trainer.is_done(progress)

    trainer.folder = tmp_path / "stopped"
    trainer.folder.mkdir()
    state, progress = begin(trainer.model, trainer.config, None)[1](), Progress()
    for stop_after, epoch, step in stops:
        stop = StopAfter(stop_after)
        trainer.fit(state, progress, stop, stop)
        assert (progress.epoch, progress.step) == (epoch, step)
        state, progress = trainer.resume(begin(trainer.model, trainer.config, None)[1]())
    assert int(state.count) == 10
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [record["epoch"] for record in done.within] == ([0.6, 1.6] if more else [])
    for a, b in zip(done.records, progress.records, strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}


def test_max_steps_ends_within_an_epoch_and_can_be_raised(tmp_path):
    given = SMALL | {"train": trees(tmp_path / "t.txt", 22), "hidden": 4, "program": "tree-fc", "max_steps": 7}
    trainer, state = trainer_of(given, tmp_path / "run")
    never, progress = StopAfter(10**9), Progress()
    state = trainer.fit(state, progress, never, never)
    assert trainer.steps == 5 and int(state.count) == 7 and trainer.is_done(progress)
    assert [record["epoch"] for record in progress.records] == [1, 1.4]
    saved = json.loads((tmp_path / "run" / "best.json").read_text())
    assert saved["epoch"] == progress.best(trainer.config)["epoch"]
    state, progress = trainer.resume(state)
    trainer.config = trainer.config.replace({"max_steps": 8})
    assert trainer.is_done(progress) is False
    state = trainer.fit(state, progress, never, never)
    assert int(state.count) == 8 and [record["epoch"] for record in progress.records] == [1, 1.4, 1.6]


def test_padding_graphs_do_not_count_and_the_key_determines_dropout(tmp_path):
    given = SMALL | {"train": trees(tmp_path / "t.txt", 22), "hidden": 4, "program": "tree-fc"}
    trainer, state = trainer_of(given, tmp_path / "run")
    train, model = trainer.data.train, trainer.model
    whole = trainer.evaluate(state.weights, train)
    assert whole["roots"] == len(train) == 20 and whole["vertices"] == train.num_vertices
    feed = batches.feed(train[:6], model.num_words)
    numbered = batches.Feed(feed.sources, lambda sample: (sample.numbers[sample.present], feed.collate(sample)))
    (_, whole), (numbers, batch) = numbered.loader(4)
    assert len(numbers) == 2 and whole.sched.shape.graphs == batch.sched.shape.graphs == 4
    params, rows = state.params, state.table.at[batch.words].get(mode="fill", fill_value=0)

    @jax.jit
    def objective(params, rows, batch, key):
        return model.objective(params, rows, batch, key)

    def loss(params, rows, key):
        return objective(params, rows, batch, jax.random.key(key))[0]

    value, metrics = objective(params, rows, batch, jax.random.key(0))
    assert metrics.count == train[numbers].num_vertices and metrics.roots == 2
    assert loss(params, rows, 0) == value
    assert abs(loss(params, rows, 1) - value) > 1e-4

    # Forward and backward use the same masks: the derivative is that of the loss with this key.
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (params, rows))
    along = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), wide)
    gradient = jax.grad(lambda p: loss(*p, 5))(wide)
    slope = sum(jnp.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, along)), strict=True))
    up, down = (loss(*jax.tree.map(lambda x, d, e=e: x + e * d, wide, along), 5) for e in (1e-5, -1e-5))
    np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-6)


def test_a_language_model_beats_the_frequencies_of_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = sentences(tmp_path / "t.txt", 200)
    flags = "--program elman --hidden 16 --epochs 6 --lr 0.02 --dropout 0 --min-count 1 --batch 10 --out run".split()
    assert cli.main(["train", "--task", "lm", path, *flags]) == 0
    assert "unigram perplexity" in capsys.readouterr().out
    config, data = read_data(configure({"train": path, "task": "lm", "min_count": 1}))
    best = json.loads(Path("run/best.json").read_text())
    assert report.perplexity(best["dev"]) < 0.5 * report.unigram_perplexity(data.train, data.dev, len(data.labels))

    Path("new.txt").write_text("w3 w4 w5\nw3 w5 w4\nnever seen\n")
    assert cli.main(["predict", "run", "new.txt"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[3]) for line in lines] == [("0", "w3 w4 w5"), ("1", "w3 w5 w4"), ("2", "never seen")]
    assert float(lines[0][1]) > float(lines[1][1])

    assert cli.main(["evaluate", "run", "new.txt", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["sentences"], values["words"], values["unknown_words"]) == (3, 11, 2)
    assert cli.main(["predict", "run", "new.txt", "--vertices", "--json"]) == 0
    words = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [w["text"] for w in words[:4]] == ["w3", "w4", "w5", "</s>"]
    assert sum(w["log_probability"] for w in words[:4]) == pytest.approx(float(lines[0][1]), abs=1e-3)
    assert values["nll"] == pytest.approx(-sum(w["log_probability"] for w in words) / 11)
