"""Prediction with a checkpoint. It needs neither the training data nor a script."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from cavs._graphs.counted import counted
from cavs._readers import FormatError
from cavs._readers.source import printable
from cavs._train import checkpoint
from cavs._train.config import Config, SaveError, TrainError, check_file
from cavs._train.model import Weights, weight_shapes
from cavs._train.task import Asked, Model, Predictions, find_task

# How numbers are printed in a table, by column. JSON has all digits.
DIGITS = {"prediction": ".6g", "probability": ".4f", "log_probability": ".3f", "perplexity": ".2f"}
JUST_GRAPHS = Asked()
STANDARD_INPUT = "standard input"


def predict(
    folder: str,
    path: str,
    out: str | None = None,
    asked: Asked = JUST_GRAPHS,
    as_json: bool = False,
    header: bool = True,
) -> int:
    """Writes predictions for the samples of a file, in order: a table with tabs between its cells, or JSON lines.

    - Classification: per root, the number of the graph, the label, its probability, and the words of the graph. With
      `asked.vertices`, per vertex, the numbers of graph and vertex, the label, its probability, and the word, or, in a tree,
      the phrase below the vertex.
    - Language model: the number of the sentence, its log-probability, the perplexity per word, and the sentence. With
      `asked.vertices`, per word, its log-probability.
    - Tags: the number of the sentence, and its words as `word|TAG`. With `asked.vertices`, as for classification.
    - Translation: the number of the sentence, and its translation.

    Args:
        folder: the folder of a run.
        path: the file of samples, `-` for standard input.
        out: the file to write; `None` writes to the terminal.
        asked: whether to write a line per vertex, and the probabilities of all labels.
        as_json: whether to write a JSON object per line.
        header: whether the first line of a table names its columns.

    Returns:
        The number of predictions.

    Raises:
        TrainError: the folder contains no valid checkpoint, the task has no such predictions, or a file cannot be read or
            written.
    """
    about, model, weights = load_model(Path(folder))
    with given_file(path) as file:
        found = find_task(about["task"]).predict(about, model, weights, file, asked)
        count = 0
        with _open(out) as output:
            if header and not as_json:
                columns = (*found.columns, *(f"p({label})" for label in found.labels))
                print(*map(printable, columns), sep="\t", file=output)
            for row in found.rows:
                print(_as_json(found, row) if as_json else _as_cells(found, row), file=output)
                count += 1
            output.flush()
    return count


def _as_cells(found: Predictions, row: tuple[object, ...]) -> str:
    cells = [_cell(name, cell) for name, cell in zip(found.columns, row, strict=False)]
    cells += [format(p, DIGITS["probability"]) for p in np.asarray(row[-1]).tolist()] if found.labels else []
    return "\t".join(map(printable, cells))


def _cell(name: str, value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{word}|{tag}" for word, tag in value)
    return format(value, DIGITS[name]) if name in DIGITS and isinstance(value, float) else str(value)


def _as_json(found: Predictions, row: tuple[object, ...]) -> str:
    values: dict[str, object] = dict(zip(found.columns, row, strict=False))
    if found.labels:
        values["probabilities"] = dict(zip(found.labels, np.asarray(row[-1]).tolist(), strict=True))
    return json.dumps(values)  # ASCII: a word may contain half a surrogate pair


@contextlib.contextmanager
def given_file(path: str) -> Iterator[str]:
    """A context with the path of a file. Standard input (`-`) is copied to a file whose suffix fits its content.

    Raises:
        TrainError: the file does not exist. Errors of the block name standard input instead of the copy.
    """
    if path != "-":
        check_file("file", path)
        yield path
        return
    data = sys.stdin.buffer.read()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"input{_suffix(data[:4096].decode('utf-8', 'replace'))}"
        copy.write_bytes(data)
        try:
            yield str(copy)
        except (TrainError, FormatError) as error:
            raise TrainError(str(error).replace(str(copy), STANDARD_INPUT)) from error


def _suffix(start: str) -> str:
    """The suffix of the format in which a text is written."""
    lines = [line.strip() for line in start.splitlines() if line.strip() and line[0] != "#"]
    first = lines[0] if lines else ""
    if first.startswith("{"):
        return ".jsonl"
    if first.startswith((".model", ".inputs")):
        return ".blif"
    if first.upper().startswith(("INPUT(", "OUTPUT(")):
        return ".bench"
    return ".conllu" if first.count("\t") == 9 else ".txt"


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
            raise ValueError(f"got {counted(words, 'word')} and {counted(labels, 'label')}, which differ from its sizes")
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
