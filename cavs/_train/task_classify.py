"""The task `classify`: labels of trees and DAGs, at the roots or at every vertex. The default data are reviews."""

import dataclasses
import functools
import importlib.resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError, read
from cavs._readers.source import bare_suffix, read_utf8
from cavs._train import data, programs, several
from cavs._train.batches import in_order
from cavs._train.circuits import FIFTHS, fifths, gates, probabilities, with_variants
from cavs._train.config import Config, TrainError, check_file, flag
from cavs._train.data import UNKNOWN, Data, root_rows
from cavs._train.model import SoftmaxModel, Weights
from cavs._train.parallel import read_sources as read_sentences
from cavs._train.phrases import phrases_of, sentences_of
from cavs._train.report import mean_nll, percent
from cavs._train.scores import Scores, with_unseen
from cavs._train.task import Asked, Cells, Curve, Evaluation, Predictions, Sums, Task

# The reviews shipped with the package, and the meanings of their labels 0 to 4.
REVIEWS = {"train": "reviews.train.txt", "dev": "reviews.dev.txt"}
NETLISTS = (".bench", ".blif")  # their labels are simulated
REVIEW_LABELS = ("very negative", "negative", "neutral", "positive", "very positive")


def accuracy(sums: Sums, where: str) -> float | None:
    """The accuracy at `where` ("roots" or "vertices"); `None` if there are no labels."""
    return sums[f"{where}_right"] / sums[where] if sums[where] else None


