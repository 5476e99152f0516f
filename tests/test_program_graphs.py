"""The graphs of ready programs: pyramids over words, words among characters, sentences over sentences."""

from typing import Any

import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import children_of


def test_pyramids_combine_neighbours() -> None:
    graphs = vp.TDRNN.graphs([3, 1], words=[7, 8, 9, 5])
    assert children_of(graphs, 0) == [[], [], [], [0, 1], [1, 2], [3, 4]]
    assert children_of(graphs, 1) == [[]]
    assert graphs.input_id is not None and graphs.input_id.tolist() == [7, 8, 9, -1, -1, -1, 5]
    assert cavs.schedule(graphs).roots.tolist() == [5, 6]
    assert np.diff(vp.TDLSTM.graphs(np.arange(1, 30)).vertex_offsets).tolist() == [n * (n + 1) // 2 for n in range(1, 30)]


def test_lattices_put_words_between_characters() -> None:
    graphs = vp.LatticeLSTM.graphs([4, 2], [[(0, 2), (1, 2), (0, 3)], np.zeros((0, 2), int)])
    assert children_of(graphs, 0) == [[], [0], [1, 4, 5], [2, 6], [0], [1], [0]]
    assert children_of(graphs, 1) == [[], [0]]
    assert graphs.kind is not None and graphs.kind.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0]


def test_target_words_read_all_source_words() -> None:
    chains, pairs = vp.EncoderDecoder.graphs([3, 1], [2, 2])
    assert children_of(chains, 0) == [[], [0], [1]]
    assert children_of(pairs, 0) == [[], [], [], [2, 0, 1], [3, 0, 1, 2]]
    assert children_of(pairs, 1) == [[], [0], [1, 0]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: vp.TDRNN.graphs([2, 0]), r"lengths: got \[2, 0\]; expected a 1-d array of integers >= 1"),
        (lambda: vp.TDRNN.graphs([2], words=[1]), "words: got 1 entries; expected 2"),
        (lambda: vp.LatticeLSTM.graphs([3], [[(0, 1), (2, 3)]]), r"words\[0\]: got .* expected pairs 0 <= first < last < 3"),
        (lambda: vp.LatticeLSTM.graphs([3], []), "words: got 0 entries; expected 1"),
        (lambda: vp.EncoderDecoder.graphs([3], [1, 2]), r"source, target: got \[3\] and \[1, 2\]"),
        (lambda: vp.EncoderDecoder.graphs([0], [1]), "all >= 1"),
    ],
)
def test_bad_lengths_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
