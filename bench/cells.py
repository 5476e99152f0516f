"""The models of the benchmarks: the shapes of their parameters, and their FLOPs (NumPy only; also for Python 3.8).

Cavs, section 5: Tree-LSTM, Tree-FC, LSTM, with the child-sum Tree-LSTM for other graphs. VPPS, section IV: TD-RNN, TD-LSTM,
RvNN with untied leaves, a BiLSTM tagger, and one with characters for rare words. Echo, section 2.2: an encoder-decoder with
attention. Other models in use: a GRU, a lattice LSTM over characters and words, and DAGNN over netlists.
"""

from __future__ import annotations

import numpy as np

from bench.graphs import CHARACTERS

TREES = ("tree_lstm", "tree_fc")
BASIC = (*TREES, "lstm")  # the models of the Cavs paper
RNNS = ("lstm", "gru")  # models of chains with a label at every word, which nn.LSTM and nn.GRU have
TAGGERS = ("bilstm", "char_bilstm")
APPLICATIONS = ("td_rnn", "td_lstm", "rvnn", *TAGGERS, "encoder_decoder", "lattice_lstm", "dagnn")
CELLS = (*BASIC, "gru", "child_sum", *APPLICATIONS)


def shapes(cell: str, e: int, h: int) -> dict:
    """Returns the shapes of a cell's parameters, with the names of `cavs.vertex_programs`.

    A dot separates nested names: `encoder.w` is `w` of the encoder. The embedding and the output layer are not included.

    Args:
        cell: One of `CELLS`.
        e: The width of the words' vectors.
        h: The width of the states.
    """
    tree_lstm = {"w_iou": (e, 3 * h), "u_iou": (h, 3 * h), "b_iou": (3 * h,), "u_f": (h, h), "b_f": (h,)}
    tree_fc = {"u": (2 * h, h), "b": (h,)}
    lstm = _lstm(e, h)
    bilstm = {**_bilstm(e, h), "mlp_w": (2 * h, h), "mlp_b": (h,)}
    by_cell = {
        "tree_lstm": tree_lstm,
        "tree_fc": tree_fc,
        "lstm": lstm,
        "gru": {"w": (e, 3 * h), "u": (h, 3 * h), "b": (3 * h,), "d": (h,)},
        "child_sum": dict(tree_lstm, w_f=(e, h)),
        "td_rnn": tree_fc,
        "td_lstm": {"u": (2 * h, 5 * h), "b": (5 * h,)},
        "rvnn": {"w": (e, h), "b_leaf": (h,), "u": (2 * h, h), "b": (h,)},
        "bilstm": bilstm,
        "char_bilstm": {**bilstm, **_bilstm(e // 4, e // 2, "spell."), "characters": (CHARACTERS, e // 4)},
        "encoder_decoder": {
            **{"encoder." + k: s for k, s in lstm.items()},
            **dict(lstm, u=(2 * h, 4 * h)),
            **{"key": (h, h), "query": (h, h), "score": (h,), "out": (2 * h, h)},
        },
        "lattice_lstm": {
            **lstm,
            **{"w_word": (e, 3 * h), "u_word": (h, 3 * h), "b_word": (3 * h,)},
            **{"w_link": (e, h), "u_link": (h, h), "b_link": (h,)},
        },
        "dagnn": {"s": (h,), "w": (e, 3 * h), "u": (h, 3 * h), "b": (3 * h,), "d": (h,)},
    }
    return by_cell[cell]


def _lstm(e: int, h: int, prefix: str = "") -> dict:
    return {prefix + "w": (e, 4 * h), prefix + "u": (h, 4 * h), prefix + "b": (4 * h,)}


def _bilstm(e: int, h: int, prefix: str = "") -> dict:
    return {**_lstm(e, h, prefix + "forward."), **_lstm(e, h, prefix + "backward.")}


def multiply_adds(cell: str, e: int, h: int, classes: int, graph: dict) -> int:
    """Returns the multiply-adds of the products of one sample's forward pass. Missing children cost nothing."""
    out = h * classes  # for one label
    if cell in RNNS:
        n, gates = len(graph["words"]), 4 if cell == "lstm" else 3
        return n * (gates * e * h + out) + (n - 1) * gates * h * h
    if cell in ("tree_lstm", "tree_fc", "rvnn"):
        inner = int((graph["left"] >= 0).sum())
        leaf, pair = {"tree_lstm": (3 * e * h, 5 * h * h), "tree_fc": (0, 2 * h * h), "rvnn": (e * h, 2 * h * h)}[cell]
        return (len(graph["left"]) - inner) * leaf + inner * pair + out
    if cell in ("child_sum", "dagnn"):
        vertices, edges, inner = len(graph["word"]), len(graph["children"]), int((np.diff(graph["child_offsets"]) > 0).sum())
        per_vertex, per_edge = (4 * e * h, h * h) if cell == "child_sum" else (3 * e * h, 2 * h)
        return vertices * per_vertex + inner * 3 * h * h + edges * per_edge + out
    if cell in ("td_rnn", "td_lstm"):
        n = len(graph["words"])
        return n * (n - 1) // 2 * 2 * h * h * (5 if cell == "td_lstm" else 1) + out
    if cell in TAGGERS:
        n = len(graph["words"])
        letters = sum(_of_bilstm(len(s), e // 4, e // 2) for s in graph.get("spellings", ()))
        return letters + _of_bilstm(n, e, h) + n * (2 * h * h + out)
    if cell == "encoder_decoder":
        s, t = len(graph["source"]), len(graph["target"])
        encoder = s * (4 * e * h + 5 * h * h) - 4 * h * h
        return encoder + t * (4 * e * h + 8 * h * h + 3 * h * h + out) + s * t * 2 * h
    assert cell == "lattice_lstm", cell
    n, words = len(graph["words"]), len(graph["spans"])
    return n * (5 * e * h + 4 * h * h + out) - 4 * h * h + words * (3 * e * h + 4 * h * h)


def _of_bilstm(n: int, e: int, h: int) -> int:
    return 2 * (n * 4 * e * h + (n - 1) * 4 * h * h)
