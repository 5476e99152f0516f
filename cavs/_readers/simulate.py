"""Simulation of netlists: how often each gate is 1 for random inputs."""

import numpy as np

from cavs._graphs.arguments import check_graphs
from cavs._graphs.graphs import Graphs

WORDS = 64  # 64 x 64 = 4,096 random inputs, simulated bit by bit in parallel
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_REDUCE = {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}
_INVERTED = {"NAND": "AND", "NOR": "OR", "XNOR": "XOR", "NOT": "OR"}
_GATES = {"INPUT", "BUF", *_REDUCE, *_INVERTED}
MSG_KINDS = "simulate_netlist: netlists: got graphs {}; expected inputs and gates. Write cavs.io.read_netlist(path)."


def simulate_netlist(netlists: Graphs, seed: int = 0) -> np.ndarray:
    """Simulates netlists for 4,096 random inputs, each bit of which is 1 in half of the cases.

    Args:
        netlists: what [`cavs.io.read_netlist`][] returned.
        seed: the seed of the inputs.

    Returns:
        (V,) float64, the share of inputs for which each vertex is 1.

    Raises:
        TypeError: `netlists` are no graphs.
        ValueError: the graphs have no kinds, or a kind that is no gate.
    """
    check_graphs(netlists, "simulate_netlist(netlists)")
    if netlists.kind is None or netlists.kind_names is None:
        raise ValueError(MSG_KINDS.format("without named kinds"))
    if other := [name for name in netlists.kind_names if name not in _GATES and not name.startswith("names:")]:
        raise ValueError(MSG_KINDS.format(f"of kind {other[0]!r}"))
    values = np.zeros((netlists.num_vertices, WORDS), np.uint64)
    fan_in, child = np.diff(netlists.child_offsets), netlists._edges[1]
    rng = np.random.default_rng(seed)
    # Gates of one level, kind and fan-in are simulated together.
    keys = np.stack([netlists.height, netlists.kind, fan_in])
    order = np.lexsort(keys[::-1])
    starts = np.flatnonzero(np.append(True, (np.diff(keys[:, order]) != 0).any(0)))
    for rows in np.split(order, starts[1:]):
        name, count = netlists.kind_names[netlists.kind[rows[0]]], int(fan_in[rows[0]])
        if name == "INPUT":
            values[rows] = rng.integers(0, _ONES, (len(rows), WORDS), np.uint64, True)
        else:
            edges = netlists.child_offsets[rows][:, None] + np.arange(count)
            values[rows] = _gate(name, values[child[edges]].reshape(len(rows), count, WORDS))
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
