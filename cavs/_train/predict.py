"""Labelling new graphs with a checkpoint, which is all that is needed: no training data, no script."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from cavs._readers.source import printable
from cavs._train import checkpoint
from cavs._train.config import Config, SaveError, TrainError
from cavs._train.model import weight_shapes
from cavs._train.task import find


def predict(folder: str, path: str, out: str | None = None, vertices: bool = False) -> int:
    """Labels the graphs of a file, in order; tab-separated to `out` or to the terminal.

    - classification: number of the graph, label, its probability, the graph's words, a line a root; with `vertices` a
      line a vertex: number of the graph, number of the vertex, label, probability, word.
    - language model: number of the sentence, log-probability, perplexity of a word, the sentence.
    - tags: number of the sentence, its words as `word|TAG`; with `vertices` as in classification.
    - translation: number of the sentence, its translation.

    **Returns:** the number of lines. **Raises:** `TrainError`.
    """
    about, model, weights = load_model(Path(folder))
    if not Path(path).is_file():
        raise TrainError(f"there is no file {path}.")
    lines = find(about["task"]).predict(about, model, weights, path, vertices)
    count = 0
    with _open(out) as file:
        for line in lines:
            print(*map(printable, map(str, line)), sep="\t", file=file)
            count += 1
        file.flush()
    return count


def load_model(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """What a checkpoint tells, its model and weights: of the best epoch, or before the first one's end the last saved."""
    if folder.is_file():
        folder = folder.parent
    about = checkpoint.read_model(folder)
    task = find(about["task"])
    try:
        Config.from_json(about["config"])
        model = task.restore(about)
        shapes = weight_shapes(model)
        words, labels = len(about["words"]), len(about["labels"] or about["words"])
        if (words, labels) != (model.num_words, getattr(model, "num_labels", labels)):
            raise ValueError(f"{words} words and {labels} labels are not as many as it has")
    except Exception as error:  # sizes that do not fit each other fail anywhere in a program
        raise TrainError(f"{folder}/model.json tells of no model that can be made ({error}); wanted another copy.") from error
    name = "best" if (folder / "best.json").exists() else "last"
    weights, saved = checkpoint.load(folder, name, shapes, about["run"])
    for place, array in jax.tree_util.tree_leaves_with_path(weights):
        if not np.isfinite(array).all():
            where = jax.tree_util.keystr(place)
            raise TrainError(f"{folder}/{saved['arrays']} holds NaN or infinity at {where}, wanted finite weights to predict.")
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
