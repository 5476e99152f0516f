"""Vertex programs by name, and which of them fit which graphs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cavs import vertex_programs
from cavs._function.vertex import VertexFunction
from cavs._graphs.graphs import Graphs
from cavs._run.run import run
from cavs._train.config import Config, TrainError


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program of the table: `make(sizes)` builds it; `arity` is the most children a vertex may have, `None` any number."""

    make: Callable[["Sizes"], Any]
    arity: int | None
    leaves_only: bool = False  # inner vertices cannot read


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a program is built from. `inner_reads`: whether vertices with children read from outside."""

    hidden: int
    inputs: int
    layers: int
    arity: int
    inner_reads: bool


MOST_ORDERED_CHILDREN = 8

PROGRAMS = {
    "binary-tree-lstm": Entry(lambda s: vertex_programs.BinaryTreeLSTM(s.hidden, s.inputs, not s.inner_reads), 2),
    "nary-tree-lstm": Entry(lambda s: vertex_programs.NaryTreeLSTM(s.hidden, s.inputs, s.arity), MOST_ORDERED_CHILDREN),
    "child-sum-tree-lstm": Entry(lambda s: vertex_programs.ChildSumTreeLSTM(s.hidden, s.inputs), None),
    "dagnn": Entry(lambda s: vertex_programs.DAGNN(s.hidden, s.inputs), None),
    "tree-fc": Entry(lambda s: vertex_programs.TreeFC(s.hidden), 2, leaves_only=True),
    "rvnn": Entry(lambda s: vertex_programs.RvNN(s.hidden, s.inputs), 2, leaves_only=True),
    "elman-rnn": Entry(lambda s: vertex_programs.ElmanRNN(s.hidden, s.inputs), 1),
    "lstm": Entry(lambda s: vertex_programs.MultiLayerLSTM(s.hidden, s.inputs, s.layers), 1),
    "gru": Entry(lambda s: vertex_programs.GRU(s.hidden, s.inputs), 1),
}


def find(name: str) -> str:
    """The full name of a program from itself or an unambiguous beginning (`child-sum`).

    **Raises:** `TrainError` that lists the programs.
    """
    plain = name.lower().replace("_", "-")
    matches = [plain] if plain in PROGRAMS else [full for full in PROGRAMS if plain and full.startswith(plain)]
    if len(matches) != 1:
        raise TrainError(f"--program is {name!r}, wanted one of {', '.join(PROGRAMS)}.")
    return matches[0]


def suggest(graphs: Graphs) -> str:
    """The program for these graphs: an LSTM for chains, a Tree-LSTM for two or for any number of children; and where children
    have several parents a mean over them, as sums would grow from level to level."""
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    parents = np.bincount(graphs.children + np.repeat(base, np.diff(graphs.child_offsets)), minlength=1)
    if parents.max() > 1:
        return "dagnn"
    return {0: "lstm", 1: "lstm", 2: "binary-tree-lstm"}.get(graphs.max_fan_in, "child-sum-tree-lstm")


def inner_reads(graphs: Graphs) -> bool:
    """Whether a vertex with children reads from outside."""
    return graphs.input_id is not None and bool(((graphs.input_id >= 0) & (graphs.height > 0)).any())


def check_fit(name: str, graphs: Graphs, where: str, arity: int | None = None) -> None:
    """Refuses graphs that a program cannot run.

    **Raises:** `TrainError` that names a vertex, and the programs that fit.
    """
    entry = PROGRAMS[name]
    limit = entry.arity if arity is None else arity
    fan_in = np.diff(graphs.child_offsets)
    if limit is not None and graphs.max_fan_in > limit:
        g, v = _place(graphs, int(np.argmax(fan_in > limit)))
        raise TrainError(
            f"{where}: vertex {v} of graph {g} has {fan_in[graphs.vertex_offsets[g] + v]} children, but --program {name} takes "
            f"at most {limit}. {_fitting(graphs)}"
        )
    if entry.leaves_only and graphs.input_id is not None and inner_reads(graphs):
        g, v = _place(graphs, int(np.argmax((graphs.input_id >= 0) & (graphs.height > 0))))
        raise TrainError(
            f"{where}: vertex {v} of graph {g} has children and an input, but --program {name} reads at leaves alone. "
            f"{_fitting(graphs)}"
        )


def settle(config: Config, parts: dict[str, Graphs], paths: dict[str, str], given_size: int | None) -> Config:
    """The configuration with a program that fits the graphs, and the size of word vectors; `given_size`: of those of a file.

    **Raises:** `TrainError`.
    """
    name = suggest(parts["train"]) if config.program is None else find(config.program)
    for part, graphs in parts.items():
        check_fit(name, graphs, paths.get(part, paths["train"]))
    if config.layers > 1 and name != "lstm":
        raise TrainError(f"--layers is {config.layers}, but --program {name} has one layer; wanted --program lstm.")
    size = settle_size(config, given_size)
    if name == "tree-fc" and size != config.hidden:
        raise TrainError(
            f"--embedding-size is {size} and --hidden {config.hidden}; wanted them alike: in --program tree-fc a leaf's input "
            "is its state."
        )
    return dataclasses.replace(config, program=name, embedding_size=size)


def settle_size(config: Config, given_size: int | None) -> int:
    """Entries of a word's vector: as given, as those of the file of vectors, or as many as hidden units."""
    if given_size is not None and config.embedding_size not in (None, given_size):
        raise TrainError(
            f"--embedding-size is {config.embedding_size}, but the vectors of {config.embeddings} have {given_size} entries."
        )
    return given_size or config.embedding_size or config.hidden


def _fitting(graphs: Graphs) -> str:
    reads = inner_reads(graphs)
    names = [
        name
        for name, entry in PROGRAMS.items()
        if (entry.arity is None or entry.arity >= graphs.max_fan_in) and not (entry.leaves_only and reads)
    ]
    return f"These fit: {', '.join(f'--program {name}' for name in names)}."


def run_program(program: Any, params: Any, sched: Any, inputs: Any, at: Any = None) -> Any:
    """The pushes of any of these programs: (M, H)."""
    if isinstance(program, vertex_programs.MultiLayerLSTM):
        return program.run(params, sched, inputs, select=at)
    if isinstance(program, vertex_programs.RvNN):  # as one function of graphs without kinds
        return run(VertexFunction(program, state=(program.hidden,), arity=2), params, sched, inputs, select=at)
    return run(program.vertex_function(), params, sched, inputs, select=at)


def _place(graphs: Graphs, row: int) -> tuple[int, int]:
    g = int(np.searchsorted(graphs.vertex_offsets, row, side="right")) - 1
    return g, row - int(graphs.vertex_offsets[g])
