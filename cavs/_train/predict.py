"""Labelling new graphs with a checkpoint, which is all that is needed: no training data, no script."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cavs._train import checkpoint
from cavs._train.config import TrainError
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
    with _open(out) as file:
        count = 0
        for line in lines:
            print(*line, sep="\t", file=file)
            count += 1
    return count


def load_model(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """What a checkpoint tells, its model and weights: of the best epoch, or before the first one's end the last saved."""
    if folder.is_file():
        folder = folder.parent
    about = checkpoint.read_json(folder, "model")
    model = find(about["task"]).restore(about)
    name = "best" if (folder / "best.json").exists() else "last"
    return about, model, checkpoint.load(folder, name, weight_shapes(model))[0]


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
