"""The task `lm`: a language model over a text, one sentence per line (Cavs' Fixed-LSTM and Var-LSTM)."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._train import data, programs, text
from cavs._train.batches import StepInput, in_order
from cavs._train.config import Config
from cavs._train.data import Data
from cavs._train.model import SoftmaxModel, Weights, read_rows
from cavs._train.report import mean_nll, perplexity, unigram_perplexity
from cavs._train.softmax import softmax_loss
from cavs._train.task import Asked, Cells, Curve, Evaluation, Predictions, Sums, Task, refuse


class LanguageModel(Task):
    """A softmax over the words at every vertex, scored by perplexity."""

    defaults = {
        "hidden": 200,
        "epochs": 10,
        "optimizer": "adam",
        "lr": 0.002,
        "weight_decay": 0.0,
        "min_count": 2,
        "loss": "all",
        "score": "all",
    }
    foreign = {"also": "it reads one training file."} | dict.fromkeys(
        ("loss", "score"), "a language model predicts at every vertex."
    )
    needs_file = "a text file, one sentence per line"
    predicts = "score your own sentences"
    panels = (Curve("perplexity", (("", "-", perplexity),), log=True),)

    def read(self, config: Config) -> tuple[Config, Data]:
        paths = data.paths_of(config)
        parts = data.with_dev(config, {name: text.read_text(path) for name, path in paths.items()}, paths["train"])
        words, vectors = data.vocabulary(config, parts, (data.UNKNOWN, *text.MARKS))
        parts = {name: text.relabel(g, words) for name, g in parts.items()}
        config = programs.settle(config, parts, paths, None if vectors is None else vectors.rows.shape[1])
        files = data.fingerprints(paths)
        return config, Data(parts["train"], parts["dev"], parts.get("test"), words, words, files, vectors)

    def model(self, config: Config, data: Data) -> SoftmaxModel:
        return SoftmaxModel.create(config, len(data.words), len(data.labels), arity=1, inner_reads=True)

    def restore(self, about: dict[str, Any]) -> SoftmaxModel:
        return SoftmaxModel.from_json(about["model"])

    def score(self, sums: Sums, config: Config) -> float:
        return -mean_nll(sums)

    def shown(self, sums: Sums) -> str:
        return f"perplexity {perplexity(sums):8.1f}"

    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        table = Table(title="the best epoch", title_justify="left", title_style="bold")
        for column in ("", "sentences", "words", "unigram perplexity", "perplexity"):
            table.add_column(column, justify="left" if not column else "right")
        for name, sums in results.items():
            part = self.parts(data)[name]
            base = unigram_perplexity(data.train, part, len(data.labels))
            table.add_row(name, f"{len(part)}", f"{int(sums['count'])}", f"{base:.1f}", f"[bold]{perplexity(sums):.1f}[/]")
        return table

    def predict(self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str, asked: Asked) -> Predictions:
        refuse(asked, "lm", "probabilities")
        graphs = text.read_text(path)
        nll = self._nll(model, weights, text.relabel(graphs, tuple(about["words"])))
        assert graphs.label_names is not None and graphs.label is not None
        following = [graphs.label_names[i] for i in graphs.label.tolist()]
        spans = [*pairwise(graphs.vertex_offsets.tolist())]
        if asked.vertices:
            rows = ((g, v, following[a + v], -float(nll[a + v])) for g, (a, b) in enumerate(spans) for v in range(b - a))
            return Predictions(("sentence", "word", "text", "log_probability"), rows)

        def cells(g: int) -> Cells:
            a, b = spans[g]
            mine = nll[a:b]
            return g, -float(mine.sum()), float(np.exp(min(mine.mean(), 700))), " ".join(following[a : b - 1])

        return Predictions(("sentence", "log_probability", "perplexity", "text"), map(cells, range(len(graphs))))

    def evaluate(self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str) -> Evaluation:
        graphs = text.read_text(path)
        known = text.relabel(graphs, tuple(about["words"]))
        nll = self._nll(model, weights, known)
        assert known.label is not None
        unknown = int((known.label == about["words"].index(data.UNKNOWN)).sum())
        value = float(np.exp(min(nll.mean(), 700)))
        values = {"sentences": len(graphs), "words": len(nll), "unknown_words": unknown}
        lines = (
            ("sentences", f"{len(graphs):,}"),
            ("words", f"{len(nll):,} with </s>, {unknown:,} of them read as {data.UNKNOWN}"),
            ("perplexity", f"{value:.2f}"),
        )
        return Evaluation(values | {"nll": float(nll.mean()), "perplexity": value}, lines)

    def graphs(self, path: str) -> Graphs:
        return text.read_text(path)

    def _nll(self, model: SoftmaxModel, weights: Weights, known: Graphs) -> np.ndarray:
        """(V,) the negative log-likelihood of the word after each vertex."""

        @jax.jit
        def nll(weights: Weights, batch: StepInput[jax.Array]) -> jax.Array:
            params, rows = weights.params, read_rows(weights.table, batch.words)
            h = model.hidden(params, rows, batch)
            return softmax_loss(h, params["w"], params["b"], batch.label, jnp.zeros_like(h[:, 0]))[1]

        values = np.zeros(known.num_vertices)
        for _, rows, batch in in_order(known, self.feed(model, known)):
            values[rows] = np.asarray(nll(weights, batch))[: len(rows)]
        return values


TASK = LanguageModel()
