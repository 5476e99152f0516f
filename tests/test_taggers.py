"""Sequence taggers: nets of nets equal the per-vertex loop and PyTorch's modules; files, entities, and whole runs."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import cavs
from cavs import cli, vertex_programs as vp
from cavs._train import chunks, sentences
from cavs._train.batches import epoch_batches
from cavs._train.config import TrainError
from cavs._train.tagged import read_tagged
from cavs._train.task import configure, find

pytestmark = pytest.mark.usefixtures("compiled")
F64 = jnp.float64
TAGGER = vp.BiLSTMTagger(labels=4, hidden=5, inputs=6, mlp=3, layers=2, dtype=F64)
SPELLER = vp.CharBiLSTMTagger(labels=4, hidden=5, inputs=6, characters=9, char_inputs=3, mlp=7, dtype=F64)
LENGTHS = {"odd": [3, 1, 7, 1, 2], "no words": []}
SPELLINGS = [4, 1, 7, 2]


def chains(lengths: list[int]) -> tuple[cavs.Graphs, cavs.Graphs]:
    """Chains and the same turned round."""
    graphs = cavs.from_lengths(np.array(lengths, int))
    return graphs, graphs.reversed()


def by_vertex(program: vp.BiLSTM, params: list, graphs: cavs.Graphs, back: cavs.Graphs, x, ends: bool = False):
    """`BiLSTM.run` by the per-vertex loop of plain Python, without a schedule."""
    for i, layer in enumerate(params):
        F = program.layer(i).vertex_function()
        h, g = cavs.interpret(F, layer["forward"], graphs, x), cavs.interpret(F, layer["backward"], back, x)
        last = ends and i == len(params) - 1
        firsts, lasts = graphs.vertex_offsets[:-1], graphs.vertex_offsets[1:] - 1
        x = jnp.concatenate([h[lasts], g[firsts]] if last else [h, g], -1)
    return x


def loss(logits):
    """A scalar on which every logit acts with a weight of its own."""
    return jnp.vdot(logits, jnp.sin(1.0 + jnp.arange(logits.size)).reshape(logits.shape))


# ---- values and gradients ----


@pytest.mark.parametrize("name", ["odd", "no words"])
def test_the_tagger_equals_the_loop_over_vertices(name):
    graphs, back = chains(LENGTHS[name])
    params = TAGGER.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (graphs.num_vertices, 6), F64)

    def ours(params, x):
        y = TAGGER.run(params, cavs.schedule(graphs), cavs.schedule(back), x)
        return loss(y), y

    def truth(params, x):
        h = by_vertex(TAGGER.bilstm, params["bilstm"], graphs, back, x)
        y = jnp.tanh(h @ params["w"] + params["b"]) @ params["v"] + params["c"]
        return loss(y), y

    got, want = (jax.grad(f, argnums=(0, 1), has_aux=True)(params, x) for f in (jax.jit(ours), truth))
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


def test_the_tagger_that_spells_equals_the_loop_over_vertices():
    (graphs, back), (words, words_back) = chains(LENGTHS["odd"]), chains(SPELLINGS)
    params = SPELLER.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((graphs.num_vertices, 6))
    spelled = rng.integers(-1, len(SPELLINGS) - 1, graphs.num_vertices)  # the last spelling is read by nobody
    spelled[0] = 2
    characters = rng.integers(0, 9, words.num_vertices)
    scheds = [cavs.schedule(g) for g in (graphs, back, words, words_back)]

    def ours(params, x):
        vectors = SPELLER.vectors(params, *scheds[2:], characters)
        y = SPELLER.run(params, *scheds[:2], x, vectors, spelled)
        return loss(y), y

    def truth(params, x):
        letters = params["characters"][characters]
        vectors = by_vertex(SPELLER.spell, params["spell"], words, words_back, letters, ends=True)
        p = params["tagger"]
        rows = jnp.concatenate([x, vectors])[np.where(spelled >= 0, len(x) + spelled, np.arange(len(x)))]
        h = by_vertex(SPELLER.tagger.bilstm, p["bilstm"], graphs, back, rows)
        y = jnp.tanh(h @ p["w"] + p["b"]) @ p["v"] + p["c"]
        return loss(y), y

    got, want = (jax.grad(f, argnums=(0, 1), has_aux=True)(params, jnp.asarray(x)) for f in (jax.jit(ours), truth))
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


def torch_lstm(torch, program: vp.BiLSTM, params: list):
    """`nn.LSTM` with the same weights: its gates are i, f, g, o, a row each, and it has two biases."""
    lstm = torch.nn.LSTM(program.inputs, program.hidden, program.layers, bidirectional=True, dtype=torch.float64)
    with torch.no_grad():
        for i, layer in enumerate(params):
            for direction, suffix in (("forward", ""), ("backward", "_reverse")):
                for ours, theirs in (("w", "weight_ih"), ("u", "weight_hh"), ("b", "bias_ih")):
                    w = torch.from_numpy(np.array(swap_og(layer[direction][ours])))
                    getattr(lstm, f"{theirs}_l{i}{suffix}").copy_(w.permute(*range(w.ndim)[::-1]))
                getattr(lstm, f"bias_hh_l{i}{suffix}").zero_()
    return lstm


def swap_og(w):
    """Gates i, f, o, g along the last axis to i, f, g, o, and back."""
    i, f, o, g = np.split(np.asarray(w), 4, -1)
    return np.concatenate([i, f, g, o], -1)


def torch_gradients(lstm, program: vp.BiLSTM) -> list:
    """The gradients of `nn.LSTM`'s weights as those of `BiLSTM`."""
    return [
        {
            direction: {
                ours: swap_og(getattr(lstm, f"{theirs}_l{i}{suffix}").grad.numpy().T)
                for ours, theirs in (("w", "weight_ih"), ("u", "weight_hh"), ("b", "bias_ih"))
            }
            for direction, suffix in (("forward", ""), ("backward", "_reverse"))
        }
        for i in range(program.layers)
    ]


