"""What all tasks do with their files: which there are, what is held out, which words and labels they name."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._train import embeddings
from cavs._train.config import Config, TrainError

UNKNOWN = "<unk>"
HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples for training, for choosing the best epoch, and (or `None`) for a last test: `Graphs`, or what the task has.

    In `Graphs` `input_id` indexes `words`, whose first is `<unk>`; -1 where a vertex reads nothing. `label` indexes
    `labels`; -1 where there is none. `files`: what was read, with a fingerprint of each file. `vectors`: those of
    `--embeddings`. `facts`: what else a checkpoint must know, as JSON.
    """

    train: Any
    dev: Any
    test: Any
    words: tuple[str, ...]
    labels: tuple[str, ...]
    files: dict[str, str]
    vectors: embeddings.Vectors | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def paths_of(config: Config) -> dict[str, str]:
    """The files of a run by their part: "train", and "dev" and "test" where given."""
    named = {"train": config.train, "dev": config.dev, "test": config.test}
    return {name: path for name, path in named.items() if path is not None}


def with_dev(config: Config, parts: dict[str, Any], where: str, noun: str = "graph") -> dict[str, Any]:
    """The same parts, "dev" among them: where none was given, a seeded tenth of "train" is held out.

    **Raises:** `TrainError` where there is nothing to hold out.
    """
    train = parts["train"]
    if "dev" in parts:
        return parts
    if len(train) < 2:
        raise TrainError(f"{where} holds one {noun}, wanted at least 2, as one is held out; or pass --dev FILE.")
    order = np.random.default_rng([config.seed, 1]).permutation(len(train))
    held = max(1, round(HELD_OUT * len(train)))
    return {"train": train[np.sort(order[held:])], "dev": train[np.sort(order[:held])]} | {
        name: part for name, part in parts.items() if name != "train"
    }


def vocabulary(
    config: Config, parts: dict[str, Graphs], special: tuple[str, ...] = (UNKNOWN,)
) -> tuple[tuple[str, ...], embeddings.Vectors | None]:
    """`special`, then the training words that are frequent enough, by first appearance in the file; and given vectors.

    Words come from the training graphs alone, except that words of the other files which have a given vector are kept too.
    """
    train = parts["train"]
    assert train.vocab is not None and train.input_id is not None
    counts = np.bincount(train.input_id[train.input_id >= 0], minlength=len(train.vocab))
    frequent = counts >= config.min_count
    if config.vocab_size:
        most = np.argsort(-counts, kind="stable")[: config.vocab_size - len(special)]
        frequent &= np.isin(np.arange(len(counts)), most)
    words = dict.fromkeys((*special, *(w for w, keep in zip(train.vocab, frequent.tolist(), strict=True) if keep)))
    if config.embeddings is None:
        return tuple(words), None
    extra = [w for name, g in parts.items() if name != "train" for w in g.vocab or () if w not in words]
    asked = dict.fromkeys((*words, *extra))
    vectors = embeddings.read_vectors(config.embeddings, asked)
    keep = np.array([w in words for w in asked]) | vectors.found
    kept = tuple(w for w, k in zip(asked, keep.tolist(), strict=True) if k)
    return kept, embeddings.Vectors(vectors.found[keep], vectors.rows[keep])


def label_names(parts: dict[str, Graphs], paths: dict[str, str]) -> tuple[str, ...]:
    """The labels of all parts, in order of appearance; numbers in their own order."""
    graphs = list(parts.values())
    if len({g.label_names is None for g in graphs if g.label is not None}) > 1:
        raise TrainError(f"labels are numbers in some of {', '.join(paths.values())} and names in others; wanted one kind.")
    if graphs[0].label_names is None:
        found = np.unique(np.concatenate([g.label for g in graphs if g.label is not None]))
        return tuple(map(str, found[found >= 0].tolist()))
    return tuple(dict.fromkeys(name for g in graphs for name in g.label_names or ()))


def with_labels(graphs: Graphs, labels: tuple[str, ...]) -> Graphs:
    """The same graphs with `label` as an index of `labels`."""
    assert graphs.label is not None
    index = {name: i for i, name in enumerate(labels)}
    if graphs.label_names is None:
        values, ids = np.unique(graphs.label, return_inverse=True)
        table = np.array([index.get(str(v), -1) for v in values.tolist()], np.int32)
        label = table[ids]
    else:
        label = np.array([index[name] for name in graphs.label_names] + [-1], np.int32)[graphs.label]
    return dataclasses.replace(graphs, label=label, label_names=labels)


def root_rows(graphs: Graphs) -> np.ndarray:
    """Rows of the vertices that are nobody's child, graph after graph."""
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    has_parent = np.zeros(graphs.num_vertices, bool)
    has_parent[graphs.children + np.repeat(base, np.diff(graphs.child_offsets))] = True
    return np.flatnonzero(~has_parent)


def words_of(graphs: Graphs) -> list[str]:
    """The word of each vertex; empty where it reads nothing."""
    assert graphs.vocab is not None and graphs.input_id is not None
    names = [*graphs.vocab, ""]
    return [names[i] for i in graphs.input_id.tolist()]


def fingerprints(paths: dict[str, str]) -> dict[str, str]:
    """SHA-256 of each file, by its path."""
    prints = {}
    for path in paths.values():
        with open(path, "rb") as file:
            prints[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return prints
