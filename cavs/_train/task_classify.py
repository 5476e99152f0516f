"""The task `classify`: labels of trees and DAGs, at the roots or at every vertex. The default data are reviews."""

import dataclasses
import importlib.resources
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError, read
from cavs._train import data, programs
from cavs._train.batches import Batch, in_order
from cavs._train.config import Config, TrainError, check_file, flag
from cavs._train.data import UNKNOWN, Data, root_rows
from cavs._train.model import SoftmaxModel, Weights
from cavs._train.report import mean_nll, percent
from cavs._train.task import Cells, Curve, Sums, Task

# The reviews shipped with the package, and the meanings of their labels 0 to 4.
REVIEWS = {"train": "reviews.train.txt", "dev": "reviews.dev.txt"}
REVIEW_LABELS = ("very negative", "negative", "neutral", "positive", "very positive")


def accuracy(sums: Sums, where: str) -> float | None:
    """The accuracy at `where` ("roots" or "vertices"); `None` if there are no labels."""
    return sums[f"{where}_right"] / sums[where] if sums[where] else None


class Classify(Task):
    """A softmax over the labels at roots or vertices, scored by accuracy."""

    inspectable = True
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
        parts = {name: _read_labelled(path, name) for name, path in paths.items()}
        parts = data.with_dev(config, parts, paths["train"])
        words, vectors = data.vocabulary(config, parts)
        labels = data.label_names(parts, paths)
        parts = {name: data.with_labels(g.with_vocab(words, UNKNOWN), labels) for name, g in parts.items()}
        config = programs.settle(config, parts, paths, None if vectors is None else vectors.rows.shape[1])
        config = _settle(config, parts["train"], paths["train"])
        if config.train is None:
            labels = REVIEW_LABELS
        files = data.fingerprints(paths)
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

    def predict(
        self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str, vertices: bool
    ) -> Iterator[Cells]:
        graphs = read_graphs(path)
        known = graphs.with_vocab(about["words"], UNKNOWN)
        programs.check_fit(about["config"]["program"], known, f"FILE: {path}", getattr(model.program, "arity", None))
        return self._lines(about["labels"], model, weights, graphs, known, vertices)

    def _lines(
        self, labels: list[str], model: SoftmaxModel, weights: Weights, graphs: Graphs, known: Graphs, vertices: bool
    ) -> Iterator[Cells]:
        @jax.jit
        def best(weights: Weights, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
            p = model.probabilities(weights, batch)
            return jnp.argmax(p, -1), jnp.max(p, -1)

        label, probability = np.zeros(known.num_vertices, int), np.zeros(known.num_vertices)
        for rows, batch in in_order(known, self.preparer(model, known, np.zeros((0, 1), int))):
            label[rows], probability[rows] = (np.asarray(x)[: len(rows)] for x in best(weights, batch))
        graph = np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets))
        read = data.words_of(graphs)
        for row in range(len(graph)) if vertices else root_rows(graphs):
            g = int(graph[row])
            start, stop = graphs.vertex_offsets[g], graphs.vertex_offsets[g + 1]
            shown = labels[label[row]], f"{probability[row]:.4f}"
            yield (g, row - start, *shown, read[row]) if vertices else (g, *shown, " ".join(filter(None, read[start:stop])))


def _percent(sums: Sums, where: str) -> str:
    return percent(accuracy(sums, where))


def _read_labelled(path: str, name: str) -> Graphs:
    graphs = read_graphs(path, name)
    if graphs.label is None or not (graphs.label >= 0).any():
        raise TrainError(
            f"{flag(name)}: got {path} without labels; expected a label at each root or at every vertex. To label it, write: "
            "cavs predict CHECKPOINT FILE"
        )
    return graphs


def read_graphs(path: str, name: str = "file") -> Graphs:
    """Reads a file of graphs by its suffix. The `input_id` of every vertex is an index of `vocab`.

    Args:
        path: the file.
        name: the field of `Config` that names it, for messages.

    Raises:
        TrainError: the file does not exist, has another format, or contains no graphs.
    """
    check_file(name, path)
    try:
        graphs = read(path)
    except FormatError as error:
        hint = " For plain text write: cavs train --task lm FILE" if ".txt" in Path(path).suffixes else ""
        raise TrainError(f"{flag(name)}: {error}{hint}") from error
    except ValueError as error:
        raise TrainError(f"{flag(name)}: {error}") from error
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