class Classify(Task):
    """A softmax over the labels at roots or vertices, scored by accuracy."""

    own = ("loss", "score")
    panels = (
        Curve("loss", (("", "-", mean_nll),)),
        Curve(
            "accuracy, %",
            tuple(
                (f", {shown}", style, lambda sums, where=where: None if (a := accuracy(sums, where)) is None else 100 * a)
                for where, style, shown in (("roots", "-", "root"), ("vertices", ":", "all vertices"))
            ),
        ),
    )

    def read(self, config: Config) -> tuple[Config, Data]:
        paths = data.paths_of(config)
        if config.train is None:
            folder = importlib.resources.files("cavs") / "data"
            paths = {name: str(folder / file) for name, file in REVIEWS.items()}
        parts = several.read_parts(config, paths, functools.partial(_read_labelled, variants=config.dev is not None))
        parts = data.with_dev(config, parts, paths["train"])
        words, vectors = data.vocabulary(config, parts)
        labels = data.label_names(parts, paths)
        parts = {name: data.with_labels(g.with_vocab(words, UNKNOWN), labels) for name, g in parts.items()}
        config = programs.settle(config, parts, paths, None if vectors is None else vectors.rows.shape[1])
        config = _settle(config, parts["train"], paths["train"])
        if config.train is None:
            labels = REVIEW_LABELS
        files = several.fingerprints(config, paths)
        notes = data.unseen_labels({name: g.label for name, g in parts.items()}, labels)
        return config, Data(parts["train"], parts["dev"], parts.get("test"), words, labels, files, vectors, notes=notes)

    def model(self, config: Config, data: Data) -> SoftmaxModel:
        parts = [g for g in (data.train, data.dev, data.test) if g is not None]
        arity, reads = max(g.max_fan_in for g in parts), any(map(programs.inner_reads, parts))
        return SoftmaxModel.create(config, len(data.words), len(data.labels), arity, reads)

    def restore(self, about: dict[str, Any]) -> SoftmaxModel:
        return SoftmaxModel.from_json(about["model"])

    def score(self, sums: Sums, config: Config) -> float:
        return accuracy(sums, "roots" if config.score == "root" else "vertices") or 0.0

    def shown(self, sums: Sums) -> str:
        parts = [f"loss {mean_nll(sums):.3f}"]
        parts += [f"root {_percent(sums, 'roots')}"] if sums["roots"] else []
        parts += [f"vertices {_percent(sums, 'vertices')}"] if sums["vertices"] > sums["roots"] else []
        return " ".join(parts)

    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        table = Table(title="the best epoch", title_justify="left", title_style="bold")
        for column in ("", "where", "labels", "majority", "accuracy"):
            table.add_column(column, justify="left" if column in ("", "where") else "right")
        for name, sums in results.items():
            part = self.parts(data)[name]
            for where in ("roots", "vertices"):
                base = majority(data.train, part, where == "roots")
                if sums[where] and base is not None and not (where == "vertices" and sums["vertices"] == sums["roots"]):
                    shown = "root" if where == "roots" else "all vertices"
                    right = f"[bold]{_percent(sums, where)}[/]"
                    table.add_row(name, shown, f"{int(sums[where])}", percent(base), right)
        return table

    def predict(self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str, asked: Asked) -> Predictions:
        graphs = _read_new(about, path)
        labels, read = tuple(about["labels"]), data.words_of(graphs)
        p = self._probabilities(about, model, weights, graphs, path)
        best = p.argmax(1)
        graph = np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets))
        rows = np.arange(len(graph)) if asked.vertices else root_rows(graphs)
        texts = phrases_of(graphs, read) if asked.vertices else sentences_of(graphs, read)

        def cells(row: int) -> Cells:
            g = int(graph[row])
            where = (g, row - int(graphs.vertex_offsets[g])) if asked.vertices else (g,)
            shown = (labels[best[row]], float(p[row, best[row]]), texts[row if asked.vertices else g])
            return (*where, *shown, *((p[row],) if asked.probabilities else ()))

        columns = ("graph", "vertex", "label", "probability", "text")
        columns = columns if asked.vertices else (columns[0], *columns[2:])
        return Predictions(columns, map(cells, rows.tolist()), labels if asked.probabilities else ())

    def evaluate(self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str) -> Evaluation:
        graphs = _read_new(about, path)
        labels, true = _true_labels(about, graphs, path)
        p = self._probabilities(about, model, weights, graphs, path)
        roots = root_rows(graphs)
        at_roots = np.full_like(true, -1)
        at_roots[roots] = true[roots]
        scores = {"roots": Scores.of("roots", labels, at_roots, p.argmax(1))}
        if (true >= 0).sum() > scores["roots"].count:
            scores["vertices"] = Scores.of("all vertices", labels, true, p.argmax(1))
        found = [s for s in scores.values() if s.count]
        lines = [("graphs", f"{len(graphs):,}"), *(s.summary() for s in found)]
        values = {"graphs": len(graphs), **{name: s.as_json() for name, s in scores.items() if s.count}}
        return Evaluation(values, tuple(lines), tuple(t for s in found for t in s.tables()), tuple(s.draw for s in found))

    def graphs(self, path: str) -> Graphs:
        return read_graphs(path)

    def _probabilities(
        self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, graphs: Graphs, path: str
    ) -> np.ndarray:
        """(V, C) the probabilities of the labels at every vertex."""
        known = graphs.with_vocab(about["words"], UNKNOWN)
        programs.check_fit(about["config"]["program"], known, f"FILE: {path}", getattr(model.program, "arity", None))
        probabilities = jax.jit(model.probabilities)
        p = np.zeros((known.num_vertices, model.num_labels), np.float32)
        for _, rows, batch in in_order(known, self.feed(model, known)):
            p[rows] = np.asarray(probabilities(weights, batch))[: len(rows)]
        return p


def _read_new(about: dict[str, Any], path: str) -> Graphs:
    """Reads the graphs to predict. A model of chains also reads plain text, one sentence per line."""
    check_file("file", path)
    name = about["config"]["program"]
    if bare_suffix(path) != ".txt" or (start := read_utf8(path).lstrip()[:60])[:1] in (b"(", b""):
        return read_graphs(path)
    if programs.PROGRAMS[name].arity == 1:
        return named_inputs(read_sentences(path))
    raise TrainError(
        f"FILE: got {path}, plain text that begins with {start.decode('utf-8', 'replace').splitlines()[0]!r}; expected graphs, "
        f"because this model (--program {name}) reads trees or DAGs. Write each sentence as a tree in brackets, "
        "(2 (2 not) (1 bad)), or in another format of `cavs predict --help`. Models of --program lstm, gru and elman-rnn, "
        "trained on chains in .jsonl, read plain sentences."
    )


