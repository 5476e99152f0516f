"""The task `lm`: a language model over a text, one sentence per line (Cavs' Fixed-LSTM and Var-LSTM)."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._train import data, programs, text
from cavs._train.batches import Batch, in_order
from cavs._train.config import Config
from cavs._train.data import Data
from cavs._train.model import SoftmaxModel, Weights, read_rows
from cavs._train.report import mean_nll, perplexity, unigram_perplexity
from cavs._train.softmax import softmax_loss
from cavs._train.task import Cells, Curve, Sums, Task


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
    foreign = dict.fromkeys(("loss", "score"), "a language model predicts at every vertex.")
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

    def predict(
        self, about: dict[str, Any], model: SoftmaxModel, weights: Weights, path: str, vertices: bool
    ) -> Iterator[Cells]:
        graphs = text.read_text(path)
        return self._lines(model, weights, graphs, text.relabel(graphs, tuple(about["words"])))

    def _lines(self, model: SoftmaxModel, weights: Weights, graphs: Graphs, known: Graphs) -> Iterator[Cells]:
        @jax.jit
        def nll(weights: Weights, batch: Batch[jax.Array]) -> jax.Array:
            params, rows = weights.params, read_rows(weights.table, batch.words)
            h = model.hidden(params, rows, batch)
            return softmax_loss(h, params["w"], params["b"], batch.label, jnp.zeros_like(h[:, 0]))[1]

        values = np.zeros(known.num_vertices)
        for rows, batch in in_order(known, self.preparer(model, known, np.zeros((0, 1), int))):
            values[rows] = np.asarray(nll(weights, batch))[: len(rows)]
        read = data.words_of(graphs)
        for g in range(len(graphs)):
            start, stop = graphs.vertex_offsets[g], graphs.vertex_offsets[g + 1]
            mine = values[start:stop]
            yield g, f"{-mine.sum():.3f}", f"{np.exp(min(mine.mean(), 700)):.2f}", " ".join(read[start + 1 : stop])


TASK = LanguageModel()
