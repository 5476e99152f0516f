"""The task `nmt`: translation with an LSTM encoder-decoder with attention (Echo's first workload)."""

import dataclasses
from typing import Any

import numpy as np
from rich.table import Table

from cavs._feed.epochs import strata
from cavs._graphs.graphs import Graphs
from cavs._train import bleu, data, parallel, programs
from cavs._train.batches import IN_ORDER, Feed
from cavs._train.config import Config
from cavs._train.data import UNKNOWN, Data
from cavs._train.model import Weights
from cavs._train.parallel import END, Parallel
from cavs._train.phrases import sentences_of
from cavs._train.report import mean_nll, percent, perplexity, unigram_perplexity
from cavs._train.step import build_evaluation
from cavs._train.sums import sums_of
from cavs._train.task import Asked, Curve, Evaluation, Predictions, Sums, Task, refuse
from cavs._train.translator import Translator


def accuracy(sums: Sums) -> float:
    """The accuracy of words, each predicted from the true words before it."""
    return sums["right"] / max(sums["count"], 1)


class Translation(Task):
    """A softmax over the target words, scored by perplexity. `cavs predict` translates greedily."""

    defaults = {
        "hidden": 256,
        "batch": 32,
        "epochs": 10,
        "optimizer": "adam",
        "lr": 0.001,
        "weight_decay": 0.0,
        "min_count": 2,
    }
    foreign = {
        "also": "it reads one training file.",
        **dict.fromkeys(("loss", "score"), "a translator predicts every target word."),
        **dict.fromkeys(("program", "layers"), "it trains an encoder-decoder of one layer."),
        "embeddings": "it learns the vectors of both languages.",
    }
    needs_file = "a file of sentence pairs, `source TAB target` on each line"
    noun = "pair"
    predicts = "translate your own sentences"
    panels = (
        Curve("perplexity", (("", "-", perplexity),), log=True),
        Curve("words right, %", (("", "-", lambda sums: 100 * accuracy(sums)),)),
    )

    def read(self, config: Config) -> tuple[Config, Data]:
        paths = data.paths_of(config)
        read = {part: parallel.read_pairs(path) for part, path in paths.items()}
        sources, targets = ({part: sides[i] for part, sides in read.items()} for i in range(2))
        # The words of both languages are rows of one table. A word that occurs in both has one row.
        labels = data.vocabulary(config, targets, (UNKNOWN, END))[0]
        words = tuple(dict.fromkeys((*labels, *data.vocabulary(config, sources)[0])))
        parts = {part: Parallel.of(sources[part], targets[part], words, labels) for part in read}
        parts = data.with_dev(config, parts, paths["train"], self.noun)
        config = dataclasses.replace(config, program="encoder-decoder", embedding_size=programs.settle_size(config, None))
        return config, Data(parts["train"], parts["dev"], parts.get("test"), words, labels, data.fingerprints(paths))

    def model(self, config: Config, data: Data) -> Translator:
        return Translator.create(config, len(data.words), len(data.labels))

    def restore(self, about: dict[str, Any]) -> Translator:
        return Translator.from_json(about["model"])

    def feed(self, model: Translator, part: Parallel, batch: int = IN_ORDER) -> Feed:
        return parallel.feed(part, model.num_words)

    def score(self, sums: Sums, config: Config) -> float:
        return -mean_nll(sums)

    def shown(self, sums: Sums) -> str:
        return f"perplexity {perplexity(sums):8.1f} words right {percent(accuracy(sums))}"

    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        table = Table(title="the best epoch", title_justify="left", title_style="bold")
        for column in ("", "pairs", "target words", "unigram perplexity", "perplexity", "words right"):
            table.add_column(column, justify="left" if not column else "right")
        for name, sums in results.items():
            part = self.parts(data)[name]
            base = unigram_perplexity(data.train.pairs, part.pairs, len(data.labels))
            cells = f"{len(part)}", f"{int(sums['count'])}", f"{base:.1f}", f"[bold]{perplexity(sums):.1f}[/]"
            table.add_row(name, *cells, percent(accuracy(sums)))
        return table

    def predict(self, about: dict[str, Any], model: Translator, weights: Weights, path: str, asked: Asked) -> Predictions:
        refuse(asked, "nmt", "vertices", "probabilities")
        lines = self._translate(about, model, weights, parallel.read_sources(path))
        return Predictions(("sentence", "text"), enumerate(lines))

    def evaluate(self, about: dict[str, Any], model: Translator, weights: Weights, path: str) -> Evaluation:
        bleu.check_installed()
        sources, targets = parallel.read_pairs(path)
        part = Parallel.of(sources, targets, tuple(about["words"]), tuple(about["labels"]))
        sums = sums_of(build_evaluation(model), weights, self.feed(model, part).loader(IN_ORDER))
        found = bleu.score(self._translate(about, model, weights, sources), sentences_of(targets, data.words_of(targets)))
        values = {"pairs": len(part), "words": int(sums["count"]), "nll": mean_nll(sums), "perplexity": perplexity(sums)}
        lines = [
            ("pairs", f"{len(part):,}"),
            ("target words", f"{int(sums['count']):,} with {END}"),
            ("perplexity", f"{perplexity(sums):.2f}"),
            ("words right, each predicted from the true words before it", percent(accuracy(sums))),
            *((name, f"{value:.2f}   {signature}") for name, (value, signature) in found.items()),
        ]
        values["words_right"] = accuracy(sums)
        for name, (value, signature) in found.items():
            values |= {name.lower(): value, f"{name.lower()}_signature": signature}
        return Evaluation(values, tuple(lines))

    def graphs(self, path: str) -> Graphs:
        sources, targets = parallel.read_pairs(path)
        words = tuple(dict.fromkeys((UNKNOWN, END, *data.words_of(sources), *data.words_of(targets))))
        return dataclasses.replace(Parallel.of(sources, targets, words, words).pairs, label=None, vocab=words)

    def _translate(self, about: dict[str, Any], model: Translator, weights: Weights, sources: Graphs) -> list[str]:
        """The greedy translation of each chain of words."""
        labels, index = about["labels"], {word: i for i, word in enumerate(about["words"])}
        rows = np.array([index[word] for word in labels])
        sources = sources.with_vocab(about["words"], UNKNOWN)
        lines = [""] * len(sources)
        for numbers in strata(np.diff(sources.vertex_offsets), IN_ORDER, None):
            numbers = numbers[numbers >= 0]
            found = model.translate(weights, sources[numbers], rows, labels.index(END))
            for g, words in zip(numbers.tolist(), found, strict=True):
                lines[g] = " ".join(labels[i] for i in words)
        return lines


TASK = Translation()