def _true_labels(about: dict[str, Any], graphs: Graphs, path: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The labels of the model and of a file, and the label of each vertex as an index of them; -1 if it has none."""
    names: tuple[str, ...] = tuple(about["labels"])
    label = graphs.label
    if label is None or not (label >= 0).any():
        raise TrainError(f"FILE: got {path} without labels; expected a label at each root or at every vertex.")
    values, which = np.unique(label[label >= 0], return_inverse=True)
    if graphs.label_names is not None:
        used = [graphs.label_names[i] for i in values.tolist()]
    else:  # numbers; those of the reviews have names
        known = [*names] if about["config"]["train"] is None else []
        used = [known[i] if i < len(known) else str(i) for i in values.tolist()]
    if not set(used) & set(names):
        raise TrainError(f"FILE: got {path} with the labels {', '.join(used[:5])}; expected some of {', '.join(names)}.")
    labels = with_unseen(names, tuple(used))
    index = {name: i for i, name in enumerate(labels)}
    true = np.full(len(label), -1)
    true[label >= 0] = np.array([index[name] for name in used])[which]
    return labels, true


def _percent(sums: Sums, where: str) -> str:
    return percent(accuracy(sums, where))


def _read_labelled(path: str, name: str, variants: bool = False) -> Graphs:
    graphs = read_graphs(path, name, variants and name == "train")
    if graphs.graph_label is not None or graphs.label is not None and (graphs.label.dtype != np.int32 or graphs.label.ndim > 1):
        raise TrainError(f"{flag(name)}: got {path} with numbers to predict as labels. Write: cavs train --task regress FILE")
    if graphs.label is None or not (graphs.label >= 0).any():
        raise TrainError(
            f"{flag(name)}: got {path} without labels; expected a label at each root or at every vertex. To label it, write: "
            "cavs predict CHECKPOINT FILE"
        )
    return graphs


def read_graphs(path: str, name: str = "file", variants: bool = False) -> Graphs:
    """Reads a file of graphs by its suffix. The `input_id` of every vertex is an index of `vocab`.

    The labels of netlists are fifths of the probability that a gate is 1, found by simulation.

    Args:
        path: the file.
        name: the field of `Config` that names it, for messages.
        variants: whether variants of netlists are added; see `circuits`.

    Raises:
        TrainError: the file does not exist, has another format, or contains no graphs.
    """
    check_file(name, path)
    try:
        graphs = read(path)
    except FormatError as error:
        text = ".txt" in Path(path).suffixes and "expected UTF-8" not in str(error)
        hint = " For plain text write: cavs train --task lm FILE" if text else ""
        raise TrainError(f"{flag(name)}: {error}{hint}") from error
    except ValueError as error:
        raise TrainError(f"{flag(name)}: {error}") from error
    if bare_suffix(path) in NETLISTS and graphs.kind is not None:
        graphs = gates(with_variants(graphs) if variants else graphs)
        graphs = dataclasses.replace(graphs, label=fifths(probabilities(graphs)), label_names=FIFTHS)
    if not len(graphs):
        raise TrainError(f"{flag(name)}: got {path} without graphs; expected at least one.")
    return named_inputs(graphs)


def named_inputs(graphs: Graphs) -> Graphs:
    """The same graphs with named inputs: words or numbers; without inputs, the kinds; without kinds, one name for all."""
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


def _settle(config: Config, train: Graphs, path: str) -> Config:
    """Chooses where the loss and the score are computed: at the roots or at all vertices."""
    label = train.label
    assert label is not None
    at_root = np.zeros(len(label), bool)
    at_root[root_rows(train)] = True
    loss = config.loss or ("all" if (label[~at_root] >= 0).any() else "root")
    # The label of a phrase summarises its subtree, so that of the root describes the graph. If inner vertices read words, as in
    # dependency trees, the root is a word like any other.
    rooted = (label[at_root] >= 0).any()
    if loss == "root" and not rooted:
        raise TrainError(f"--loss: got root, but no root in {path} has a label. Write --loss all.")
    best_at = config.score or ("root" if loss == "root" or rooted and not programs.inner_reads(train) else "all")
    if best_at == "root" and not rooted:
        raise TrainError(f"--score: got root, but no root in {path} has a label. Write --score all.")
    return dataclasses.replace(config, loss=loss, score=best_at)


def majority(train: Graphs, graphs: Graphs, at_roots: bool) -> float | None:
    """The accuracy of always predicting the most frequent training label; `None` if there are no labels."""
    assert train.label is not None and graphs.label is not None
    seen, label = train.label, graphs.label
    if at_roots:
        seen, label = seen[root_rows(train)], label[root_rows(graphs)]
    seen, label = seen[seen >= 0], label[label >= 0]
    return float((label == np.bincount(seen).argmax()).mean()) if len(seen) and len(label) else None


TASK = Classify()
