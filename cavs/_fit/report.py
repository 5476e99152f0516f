"""Scores as text, as JSON and as pictures."""

import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from cavs._fit.evaluate import Sums
from cavs._fit.kept import Evaluated, rank
from cavs._fit.scores import ConfusionMatrix, Found
from cavs._graphs.files import write_whole
from cavs._readers.source import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

WIDTH_OF_PIPES = 1000  # a terminal wraps lines, a file or another program does not
MOST_COLUMNS = 12  # a matrix of more labels is in the JSON and in the picture only


def json_of(value: Any) -> Any:
    """Converts scores to what JSON knows: dicts, lists, and `None` for NaN and infinity.

    Args:
        value: numbers, texts, arrays, [`cavs.data.ConfusionMatrix`][], [`cavs.data.Found`][], and dicts and lists of these.
    """
    if hasattr(value, "as_json"):
        value = value.as_json()
    if isinstance(value, Mapping):
        return {str(name): json_of(x) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [json_of(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_figure(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Writes a figure of matplotlib in the format of the file's name. The file appears when it is complete."""
    picture = io.BytesIO()
    figure.savefig(picture, format=os.path.splitext(path)[1][1:].lower(), dpi=120)
    write_whole(path, picture.getvalue())


def draw_history(
    history: Sequence[Evaluated], path: str | os.PathLike[str], scores: Callable[[Sums], Mapping[str, float | None]]
) -> None:
    """Draws the scores of a run over its epochs: a panel for each, of the training and the held-out data.

    Args:
        history: the `history` of a [`cavs.data.Keeper`][].
        path: the picture, whose name ends in .png, .pdf or .svg.
        scores: maps summed metrics to scores by name.

    Raises:
        ValueError: the history is empty.
    """
    if not history:
        raise ValueError("draw_history: history: got no evaluations; expected the history of a keeper that has scored some.")
    from matplotlib.figure import Figure  # needs no display; imported here because only this function needs it
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    best = max(history, key=rank)["epoch"]
    by_label = {"train": [scores(r["train"]) for r in history], "held-out": [scores(r["held_out"]) for r in history]}
    names = [name for name, value in by_label["held-out"][-1].items() if value is not None]
    figure = Figure(figsize=(1 + 4 * len(names), 3.6), layout="constrained")
    for name, ax in zip(names, np.atleast_1d(figure.subplots(1, len(names))), strict=True):
        for label, colour in (("train", "tab:gray"), ("held-out", "tab:blue")):
            values = [scored.get(name) for scored in by_label[label]]
            if None not in values:
                ax.plot([record["epoch"] for record in history], values, marker=".", color=colour, label=label)
        ax.set(xlabel="epoch", ylabel=name, yscale="log" if name == "perplexity" else "linear")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis(StrMethodFormatter("{x:,.6g}"))
        ax.axvline(best, color="tab:red", linestyle=":", linewidth=1, label=f"best epoch: {round(best, 2):g}")
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=8)  # above, to cover no line
        ax.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def print_scores(found: Mapping[str, Any], title: str = "", console: "Console | None" = None) -> None:
    """Prints scores: numbers and texts as lines, and below them tables with precision, recall and F1.

    Args:
        found: by name, a number, a text, a [`cavs.data.ConfusionMatrix`][], or what [`cavs.data.span_scores`][] returns.
        title: the first line.
        console: the console of rich; by default a new one.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console(width=None if sys.stdout.isatty() else WIDTH_OF_PIPES)
    console.print(escape(title), style="bold", highlight=False, soft_wrap=True)
    facts = Table(show_header=False, box=None, pad_edge=False)
    tables = [facts]
    for name, value in found.items():
        if isinstance(value, ConfusionMatrix):
            right = f"accuracy {100 * value.accuracy:.2f} % of {value.count:,}"
            others = f"most frequent label {100 * value.majority:.2f} %, macro F1 {100 * value.macro_f1:.2f}"
            facts.add_row(name, f"{right}, {others}")
            tables.append(_scores_table(name, value.found()))
            if len(value.labels) <= MOST_COLUMNS:
                tables.append(_matrix_table(name, value))
        elif isinstance(value, Mapping):
            tables.append(_scores_table(name, value))
        else:
            facts.add_row(name, escape(shown(value)))
    for table in tables:
        console.print(table, highlight=False)


def shown(value: object) -> str:
    """Returns a score as text: numbers with four digits, `-` for `None`."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _scores_table(title: str, scores: Mapping[str, Found]) -> "Table":
    values = {name: ((x.true, x.predicted), (x.precision, x.recall, x.f1)) for name, x in scores.items()}
    rows = [(name, *map(str, counts), *(f"{100 * share:.1f}" for share in shares)) for name, (counts, shares) in values.items()]
    return _table(title, ("count", "predicted", "precision", "recall", "F1"), rows)


def _matrix_table(title: str, matrix: ConfusionMatrix) -> "Table":
    short = all(len(printable(label)) <= 6 for label in matrix.labels)  # longer ones are numbered
    names = matrix.labels if short else [f"{i + 1} {label}" for i, label in enumerate(matrix.labels)]
    rows = [(name, *map(str, counts)) for name, counts in zip(names, matrix.counts.tolist(), strict=True)]
    columns = [name if short else name.split()[0] for name in names]
    return _table(f"{title}: true (rows), predicted (columns)", columns, rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Builds a table of numbers, whose first column, without a title, has names."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("", *columns):
        table.add_column(escape(printable(column)), justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    return table
