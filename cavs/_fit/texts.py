"""Words, labels and roots of graphs: numbers and their names, and the text of each vertex."""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from cavs._graphs.checks import check_order
from cavs._graphs.graphs import Graphs, check_graphs


def named(graphs: Graphs) -> Graphs:
    """Returns the same graphs with names for `input_id` and `label`, which are their numbers if there are no names.

    Graphs without `input_id` get their kinds in its place, and graphs without kinds one name, "vertex", for all vertices.
    Labels that are not integers stay as they are.
    """
    ids, names = graphs.input_id, graphs.vocab
    if ids is None:
        ids, names = graphs.kind, graphs.kind_names
    if ids is None:
        ids, names = np.zeros(graphs.num_vertices, np.int32), ("vertex",)
    if names is None:
        ids, names = _numbers(ids)
    label, of_label = graphs.label, graphs.label_names
    if label is not None and label.dtype == np.int32 and label.ndim == 1 and of_label is None:
        label, of_label = _numbers(label)
    return dataclasses.replace(graphs, input_id=ids, vocab=names, label=label, label_names=of_label)


def _numbers(ids: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers, and -1, as indices of their names."""
    values, index = np.unique(ids, return_inverse=True)
    negative = int((values < 0).sum())
    return (index - negative).astype(np.int32), tuple(map(str, values[negative:].tolist()))


def label_names(parts: Iterable[Graphs]) -> tuple[str, ...]:
    """Returns the names of the labels of several data sets: numbers in ascending order, other names by first appearance."""
    names = [*dict.fromkeys(name for graphs in parts for name in graphs.label_names or ())]
    return tuple(sorted(names, key=int) if all(map(str.isdecimal, names)) else names)


def with_labels(graphs: Graphs, labels: Sequence[str]) -> Graphs:
    """Returns the same graphs with `label` as an index of `labels`.

    Args:
        graphs: graphs with named labels: `label` and `label_names`.
        labels: names, which include all of `graphs.label_names`.

    Raises:
        TypeError: `labels` is a set.
        ValueError: the labels of the graphs have no names, or `labels` lacks one.
    """
    if graphs.label is None or graphs.label_names is None:
        raise ValueError(
            f"with_labels: graphs: got graphs {'without labels' if graphs.label is None else 'whose labels have no names'}; "
            "expected label and label_names. Write graphs.replace(label_names=('negative', 'positive'))."
        )
    check_order("with_labels: labels", labels)
    labels = tuple(labels)
    index = {name: i for i, name in enumerate(labels)}
    if missing := [name for name in graphs.label_names if name not in index]:
        raise ValueError(
            f"with_labels: labels: got {list(labels)}; expected all labels of the graphs, also {missing}. Write "
            "[*labels, *missing], or graphs whose labels the model knows."
        )
    table = np.array([*(index[name] for name in graphs.label_names), -1], np.int32)
    return dataclasses.replace(graphs, label=table[graphs.label], label_names=labels)


def vocabulary(graphs: Graphs, special: Sequence[str] = (), min_count: int = 1, size: int = 0) -> list[str]:
    """Lists the words of graphs: `special`, then the words that occur `min_count` times, by first appearance.

    Args:
        graphs: the graphs to train on, with `input_id` and `vocab`.
        special: words that come first, such as `<unk>`.
        min_count: how often a word must occur.
        size: the most words, with `special`: the most frequent ones; 0 for all.

    Raises:
        TypeError: `special` is one str, or a set.
        ValueError: the graphs have no words, or `size` or `min_count` is no int >= 0.
    """
    if isinstance(special, str):  # its letters would be words
        raise TypeError(f"vocabulary: special: got {special!r}; expected a list of words. Write [{special!r}].")
    check_order("vocabulary: special", special)
    special = tuple(special)
    for name, got in (("min_count", min_count), ("size", size)):
        if not isinstance(got, int | np.integer) or got < 0:
            raise ValueError(f"vocabulary: {name}: got {got!r}; expected an int >= 0.")
    ids, names = _named_inputs(graphs, "vocabulary")
    counts = np.bincount(ids[ids >= 0], minlength=len(names))
    kept = counts >= min_count
    if size:
        kept &= np.isin(np.arange(len(counts)), np.argsort(-counts, kind="stable")[: max(0, size - len(special))])
    return [*dict.fromkeys((*special, *(word for word, keep in zip(names, kept.tolist(), strict=True) if keep)))]


def _named_inputs(graphs: Graphs, function: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the words of the vertices, and their names. Raises `ValueError` if the graphs have none."""
    if graphs.vocab is None or graphs.input_id is None:
        raise ValueError(
            f"{function}: graphs: got graphs without words; expected vocab and input_id, as cavs.read returns them for texts. "
            "Write graphs.replace(vocab=words, input_id=numbers)."
        )
    return graphs.input_id, graphs.vocab


def graph_of(graphs: Graphs) -> np.ndarray:
    """Returns the number of the graph of each vertex, int64[V]. Raises a `TypeError` if `graphs` is something else."""
    check_graphs(graphs, "graph_of(graphs)")
    return np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets))


def words_of(graphs: Graphs) -> list[str]:
    """Returns the word of each vertex, V of them; "" if it reads nothing. Raises a `ValueError` if the graphs have no words."""
    ids, names = _named_inputs(graphs, "words_of")
    return [*map([*names, ""].__getitem__, ids.tolist())]


def sentences_of(graphs: Graphs) -> list[str]:
    """Returns a text for each graph: its words, in the order of its vertices. Raises a `ValueError` if there are no words."""
    words = words_of(graphs)
    return [" ".join(filter(None, words[a:b])) for a, b in pairwise(graphs.vertex_offsets.tolist())]


def phrases_of(graphs: Graphs) -> list[str]:
    """Returns the text of each vertex: its word; in trees, for a vertex without a word, the texts of its children in order.

    Raises:
        ValueError: the graphs have no words.
    """
    texts, ends = words_of(graphs), graphs.child_offsets.tolist()
    rows = graphs._edges[1]
    if np.bincount(rows, minlength=1).max() > 1:  # in a DAG the texts could be exponentially long
        return texts
    children = rows.tolist()
    for v in np.argsort(graphs.height, kind="stable").tolist():
        if not texts[v]:
            texts[v] = " ".join(filter(None, (texts[c] for c in children[ends[v] : ends[v + 1]])))
    return texts
