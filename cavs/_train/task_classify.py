"""The task `classify`: labels of trees and DAGs, at their roots or at every vertex; sentiment of reviews by default."""

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
from cavs._train.config import Config, TrainError
from cavs._train.data import UNKNOWN, Data, root_rows
from cavs._train.model import Model, Weights
from cavs._train.report import mean_nll, percent
from cavs._train.task import Curve, Sums, Task

# The reviews shipped with the package, and what their labels 0 to 4 mean.
REVIEWS = {"train": "reviews.train.txt", "dev": "reviews.dev.txt"}
REVIEW_LABELS = ("very negative", "negative", "neutral", "positive", "very positive")


def accuracy(sums: Sums, where: str) -> float | None:
    """At `where`, "roots" or "vertices"; `None` where there are no labels."""
    return sums[f"{where}_right"] / sums[where] if sums[where] else None


class Classify(Task):
    """Softmax over the labels at roots or vertices; accuracy."""

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
        parts = {name: _labelled(path) for name, path in paths.items()}
        parts = data.with_dev(config, parts, paths["train"])
        words, vectors = data.vocabulary(config, parts)
        labels = data.label_names(parts, paths)
        parts = {name: data.with_labels(g.with_vocab(words, UNKNOWN), labels) for name, g in parts.items()}
        config = programs.settle(config, parts, paths, None if vectors is None else vectors.rows.shape[1])
        config = _settle(config, parts["train"], paths["train"])
        if config.train is None:
            labels = REVIEW_LABELS
        files = data.fingerprints(paths)
        return config, Data(parts["train"], parts["dev"], parts.get("test"), words, labels, files, vectors)

    def model(self, config: Config, data: Data) -> Model:
        parts = [g for g in (data.train, data.dev, data.test) if g is not None]
        arity, reads = max(g.max_fan_in for g in parts), any(map(programs.inner_reads, parts))
        return Model.make(config, len(data.words), len(data.labels), arity, reads)

    def restore(self, about: dict[str, Any]) -> Model:
        return Model.from_json(about["model"])

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
        self, about: dict[str, Any], model: Model, weights: Weights, path: str, vertices: bool
    ) -> Iterator[tuple[Any, ...]]:
        graphs = read_graphs(path)
        known = graphs.with_vocab(about["words"], UNKNOWN)
        programs.check_fit(about["config"]["program"], known, path, getattr(model.program, "arity", None))
        return self._lines(about["labels"], model, weights, graphs, known, vertices)

    def _lines(
        self, labels: list[str], model: Model, weights: Weights, graphs: Graphs, known: Graphs, vertices: bool
    ) -> Iterator[tuple[Any, ...]]:
        @jax.jit
        def best(weights: Weights, batch: Batch) -> tuple[Any, Any]:
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


def _labelled(path: str) -> Graphs:
    graphs = read_graphs(path)
    if graphs.label is None or not (graphs.label >= 0).any():
        raise TrainError(f"{path} has no labels; wanted a label at each root or at every vertex. To label it: cavs predict.")
    return graphs


def read_graphs(path: str) -> Graphs:
    """One file of graphs, by its suffix, of which every vertex's `input_id` names a word of `vocab`.

    **Raises:** `TrainError`, `FormatError`.
    """
    if not Path(path).is_file():
        raise TrainError(f"there is no file {path}.")
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


def _settle(config: Config, train: Graphs, path: str) -> Config:
    """Where the loss is, and the score."""
    label = train.label
    assert label is not None
    at_root = np.zeros(len(label), bool)
    at_root[root_rows(train)] = True
    loss = config.loss or ("all" if (label[~at_root] >= 0).any() else "root")
    # A phrase's label sums up its subtree, so the root's is the graph's; where inner vertices read words of their own, as in
    # dependency trees, the root is a word like any other.
    rooted = (label[at_root] >= 0).any()
    if loss == "root" and not rooted:
        raise TrainError(f"--loss root, but no root of {path} has a label; wanted --loss all.")
    best_at = config.score or ("root" if loss == "root" or rooted and not programs.inner_reads(train) else "all")
    if best_at == "root" and not rooted:
        raise TrainError(f"--score root, but no root of {path} has a label; wanted --score all.")
    return dataclasses.replace(config, loss=loss, score=best_at)


def majority(train: Graphs, graphs: Graphs, at_roots: bool) -> float | None:
    """The accuracy of always answering training's most frequent label; `None` where there are no labels."""
    assert train.label is not None and graphs.label is not None
    ours, theirs = train.label, graphs.label
    if at_roots:
        ours, theirs = ours[root_rows(train)], theirs[root_rows(graphs)]
    ours, theirs = ours[ours >= 0], theirs[theirs >= 0]
    return float((theirs == np.bincount(ours).argmax()).mean()) if len(ours) and len(theirs) else None


TASK = Classify()
