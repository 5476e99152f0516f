"""The task `tag`: a label for every word of a sentence, such as parts of speech or entities. Rare words are spelled."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._train import data, programs, sentences
from cavs._train.batches import Prepare, in_order, in_order_grid
from cavs._train.chunks import Chunks, f1
from cavs._train.config import Config, TrainError, flag
from cavs._train.data import UNKNOWN, Data
from cavs._train.model import Weights
from cavs._train.report import mean_nll, percent
from cavs._train.sentences import Sentences
from cavs._train.tagged import read_tagged
from cavs._train.tagger import TagModel
from cavs._train.task import Cells, Curve, Sums, Task

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
    foreign = dict.fromkeys(("loss", "score"), "a tagger labels every word.")
    needs_file = "a file of tagged sentences"
    noun = "sentences"
    predicts = "tag your own sentences"
    panels = (
        Curve("loss", (("", "-", mean_nll),)),
        Curve("accuracy, %", ((", labels", ":", lambda sums: 100 * accuracy(sums)), (", entity F1", "-", _f1_percent))),
    )

    def read(self, config: Config) -> tuple[Config, Data]:
        name = find_tagger(config.program)
        paths = data.paths_of(config)
        parts = {part: _read_labelled(path, config.column, part) for part, path in paths.items()}
        parts = data.with_dev(config, parts, paths["train"], "sentence")
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

    def sizes(self, part: Sentences) -> np.ndarray:
        return np.diff(part.words.vertex_offsets)

    def preparer(self, model: TagModel, part: Sentences, grid: np.ndarray) -> Prepare:
        return sentences.preparer(part, grid, model.num_words)

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

    def predict(self, about: dict[str, Any], model: TagModel, weights: Weights, path: str, vertices: bool) -> Iterator[Cells]:
        graphs = read_tagged(path, about["config"]["column"], labelled=False)
        bare = dataclasses.replace(graphs, label=None, label_names=None)
        known = Sentences.of(bare, tuple(about["words"]), (), tuple(about["facts"]["characters"]))
        return self._lines(about["labels"], model, weights, graphs, known, vertices)

    def _lines(
        self, labels: list[str], model: TagModel, weights: Weights, graphs: Graphs, known: Sentences, vertices: bool
    ) -> Iterator[Cells]:
        best = jax.jit(model.best)
        label, probability = np.zeros(graphs.num_vertices, int), np.zeros(graphs.num_vertices)
        prepare = self.preparer(model, known, in_order_grid(self.sizes(known)))
        for rows, batch in in_order(known.words, prepare):
            label[rows], probability[rows] = (np.asarray(x)[: len(rows)] for x in best(weights, batch))
        read = data.words_of(graphs)
        for g in range(len(graphs)):
            rows = range(*graphs.vertex_offsets[g : g + 2].tolist())
            if vertices:
                for v, row in enumerate(rows):
                    yield g, v, labels[label[row]], f"{probability[row]:.4f}", read[row]
            else:
                yield g, " ".join(f"{read[row]}|{labels[label[row]]}" for row in rows)


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
