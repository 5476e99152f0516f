"""`cavs evaluate`: the scores of a checkpoint on a file, as tables, JSON and a picture."""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cavs._train import checkpoint
from cavs._train.config import TrainError
from cavs._train.predict import given_file, load_model
from cavs._train.task import Evaluation, find_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".png", ".pdf", ".svg")


def evaluate(
    folder: str, path: str, as_json: bool = False, out: str | None = None, console: Console | None = None
) -> Evaluation:
    """Evaluates a checkpoint on the samples of a file, and prints the scores.

    Args:
        folder: the folder of a run.
        path: the file of labelled samples, `-` for standard input.
        as_json: whether to print one JSON object instead of tables.
        out: a file for the picture: PNG, PDF or SVG, by its suffix; `None` for no picture.
        console: where tables are printed.

    Raises:
        TrainError: the folder contains no valid checkpoint, a file cannot be read or written, it has no labels, or the task has
            no picture.
    """
    if out is not None and Path(out).suffix.lower() not in PICTURES:
        raise TrainError(f"--out: got {out}; expected a name that ends in {', '.join(PICTURES)}.")
    about, model, weights = load_model(Path(folder))
    task = find_task(about["task"])
    with given_file(path) as file:
        found = task.evaluate(about, model, weights, file)
    values = {"task": about["task"], "checkpoint": folder, "file": path, **found.values}
    if out is not None:
        if not found.pictures:
            raise TrainError(f"--out: got {out}, but there is no picture of the scores of --task {about['task']}. Omit --out.")
        _draw(Path(out), found.pictures)
    if as_json:
        print(json.dumps(values, ensure_ascii=False, indent=1), file=sys.stdout)
        return dataclasses.replace(found, values=values)
    console = console or Console()
    facts = Table(
        title=escape(f"{path}"), title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False
    )
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in found.lines:
        facts.add_row(name, escape(text))
    for table in (facts, *found.tables):
        console.print(table, highlight=False)
    if out is not None:
        console.print(f"picture: {escape(out)}", highlight=False, soft_wrap=True)
    return dataclasses.replace(found, values=values)


def _draw(path: Path, pictures: "tuple[Callable[[Axes], None], ...]") -> None:
    from matplotlib.figure import Figure  # needs no display; imported here because only this function needs it

    figure = Figure(figsize=(6 * len(pictures), 5.4), layout="constrained")
    for i, draw in enumerate(pictures):
        draw(figure.add_subplot(1, len(pictures), i + 1))
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=120)
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            raise TrainError(f"--out: got {path}, a directory; expected the path of a file.")
    checkpoint.write(path, picture.getvalue())