def packed(torch, rows, lengths: list[int]):
    """Rows of sequences laid end to end, packed."""
    return torch.nn.utils.rnn.pack_sequence(torch.split(rows, lengths), enforce_sorted=False)


def test_the_tagger_equals_torch():
    torch = pytest.importorskip("torch", reason="the modules to compare with are PyTorch's; pip install torch")
    lengths = LENGTHS["odd"]
    graphs, back = chains(lengths)
    params = TAGGER.init(jax.random.key(0))
    x = np.array(jax.random.normal(jax.random.key(1), (graphs.num_vertices, 6), F64))

    def ours(params, x):
        y = TAGGER.run(params, cavs.schedule(graphs), cavs.schedule(back), x)
        return loss(y), y

    (by_params, by_x), y = jax.grad(jax.jit(ours), argnums=(0, 1), has_aux=True)(params, x)

    lstm = torch_lstm(torch, TAGGER.bilstm, params["bilstm"])
    head = {k: torch.tensor(np.array(params[k]), requires_grad=True) for k in "wbvc"}
    rows = torch.tensor(x, requires_grad=True)
    h = torch.cat(torch.nn.utils.rnn.unpack_sequence(lstm(packed(torch, rows, lengths))[0]))
    want = (h @ head["w"] + head["b"]).tanh() @ head["v"] + head["c"]
    (want * torch.sin(1.0 + torch.arange(want.numel(), dtype=torch.float64)).view(want.shape)).sum().backward()
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_x, rows.grad.numpy(), rtol=1e-10, atol=1e-10)
    theirs = {"bilstm": torch_gradients(lstm, TAGGER.bilstm)} | {k: w.grad.numpy() for k, w in head.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), by_params, theirs)


