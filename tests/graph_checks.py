"""Checks of the properties of every `Graphs`, in plain loops; and a parser of trees that uses a stack."""

import re
from pathlib import Path

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs.io import load_npz, read, save_npz, write_edges


def check_graphs(graphs: Graphs) -> None:
    """Checks the properties of every `Graphs` in plain loops."""
    assert graphs.vertex_offsets[0] == 0 and graphs.child_offsets[0] == 0
    assert graphs.vertex_offsets[-1] == len(graphs.height) == len(graphs.child_offsets) - 1
    assert graphs.child_offsets[-1] == len(graphs.children)
    ids = ((graphs.kind, graphs.kind_names, 0), (graphs.label, graphs.label_names, -1), (graphs.input_id, graphs.vocab, -1))
    for values, names, low in ids:
        if values is not None:
            assert len(values) == len(graphs.height)
            if values is graphs.label and (values.ndim > 1 or values.dtype != np.int32):  # numbers that are no ids
                assert names is None
                continue
            assert values.dtype == np.int32
            high = 2**31 - 1 if names is None else len(names) - 1
            assert all(low <= value <= high for value in values.tolist())
        assert names is None or len(set(names)) == len(names) and all(type(name) is str for name in names)
    for g in range(len(graphs)):
        start, stop = graphs.vertex_offsets[g : g + 2].tolist()
        assert stop > start
        for row in range(start, stop):
            kids = graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]].tolist()
            assert all(0 <= kid < stop - start for kid in kids)
            assert graphs.height[row] == max((graphs.height[start + kid] + 1 for kid in kids), default=0)


def check_round_trips(graphs: Graphs, folder: Path) -> None:
    save_npz(graphs, folder / "again.npz")
    write_edges(graphs, folder / "again.jsonl")
    for again in (load_npz(folder / "again.npz"), read(folder / "again.jsonl")):
        assert again.vertex_offsets.tolist() == graphs.vertex_offsets.tolist()
        assert again.child_offsets.tolist() == graphs.child_offsets.tolist()
        assert again.children.tolist() == graphs.children.tolist()


def check_trees(data: bytes, graphs: Graphs | None) -> None:
    try:
        expected = plain_trees(data)
    except ValueError as error:
        assert graphs is None, f"read_trees accepted a file that the plain parser refuses: {error}"
        return
    assert graphs is not None, "read_trees refused a file that the plain parser accepts"
    start = graphs.vertex_offsets.tolist()
    assert len(graphs) == len(expected)
    for g, tree in enumerate(expected):
        assert start[g + 1] - start[g] == len(tree)
        for row, (label, word, kids) in enumerate(tree, start=start[g]):
            assert graphs.children[graphs.child_offsets[row] : graphs.child_offsets[row + 1]].tolist() == kids
            assert (None if graphs.input_id[row] < 0 else graphs.vocab[graphs.input_id[row]]) == word
            number = int(graphs.label[row])
            if graphs.label_names is None or label is None:
                assert number == (-1 if label is None else int(label))
            else:
                assert graphs.label_names[number] == label


def plain_trees(data: bytes) -> list[list[tuple[str | None, str | None, list[int]]]]:
    """Parses trees: for each tree and vertex, in post-order, (label, word, children). The reference for `read_trees`."""
    text = data.decode("utf-8").removeprefix("\ufeff")
    trees: list[list[tuple[str | None, str | None, list[int]]]] = []
    stack: list[tuple[list[str], list[int]]] = []  # for each open bracket: its label and word, its children so far
    for token in re.findall(r"[()]|[^() \t\n\r\v\f]+", text):
        if token == "(":
            if not stack:
                trees.append([])
            elif len(stack[-1][0]) > 1:
                raise ValueError("a child after a word")
            stack.append(([], []))
        elif not stack:
            raise ValueError("outside brackets")
        elif token == ")":
            atoms, kids = stack.pop()
            if len(atoms) + bool(kids) < (1 if kids else 2):
                raise ValueError("neither word nor children")
            trees[-1].append((atoms[0] if atoms else None, atoms[1] if len(atoms) > 1 else None, kids))
            if stack:
                stack[-1][1].append(len(trees[-1]) - 1)
        elif stack[-1][1] or len(stack[-1][0]) > 1:
            raise ValueError("a word after a child or a word")
        else:
            stack[-1][0].append(token)
    if stack:
        raise ValueError("a bracket stays open")
    return trees
