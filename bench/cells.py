"""The models of the benchmarks: the shapes of their parameters, and their FLOPs (NumPy only; also for Python 3.8).

Cavs, section 5: Tree-LSTM, Tree-FC, LSTM, with the child-sum Tree-LSTM for other graphs.
"""

from __future__ import annotations

import numpy as np

TREES = ("tree_lstm", "tree_fc")
BASIC = (*TREES, "lstm")  # the models of the Cavs paper
CELLS = (*BASIC, "child_sum")


def shapes(cell: str, e: int, h: int) -> dict:
    """Returns the shapes of a cell's parameters, with the names of `cavs.vertex_programs`.

    The embedding and the output layer are not included.

    Args:
        cell: One of `CELLS`.
        e: The width of the words' vectors.
        h: The width of the states.
    """
    tree_lstm = {"w_iou": (e, 3 * h), "u_iou": (h, 3 * h), "b_iou": (3 * h,), "u_f": (h, h), "b_f": (h,)}
    tree_fc = {"u": (2 * h, h), "b": (h,)}
    of = {
        "tree_lstm": tree_lstm,
        "tree_fc": tree_fc,
        "lstm": {"w": (e, 4 * h), "u": (h, 4 * h), "b": (4 * h,)},
        "child_sum": dict(tree_lstm, w_f=(e, h)),
    }
    return of[cell]


def multiply_adds(cell: str, e: int, h: int, classes: int, graph: dict) -> int:
    """Returns the multiply-adds of the products of one sample's forward pass. Missing children cost nothing."""
    out = h * classes  # for one label
    if cell == "lstm":
        n = len(graph["words"])
        return n * (4 * e * h + out) + (n - 1) * 4 * h * h
    if cell in TREES:
        inner = int((graph["left"] >= 0).sum())
        leaf, pair = (3 * e * h, 5 * h * h) if cell == "tree_lstm" else (0, 2 * h * h)
        return (len(graph["left"]) - inner) * leaf + inner * pair + out
    assert cell == "child_sum", cell
    vertices, edges, inner = len(graph["word"]), len(graph["children"]), int((np.diff(graph["child_offsets"]) > 0).sum())
    return vertices * 4 * e * h + inner * 3 * h * h + edges * h * h + out
