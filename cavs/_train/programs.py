"""The vertex programs that `--program` names, and which graphs each of them accepts."""

import dataclasses
from collections.abc import Callable, Collection
from typing import TypeAlias

import jax
import numpy as np

from cavs import vertex_programs
from cavs._function.vertex import VertexFunction
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._graphs.suggest import suggestion
from cavs._run.run import run
from cavs._schedule.schedule import Schedule
from cavs._train.config import Config, TrainError

VertexProgram: TypeAlias = (
    vertex_programs.BinaryTreeLSTM
    | vertex_programs.NaryTreeLSTM
    | vertex_programs.ChildSumTreeLSTM
    | vertex_programs.DAGNN
    | vertex_programs.TreeFC
    | vertex_programs.RvNN
    | vertex_programs.ElmanRNN
    | vertex_programs.MultiLayerLSTM
    | vertex_programs.GRU
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the table of programs.

    Attributes:
        create: builds the program.
        arity: the largest number of children of a vertex, `None` if unlimited.
        leaves_only: whether only leaves can read inputs.
    """

    create: Callable[["Sizes"], VertexProgram]
    arity: int | None
    leaves_only: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The arguments from which a program is built. `inner_reads`: whether vertices with children read inputs."""

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


def complete(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that `name` is or abbreviates (`child-sum`); `None` if none or several match."""
    plain = name.lower().replace("_", "-")
    if plain in names:
        return plain
    matches = [full for full in names if plain and full.startswith(plain)]
    return matches[0] if len(matches) == 1 else None


def find_program(name: str) -> str:
    """The full name of a program from itself or an unambiguous abbreviation. Raises a `TrainError` that lists the programs."""
    found = complete(name, PROGRAMS)
    if found is None:
        raise TrainError(
            f"--program: got {name!r}; expected one of {', '.join(PROGRAMS)}. {suggestion(name, PROGRAMS)}".rstrip()
        )
    return found


def suggest(graphs: Graphs) -> str:
    """The default program for these graphs: an LSTM for chains, a Tree-LSTM for trees, DAGNN if vertices have several parents.

    DAGNN takes a mean over the children. Sums would grow from level to level.
    """
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    parents = np.bincount(graphs.children + np.repeat(base, np.diff(graphs.child_offsets)), minlength=1)
    if parents.max() > 1:
        return "dagnn"
    return {0: "lstm", 1: "lstm", 2: "binary-tree-lstm"}.get(graphs.max_fan_in, "child-sum-tree-lstm")


def inner_reads(graphs: Graphs) -> bool:
    """Whether any vertex with children reads an input."""
    return graphs.input_id is not None and bool(((graphs.input_id >= 0) & (graphs.height > 0)).any())


def check_fit(name: str, graphs: Graphs, where: str, arity: int | None = None) -> None:
    """Raises a `TrainError` that names a vertex, and the programs that fit, if a program cannot run these graphs."""
    entry = PROGRAMS[name]
    limit = entry.arity if arity is None else arity
    fan_in = np.diff(graphs.child_offsets)
    if limit is not None and graphs.max_fan_in > limit:
        g, v = _place(graphs, int(np.argmax(fan_in > limit)))
        raise TrainError(
            f"{where}: got {counted(int(fan_in[graphs.vertex_offsets[g] + v]), 'child')} at vertex {v} of graph {g}; "
            f"expected at most {limit} for --program {name}. {_fitting(graphs)}"
        )
    if entry.leaves_only and graphs.input_id is not None and inner_reads(graphs):
        g, v = _place(graphs, int(np.argmax((graphs.input_id >= 0) & (graphs.height > 0))))
        raise TrainError(
            f"{where}: got an input at vertex {v} of graph {g}, which has children; expected inputs only at leaves for "
            f"--program {name}. {_fitting(graphs)}"
        )


def settle(config: Config, parts: dict[str, Graphs], paths: dict[str, str], given_size: int | None) -> Config:
    """Completes the configuration with a program that fits the graphs and with the size of word vectors.

    Args:
        config: the settings.
        parts: the parts of the data.
        paths: the file of each part, for messages.
        given_size: the size of the vectors of `--embeddings`, or `None`.

    Raises:
        TrainError: the settings do not fit the graphs or each other.
    """
    name = suggest(parts["train"]) if config.program is None else find_program(config.program)
    for part, graphs in parts.items():
        check_fit(name, graphs, paths.get(part, paths["train"]))
    if config.layers > 1 and name != "lstm":
        raise TrainError(f"--layers: got {config.layers}; expected 1 for --program {name}. Several layers need --program lstm.")
    size = settle_size(config, given_size)
    if name == "tree-fc" and size != config.hidden:
        raise TrainError(
            f"--embedding-size: got {size}; expected {config.hidden}, the value of --hidden, because in --program tree-fc the "
            "state of a leaf is its input."
        )
    return dataclasses.replace(config, program=name, embedding_size=size)


def settle_size(config: Config, given_size: int | None) -> int:
    """The size of a word's vector: that of the given vectors, or `--embedding-size`, or the number of hidden units."""
    if given_size is not None and config.embedding_size not in (None, given_size):
        raise TrainError(
            f"--embedding-size: got {config.embedding_size}; expected {given_size}, the size of the vectors in "
            f"{config.embeddings}."
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


def run_program(
    program: VertexProgram, params: PyTree, sched: Schedule, inputs: jax.Array, select: jax.Array | None = None
) -> jax.Array:
    """Runs a program of the table. Returns its pushes (M, H), of all vertices or of those that `select` lists."""
    if isinstance(program, vertex_programs.MultiLayerLSTM):
        return program.run(params, sched, inputs, select=select)
    if isinstance(program, vertex_programs.RvNN):  # as one function for graphs without kinds
        return run(VertexFunction(program, state=(program.hidden,), arity=2), params, sched, inputs, select=select)
    return run(program.vertex_function(), params, sched, inputs, select=select)


def _place(graphs: Graphs, row: int) -> tuple[int, int]:
    g = int(np.searchsorted(graphs.vertex_offsets, row, side="right")) - 1
    return g, row - int(graphs.vertex_offsets[g])
