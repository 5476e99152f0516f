"""Files of graphs, of parameters and of training loops: readers, writers, and `FormatError`."""

import os
import typing

from cavs._interop.checkpoint import restore_checkpoint as restore_checkpoint, save_checkpoint as save_checkpoint
from cavs._interop.weights import load_params as load_params, save_params as save_params
from cavs._readers import read as read
from cavs._readers.conllu import read_conllu as read_conllu
from cavs._readers.edges import read_edges as read_edges, write_edges as write_edges
from cavs._readers.netlist import (
    read_netlist as read_netlist,
    read_signals as read_signals,
    simulate_netlist as simulate_netlist,
)
from cavs._readers.npz import load_npz as load_npz, save_npz as save_npz
from cavs._readers.source import FormatError as FormatError, printable as printable
from cavs._readers.tagged import read_tagged as read_tagged
from cavs._readers.text import read_lines as read_lines, read_pairs as read_pairs, read_text as read_text
from cavs._readers.trees import read_trees as read_trees
from cavs._readers.vectors import Vectors as Vectors, read_vectors as read_vectors


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
