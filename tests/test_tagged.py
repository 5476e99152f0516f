"""Tagged sentences: readers of each format, and counts of entities equal to those of `conlleval`."""

import re

import numpy as np
import pytest

import cavs
from cavs.io import read_tagged

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
FILES["tagged.conllu"] = re.sub(
    r"\t\d\tdep", r"\t_\t_", FILES["c.conllu"]
)  # tagged, not parsed: HEAD and DEPREL are unspecified


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


def test_a_cell_without_a_label_is_no_label_and_one_without_a_word_is_named(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("Ada\tX\t\nmet\t\tY\n")
    graphs = read_tagged(str(path))
    assert graphs.label.tolist() == [-1, 0] and graphs.label_names == ("Y",)
    path.write_text("New York\tX\nmet\t\n\nmet \t \n")
    graphs = read_tagged(str(path))
    assert graphs.label.tolist() == [0, -1, -1] and graphs.vocab == ("New York", "met")
    path.write_text("Ada X\t\nmet Y\t\n")  # tabs at the ends of lines separate nothing
    assert read_tagged(str(path)).vocab == ("Ada", "met")
    path.write_text("Ada\tX\n\tY\n")
    with pytest.raises(cavs.io.FormatError, match=r"a.tsv, line 2: got '\\tY'; expected a word and its label"):
        read_tagged(str(path))


def test_plain_text_is_for_prediction(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("Ada met  Paris\n\nyes\n")
    graphs = read_tagged(str(path), labelled=False)
    assert [graphs.vocab[i] for i in graphs.input_id] == ["Ada", "met", "Paris", "yes"] and graphs.label is None
    with pytest.raises(cavs.io.FormatError, match="plain.txt, line 3: got 'yes'; expected tags: CoNLL-U"):
        read_tagged(str(path))
    path.write_text("\nAda met Paris\nyes or no\n")
    with pytest.raises(cavs.io.FormatError, match="plain.txt, line 2: got 'Ada met Paris'; expected tags: CoNLL-U"):
        read_tagged(str(path))
    path.write_text("Ada|P met|V Paris\n")
    with pytest.raises(cavs.io.FormatError, match=r"plain.txt, line 1: got 'Paris'; expected word\|TAG"):
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


def whole_spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """The spans of a sentence in IOBES, by trying all pairs of ends."""
    kinds = {tag[2:] for tag in tags if tag != "O"}
    found = {(i, i + 1, tag[2:]) for i, tag in enumerate(tags) if tag[0] == "S"}
    for i in range(len(tags)):
        for j in range(i + 1, len(tags)):
            for kind in kinds:
                if tags[i : j + 1] == [f"B-{kind}", *[f"I-{kind}"] * (j - i - 1), f"E-{kind}"]:
                    found.add((i, j + 1, kind))
    return found


def random_sentences(marks: str, rng: np.random.Generator) -> tuple[list[list[str]], list[list[str]]]:
    """True and predicted tags of six sentences."""
    labels = [m if m == "O" else f"{m}-{kind}" for m in marks for kind in ("PER", "LOC") if m != "O" or kind == "PER"]
    true = [[labels[i] for i in rng.integers(0, len(labels), n)] for n in rng.integers(1, 9, 6)]
    draw = lambda tag: labels[int(rng.integers(len(labels)))] if rng.random() < 0.3 else tag  # noqa: E731
    return true, [[draw(tag) for tag in tags] for tags in true]


@pytest.mark.parametrize("marks", ["OBI", "OIE", "OI"])
def test_entities_are_counted_as_conlleval_counts_them(marks):
    rng = np.random.default_rng(0)
    for _ in range(60):
        true, best = random_sentences(marks, rng)
        want = conlleval([list(zip(a, b, strict=True)) for a, b in zip(true, best, strict=True)])
        found = cavs.data.span_scores(true, best)
        assert tuple(found["all"]) == want
        assert found["all"].f1 == pytest.approx(2 * want[2] / max(want[0] + want[1], 1))
        for kind in {"PER", "LOC"} & found.keys():
            only = [[[t if t[2:] == kind else "O" for t in tags] for tags in side] for side in (true, best)]
            assert tuple(found[kind]) == conlleval([list(zip(a, b, strict=True)) for a, b in zip(*only, strict=True)])


@pytest.mark.parametrize("marks", ["OBIES", "OBILU", "OBMES"])
def test_schemes_that_mark_both_ends_count_whole_spans_only(marks):
    same = str.maketrans("LUM", "ESI")
    rng = np.random.default_rng(1)
    for _ in range(60):
        true, best = random_sentences(marks, rng)
        sides = [[whole_spans([tag[0].translate(same) + tag[1:] for tag in tags]) for tags in side] for side in (true, best)]
        both = sum(len(a & b) for a, b in zip(*sides, strict=True))
        assert tuple(cavs.data.span_scores(true, best)["all"]) == (*(sum(map(len, side)) for side in sides), both)


def test_known_values_of_seqeval():
    """Values of seqeval 1.2.2 with mode="strict"."""
    tags = ["B-LOC", "E-LOC", "B-LOC", "E-LOC"]
    assert cavs.data.span_scores([tags], [["B-LOC", "I-LOC", "I-LOC", "E-LOC"]])["all"].f1 == 0
    assert cavs.data.span_scores([tags], [tags])["all"].f1 == 1
    true = [["O", "B-PER", "I-PER", "O"], ["B-LOC", "B-LOC"]]
    best = [["O", "B-PER", "I-PER", "O"], ["B-LOC", "I-LOC"]]
    found = cavs.data.span_scores(true, best)
    assert (found["all"].precision, found["all"].recall, found["all"].f1) == (0.5, 1 / 3, 0.4)
    assert found["PER"].f1 == 1 and found["LOC"].f1 == 0


def test_a_type_may_be_called_all_and_sentences_may_come_from_a_generator():
    tags = [["B-all", "O", "B-X"]]
    found = cavs.data.span_scores((one for one in tags), (one for one in tags))
    assert [*found] == ["all", "X"] and found["all"].both == 2 and found["X"].both == 1


def test_other_labels_mark_no_spans():
    assert not cavs.data.is_tagging(("NOUN", "VERB", "X")) and not cavs.data.is_tagging(("O",))
    assert not cavs.data.is_tagging(("-LRB-", "O", "B-X")) and cavs.data.is_tagging(("O", "U-X", "M-X"))
    assert cavs.data.span_scores([["O"]], [["O"]])["all"].f1 == 0


@pytest.mark.parametrize(
    "text, words",
    [
        ("# id 7\tdomain=en\nthe _ _ O\nred _ _ B-X\n\n# id 8\tdomain=en\na _ _ O\nb _ _ O\n", ["the", "red", "a", "b"]),
        ("#\tO\nnice\tO\n\n#\tO\nBerlin\tB-LOC\n", ["#", "nice", "#", "Berlin"]),
        ("New York\tPROPN\tB-LOC\n26 000\tNUM\tO\n\ndogs\tNOUN\tO\n", ["New York", "26 000", "dogs"]),
    ],
)
def test_comments_are_skipped_and_tabs_alone_separate_where_all_lines_have_them(text, words, tmp_path):
    (tmp_path / "a.conll").write_text(text)
    graphs = read_tagged(str(tmp_path / "a.conll"))
    assert [graphs.vocab[i] for i in graphs.input_id] == words
