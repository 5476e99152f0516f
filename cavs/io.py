"""Files of graphs, of parameters and of training loops: readers, writers, and `FormatError`."""

import os
import typing

from cavs._interop.checkpoint import restore_checkpoint as restore_checkpoint, save_checkpoint as save_checkpoint
from cavs._interop.weights import load_params as load_params, save_params as save_params
from cavs._readers import (
    FormatError as FormatError,
    Vectors as Vectors,
    load_npz as load_npz,
    printable as printable,
    read as read,
    read_conllu as read_conllu,
    read_edges as read_edges,
    read_lines as read_lines,
    read_netlist as read_netlist,
    read_pairs as read_pairs,
    read_signals as read_signals,
    read_tagged as read_tagged,
    read_text as read_text,
    read_trees as read_trees,
    read_vectors as read_vectors,
    save_npz as save_npz,
    simulate_netlist as simulate_netlist,
    write_edges as write_edges,
)


def load_run(folder: str | os.PathLike[str]) -> tuple[typing.Any, typing.Any]:
    """Loads a run of `cavs train`: the same as [`cavs.recipes.load_run`][].

    Args:
        folder: the folder of the run, or a file in it.

    Returns:
        The recipe, whose `facts` hold the words and labels, and the parameters of the best epoch.

    Raises:
        cavs.recipes.Mistake: the folder holds no run.
        cavs.data.KeeperError: a file is damaged.
    """
    from cavs.recipes import load_run as load  # what it imports, readers do not need

    return load(folder)
