"""Ready programs by name, and which graphs each of them accepts."""

import difflib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np

import cavs
from cavs.vertex_programs._types import Array
from cavs.vertex_programs.binary_tree_lstm import BinaryTreeLSTM
from cavs.vertex_programs.child_sum_tree_lstm import ChildSumTreeLSTM
from cavs.vertex_programs.dagnn import DAGNN
from cavs.vertex_programs.elman_rnn import ElmanRNN
from cavs.vertex_programs.gru import GRU
from cavs.vertex_programs.multi_layer_lstm import MultiLayerLSTM
from cavs.vertex_programs.nary_tree_lstm import NaryTreeLSTM
from cavs.vertex_programs.rvnn import RvNN
from cavs.vertex_programs.tree_fc import TreeFC

MOST_ORDERED_CHILDREN = 8


class ProgramError(ValueError):
    """A program does not fit graphs, or sizes do not fit a program. The message names the vertex, and programs that fit."""


class Sizes(NamedTuple):
    """The sizes from which a program is created.

    Attributes:
        hidden: The size of the state.
        inputs: The size of the inputs.
        layers: The number of layers, for `lstm`.
        arity: The largest number of children of a vertex.
        inner_reads: Whether vertices with children read inputs.
    """

    hidden: int
    inputs: int
    layers: int = 1
    arity: int = 1
    inner_reads: bool = True


class Entry(NamedTuple):
    """A program of the table.

    Attributes:
        create: builds the program.
        arity: the largest number of children of a vertex, `None` if unlimited.
        leaves_only: whether only leaves can read inputs.
    """

    create: Callable[[Sizes], Any]
    arity: int | None
    leaves_only: bool = False


PROGRAMS = {
    "binary-tree-lstm": Entry(lambda s: BinaryTreeLSTM(s.hidden, s.inputs, not s.inner_reads), 2),
    "nary-tree-lstm": Entry(lambda s: NaryTreeLSTM(s.hidden, s.inputs, s.arity), MOST_ORDERED_CHILDREN),
    "child-sum-tree-lstm": Entry(lambda s: ChildSumTreeLSTM(s.hidden, s.inputs), None),
    "dagnn": Entry(lambda s: DAGNN(s.hidden, s.inputs), None),
    "tree-fc": Entry(lambda s: TreeFC(s.hidden), 2, leaves_only=True),
    "rvnn": Entry(lambda s: RvNN(s.hidden, s.inputs), 2, leaves_only=True),
    "elman-rnn": Entry(lambda s: ElmanRNN(s.hidden, s.inputs), 1),
    "lstm": Entry(lambda s: MultiLayerLSTM(s.hidden, s.inputs, s.layers), 1),
    "gru": Entry(lambda s: GRU(s.hidden, s.inputs), 1),
}


