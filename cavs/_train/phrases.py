"""The text that `cavs predict --vertices` shows beside each vertex: its word, or the words of the phrase below it."""

from itertools import pairwise

import numpy as np

from cavs._graphs.graphs import Graphs


def phrases_of(graphs: Graphs, words: list[str]) -> list[str]:
    """The text of each vertex of some graphs.

    Args:
        graphs: the graphs.
        words: (V,) the word of each vertex, "" if it has none.

    Returns:
        (V,) the words; in trees, for a vertex without a word, the texts of its children in order.
    """
    ends = graphs.child_offsets.tolist()
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    rows = graphs.children + np.repeat(base, np.diff(graphs.child_offsets))
    if np.bincount(rows, minlength=1).max() > 1:  # in a DAG the texts could be exponentially long
        return words
    children, texts = rows.tolist(), list(words)
    for v in np.argsort(graphs.height, kind="stable").tolist():
        if not texts[v]:
            texts[v] = " ".join(filter(None, (texts[c] for c in children[ends[v] : ends[v + 1]])))
    return texts


def sentences_of(graphs: Graphs, words: list[str]) -> list[str]:
    """The words of each graph, in the order of its vertices."""
    return [" ".join(filter(None, words[a:b])) for a, b in pairwise(graphs.vertex_offsets.tolist())]
