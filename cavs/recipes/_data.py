"""Steps that recipes share: the parts of the data, vocabularies of words and labels, and the texts of vertices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import cavs
from cavs.recipes._options import Mistake, RunOptions, check_file, flag

UNKNOWN = "<unk>"
HELD_OUT = 0.1
PROGRAM = f"{', '.join(cavs.vertex_programs.PROGRAMS)}; the first letters are enough (default: depends on the graphs)"
PARTS = {"train": "train", "dev": "held-out", "test": "test"}  # of the data, in messages
HELD_OUT_HINT = "--dev FILE, or another --seed, which chooses what FILE holds out."
WORD_SCALE = 0.1  # the standard deviation of random word vectors


@dataclasses.dataclass(frozen=True)
class Data:
    """The data that a recipe reads.

    Attributes:
        facts: the facts about the training data that the model needs, as JSON: its words, its labels, ...
        parts: "train", "dev", and "test" if given, as the recipe's `collate` expects them.
        vectors: the word vectors of `--embeddings`.
        notes: messages for the user.
    """

    facts: dict[str, Any]
    parts: dict[str, Any]
    vectors: cavs.io.Vectors | None = None
    notes: tuple[str, ...] = ()


def read_parts(kind: Any, options: RunOptions, read: Callable[[str, str], Any]) -> dict[str, Any]:
    """Reads the files of a run: "train", "dev" and "test". Without `--dev`, a tenth of "train" is held out.

    Args:
        kind: the recipe, whose `noun` and `needs` are for messages.
        options: the options of the run.
        read: `read(path, part)` returns `Graphs`, or a tuple of them of equal lengths.

    Raises:
        Mistake: a file does not exist, or "train" is too small to hold out a graph.
    """
    if not options.train:
        raise Mistake(f"FILE: got nothing; expected {kind.needs}. Write: cavs train --task {kind.name} FILE")
    paths = {"train": options.train} | {name: (path,) for name in ("dev", "test") if (path := getattr(options, name))}
    for name, path in ((name, path) for name, files in paths.items() for path in files):
        check_file(name, path)
    parts = {name: jax.tree.map(_joined, *(read(path, name) for path in files)) for name, files in paths.items()}
    if "dev" in parts:
        return parts
    count = len(jax.tree.leaves(parts["train"])[0])
    if count < 2:
        file = options.train[0]
        raise Mistake(f"FILE: got {file} with 1 {kind.noun}; expected at least 2, because 1 is held out. Or write --dev FILE.")
    order, num_dev = np.random.default_rng([options.seed, 1]).permutation(count), max(1, round(HELD_OUT * count))
    indices = (np.sort(numbers) for numbers in (order[num_dev:], order[:num_dev]))
    train, dev = (jax.tree.map(lambda graphs, i=i: graphs[i], parts["train"]) for i in indices)
    return {"train": train, "dev": dev} | {name: part for name, part in parts.items() if name != "train"}


def _joined(*files: cavs.Graphs) -> cavs.Graphs:
    """Several files as one. Words and labels are numbered anew."""
    if len(files) == 1:
        return files[0]
    try:
        return cavs.Graphs.concat(graphs.replace(kind=None, kind_names=None) for graphs in files)
    except ValueError as error:
        raise Mistake(f"FILE: {error}") from error


def unseen_labels(parts: Mapping[str, np.ndarray | None], labels: Sequence[str], noun: str = "labels") -> tuple[str, ...]:
    """Returns notes about labels that occur in another part but not in "train".

    Args:
        parts: the numbers of the labels of each part, -1 where there is none.
        labels: the names of the labels.
        noun: the word for the labels.

    Raises:
        Mistake: a part has no labels, or none that occurs in "train", so that no prediction could be right.
    """
    ids_by_part = {name: np.unique(np.zeros(0, np.int32) if ids is None else ids[ids >= 0]) for name, ids in parts.items()}
    notes = []
    for name, ids in ids_by_part.items():
        if not ids.size:
            got = f"{flag(name, part=True)}: got no {noun} in the {PARTS[name]} part of the data; expected some in each"
            raise Mistake(f"{got}. Write {HELD_OUT_HINT}")
        unseen = np.setdiff1d(ids, ids_by_part["train"])
        if unseen.size == ids.size:
            got = f"{flag(name, part=True)}: got no {noun} that occur in the training data, but {_listed(labels, ids)}"
            expected = f"expected some of {_listed(labels, ids_by_part['train'])}"
            other = f", or {HELD_OUT_HINT}" if name == "dev" else "."
            raise Mistake(f"{got}; {expected}. Write the labels of all files alike{other}")
        if unseen.size:
            notes.append(f"{flag(name, part=True)}: {noun} that do not occur in the training data: {_listed(labels, unseen)}")
    return tuple(notes)


def _listed(labels: Sequence[str], ids: np.ndarray) -> str:
    """Returns the names of a few labels."""
    return ", ".join([*(repr(labels[i]) for i in ids[:5].tolist()), *["..."] * (len(ids) > 5)])


def vocabulary(
    options: RunOptions, parts: dict[str, cavs.Graphs], special: tuple[str, ...] = (UNKNOWN,)
) -> tuple[list[str], cavs.io.Vectors | None]:
    """Returns the words and the vectors of `--embeddings`: first `special`, then frequent words of "train" by first appearance.

    Words of the other parts are added only if they have a vector.
    """
    words = cavs.data.vocabulary(parts["train"], special, options.min_count, options.vocab_size)
    path = getattr(options, "embeddings", None)
    if path is None:
        return words, None
    check_file("embeddings", path)
    known, other_words = set(words), (word for name, graphs in parts.items() if name != "train" for word in graphs.vocab or ())
    candidates = [*dict.fromkeys((*words, *other_words))]
    vectors = cavs.io.read_vectors(path, candidates)
    size = vectors.rows.shape[1]
    if options.embedding_size not in (None, size):
        got = f"--embedding-size: got {options.embedding_size}; expected {size}"
        raise Mistake(f"{got}, the size of the vectors in {path}.")
    keep = vectors.found | np.array([word in known for word in candidates])
    words = [word for word, kept in zip(candidates, keep.tolist(), strict=True) if kept]
    return words, cavs.io.Vectors(vectors.found[keep], vectors.rows[keep])


def embedding_size(options: RunOptions, vectors: cavs.io.Vectors | None, default: int | None = None) -> int:
    """Returns the size of word vectors: the size of `vectors`, or `--embedding-size`, or `default`, or of the hidden units."""
    return options.embedding_size or default or options.hidden if vectors is None else vectors.rows.shape[1]


def init_table(key: jax.Array, count: int, size: int, vectors: cavs.io.Vectors | None) -> jax.Array:
    """Returns the initial word vectors, (count, size): given vectors where there are any, else normal with deviation 0.1."""
    table = WORD_SCALE * jax.random.normal(key, (count, size), "float32")
    return table if vectors is None else jax.numpy.where(vectors.found[:, None], vectors.rows, table)


def read_graphs(path: str, name: str = "file") -> cavs.Graphs:
    """Reads a file of graphs by its suffix, with named inputs and labels. Raises a `Mistake` if it has no graphs."""
    check_file(name, path)
    try:
        graphs = cavs.read(path)
    except ValueError as error:
        plain = isinstance(error, cavs.io.FormatError) and ".txt" in str(path) and "expected UTF-8" not in str(error)
        raise Mistake(f"{flag(name)}: {error}{' For plain text write: --task lm' * plain}") from error
    if not len(graphs):
        raise Mistake(f"{flag(name)}: got {path} without graphs; expected at least one.")
    return cavs.data.named(graphs)
