"""Prediction with a checkpoint. It needs neither the training data nor a script."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from cavs._readers.source import printable
from cavs._train import checkpoint
from cavs._train.config import Config, SaveError, TrainError, check_file
from cavs._train.model import Weights, weight_shapes
from cavs._train.task import Model, find_task


def predict(folder: str, path: str, out: str | None = None, vertices: bool = False) -> int:
    """Writes predictions for the samples of a file, in order, as tab-separated lines.

    - Classification: per root, the number of the graph, the label, its probability, and the words of the graph. With
      `vertices`, per vertex, the numbers of graph and vertex, the label, its probability, and the word.
    - Language model: the number of the sentence, its log-probability, the perplexity per word, and the sentence.
    - Tags: the number of the sentence, and its words as `word|TAG`. With `vertices`, as for classification.
    - Translation: the number of the sentence, and its translation.

    Args:
        folder: the folder of a run.
        path: the file of samples.
        out: the file to write; `None` writes to the terminal.
        vertices: whether to write a line per vertex.

    Returns:
        The number of lines.

    Raises:
        TrainError: the folder contains no valid checkpoint, or a file cannot be read or written.
    """
    about, model, weights = load_model(Path(folder))
    check_file("file", path)
    lines = find_task(about["task"]).predict(about, model, weights, path, vertices)
    count = 0
    with _open(out) as file:
        for line in lines:
            print(*map(printable, map(str, line)), sep="\t", file=file)
            count += 1
        file.flush()
    return count


def load_model(folder: Path) -> tuple[dict[str, Any], Model, Weights]:
    """Loads the facts, the model and the weights of a run: those of the best epoch, or of the last save in the first epoch."""
    given = folder
    if folder.is_file():
        folder = folder.parent
    if not (folder / "model.json").exists():
        raise TrainError(f"CHECKPOINT: got {given}; expected the folder of a run, as `cavs train --out DIR` writes it.")
    about = checkpoint.read_model(folder)
    task = find_task(about["task"])
    try:
        Config.from_json(about["config"])
        model = task.restore(about)
        shapes = weight_shapes(model)
        words, labels = len(about["words"]), len(about["labels"] or about["words"])
        if (words, labels) != (model.num_words, getattr(model, "num_labels", labels)):
            raise ValueError(f"got {words} words and {labels} labels, which differ from its sizes")
    except Exception as error:  # inconsistent sizes may fail anywhere in a program
        raise TrainError(f"{folder}/model.json does not describe a valid model ({error}). Restore it from a copy.") from error
    name = "best" if (folder / "best.json").exists() else "last"
    weights, saved = checkpoint.load(folder, name, shapes, about["run"])
    for place, array in jax.tree_util.tree_leaves_with_path(weights):
        if not np.isfinite(array).all():
            where = jax.tree_util.keystr(place)
            raise TrainError(f"{folder}/{saved['arrays']}: got NaN or infinity at {where}; expected finite weights.")
    return about, model, weights


@contextlib.contextmanager
def _open(out: str | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    try:
        with open(out, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise SaveError(f"--out: {out} cannot be written ({error.strerror}).") from error
