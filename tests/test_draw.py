"""Pictures of graphs and of schedules as SVG: where vertices are, what is written beside them, and what a notebook shows."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import cavs
from tests.random_graphs import build, forests

SVG = "{http://www.w3.org/2000/svg}"
TREE = cavs.read_trees(["(3 (2 not) (1 (1 <bad>) (2 .)))"])


def vertices(picture: str) -> list[tuple[float, float, list[tuple[str, str]]]]:
    """x, y, and the texts of each vertex with their colours, in order."""
    found = []
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        (circle,) = group.iter(f"{SVG}circle")
        texts = [(text.text or "", text.attrib["fill"]) for text in group.iter(f"{SVG}text")]
        found.append((float(circle.attrib["cx"]), float(circle.attrib["cy"]), texts))
    return found


@settings(deadline=None, max_examples=30)
@given(forest=forests())
def test_each_vertex_lies_above_its_children_and_beside_the_others(forest):
    graphs = build(forest)
    if not len(graphs) or graphs.num_vertices > 400:
        return
    places = [(x, y) for x, y, _ in vertices(cavs.debug.draw(graphs))]
    assert len(set(places)) == len(places) == graphs.num_vertices
    for x, y in places:
        assert all(abs(x - other) > 20 for other, level in places if level == y and other != x)
    at = 0
    for rows in forest:
        for v, children in enumerate(rows):
            assert all(places[at + v][1] < places[at + child][1] for child in children)
        at += len(rows)


def test_words_labels_and_wrong_predictions_are_written(tmp_path):
    ink, red = "#222222", "#c62828"
    told = [texts for *_, texts in vertices(cavs.debug.draw(TREE))]
    assert TREE.input_id is not None and TREE.label is not None
    word = [["", "not", "<bad>", "."][i + 1] for i in TREE.input_id]
    label = TREE.label.tolist()
    assert told == [([(w, ink)] if w else []) + [(str(y), ink)] for w, y in zip(word, label, strict=True)]

    guess = np.array(label)
    guess[[0, -1]] = 4
    drawn = cavs.debug.draw(TREE, tmp_path / "tree.svg", predictions=jax.numpy.asarray(guess))
    assert (tmp_path / "tree.svg").read_text() == drawn == drawn._repr_html_() and repr(drawn).startswith("Drawing(")
    last = [texts[-1] for *_, texts in vertices(drawn)]
    assert last[0] == (f"4 ({label[0]})", red) and last[-1] == (f"4 ({label[-1]})", red)
    assert last[1:-1] == [(str(y), ink) for y in label[1:-1]]


def test_numbers_names_kinds_and_texts():
    numbers = cavs.from_lengths([2], label=[0.5, np.nan])
    found = [[t for t, _ in texts] for *_, texts in vertices(cavs.debug.draw(numbers, predictions=[0.25, 2], text=["a", "b"]))]
    assert found == [["a", "0.25 (0.5)"], ["b 2"]]
    named = cavs.from_lengths([2], kind=[0, 1], kind_names=["in", "out"], label=[1, -1], label_names=["no", "yes"])
    found = [[t for t, _ in texts] for *_, texts in vertices(cavs.debug.draw(named, predictions=[0, 1]))]
    assert found == [["in", "no (yes)"], ["out yes"]]


def test_any_text_gives_valid_svg():
    graphs = cavs.from_lengths([4], input_id=np.arange(4), vocab=["<&>", "\x1b[2J", "\ud800", "x" * 99])
    (a, b, c, d) = (texts[0][0] for *_, texts in vertices(cavs.debug.draw(graphs)))
    assert a == "<&>" and "\x1b" not in b and c == "\ufffd" and len(d) == 16


def test_large_batches_are_cut_and_errors_say_what_to_write():
    many = cavs.from_lengths([150] * 5)
    drawn = cavs.debug.draw(many)
    assert len(vertices(drawn)) == 300 and "the first 2 of 5 graphs" in drawn
    with pytest.raises(ValueError, match=r"draw: graphs: got a first graph of 401 vertices; expected .*\.plot\("):
        cavs.debug.draw(cavs.from_lengths([401]))
    with pytest.raises(ValueError, match=r"draw: predictions: got shape \(3,\); expected 5 entries, one per vertex"):
        cavs.debug.draw(TREE, predictions=[1, 2, 3])
    with pytest.raises(ValueError, match=r"draw: predictions: got shape \(5, 2\); expected 5 entries, one per vertex"):
        cavs.debug.draw(TREE, predictions=np.zeros((5, 2)))  # logits, of which nothing was drawn
    with pytest.raises(ValueError, match=r"draw: path: got tree\.png; expected a name that ends in \.svg"):
        cavs.debug.draw(TREE, "tree.png")
    with pytest.raises(TypeError, match=r"draw: graphs: got a Schedule; expected cavs\.Graphs"):
        cavs.debug.draw(cavs.schedule(TREE))  # pyright: ignore[reportArgumentType]


def test_a_notebook_shows_graphs_and_schedules():
    root = ET.fromstring(TREE._repr_html_().replace("<br>", "<br/>"))
    assert len([*root.iter(f"{SVG}circle")]) == TREE.num_vertices and "5 vertices" in "".join(root.itertext())
    assert "<svg" not in cavs.from_lengths([300])._repr_html_() and "<svg" not in TREE[:0]._repr_html_()

    sched = cavs.schedule(TREE)
    root = ET.fromstring(sched._repr_html_().replace("<br>", "<br/>"))
    told = [re.findall(r"\d+", tip.text or "") for tip in root.iter(f"{SVG}title")]
    assert [int(size) for _, size, _ in told] == sched.widths.tolist()
    rows = sum(int(size) + int(padding) for _, size, padding in told)
    assert sched.waste == pytest.approx(1 - TREE.num_vertices / rows)
    jax.jit(lambda s: print(s._repr_html_()) or s.num_vertices)(sched)  # a traced one has no integers
    assert "<svg" not in cavs.schedule(cavs.from_lengths([100]))._repr_html_()


def test_pictures_need_no_other_package():
    code = "import sys, cavs; cavs.debug.draw(cavs.from_lengths([3])); assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