def test_the_tagger_that_spells_equals_torch():
    torch = pytest.importorskip("torch", reason="the modules to compare with are PyTorch's; pip install torch")
    lengths = LENGTHS["odd"]
    (graphs, back), (words, words_back) = chains(lengths), chains(SPELLINGS)
    params = SPELLER.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((graphs.num_vertices, 6))
    spelled = rng.integers(-1, len(SPELLINGS), graphs.num_vertices)
    characters = rng.integers(0, 9, words.num_vertices)
    scheds = [cavs.schedule(g) for g in (graphs, back, words, words_back)]

    def ours(params, x):
        y = SPELLER.run(params, *scheds[:2], x, SPELLER.vectors(params, *scheds[2:], characters), spelled)
        return loss(y), y

    (by_params, by_x), y = jax.grad(jax.jit(ours), argnums=(0, 1), has_aux=True)(params, x)

    p = params["tagger"]
    spell, lstm = (torch_lstm(torch, b, q) for b, q in ((SPELLER.spell, params["spell"]), (SPELLER.tagger.bilstm, p["bilstm"])))
    table = torch.nn.Embedding.from_pretrained(torch.tensor(np.array(params["characters"])), freeze=False)
    head = {k: torch.tensor(np.array(p[k]), requires_grad=True) for k in "wbvc"}
    rows = torch.tensor(x, requires_grad=True)
    _, (last, _) = spell(packed(torch, table(torch.from_numpy(characters)), SPELLINGS))
    inputs = torch.cat([rows, torch.cat([last[0], last[1]], 1)])
    which = np.where(spelled >= 0, len(x) + spelled, np.arange(len(x)))
    h = lstm(packed(torch, inputs[torch.from_numpy(which)], lengths))[0]
    h = torch.cat(torch.nn.utils.rnn.unpack_sequence(h))
    want = (h @ head["w"] + head["b"]).tanh() @ head["v"] + head["c"]
    (want * torch.sin(1.0 + torch.arange(want.numel(), dtype=torch.float64)).view(want.shape)).sum().backward()
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_x, rows.grad.numpy(), rtol=1e-10, atol=1e-10)
    theirs = {
        "tagger": {"bilstm": torch_gradients(lstm, SPELLER.tagger.bilstm)} | {k: w.grad.numpy() for k, w in head.items()},
        "spell": torch_gradients(spell, SPELLER.spell),
        "characters": table.weight.grad.numpy(),
    }
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), by_params, theirs)