def complete(name: str, names: Collection[str]) -> str:
    """Completes an abbreviated name, such as `child-sum`. Raises a `ProgramError` unless it fits exactly one of `names`."""
    plain = name.lower().replace("_", "-")
    matches = [full for full in names if plain and full.startswith(plain)]
    if plain in names:
        return plain
    if len(matches) != 1:
        near = difflib.get_close_matches(plain, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ProgramError(f"program: got {name!r}; expected one of {', '.join(names)}.{hint}")
    return matches[0]


def suggest(graphs: cavs.Graphs) -> str:
    """Returns the default program: an LSTM for chains, a Tree-LSTM for trees, DAGNN if vertices have several parents.

    DAGNN takes a mean over the children. Sums would grow from level to level.
    """
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    parents = np.bincount(graphs.children + np.repeat(base, np.diff(graphs.child_offsets)), minlength=1)
    if parents.max() > 1:
        return "dagnn"
    return {0: "lstm", 1: "lstm", 2: "binary-tree-lstm"}.get(graphs.max_fan_in, "child-sum-tree-lstm")


def inner_reads(graphs: cavs.Graphs) -> bool:
    """Returns whether any vertex with children reads an input."""
    return graphs.input_id is not None and bool(((graphs.input_id >= 0) & (graphs.height > 0)).any())


def check_fit(name: str, graphs: cavs.Graphs, where: str, program: Any = None) -> None:
    """Raises a `ProgramError` that names a vertex, and the programs that fit, if a program cannot run these graphs.

    Args:
        name: The name of the program.
        graphs: The graphs.
        where: Where they are from, for the message.
        program: The program, if it was created: it may take fewer children, or inputs at leaves only.
    """
    entry, fan_in = PROGRAMS[name], np.diff(graphs.child_offsets)
    limit, leaves_only = getattr(program, "arity", entry.arity), getattr(program, "leaf_inputs_only", entry.leaves_only)
    reads = inner_reads(graphs)
    fit = [
        candidate
        for candidate, e in PROGRAMS.items()
        if candidate != name and (e.arity is None or e.arity >= graphs.max_fan_in) and not (e.leaves_only and reads)
    ]
    if limit is not None and graphs.max_fan_in > limit:
        row = int(np.argmax(fan_in > limit))
        got, expected = f"{fan_in[row]} children", f"at most {limit}"
    elif leaves_only and reads:
        assert graphs.input_id is not None
        row = int(np.argmax((graphs.input_id >= 0) & (graphs.height > 0)))
        got, expected = "an input", "inputs only at leaves"
    else:
        return
    g = int(np.searchsorted(graphs.vertex_offsets, row, side="right")) - 1
    place = f"vertex {row - int(graphs.vertex_offsets[g])} of graph {g}"
    raise ProgramError(f"{where}: got {got} at {place}; expected {expected} for program {name}. These fit: {', '.join(fit)}.")


def choose_program(given: str | None, parts: dict[str, cavs.Graphs], layers: int = 1) -> tuple[str, int, bool]:
    """Chooses a program that fits all parts of the data.

    Args:
        given: The name of a program, possibly abbreviated; None chooses by the graphs.
        parts: The parts of the data, such as "train" and "dev".
        layers: The number of layers.

    Returns:
        The name of the program, the largest number of children of a vertex, and whether vertices with children read inputs.

    Raises:
        ProgramError: The given program does not fit.
    """
    name = suggest(parts["train"]) if given is None else complete(given, PROGRAMS)
    for part, graphs in parts.items():
        check_fit(name, graphs, part)
    if layers > 1 and name != "lstm":
        raise ProgramError(f"layers: got {layers}; expected 1 for program {name}. Several layers need lstm.")
    return name, max(1, *(g.max_fan_in for g in parts.values())), any(map(inner_reads, parts.values()))


def create_program(name: str, sizes: Sizes) -> Any:
    """Creates a program.

    Args:
        name: The name of the program, one of `PROGRAMS`.
        sizes: Its sizes.

    Raises:
        ProgramError: The sizes do not fit the program.
    """
    if name == "tree-fc" and sizes.inputs != sizes.hidden:
        text = f"inputs: got {sizes.inputs}; expected {sizes.hidden}, the hidden size"
        raise ProgramError(f"{text}, because in tree-fc the state of a leaf is its input.")
    return PROGRAMS[name].create(sizes)


def run_program(program: Any, params: Any, sched: cavs.Schedule, inputs: Array) -> jax.Array:
    """Runs a program that `create_program` created.

    Args:
        program: The program.
        params: Its parameters, as returned by `init`.
        sched: A schedule of the graphs, which need no kinds.
        inputs: x of each vertex, float[V, E], as for `cavs.run`.

    Returns:
        h of each vertex, (V, H), in the order of the rows of `cavs.run`.
    """
    if isinstance(program, MultiLayerLSTM):
        return program.run(params, sched, inputs)
    if isinstance(program, RvNN):  # as one function for graphs without kinds
        return cavs.run(cavs.VertexFunction(program, state=(program.hidden,), arity=2), params, sched, inputs)
    return cavs.run(program.vertex_function(), params, sched, inputs)
