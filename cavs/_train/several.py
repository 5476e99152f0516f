"""Several training files as one data set."""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Sequence

from cavs._graphs.graphs import Graphs
from cavs._train import data
from cavs._train.config import Config, TrainError, check_file


def more_paths(config: Config) -> list[str]:
    """The training files after the first one."""
    return [] if config.also is None else config.also.split(os.pathsep)


def read_parts(config: Config, paths: dict[str, str], read: Callable[[str, str], Graphs]) -> dict[str, Graphs]:
    """Reads each part of the data by `read(path, part)`; the training part from all of its files.

    Raises:
        TrainError: a file does not exist, or the files' labels are of different kinds.
    """
    parts = {name: read(path, name) for name, path in paths.items()}
    more = more_paths(config)
    for path in more:
        check_file("train", path)
    if more:
        parts["train"] = _joined([parts["train"], *(read(path, "train") for path in more)], [paths["train"], *more])
    return parts


def fingerprints(config: Config, paths: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each file, by path."""
    return data.fingerprints(paths | {path: path for path in more_paths(config)})


def _joined(graphs: Sequence[Graphs], paths: Sequence[str]) -> Graphs:
    """One `Graphs` of several, whose words and labels are numbered anew."""
    words = tuple(dict.fromkeys(word for g in graphs for word in g.vocab or ()))
    graphs = [dataclasses.replace(g.with_vocab(words), kind=None, kind_names=None) for g in graphs]
    if any(g.label_names is not None for g in graphs):
        labels = data.label_names(dict(zip(paths, graphs, strict=True)), dict(zip(paths, paths, strict=True)))
        graphs = [data.with_labels(g, labels) for g in graphs]
    try:
        return functools.reduce(operator.add, graphs)
    except ValueError as error:
        raise TrainError(f"FILE: {', '.join(paths)}: {error}") from error
