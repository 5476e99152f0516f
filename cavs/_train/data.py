"""Files to what a model trains on: graphs whose ids mean the same words and labels everywhere."""

import dataclasses
import hashlib
import importlib.resources
from pathlib import Path

import numpy as np

from cavs._graphs import Graphs
from cavs._readers import FormatError, read
from cavs._train import embeddings, programs, text
from cavs._train.config import Config, TrainError

UNKNOWN = "<unk>"
HELD_OUT = 0.1
# The reviews shipped with the package, and what their labels 0 to 4 mean.
REVIEWS = ("reviews.train.txt", "reviews.dev.txt")
REVIEW_LABELS = ("very negative", "negative", "neutral", "positive", "very positive")


@dataclasses.dataclass(frozen=True)
class Data:
    """Graphs for training, for choosing the best epoch, and (or `None`) for a last test.

    `input_id` indexes `words`, whose first is `<unk>`; -1 where a vertex reads nothing. `label` indexes `labels`; -1
    where there is none. `files`: what was read, with a fingerprint of each file. `vectors`: those of `--embeddings`.
    """

    train: Graphs
    dev: Graphs
    test: Graphs | None
    words: tuple[str, ...]
    labels: tuple[str, ...]
    files: dict[str, str]
    vectors: embeddings.Vectors | None


def read_data(config: Config) -> tuple[Config, Data]:
    """Reads all files of a run, and the configuration with what the data settles: program, loss, size of embeddings.

    Without a dev file a seeded tenth of the training graphs is held out. Words come from the training graphs alone,
    except that words of the other files which have a given embedding are kept too.

    **Raises:** `TrainError` for a file that is missing, of unknown format, without labels or too small.
    """
    paths = _paths(config)
    parts = {name: _read(path, config) for name, path in paths.items()}
    train = parts["train"]
    if "dev" in parts:
        dev = parts["dev"]
    else:
        if len(train) < 2:
            raise TrainError(f"{paths['train']} holds one graph, wanted at least 2, as one is held out; or pass --dev FILE.")
        order = np.random.default_rng([config.seed, 1]).permutation(len(train))
        held = max(1, round(HELD_OUT * len(train)))
        dev, train = train[np.sort(order[:held])], train[np.sort(order[held:])]
    others = [dev] + ([parts["test"]] if "test" in parts else [])

    words, vectors = _words(config, train, others)
    if config.task == "lm":
        labels: tuple[str, ...] = words
        train, *others = (text.relabel(g, words) for g in (train, *others))
    else:
        labels = _labels(paths, train, others)
        train, *others = (_with_labels(g.with_vocab(words, UNKNOWN), labels) for g in (train, *others))
    if config.task != "lm" and paths["train"].endswith(REVIEWS[0]) and config.train is None:
        labels = REVIEW_LABELS
    test = others[1] if "test" in parts else None
    files = {path: _fingerprint(path) for path in paths.values()}
    data = Data(train, others[0], test, words, labels, files, vectors)
    return _settle(config, data, paths), data


def _paths(config: Config) -> dict[str, str]:
    if config.train is None:
        folder = importlib.resources.files("cavs") / "data"
        return {"train": str(folder / REVIEWS[0]), "dev": str(folder / REVIEWS[1])}
    named = {"train": config.train, "dev": config.dev, "test": config.test}
    return {name: path for name, path in named.items() if path is not None}


def _read(path: str, config: Config) -> Graphs:
    graphs = read_graphs(path, config.task)
    if config.task != "lm" and (graphs.label is None or not (graphs.label >= 0).any()):
        raise TrainError(f"{path} has no labels; wanted a label at each root or at every vertex. To label it: cavs predict.")
    return graphs


def read_graphs(path: str, task: str) -> Graphs:
    """One file, of which every vertex's `input_id` names a word of `vocab`; by suffix, or for `lm` a text.

    **Raises:** `TrainError`, `FormatError`.
    """
    if not Path(path).is_file():
        raise TrainError(f"there is no file {path}.")
    if task == "lm":
        return text.read_text(path)
    try:
        graphs = read(path)
    except FormatError as error:
        hint = " For plain text: cavs train --task lm FILE." if ".txt" in Path(path).suffixes else ""
        raise TrainError(f"{error}{hint}") from error
    except ValueError as error:
        raise TrainError(str(error)) from error
    if not len(graphs):
        raise TrainError(f"{path} holds no graphs.")
    return named_inputs(graphs)


