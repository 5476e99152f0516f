"""Tagged sentences: readers of each format, and counts of entities equal to those of `conlleval`."""

import jax
import numpy as np
import pytest

from cavs._train import chunks
from cavs._train.config import TrainError
from cavs._train.tagged import read_tagged

SENTENCES = [[("Ada", "B-PER"), ("met", "O"), ("a|b", "O")], [("Paris", "I-LOC")]]

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
    with pytest.raises(TrainError, match="plain.txt: got no tags; expected CoNLL-U"):
        read_tagged(str(path))


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
        # As in a batch, padding follows. It has no label, and predictions there do not count.
        room = 60 - len(gold)
        padded = np.append(gold, np.full(room, -1)), np.append(guess, np.zeros(room, int)), np.append(graph, np.full(room, 6))
        assert tuple(int(n) for n in count(*padded)) == want
    assert chunks.f1(*want) == pytest.approx(2 * want[2] / (want[0] + want[1]))


def test_other_labels_are_not_entities():
    assert chunks.Chunks.of(("NOUN", "VERB", "X")) is None
    assert chunks.Chunks.of(("O",)) is None
    assert chunks.Chunks.of(("-LRB-", "O", "B-X")) is None
    assert chunks.f1(0, 0, 0) == 0
