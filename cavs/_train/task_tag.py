"""The task `tag`: a label for every word of a sentence, such as parts of speech or entities. Rare words are spelled."""

import dataclasses
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from rich.markup import escape
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._readers.source import printable
from cavs._train import data, programs, sentences
from cavs._train.batches import IN_ORDER, Feed, in_order
from cavs._train.chunks import Chunks, Found, f1
from cavs._train.config import Config, TrainError, flag
from cavs._train.data import UNKNOWN, Data
from cavs._train.model import Weights
from cavs._train.report import mean_nll, percent
from cavs._train.scores import Scores, with_unseen
from cavs._train.sentences import Sentences
from cavs._train.tagged import read_tagged
from cavs._train.tagger import TagModel
from cavs._train.task import Asked, Cells, Curve, Evaluation, Predictions, Sums, Task

PROGRAMS = ("char-bilstm", "bilstm")


def accuracy(sums: Sums) -> float:
    """The accuracy of labels."""
    return sums["right"] / max(sums["count"], 1)


def entity_f1(sums: Sums) -> float | None:
    """The F1 of entities as `conlleval` computes it; `None` if there are none."""
    return f1(sums["entities"], sums["guessed"], sums["both"]) if sums["entities"] + sums["guessed"] else None


def _f1_percent(sums: Sums) -> float | None:
    value = entity_f1(sums)
    return None if value is None else 100 * value


class Tag(Task):
    """A softmax over the labels at every word, scored by accuracy, or by F1 if the labels are those of entities."""

    defaults = {
        "program": "char-bilstm",
        "embedding_size": 128,
        "batch": 32,
        "epochs": 12,
        "optimizer": "adam",
        "lr": 0.002,
        "weight_decay": 0.0,
        "dropout": 0.3,
        "min_count": 5,
    }
    own = ("column", "char_size")
    foreign = {"also": "it reads one training file."} | dict.fromkeys(("loss", "score"), "a tagger labels every word.")
    needs_file = "a file of tagged sentences"
    noun = "sentence"
    predicts = "tag your own sentences"
    panels = (
        Curve("loss", (("", "-", mean_nll),)),
        Curve("accuracy, %", ((", labels", ":", lambda sums: 100 * accuracy(sums)), (", entity F1", "-", _f1_percent))),
    )

    def read(self, config: Config) -> tuple[Config, Data]:
        name = find_tagger(config.program)
        paths = data.paths_of(config)
        parts = {part: _read_labelled(path, config.column, part) for part, path in paths.items()}
        parts = data.with_dev(config, parts, paths["train"], self.noun)
        words, vectors = data.vocabulary(config, parts)
        labels = data.label_names(parts, paths)
        characters = _characters(parts["train"]) if name == "char-bilstm" else ()
        size = programs.settle_size(config, None if vectors is None else vectors.rows.shape[1])
        if characters and size % 2:
            raise TrainError(
                f"--embedding-size: got {size}; expected an even number: each direction computes one half of a word's vector."
            )
        config = dataclasses.replace(config, program=name, embedding_size=size)
        chains = {part: Sentences.of(g, words, labels, characters) for part, g in parts.items()}
        facts = {"characters": characters}
        files = data.fingerprints(paths)
        notes = data.unseen_labels({name: c.words.label for name, c in chains.items()}, labels)
        return config, Data(chains["train"], chains["dev"], chains.get("test"), words, labels, files, vectors, facts, notes)

    def model(self, config: Config, data: Data) -> TagModel:
        return TagModel.create(config, len(data.words), data.labels, len(data.facts["characters"]))

    def restore(self, about: dict[str, Any]) -> TagModel:
        return TagModel.from_json(about["model"], about["labels"])

    def feed(self, model: TagModel, part: Sentences, batch: int = IN_ORDER) -> Feed:
        return sentences.feed(part, model.num_words, batch)

    def score(self, sums: Sums, config: Config) -> float:
        value = entity_f1(sums)
        return accuracy(sums) if value is None else value

    def shown(self, sums: Sums) -> str:
        parts = [f"loss {mean_nll(sums):.3f}", f"accuracy {percent(accuracy(sums))}"]
        value = entity_f1(sums)
        return " ".join(parts if value is None else [*parts, f"F1 {100 * value:5.2f}"])

    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        entities = Chunks.of(data.labels) is not None
        table = Table(title="the best epoch", title_justify="left", title_style="bold")
        for column in (
            "",
            "words",
            *(("accuracy", "entities", "precision", "recall", "F1") if entities else ("majority", "accuracy")),
        ):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        label = data.train.words.label
        most = np.bincount(label[label >= 0]).argmax()
        for name, sums in results.items():
            true = self.parts(data)[name].words.label
            cells, right = [name, f"{int(sums['count'])}"], f"{100 * accuracy(sums):.2f} %"
            if entities:
                precision, recall = (100 * sums["both"] / max(sums[of], 1) for of in ("guessed", "entities"))
                cells += [right, f"{int(sums['entities'])}", f"{precision:.2f}", f"{recall:.2f}"]
                cells += [f"[bold]{_f1_percent(sums) or 0.0:.2f}[/]"]
            else:
                cells += [percent(float((true[true >= 0] == most).mean())), f"[bold]{right}[/]"]
            table.add_row(*cells)
        return table

    def predict(self, about: dict[str, Any], model: TagModel, weights: Weights, path: str, asked: Asked) -> Predictions:
        if asked.probabilities and not asked.vertices:
            raise TrainError("--probabilities: got it without --vertices; expected both for a tagger: one line per word.")
        graphs = read_tagged(path, about["config"]["column"], labelled=False)
        p = self._probabilities(about, model, weights, graphs)
        labels, best, read = tuple(about["labels"]), p.argmax(1), data.words_of(graphs)
        spans = [*pairwise(graphs.vertex_offsets.tolist())]
        if not asked.vertices:
            tagged = [(word, labels[i]) for word, i in zip(read, best.tolist(), strict=True)]
            return Predictions(("sentence", "text"), ((g, tagged[a:b]) for g, (a, b) in enumerate(spans)))

        def cells(g: int, a: int, row: int) -> Cells:
            shown = (g, row - a, labels[best[row]], float(p[row, best[row]]), read[row])
            return (*shown, *((p[row],) if asked.probabilities else ()))

        rows = (cells(g, a, row) for g, (a, b) in enumerate(spans) for row in range(a, b))
        return Predictions(("sentence", "word", "label", "probability", "text"), rows, labels if asked.probabilities else ())

    def evaluate(self, about: dict[str, Any], model: TagModel, weights: Weights, path: str) -> Evaluation:
        graphs = _read_labelled(path, about["config"]["column"], "file")
        assert graphs.label is not None and graphs.label_names is not None
        labels = with_unseen(tuple(about["labels"]), graphs.label_names)
        index = {name: i for i, name in enumerate(labels)}
        true = np.array([index[name] for name in graphs.label_names] + [-1])[graphs.label]
        best = self._probabilities(about, model, weights, graphs).argmax(1)
        scores = Scores.of("words", labels, true, best)
        values = {"sentences": len(graphs), "words": scores.as_json()}
        lines, tables = [("sentences", f"{len(graphs):,}"), scores.summary()], []
        chunks = Chunks.of(labels)
        if chunks is not None:
            entities = chunks.scores(true, best, np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets)))
            values["entities"] = {name: score._asdict() | {"f1": score.f1} for name, score in entities.items()}
            every = entities["all"]
            lines.append(("F1 of entities, as conlleval", f"{100 * every.f1:.2f} of {every.true:,}"))
            tables.append(_entity_table(entities))
        return Evaluation(values, tuple(lines), (*tables, *scores.tables()), (scores.draw,))

    def graphs(self, path: str) -> Graphs:
        return read_tagged(path, labelled=False)

    def _probabilities(self, about: dict[str, Any], model: TagModel, weights: Weights, graphs: Graphs) -> np.ndarray:
        """(V, labels) the probabilities of the labels of every word."""
        bare = dataclasses.replace(graphs, label=None, label_names=None)
        known = Sentences.of(bare, tuple(about["words"]), (), tuple(about["facts"]["characters"]))
        probabilities = jax.jit(model.probabilities)
        p = np.zeros((graphs.num_vertices, len(model.labels)), np.float32)
        for _, rows, batch in in_order(known.words, self.feed(model, known)):
            p[rows] = np.asarray(probabilities(weights, batch))[: len(rows)]
        return p