def named_inputs(graphs: Graphs) -> Graphs:
    """The same graphs with inputs that have names: words, else numbers; else kinds; else one input for all vertices."""
    ids, names = graphs.input_id, graphs.vocab
    if ids is None:
        ids, names = graphs.kind, graphs.kind_names
    if ids is None:
        ids, names = np.zeros(graphs.num_vertices, np.int32), ("vertex",)
    if names is None:
        values, ids_in = np.unique(ids, return_inverse=True)
        negative = int((values < 0).sum())
        ids, names = (ids_in - negative).astype(np.int32), tuple(map(str, values[negative:].tolist()))
    return dataclasses.replace(graphs, input_id=ids, vocab=names)


def _words(config: Config, train: Graphs, others: list[Graphs]) -> tuple[tuple[str, ...], embeddings.Vectors | None]:
    """`<unk>`, then the training words that are frequent enough, by first appearance in the file."""
    assert train.vocab is not None and train.input_id is not None
    special = (UNKNOWN, *(text.MARKS if config.task == "lm" else ()))
    counts = np.bincount(train.input_id[train.input_id >= 0], minlength=len(train.vocab))
    frequent = counts >= config.min_count
    if config.vocab_size:
        most = np.argsort(-counts, kind="stable")[: config.vocab_size - len(special)]
        frequent &= np.isin(np.arange(len(counts)), most)
    words = dict.fromkeys((*special, *(w for w, keep in zip(train.vocab, frequent.tolist(), strict=True) if keep)))
    if config.embeddings is None:
        return tuple(words), None
    extra = [w for g in others for w in g.vocab or () if w not in words]
    asked = dict.fromkeys((*words, *extra))
    vectors = embeddings.read_vectors(config.embeddings, asked)
    keep = np.array([w in words for w in asked]) | vectors.found
    kept = tuple(w for w, k in zip(asked, keep.tolist(), strict=True) if k)
    return kept, embeddings.Vectors(vectors.found[keep], vectors.rows[keep])


def _labels(paths: dict[str, str], train: Graphs, others: list[Graphs]) -> tuple[str, ...]:
    parts = [train, *others]
    if len({g.label_names is None for g in parts if g.label is not None}) > 1:
        raise TrainError(f"labels are numbers in some of {', '.join(paths.values())} and names in others; wanted one kind.")
    if train.label_names is None:
        found = np.unique(np.concatenate([g.label for g in parts if g.label is not None]))
        return tuple(map(str, found[found >= 0].tolist()))
    return tuple(dict.fromkeys(name for g in parts for name in g.label_names or ()))


def _with_labels(graphs: Graphs, labels: tuple[str, ...]) -> Graphs:
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


def _settle(config: Config, data: Data, paths: dict[str, str]) -> Config:
    name = programs.suggest(data.train) if config.program is None else programs.find(config.program)
    parts = {paths["train"]: data.train, paths.get("dev", paths["train"]): data.dev}
    if data.test is not None:
        parts[paths["test"]] = data.test
    for path, graphs in parts.items():
        programs.check_fit(name, graphs, path)
    if config.layers > 1 and name != "lstm":
        raise TrainError(f"--layers is {config.layers}, but --program {name} has one layer; wanted --program lstm.")
    label = data.train.label
    assert label is not None
    at_root = np.zeros(len(label), bool)
    at_root[root_rows(data.train)] = True
    loss = config.loss or ("all" if (label[~at_root] >= 0).any() else "root")
    # A phrase's label sums up its subtree, so the root's is the graph's; where inner vertices read words of their own, as in
    # dependency trees, the root is a word like any other.
    rooted = (label[at_root] >= 0).any()
    if loss == "root" and not rooted:
        raise TrainError(f"--loss root, but no root of {paths['train']} has a label; wanted --loss all.")
    best_at = config.score or ("root" if loss == "root" or rooted and not programs.inner_reads(data.train) else "all")
    if best_at == "root" and not rooted:
        raise TrainError(f"--score root, but no root of {paths['train']} has a label; wanted --score all.")
    size = config.embedding_size
    if data.vectors is not None:
        given = data.vectors.rows.shape[1]
        if size not in (None, given):
            raise TrainError(f"--embedding-size is {size}, but the vectors of {config.embeddings} have {given} entries.")
        size = given
    size = size or config.hidden
    if name == "tree-fc" and size != config.hidden:
        raise TrainError(
            f"--embedding-size is {size} and --hidden {config.hidden}; wanted them alike: in --program tree-fc a leaf's input "
            "is its state."
        )
    return dataclasses.replace(config, program=name, loss=loss, score=best_at, embedding_size=size)


def _fingerprint(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
