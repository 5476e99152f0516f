"""Targets to learn from a netlist: how often each gate is 1 under random inputs, found by simulation.

`cavs train` predicts this probability (`--task regress`) or its fifth (`--task dag`). It depends on the whole cone of a gate.

Few circuits exist, and some kinds of gates occur in one or two of them. `with_variants` creates more by changing gates.
"""

import dataclasses
import functools
import operator

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._graphs.segments import ranges

WORDS = 64  # 64 x 64 = 4,096 random inputs, simulated bit by bit in parallel
FIFTHS = ("1 in 0 to 20 %", "1 in 20 to 40 %", "1 in 40 to 60 %", "1 in 60 to 80 %", "1 in 80 to 100 %")
VARIANTS = 8  # of each circuit to train on
SHARE = 0.5  # of the gates of a variant are drawn anew
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_REDUCE = {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}
_SINGLE, _SEVERAL = ("NOT", "BUF"), ("AND", "NAND", "OR", "NOR", "XOR", "XNOR")
_INVERTED = {"NAND": "AND", "NOR": "OR", "XNOR": "XOR", "NOT": "OR"}


def probabilities(netlists: Graphs, seed: int = 0) -> np.ndarray:
    """(V,) the share of random inputs for which each vertex of netlists is 1. The same seed gives the same inputs.

    Args:
        netlists: graphs whose `kind_names` are those of `cavs.io.read_netlist`.
        seed: the seed of the inputs, each bit of which is 1 in half of the cases.
    """
    assert netlists.kind is not None and netlists.kind_names is not None
    values = np.zeros((netlists.num_vertices, WORDS), np.uint64)
    fan_in = np.diff(netlists.child_offsets)
    base = np.repeat(netlists.vertex_offsets[:-1], np.diff(netlists.vertex_offsets))
    child = netlists.children + np.repeat(base, fan_in)
    rng = np.random.default_rng(seed)
    # Gates of one level, kind and fan-in are simulated together.
    keys = np.stack([netlists.height, netlists.kind, fan_in])
    order = np.lexsort(keys[::-1])
    starts = np.flatnonzero(np.append(True, (np.diff(keys[:, order]) != 0).any(0)))
    for rows in np.split(order, starts[1:]):
        name, count = netlists.kind_names[netlists.kind[rows[0]]], int(fan_in[rows[0]])
        edges = ranges(netlists.child_offsets[rows], fan_in[rows])
        inputs = values[child[edges]].reshape(len(rows), count, WORDS)
        values[rows] = (
            rng.integers(0, _ONES, inputs[:, :0].sum(1).shape, np.uint64, True) if name == "INPUT" else _gate(name, inputs)
        )
    return np.bitwise_count(values).sum(1) / (64.0 * WORDS) if hasattr(np, "bitwise_count") else _count(values)


def with_variants(netlists: Graphs, count: int = VARIANTS, seed: int = 0) -> Graphs:
    """The netlists, and `count` variants of each in which about half of the gates are of a random other kind.

    A gate of one input becomes a NOT or a BUF, and a gate of several inputs one of AND, NAND, OR, NOR, XOR and XNOR. Inputs and
    constants stay.
    """
    assert netlists.kind is not None and netlists.kind_names is not None
    rng, fan_in = np.random.default_rng([seed, 3]), np.diff(netlists.child_offsets)
    names = tuple(dict.fromkeys((*netlists.kind_names, *_SINGLE, *_SEVERAL)))
    every = [dataclasses.replace(netlists, kind_names=names)]
    for _ in range(count):
        kind, hit = netlists.kind.copy(), rng.random(netlists.num_vertices) < SHARE
        for kinds, rows in ((_SINGLE, hit & (fan_in == 1)), (_SEVERAL, hit & (fan_in > 1))):
            kind[rows] = rng.choice([names.index(name) for name in kinds], int(rows.sum()))
        every.append(dataclasses.replace(every[0], kind=kind))
    return functools.reduce(operator.add, every)


def gates(netlists: Graphs) -> Graphs:
    """The netlists with a word for each gate as its input: its kind and, if it has several inputs, their number (`NAND3`)."""
    assert netlists.kind is not None and netlists.kind_names is not None
    fan_in = np.diff(netlists.child_offsets)
    pairs, ids = np.unique(np.stack([netlists.kind, fan_in], 1), axis=0, return_inverse=True)
    kinds = [(netlists.kind_names[kind], count) for kind, count in pairs.tolist()]
    words = [name + (str(count) if count > 1 and name in _SEVERAL else "") for name, count in kinds]
    vocab = tuple(dict.fromkeys(words))
    index = np.array([vocab.index(word) for word in words], np.int32)
    return dataclasses.replace(netlists, input_id=index[ids.ravel()], vocab=vocab)


def _count(values: np.ndarray) -> np.ndarray:
    return np.unpackbits(values.view(np.uint8), axis=1).mean(1)


def _gate(name: str, inputs: np.ndarray) -> np.ndarray:
    """(N, WORDS) the outputs of N gates of a kind. `inputs` is (N, fan-in, WORDS)."""
    if name.startswith("names:"):
        return _cover(name.removeprefix("names:"), inputs)
    if name in _INVERTED:
        return ~_gate(_INVERTED[name], inputs)
    return _REDUCE.get(name, np.bitwise_or).reduce(inputs, 1)  # a buffer is an OR of one input


def _cover(cover: str, inputs: np.ndarray) -> np.ndarray:
    """A gate of a BLIF file: the OR of its rows, each an AND of inputs (1), inverted inputs (0) and ignored ones (-)."""
    out = np.zeros((len(inputs), inputs.shape[2]), np.uint64)
    rows = [row.split() for row in cover.split("|")]
    for *literals, _ in rows:
        term = np.full_like(out, _ONES)
        for i, literal in enumerate(literals[0] if literals else ""):
            term &= _ONES if literal == "-" else inputs[:, i] if literal == "1" else ~inputs[:, i]
        out |= term
    return out if rows[0][-1] == "1" else ~out  # rows that end in 0 say when the output is 0


def fifths(share: np.ndarray) -> np.ndarray:
    """(V,) int32, the index in `FIFTHS` of each probability."""
    return np.minimum((5 * share).astype(np.int32), 4)