def test_dropout_is_of_the_key():
    graphs, back = chains([4, 2])
    program = vp.BiLSTMTagger(labels=3, hidden=4, inputs=4, dropout=0.5)
    params, x = program.init(jax.random.key(0)), jnp.ones((6, 4), jnp.float32)
    scheds = cavs.schedule(graphs), cavs.schedule(back)
    first, again, other = (program.run(params, *scheds, x, key=jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert abs(np.asarray(first - other)).max() > 1e-3
    assert abs(np.asarray(first - program.run(params, *scheds, x))).max() > 1e-3


# ---- entities ----


def conlleval(sentences_: list[list[tuple[str, str]]]) -> tuple[int, int, int]:
    """A line-by-line rewriting of `conlleval` (Tjong Kim Sang, 2004): entities right, guessed, and both."""

    def ends(a, b, ka, kb):
        return a + b in ("BB", "BO", "IB", "IO", "EE", "EI", "EO") or a != "O" and ka != kb

    def starts(a, b, ka, kb):
        return a + b in ("BB", "IB", "OB", "OI", "EE", "EI", "OE") or b != "O" and ka != kb

    def parse(label):
        tag, _, kind = label.partition("-")
        return tag, kind

    right = guessed = both = 0
    inside = False
    last = ("O", ""), ("O", "")
    for pair in [pair for sentence in sentences_ for pair in [*sentence, ("O", "O")]]:
        now = parse(pair[0]), parse(pair[1])
        end = [ends(a[0], b[0], a[1], b[1]) for a, b in zip(last, now, strict=True)]
        start = [starts(a[0], b[0], a[1], b[1]) for a, b in zip(last, now, strict=True)]
        if inside:
            if all(end) and last[0][1] == last[1][1]:
                inside, both = False, both + 1
            elif end[0] != end[1] or now[0][1] != now[1][1]:
                inside = False
        if all(start) and now[0][1] == now[1][1]:
            inside = True
        right, guessed, last = right + start[0], guessed + start[1], now
    return right, guessed, both


@pytest.mark.parametrize("tags", ["BIO", "BIEO", "BIESO", "IO"])
def test_entities_are_counted_as_conlleval_counts_them(tags):
    labels = tuple(t if t == "O" else f"{t}-{kind}" for t in tags for kind in ("PER", "LOC") if t != "O" or kind == "PER")
    table = chunks.Chunks.of(labels)
    assert table is not None
    count = jax.jit(table.count)
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = rng.integers(1, 9, 6)
        gold = rng.integers(0, len(labels), lengths.sum())
        guess = np.where(rng.random(len(gold)) < 0.4, rng.integers(0, len(labels), len(gold)), gold)
        graph = np.repeat(np.arange(6), lengths)
        pairs = [(labels[a], labels[b]) for a, b in zip(gold, guess, strict=True)]
        cut = np.cumsum(lengths)[:-1].tolist()
        want = conlleval([pairs[a:b] for a, b in zip([0, *cut], [*cut, None], strict=True)])
        # Padding follows, as in a batch: it has no label, and what is guessed there does not count.
        room = 60 - len(gold)
        padded = np.append(gold, np.full(room, -1)), np.append(guess, np.zeros(room, int)), np.append(graph, np.full(room, 6))
        assert tuple(int(n) for n in count(*padded)) == want
    assert chunks.f1(*want) == pytest.approx(2 * want[2] / (want[0] + want[1]))


def test_other_labels_are_no_entities():
    assert chunks.Chunks.of(("NOUN", "VERB", "X")) is None
    assert chunks.Chunks.of(("O",)) is None
    assert chunks.Chunks.of(("-LRB-", "O", "B-X")) is None
    assert chunks.f1(0, 0, 0) == 0


# ---- files ----

SENTENCES = [[("Ada", "B-PER"), ("met", "O"), ("a|b", "O")], [("Paris", "I-LOC")]]
CONLLU = "1\t{0}\t_\tX\tB-PER\t_\t0\troot\t_\t_\n"
FILES = {
    "a.txt": "Ada|B-PER met|O a|b|O\n\nParis|I-LOC\n",
    "three.txt": "Ada|NNP|B-PER met|VBD|O a|b|SYM|O\nParis|NNP|I-LOC\n",
    "b.conll": "-DOCSTART- -X- O\n\nAda NNP B-PER\nmet VBD O\na|b SYM O\n\nParis NNP I-LOC",
    "columns.txt": "Ada\tNNP\tB-PER\r\nmet\tVBD\tO\r\na|b\tSYM\tO\r\n\r\nParis\tNNP\tI-LOC\r\n",
    "c.conllu": "".join(
        "".join(f"{i}\t{w}\t_\t{t}\tXP\t_\t{i - 1}\tdep\t_\t_\n" for i, (w, t) in enumerate(s, 1)) + "\n" for s in SENTENCES
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_sentences_are_read_from_each_format(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    graphs = read_tagged(str(tmp_path / name))
    words = [graphs.vocab[i] for i in graphs.input_id]
    labels = [graphs.label_names[i] for i in graphs.label]
    assert list(zip(words, labels, strict=True)) == [pair for sentence in SENTENCES for pair in sentence]
    assert np.diff(graphs.vertex_offsets).tolist() == [3, 1] and graphs.height.tolist() == [0, 1, 2, 0]


def test_a_column_is_chosen(tmp_path):
    for name, column, want in (("b.conll", "2", ["NNP", "VBD", "SYM"]), ("c.conllu", "xpos", ["XP"])):
        (tmp_path / name).write_text(FILES[name])
        assert list(read_tagged(str(tmp_path / name), column).label_names) == want


def test_plain_text_is_for_prediction(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("Ada met  Paris\n\nyes\n")
    graphs = read_tagged(str(path), labelled=False)
    assert [graphs.vocab[i] for i in graphs.input_id] == ["Ada", "met", "Paris", "yes"] and graphs.label is None
    with pytest.raises(TrainError, match="has no tags that can be read; wanted CoNLL-U"):
        read_tagged(str(path))


# ---- batches and runs ----


def corpus(path: Path, count: int, seed: int = 0) -> str:
    """Sentences in which names follow `mr` or `in`, mostly names of their own: only their spelling tells of what kind."""
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


def test_batches_take_few_shapes_and_hold_every_word_once(tmp_path):
    path = corpus(tmp_path / "t.txt", 400)
    task = find("tag")
    config, data = task.read(configure({"task": "tag", "train": path, "batch": 16, "min_count": 3}))
    sizes = task.sizes(data.train)
    prepare = sentences.preparer(data.train, epoch_batches(sizes, 16, 0, 0), len(data.words))
    train, seen, shapes = data.train, 0, set()
    assert sorted(data.words) == ["<unk>", "a", "so"] and train.spellings is not None
    for epoch in range(3):
        for numbers in epoch_batches(sizes, 16, 0, epoch):
            batch = prepare(numbers)
            shapes.add((batch.sched.shape, batch.spellings.sched.shape))
            assert batch.back.shape == batch.sched.shape and batch.spellings.back.shape == batch.spellings.sched.shape
            assert batch.label[batch.label >= 0].size == sizes[numbers[numbers >= 0]].sum()
            seen += int(batch.label[batch.label >= 0].size)
            one = (np.asarray(batch.word) >= 0).astype(int) + (np.asarray(batch.spellings.spelled) >= 0)
            assert (one == np.asarray(batch.sched.graph < 16)).all()
    assert seen == 3 * train.num_vertices and len(shapes) <= 4

    # What a vertex reads is its word: through the table, or letter by letter.
    numbers = np.array([3, 5])
    batch = prepare(numbers)
    graphs = read_tagged(path)
    order = np.random.default_rng([0, 1]).permutation(400)
    original = graphs[np.sort(order[40:])][numbers]
    starts = np.append(0, np.cumsum(np.diff(train.spellings.vertex_offsets)))
    for row, word in enumerate(original.input_id):
        at = int(batch.spellings.spelled[row])
        if at < 0:
            assert data.words[int(batch.words[batch.word[row]])] == graphs.vocab[word]
        else:
            spelled = np.asarray(batch.spellings.sched.graph) == at
            text = "".join(data.facts["characters"][c] for c in np.asarray(batch.spellings.characters)[spelled])
            assert text == graphs.vocab[word]
    assert starts[1] == 1


FAST = "--hidden 12 --embedding-size 16 --char-size 8 --lr 0.02 --batch 50 --seed 1 --min-count 3".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled) -> Path:
    """A folder in which a tagger was trained to find names."""
    folder = tmp_path_factory.mktemp("tags")
    train, dev = corpus(folder / "train.txt", 200), corpus(folder / "dev.txt", 40, seed=9)
    flags = ["--epochs", "7", "--out", str(folder / "run"), *FAST]
    assert cli.main(["train", "--task", "tag", train, "--dev", dev, "--test", dev, *flags]) == 0
    return folder


def test_a_tagger_learns_names_from_their_spelling(run):
    best = json.loads((run / "run" / "best.json").read_text())["dev"]
    assert best["entities"] > 50 and chunks.f1(best["entities"], best["guessed"], best["both"]) > 0.9
    assert json.loads((run / "run" / "test.json").read_text())["test"] == best
    assert (run / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_are_as_right_as_training_said(run, capsys):
    capsys.readouterr()
    assert cli.main(["predict", str(run / "run"), str(run / "dev.txt")]) == 0
    lines = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    want = (run / "dev.txt").read_text().splitlines()
    pairs = [(w.split("|"), g.split("|")) for w, g in zip(" ".join(want).split(), " ".join(lines).split(), strict=True)]
    assert all(w[0] == g[0] for w, g in pairs)
    best = json.loads((run / "run" / "best.json").read_text())["dev"]
    assert sum(w[1] == g[1] for w, g in pairs) == best["right"] and len(pairs) == best["count"]


def test_prediction_takes_plain_text_and_letters_never_seen(run, capsys):
    (run / "new.txt").write_text("so a bagx bago\nZzy\n")
    capsys.readouterr()
    assert cli.main(["predict", str(run / "run"), str(run / "new.txt"), "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1], line[4]) for line in lines] == [
        ("0", "0", "so"),
        ("0", "1", "a"),
        ("0", "2", "bagx"),
        ("0", "3", "bago"),
        ("1", "0", "Zzy"),
    ]
    assert [line[2] for line in lines[:4]] == ["O", "O", "B-PER", "I-PER"]


def test_going_on_ends_where_a_straight_run_does(run, tmp_path):
    train, dev, stopped = str(run / "train.txt"), str(run / "dev.txt"), str(tmp_path / "stopped")
    assert cli.main(["train", "--task", "tag", train, "--dev", dev, "--epochs", "4", "--out", stopped, *FAST]) == 0
    assert cli.main(["train", "--resume", stopped, "--epochs", "7"]) == 0
    arrays = []
    for folder in (tmp_path / "stopped", run / "run"):
        (path,) = folder.glob("last-*.npz")
        with np.load(path) as file:
            arrays.append({key: file[key] for key in file.files})
    assert arrays[0].keys() == arrays[1].keys()
    for key in arrays[0]:
        np.testing.assert_array_equal(arrays[0][key], arrays[1][key], err_msg=key)


def test_parts_of_speech_without_spelling(tmp_path, capsys):
    path = tmp_path / "t.conllu"
    words = [("the", "DET"), ("cat", "NOUN"), ("sees", "VERB"), ("it", "PRON")]
    lines = "".join(f"{i}\t{w}\t_\t{t}\t_\t_\t{i - 1}\tdep\t_\t_\n" for i, (w, t) in enumerate(words, 1))
    path.write_text(f"{lines}\n" * 40)
    flags = ["--program", "bilstm", "--epochs", "4", "--out", str(tmp_path / "run"), *FAST, "--batch", "8"]
    assert cli.main(["train", "--task", "tag", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert "100.00 %" in out and "F1" not in out


MISTAKES = {
    "train --task tag": "--task tag needs a file of tagged sentences: cavs train --task tag FILE",
    "train --task tag nowhere.txt": "there is no file .*nowhere.txt",
    "train --task tags TAGS": "--task is 'tags', wanted one of classify, lm, .*tag.*, sentiment",
    "train --task tag PLAIN": "has no tags that can be read; wanted CoNLL-U",
    "train --task tag TAGS --loss root": "--loss is for classification; a tagger labels every word",
    "train --task tag TAGS --program lstm": "--program is 'lstm', wanted one of char-bilstm, bilstm for --task tag",
    "train --task tag TAGS --column 2": "--column is '2', but .* has word.TAG and no columns",
    "train --task tag COLUMNS --column upos": "--column is 'upos', wanted a number from 2",
    "train --task tag COLUMNS --column 4": "line 1: read 'a B-X', expected at least 4 cells",
    "train --task tag BROKEN": r"line 2: read 'b\|', expected word\|TAG",
    "train --task tag TAGS --embedding-size 7": "--embedding-size is 7, wanted an even number",
    "train --task tag TAGS --char-size 0": "--char-size is 0, wanted an integer of at least 1",
    "train --task lm PLAIN --column 2": "--column is for --task tag; this is --task lm",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told_in_one_line(line, tmp_path, monkeypatch, capsys):
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
