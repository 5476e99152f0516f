"""The data of the benchmarks have the stated statistics and survive a round trip."""

import numpy as np
import pytest

from bench import cases, graphs, suites


def heights(graph):
    """The height of every vertex of a tree, by a plain loop."""
    found = []
    for a, b in zip(graph["left"].tolist(), graph["right"].tolist(), strict=True):
        found.append(0 if a < 0 else 1 + max(found[a], found[b]))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_generated_trees_match_sst(seed):
    trees = graphs.sst_like(np.random.default_rng(seed), 8544)
    leaves = np.array([(t["left"] < 0).sum() for t in trees])
    height = np.array([heights(t)[-1] for t in trees])
    for found, (mean, median, p95, largest) in ((leaves, (19.14, 18, 35, 52)), (height, (9.83, 10, 17, 29))):
        assert found.mean() == pytest.approx(mean, rel=0.03)
        assert np.median(found) == pytest.approx(median, rel=0.03)
        assert np.quantile(found, 0.95) == pytest.approx(p95, rel=0.03)
        assert found.max() == pytest.approx(largest, rel=0.1)  # of one tree alone


@pytest.mark.parametrize("shape", [s for s in cases.SHAPES if s not in ("sentences", "pairs")])
def test_every_shape_has_one_root_last_and_children_first(shape):
    from bench.ours import graphs_of

    found = graphs_of(cases.SHAPES[shape](np.random.default_rng(0), 5))
    assert len(found) == 5
    for i in range(5):
        g = found[i]
        owner = np.repeat(np.arange(g.num_vertices), np.diff(g.child_offsets))
        assert (g.children < owner).all()
        assert sorted(set(range(g.num_vertices)) - set(g.children.tolist())) == [g.num_vertices - 1]


def test_rare_words_are_spelled():
    samples = cases.SHAPES["spelled"](np.random.default_rng(0), 400)
    words = np.concatenate([g["words"] for g in samples])
    letters = np.array([len(s) for g in samples for s in g["spellings"]])
    assert all((g["words"] < 0).sum() == len(g["spellings"]) for g in samples)
    assert [len(words) / 400, (words < 0).mean(), letters.mean()] == pytest.approx([24.5, 0.125, 7.5], rel=0.05)


def test_names_of_cases_are_read_back():
    for suite in suites.SUITES:
        for quick in (False, True):
            for case in suites.cases_of(suite, quick):
                assert cases.parse(case.name) == case
    with pytest.raises(ValueError, match="expected cell/shape"):
        cases.parse("tree_lstm/sst")


def test_packed_trees_are_read_back(tmp_path):
    trees = graphs.sst_like(np.random.default_rng(0), 5)
    cases.pack(trees, str(tmp_path / "trees.json"))
    for a, b in zip(trees, cases.unpack(str(tmp_path / "trees.json")), strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in ("left", "right", "word", "label"))


def test_gflop_counts_the_products_of_a_tree():
    tree = {"left": np.array([-1, -1, 0]), "right": np.array([-1, -1, 1]), "word": np.array([0, 1, -1]), "label": 0}
    case = cases.Case("tree_lstm", "sst", 10, 1, 7)
    products = 2 * (7 * 30) + (10 * 30 + 2 * 10 * 10) + 10 * cases.CLASSES
    assert cases.gflop(case, [[tree]]) == pytest.approx(3 * 2 * products / 1e9)