def _entity_table(entities: dict[str, Found]) -> Table:
    table = Table(title="entities", title_justify="left", title_style="bold")
    for column in ("", "count", "predicted", "precision", "recall", "F1"):
        table.add_column(column, justify="right" if column else "left")
    for name, score in entities.items():
        shares = (score.both / max(score.predicted, 1), score.both / max(score.true, 1), score.f1)
        table.add_row(escape(printable(name)), str(score.true), str(score.predicted), *(f"{100 * x:.1f}" for x in shares))
    return table


def find_tagger(name: str | None) -> str:
    """The full name of a tagger from itself or an unambiguous abbreviation. Raises a `TrainError` that lists the taggers."""
    found = programs.complete((name or PROGRAMS[0]).lower().replace("_", "-").removesuffix("-tagger"), PROGRAMS)
    if found is None:
        raise TrainError(f"--program: got {name!r}; expected one of {', '.join(PROGRAMS)} for --task tag.")
    return found


def _read_labelled(path: str, column: str | None, name: str) -> Graphs:
    graphs = read_tagged(path, column)
    if graphs.label is None or not (graphs.label >= 0).any():
        raise TrainError(
            f"{flag(name)}: got {path} without labels; expected one at every word. To tag it, write: cavs predict CHECKPOINT "
            "FILE"
        )
    return graphs


def _characters(train: Graphs) -> tuple[str, ...]:
    assert train.vocab is not None
    return (UNKNOWN, *dict.fromkeys(character for word in train.vocab for character in word))


TASK = Tag()
