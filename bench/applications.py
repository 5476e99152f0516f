"""The applications of the papers beyond `bench.cases`' cells: their graphs, parameters and operations (NumPy only).

VPPS, section IV: TD-RNN, TD-LSTM, RvNN with untied leaves. Echo, section 2.2: an encoder-decoder with attention. And what users
of the field run: a lattice LSTM over characters and words, a recurrent net over netlists. Samples are dicts of arrays:
sentences `words`, `label`; pairs `source`, `target`, `labels` (one a target word); character lattices `words`, `labels`,
`spans` (words of a lexicon: first and last character), `span_words`; netlists as graphs of any fan-in in `bench.cases`.
"""

from __future__ import annotations

import numpy as np

VOCAB, CLASSES = 10_000, 5  # as bench.cases
CELLS = ("td_rnn", "td_lstm", "rvnn", "encoder_decoder", "lattice_lstm", "dagnn")
EQUAL_WIDTHS = ("td_rnn", "td_lstm")  # a word's vector is its state


def shapes(cell: str, e: int, h: int) -> dict:
    """Shapes of a cell's parameters; the names are those of `cavs.vertex_programs`."""
    lstm = {"w": (e, 4 * h), "u": (h, 4 * h), "b": (4 * h,)}
    return {
        "td_rnn": {"u": (2 * h, h), "b": (h,)},
        "td_lstm": {"u": (2 * h, 5 * h), "b": (5 * h,)},
        "rvnn": {"w": (e, h), "b_leaf": (h,), "u": (2 * h, h), "b": (h,)},
        "encoder_decoder": {
            **{"encoder_" + k: s for k, s in lstm.items()},
            **dict(lstm, u=(2 * h, 4 * h)),
            **{"key": (h, h), "query": (h, h), "score": (h,), "out": (2 * h, h)},
        },
        "lattice_lstm": {
            **lstm,
            **{"w_word": (e, 3 * h), "u_word": (h, 3 * h), "b_word": (3 * h,)},
            **{"w_link": (e, h), "u_link": (h, h), "b_link": (h,)},
        },
        "dagnn": {"s": (h,), "w": (e, 3 * h), "u": (h, 3 * h), "b": (3 * h,), "d": (h,)},
    }[cell]


# ---- graphs ----


def sentences(rng, count: int) -> list:
    """Sentences of a treebank's lengths, for pyramids: 19.2 words on average, standard deviation 9.3."""
    lengths = np.clip(np.rint(rng.gamma(4.26, 4.5, count)), 2, 52).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "label": int(rng.integers(CLASSES))} for n in lengths.tolist()]


def pairs(rng, count: int) -> list:
    """Sentence pairs with the lengths of a small English-Japanese corpus: 9.3 words on average, and 13.7."""
    source = np.clip(np.rint(rng.gamma(5.6, 1.66, count)), 2, 54).astype(int)
    target = np.clip(np.rint(source * rng.normal(1.47, 0.28, count)), 2, 66).astype(int)
    return [
        {"source": rng.integers(VOCAB, size=s), "target": rng.integers(VOCAB, size=t), "labels": rng.integers(CLASSES, size=t)}
        for s, t in zip(source.tolist(), target.tolist(), strict=True)
    ]


def characters(rng, count: int) -> list:
    """Character lattices: 44 characters on average, and a word of 2 to 4 characters from every second one."""
    samples = []
    for n in np.clip(np.rint(rng.gamma(3.0, 14.7, count)), 5, 211).astype(int).tolist():
        first = np.flatnonzero(rng.random(n) < 0.53)
        last = first + rng.choice([1, 2, 3], size=len(first), p=[0.7, 0.2, 0.1])
        spans = np.stack([first, last], 1)[last < n]
        samples.append(
            {
                "words": rng.integers(VOCAB, size=n),
                "labels": rng.integers(CLASSES, size=n),
                "spans": spans,
                "span_words": rng.integers(VOCAB, size=len(spans)),
            }
        )
    return samples


def netlist(rng, count: int, gates: int = 400) -> list:
    """Circuits: inputs, gates of fan-in 1 to 9 (mostly 2) that read near ones, and a last vertex over what nothing reads."""
    samples, inputs = [], gates // 8
    for _ in range(count):
        fan_in = rng.choice([1, 2, 3, 4, 5, 8, 9], size=gates, p=[0.2, 0.6, 0.08, 0.06, 0.03, 0.02, 0.01])
        children = [[] for _ in range(inputs)]
        for n in fan_in.tolist():
            back = np.minimum(rng.geometric(0.02, n), len(children))
            children.append(sorted({len(children) - int(b) for b in back}))
        read = {k for kids in children for k in kids}
        children.append([v for v in range(len(children)) if v not in read])
        samples.append(
            {
                "child_offsets": np.concatenate([[0], np.cumsum([len(c) for c in children])]),
                "children": np.array([k for c in children for k in c]),
                "word": rng.integers(12, size=len(children)),  # the kind of a gate
                "label": int(rng.integers(CLASSES)),
            }
        )
    return samples


SHAPES = {"sentences": sentences, "pairs": pairs, "characters": characters, "netlist": netlist}


# ---- operations ----


def multiply_adds(cell: str, e: int, h: int, classes: int, graph: dict) -> int:
    """Of the matrix products of one sample's forward."""
    if cell in EQUAL_WIDTHS:
        n = len(graph["words"])
        return n * (n - 1) // 2 * 2 * h * h * (5 if cell == "td_lstm" else 1) + h * classes
    if cell == "rvnn":
        inner = int((graph["left"] >= 0).sum())
        return (len(graph["left"]) - inner) * e * h + inner * 2 * h * h + h * classes
    if cell == "encoder_decoder":
        s, t = len(graph["source"]), len(graph["target"])
        encoder = s * (4 * e * h + 5 * h * h) - 4 * h * h
        return encoder + t * (4 * e * h + 8 * h * h + 3 * h * h + h * classes) + s * t * 2 * h
    if cell == "lattice_lstm":
        n, words = len(graph["words"]), len(graph["spans"])
        return n * (5 * e * h + 4 * h * h + h * classes) - 4 * h * h + words * (3 * e * h + 4 * h * h)
    inner = int((np.diff(graph["child_offsets"]) > 0).sum())
    return len(graph["word"]) * 3 * e * h + inner * 3 * h * h + len(graph["children"]) * 2 * h + h * classes
