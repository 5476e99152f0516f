"""Labelling new graphs with a checkpoint, which is all that is needed: no training data, no script."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs import Graphs
from cavs._train import checkpoint, programs, text
from cavs._train.batches import Batch, prepare, strata
from cavs._train.config import TrainError
from cavs._train.data import UNKNOWN, read_graphs, root_rows
from cavs._train.model import Model, Weights, read_rows
from cavs._train.softmax import softmax_loss

BATCH = 64


def predict(folder: str, path: str, out: str | None = None, vertices: bool = False) -> int:
    """Labels the graphs of a file, in order; tab-separated to `out` or to the terminal.

    - classification: number of the graph, label, its probability, the graph's words, a line a root; with `vertices` a
      line a vertex: number of the graph, number of the vertex, label, probability, word.
    - language model: number of the sentence, log-probability, perplexity of a word, the sentence.

    **Returns:** the number of lines. **Raises:** `TrainError`.
    """
    about, model, weights = load_model(Path(folder))
    graphs = read_graphs(path, about["task"])
    words = tuple(about["words"])
    if about["task"] == "lm":
        known = text.relabel(graphs, words)
        lines = _score(model, weights, graphs, known)
    else:
        known = graphs.with_vocab(words, UNKNOWN)
        name = about["config"]["program"]
        programs.check_fit(name, known, path, getattr(model.program, "arity", None))
        lines = _label(model, weights, graphs, known, about["labels"], vertices)
    with _open(out) as file:
        count = 0
        for line in lines:
            print(*line, sep="\t", file=file)
            count += 1
    return count


def load_model(folder: Path) -> tuple[dict[str, Any], Model, Weights]:
    """What a checkpoint tells, its model and weights: of the best epoch, or before the first one's end the last saved."""
    if folder.is_file():
        folder = folder.parent
    about = checkpoint.read_json(folder, "model")
    model = Model.from_json(about["model"])
    name = "best" if (folder / "best.json").exists() else "last"
    return about, model, checkpoint.load(folder, name, model.shapes())[0]


def _batches(graphs: Graphs, model: Model) -> Iterator[tuple[np.ndarray, Batch]]:
    """The rows that a batch's first vertices have in `graphs`, and the batch."""
    for numbers in strata(np.diff(graphs.vertex_offsets), BATCH, None):
        numbers = numbers[np.argsort(numbers < 0, kind="stable")]  # what stands in for missing graphs comes last
        yield _rows(graphs, numbers[numbers >= 0]), prepare(graphs, numbers, model.num_words)


def _label(
    model: Model, weights: Weights, graphs: Graphs, known: Graphs, labels: list[str], vertices: bool
) -> Iterator[tuple[Any, ...]]:
    @jax.jit
    def best(weights: Weights, batch: Batch) -> tuple[Any, Any]:
        p = model.probabilities(weights, batch)
        return jnp.argmax(p, -1), jnp.max(p, -1)

    label, probability = np.zeros(known.num_vertices, int), np.zeros(known.num_vertices)
    for rows, batch in _batches(known, model):
        label[rows], probability[rows] = (np.asarray(x)[: len(rows)] for x in best(weights, batch))
    graph = np.repeat(np.arange(len(graphs)), np.diff(graphs.vertex_offsets))
    read = _words(graphs)
    for row in range(len(graph)) if vertices else root_rows(graphs):
        g = int(graph[row])
        start, stop = graphs.vertex_offsets[g], graphs.vertex_offsets[g + 1]
        shown = labels[label[row]], f"{probability[row]:.4f}"
        yield (g, row - start, *shown, read[row]) if vertices else (g, *shown, " ".join(filter(None, read[start:stop])))


def _score(model: Model, weights: Weights, graphs: Graphs, known: Graphs) -> Iterator[tuple[Any, ...]]:
    @jax.jit
    def nll(weights: Weights, batch: Batch) -> Any:
        params, rows = weights.params, read_rows(weights.table, batch)
        h = model.hidden(params, rows, batch)
        return softmax_loss(h, params["w"], params["b"], batch.label, jnp.zeros_like(h[:, 0]))[1]

    values = np.zeros(known.num_vertices)
    for rows, batch in _batches(known, model):
        values[rows] = np.asarray(nll(weights, batch))[: len(rows)]
    read = _words(graphs)
    for g in range(len(graphs)):
        start, stop = graphs.vertex_offsets[g], graphs.vertex_offsets[g + 1]
        mine = values[start:stop]
        yield g, f"{-mine.sum():.3f}", f"{np.exp(min(mine.mean(), 700)):.2f}", " ".join(read[start + 1 : stop])


def _rows(graphs: Graphs, numbers: np.ndarray) -> np.ndarray:
    starts, stops = graphs.vertex_offsets[numbers].tolist(), graphs.vertex_offsets[numbers + 1].tolist()
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])


def _words(graphs: Graphs) -> list[str]:
    assert graphs.vocab is not None and graphs.input_id is not None
    names = [*graphs.vocab, ""]
    return [names[i] for i in graphs.input_id.tolist()]


@contextlib.contextmanager
def _open(out: str | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    try:
        file = open(out, "w", encoding="utf-8")
    except OSError as error:
        raise TrainError(f"--out: {out} cannot be written ({error.strerror}).") from error
    with file:
        yield file
