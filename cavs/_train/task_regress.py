"""The task `regress`: numbers at vertices, at roots, or of whole graphs, scored by their root mean squared error and R2."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._readers.source import bare_suffix
from cavs._train import data, programs, regressor, several
from cavs._train.batches import IN_ORDER, Feed, in_order
from cavs._train.circuits import probabilities
from cavs._train.config import Config, TrainError, flag
from cavs._train.data import UNKNOWN, Data, root_rows
from cavs._train.model import Weights
from cavs._train.phrases import phrases_of, sentences_of
from cavs._train.regressor import Regressor
from cavs._train.task import Asked, Curve, Evaluation, Predictions, Sums, Task, refuse
from cavs._train.task_classify import NETLISTS, read_graphs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rmse(sums: Sums) -> float:
    """The root mean squared error."""
    return math.sqrt(sums["nll"] / max(sums["count"], 1))


def deviation(sums: Sums) -> float:
    """The standard deviation of the targets: the error of always predicting their mean."""
    count = max(sums["count"], 1)
    return math.sqrt(max(sums["square"] / count - (sums["distance"] / count) ** 2, 0))


def r2(sums: Sums) -> float:
    """The coefficient of determination: 1 - squared errors / squared distances from the mean."""
    return 1 - (rmse(sums) / max(deviation(sums), 1e-30)) ** 2


class Regress(Task):
    """A linear layer with one output, trained on squared errors."""

    own = ("loss",)
    foreign = {"score": "the score of a regression is its error where the loss is computed."}
    needs_file = "a file of graphs with numbers as labels"
    predicts = "predict the numbers of your own graphs"
    panels = (Curve("root mean squared error", (("", "-", rmse),)), Curve("R2", (("", "-", r2),)))

    def read(self, config: Config) -> tuple[Config, Data]:
        paths = data.paths_of(config)
        parts = several.read_parts(config, paths, functools.partial(_read, variants=config.dev is not None))
        at = _where(config, parts["train"], paths["train"])
        parts = {name: _with_targets(g, at, paths[name], name) for name, g in parts.items()}
        parts = data.with_dev(config, parts, paths["train"])
        words, vectors = data.vocabulary(config, parts)
        parts = {name: g.with_vocab(words, UNKNOWN) for name, g in parts.items()}
        config = programs.settle(config, parts, paths, None if vectors is None else vectors.rows.shape[1])
        config = dataclasses.replace(config, loss=None if at == "graph" else at, score=None)
        values = _targets(parts["train"], at)
        values = values[~np.isnan(values)]
        facts = {"at": at, "mean": float(values.mean()), "scale": float(values.std()) or 1.0}
        files = several.fingerprints(config, paths)
        return config, Data(parts["train"], parts["dev"], parts.get("test"), words, words, files, vectors, facts)

    def model(self, config: Config, data: Data) -> Regressor:
        parts = [g for g in (data.train, data.dev, data.test) if g is not None]
        arity, reads = max(g.max_fan_in for g in parts), any(map(programs.inner_reads, parts))
        return Regressor.create(config, len(data.words), arity, reads, **data.facts)

    def restore(self, about: dict[str, Any]) -> Regressor:
        return Regressor.from_json(about["model"])

    def feed(self, model: Regressor, part: Graphs, batch: int = IN_ORDER) -> Feed:
        return regressor.feed(part, model.num_words, model.at)

    def score(self, sums: Sums, config: Config) -> float:
        return -rmse(sums)

    def shown(self, sums: Sums) -> str:
        return f"RMSE {rmse(sums):.4g} R2 {r2(sums):7.4f}"

    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        table = Table(title="the best epoch", title_justify="left", title_style="bold")
        for column in ("", "labels", "standard deviation", "RMSE", "R2"):
            table.add_column(column, justify="left" if not column else "right")
        for name, sums in results.items():
            shown = (f"{deviation(sums):.4g}", f"{rmse(sums):.4g}", f"[bold]{r2(sums):.4f}[/]")
            table.add_row(name, f"{int(sums['count'])}", *shown)
        return table

    def predict(self, about: dict[str, Any], model: Regressor, weights: Weights, path: str, asked: Asked) -> Predictions:
        refuse(asked, "regress", "probabilities")
        graphs = _read(path)
        read, at = data.words_of(graphs), "all" if asked.vertices else model.at
        values = self._values(about, model, weights, graphs, path, at).tolist()
        graph = np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets)).tolist()
        if asked.vertices:
            texts, starts = phrases_of(graphs, read), graphs.vertex_offsets.tolist()
            rows = ((g, row - starts[g], values[row], texts[row]) for row, g in enumerate(graph))
            return Predictions(("graph", "vertex", "prediction", "text"), rows)
        texts = sentences_of(graphs, read)
        numbers = range(len(graphs)) if at == "graph" else [graph[row] for row in self._rows(graphs, "root")]
        places = numbers if at == "graph" else self._rows(graphs, "root").tolist()
        rows = ((g, values[place], texts[g]) for g, place in zip(numbers, places, strict=True))
        return Predictions(("graph", "prediction", "text"), rows)

    def evaluate(self, about: dict[str, Any], model: Regressor, weights: Weights, path: str) -> Evaluation:
        graphs = _with_targets(_read(path), model.at, path, "file")
        true, rows = _targets(graphs, model.at), self._rows(graphs, model.at)
        guess = self._values(about, model, weights, graphs, path, model.at)[rows]
        has = ~np.isnan(true)
        true, guess = true[has], guess[has]
        error = guess - true
        squares, spread = float(np.mean(error**2)), float(np.var(true))
        values = {"graphs": len(graphs), "count": len(true), "rmse": math.sqrt(squares), "mae": float(np.abs(error).mean())}
        values |= {"r2": 1 - squares / max(spread, 1e-30), "standard_deviation": math.sqrt(spread)}
        lines = (
            ("graphs", f"{len(graphs):,}"),
            ("labels", f"{len(true):,}, standard deviation {values['standard_deviation']:.4g}"),
            ("RMSE", f"{values['rmse']:.4g}"),
            ("mean absolute error", f"{values['mae']:.4g}"),
            ("R2", f"{values['r2']:.4f}"),
        )
        return Evaluation(values, lines, pictures=(functools.partial(_scatter, true, guess, values["r2"]),))

    def graphs(self, path: str) -> Graphs:
        return _read(path)

    @staticmethod
    def _rows(graphs: Graphs, at: str) -> np.ndarray:
        """The rows of the predictions that count: of vertices, of the roots among them, or of graphs."""
        return root_rows(graphs) if at == "root" else np.arange(len(graphs) if at == "graph" else graphs.num_vertices)

    def _values(
        self, about: dict[str, Any], model: Regressor, weights: Weights, graphs: Graphs, path: str, at: str
    ) -> np.ndarray:
        """The predictions of graphs (G,), or of all vertices (V,)."""
        known = dataclasses.replace(graphs.with_vocab(about["words"], UNKNOWN), label=None, label_names=None, graph_label=None)
        programs.check_fit(about["config"]["program"], known, f"FILE: {path}", getattr(model.program, "arity", None))
        at = "graph" if at == "graph" else "all"
        predictions = jax.jit(functools.partial(model.predictions, at=at))
        values = np.zeros(len(graphs) if at == "graph" else graphs.num_vertices)
        for numbers, rows, batch in in_order(known, regressor.feed(known, model.num_words, at)):
            where = numbers if at == "graph" else rows
            values[where] = np.asarray(predictions(weights, batch))[: len(where)]
        return values


def _where(config: Config, train: Graphs, path: str) -> str:
    """Where the targets are: "graph", "root" or "all"."""
    if train.graph_label is not None:
        if config.loss == "all":  # a resumed run has "root"
            raise TrainError(f"--loss: got {config.loss}, but the labels of {path} are those of graphs. Omit --loss.")
        return "graph"
    values = _targets(train, "all")
    values[root_rows(train)] = np.nan
    return config.loss or ("root" if np.isnan(values).all() else "all")


def _targets(graphs: Graphs, at: str) -> np.ndarray:
    """(G,), (R,) or (V,) float64 targets, NaN if there is none."""
    if at == "graph":
        return np.full(len(graphs), np.nan) if graphs.graph_label is None else np.array(graphs.graph_label, np.float64)
    label = graphs.label
    if label is None or label.ndim > 1 or graphs.label_names is not None:
        return np.full(graphs.num_vertices if at == "all" else len(root_rows(graphs)), np.nan)
    values = np.where(label < 0, np.nan, label) if label.dtype == np.int32 else np.array(label, np.float64)
    return values[root_rows(graphs)] if at == "root" else values


def _with_targets(graphs: Graphs, at: str, path: str, name: str) -> Graphs:
    """The graphs with float64 targets. Raises a `TrainError` if there are none, or they are not single numbers."""
    shape = () if graphs.graph_label is None else graphs.graph_label.shape[1:]
    shape = shape if at == "graph" or graphs.label is None else graphs.label.shape[1:]
    if shape:
        raise TrainError(f"{flag(name)}: got {path} with labels of shape {shape}; --task regress expects one number each.")
    values = _targets(graphs, at)
    if np.isnan(values).all():
        what = {"graph": "each graph", "root": "each root", "all": "vertices"}[at]
        raise TrainError(
            f"{flag(name)}: got {path} without numbers as labels of {what}; expected such as "
            '{"children": [[], [0]], "label": 0.73} or "labels": [null, 0.73] in .jsonl.'
        )
    if at == "graph":
        return dataclasses.replace(graphs, graph_label=values, label=None, label_names=None)
    return dataclasses.replace(graphs, label=_targets(graphs, "all"))


def _read(path: str, name: str = "file", variants: bool = False) -> Graphs:
    """As `read_graphs`. The labels of a netlist are the probabilities that its gates are 1."""
    graphs = read_graphs(path, name, variants and name == "train")
    if bare_suffix(path) in NETLISTS:
        graphs = dataclasses.replace(graphs, label=probabilities(graphs), label_names=None)
    return graphs


def _scatter(true: np.ndarray, guess: np.ndarray, score: float, ax: "Axes") -> None:
    ax.plot(true, guess, ".", color="tab:blue", alpha=min(1.0, 30 / math.sqrt(len(true))), markersize=4)
    ends = [min(true.min(), guess.min()), max(true.max(), guess.max())]
    ax.plot(ends, ends, color="tab:gray", linewidth=1)
    ax.set(xlabel="true", ylabel="predicted", title=f"R2 {score:.4f}, {len(true):,} labels")


TASK = Regress()
