"""Readers: a file in, `Graphs` out; one file a format. A new format is a file here and a line in `_BY_SUFFIX`."""

import os

from cavs._graphs.graphs import Graphs
from cavs._readers.conllu import read_conllu as read_conllu
from cavs._readers.edges import read_edges as read_edges, write_edges as write_edges
from cavs._readers.netlist import read_netlist as read_netlist
from cavs._readers.npz import load_npz as load_npz, save_npz as save_npz
from cavs._readers.source import FormatError as FormatError, Path, bare_suffix
from cavs._readers.trees import read_trees as read_trees

_BY_SUFFIX = {
    ".txt": read_trees,
    ".ptb": read_trees,
    ".trees": read_trees,
    ".mrg": read_trees,
    ".conllu": read_conllu,
    ".jsonl": read_edges,
    ".bench": read_netlist,
    ".blif": read_netlist,
    ".npz": load_npz,
}


def read(path: Path) -> Graphs:
    """Reads a file by what its name ends in, with or without `.gz`.

    - `.txt`, `.ptb`, `.trees`, `.mrg`: `read_trees`
    - `.conllu`: `read_conllu`
    - `.jsonl`: `read_edges`
    - `.bench`, `.blif`: `read_netlist`
    - `.npz`: `load_npz`

    **Raises:** `ValueError` for any other name; `FormatError` as the reader does.
    """
    suffix = bare_suffix(path)
    if suffix not in _BY_SUFFIX:
        raise ValueError(
            f"read: {os.fspath(path)} ends in {suffix!r}, wanted one of {', '.join(_BY_SUFFIX)}, or one of these with .gz. "
            "For other names call the reader itself: read_trees, read_conllu, read_edges, read_netlist, load_npz."
        )
    return _BY_SUFFIX[suffix](path)
