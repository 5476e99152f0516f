"""Readers of graphs, one file per format. To add a format, add a file and a line in `BY_SUFFIX`."""

import os
import pathlib
from collections.abc import Sequence

from cavs._graphs.checks import check_choice
from cavs._graphs.graphs import Graphs
from cavs._readers.conllu import read_conllu
from cavs._readers.edges import read_edges
from cavs._readers.netlist import read_netlist
from cavs._readers.npz import load_npz
from cavs._readers.source import Path, bare_suffix
from cavs._readers.trees import read_trees

BY_SUFFIX = {
    **dict.fromkeys((".txt", ".ptb", ".trees", ".mrg"), read_trees),
    ".conllu": read_conllu,
    ".jsonl": read_edges,
    **dict.fromkeys((".bench", ".blif"), read_netlist),
    ".npz": load_npz,
}


def read(path: Path | Sequence[Path]) -> Graphs:
    """Reads a file, or several, with the reader for its suffix, with or without `.gz`.

    | suffix | reader |
    |---|---|
    | `.txt`, `.ptb`, `.trees`, `.mrg` | [`cavs.read_trees`][] |
    | `.conllu` | [`cavs.io.read_conllu`][] |
    | `.jsonl` | [`cavs.io.read_edges`][] |
    | `.bench`, `.blif` | [`cavs.io.read_netlist`][] |
    | `.npz` | [`cavs.io.load_npz`][] |

    Each file gets its own vocabulary. To give a development or test set the word ids of the training set, write
    `dev = cavs.read("dev.txt").with_vocab(train.vocab)`. If labels have names, [`cavs.data.with_labels`][] gives them the
    numbers of the training set.

    Args:
        path: the file; or a list of files, whose graphs are joined by [`cavs.Graphs.concat`][].

    Returns:
        The graphs of the file.

    Raises:
        TypeError: `path` is neither a path nor a list of paths.
        ValueError: the suffix is unknown; or the files have different fields.
        FormatError: the file is not in the format of the reader.
    """
    if isinstance(path, Sequence) and not isinstance(path, str | bytes):
        return Graphs.concat(map(read, path))
    suffix = bare_suffix(path)
    if suffix not in BY_SUFFIX:
        raise ValueError(
            f"read: path: got {os.fspath(path)!r}, which ends in {suffix!r}; expected one of {', '.join(BY_SUFFIX)}, or "
            "one of these with .gz. For other names call the reader itself: cavs.read_trees, cavs.io.read_conllu, read_edges, "
            "read_netlist or load_npz."
        )
    return BY_SUFFIX[suffix](path)


_FOLDER = pathlib.Path(__file__).parent.parent / "data"


def example(name: str) -> str:
    """Returns the path of a sample file that comes with cavs, for [`cavs.read`][].

    ```python
    train = cavs.read(cavs.data.example("reviews.train"))             # 439 trees of short reviews, rated from 0 to 4
    dev = cavs.read(cavs.data.example("reviews.dev")).with_vocab(train.vocab)
    ```

    Args:
        name: "reviews.train" or "reviews.dev".

    Raises:
        ValueError: there is no such file.
    """
    names = sorted(path.stem for path in _FOLDER.glob("*.txt"))
    check_choice("example: name", name, names)
    return str(_FOLDER / f"{name}.txt")
