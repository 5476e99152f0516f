"""Steps that all tasks share: the files of a run, the held-out part, and the vocabularies of words and labels."""

import dataclasses
import hashlib
from typing import Any, TypeAlias

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._train import embeddings
from cavs._train.config import Config, TrainError, check_file

UNKNOWN = "<unk>"
HELD_OUT = 0.1

Samples: TypeAlias = Any  # Graphs, Sentences or Parallel: each task has its own class, with `len` and indexing by samples


@dataclasses.dataclass(frozen=True)
class Data:
    """The samples of a run: `Graphs`, `Sentences` or `Parallel`, depending on the task.

    In `Graphs`, `input_id` is an index of `words`, or -1 if the vertex reads nothing, and `label` is an index of `labels`, or
    -1 if the vertex has no label.

    Attributes:
        train: samples to train on.
        dev: held-out samples, which choose the best epoch.
        test: samples for a final test, or `None`.
        words: the vocabulary, `<unk>` first.
        labels: the names of the labels.
        files: the SHA-256 of each file that was read, by path.
        vectors: the word vectors of `--embeddings`.
        facts: anything else that a checkpoint must store, as JSON.
        notes: messages for the user.
    """

    train: Samples
    dev: Samples
    test: Samples | None
    words: tuple[str, ...]
    labels: tuple[str, ...]
    files: dict[str, str]
    vectors: embeddings.Vectors | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def paths_of(config: Config) -> dict[str, str]:
    """The files of a run by part: "train", and "dev" and "test" if given. Raises a `TrainError` if one does not exist."""
    named = {"train": config.train, "dev": config.dev, "test": config.test}
    paths = {name: path for name, path in named.items() if path is not None}
    for name, path in paths.items():
        check_file(name, path)
    return paths


def with_dev(config: Config, parts: dict[str, Samples], where: str, noun: str = "graph") -> dict[str, Samples]:
    """Adds the part "dev" if it was not given: a tenth of "train", drawn with the seed.

    Raises:
        TrainError: "train" is too small to hold out a sample.
    """
    train = parts["train"]
    if "dev" in parts:
        return parts
    if len(train) < 2:
        raise TrainError(f"FILE: got {where} with 1 {noun}; expected at least 2, because 1 is held out. Or write --dev FILE.")
    order = np.random.default_rng([config.seed, 1]).permutation(len(train))
    held = max(1, round(HELD_OUT * len(train)))
    return {"train": train[np.sort(order[held:])], "dev": train[np.sort(order[:held])]} | {
        name: part for name, part in parts.items() if name != "train"
    }


def vocabulary(
    config: Config, parts: dict[str, Graphs], special: tuple[str, ...] = (UNKNOWN,)
) -> tuple[tuple[str, ...], embeddings.Vectors | None]:
    """The vocabulary: `special`, then the frequent words of the training part, by first appearance; and the given vectors.

    Words of the other parts are added only if they have a vector in `--embeddings`.
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
    """The labels of all parts: names in order of appearance, numbers in ascending order."""
    graphs = list(parts.values())
    if len({g.label_names is None for g in graphs if g.label is not None}) > 1:
        raise TrainError(f"labels: got numbers in some of {', '.join(paths.values())} and names in others; expected one kind.")
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


def unseen_labels(parts: dict[str, np.ndarray | None], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Notes about labels that occur in another part but not in "train", whose `parts` are indices of `labels`."""
    seen, notes = parts["train"], []
    for part, label in parts.items():
        if part != "train" and seen is not None and label is not None:
            unseen = [repr(labels[i]) for i in np.setdiff1d(label[label >= 0], seen)]
            if unseen:
                more = ", ..." if len(unseen) > 5 else ""
                notes.append(f"--{part}: labels that do not occur in the training data: {', '.join(unseen[:5])}{more}")
    return tuple(notes)


def root_rows(graphs: Graphs) -> np.ndarray:
    """The rows of the vertices without a parent, in graph order."""
    base = np.repeat(graphs.vertex_offsets[:-1], np.diff(graphs.vertex_offsets))
    has_parent = np.zeros(graphs.num_vertices, bool)
    has_parent[graphs.children + np.repeat(base, np.diff(graphs.child_offsets))] = True
    return np.flatnonzero(~has_parent)


def words_of(graphs: Graphs) -> list[str]:
    """The word of each vertex, "" if it reads nothing."""
    assert graphs.vocab is not None and graphs.input_id is not None
    names = [*graphs.vocab, ""]
    return [names[i] for i in graphs.input_id.tolist()]


def fingerprints(paths: dict[str, str]) -> dict[str, str]:
    """The SHA-256 of each file, by path."""
    prints = {}
    for path in paths.values():
        with open(path, "rb") as file:
            prints[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return prints
