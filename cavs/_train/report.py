"""What a run shows: a progress bar, a line an epoch, tables at the end, the curve as a picture."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from cavs._graphs import Graphs
from cavs._train import text
from cavs._train.data import Data, root_rows
from cavs._train.loop import Progress


class Screen:
    """Shows training on a console; a context that holds the progress bar."""

    def __init__(self, console: Console, task: str, epochs: int):
        self.console, self.task, self.epochs = console, task, epochs
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._id: TaskID | None = None

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

    def step(self, done: Progress, steps: int, sums: dict[str, float]) -> None:
        """Moves the bar."""
        if self._id is None:
            self._id = self._bar.add_task("", total=steps * self.epochs, epoch="", shown="compiling")
        shown = f"loss {sums['nll'] / max(sums['count'], 1):.3f}" if sums else "compiling"
        self._bar.update(
            self._id, completed=done.epoch * steps + done.step, epoch=f"{done.epoch + 1}/{self.epochs}", shown=shown
        )

    def epoch(self, record: dict[str, Any], best: bool) -> None:
        """Prints a line."""
        parts = [f"epoch {record['epoch']:3d}", f"{record['seconds']:6.1f} s"]
        for name in ("train", "dev"):
            parts.append(f"{'held-out' if name == 'dev' else name} {_in_words(record[name], self.task)}")
        self.console.print("  ".join(parts) + ("  *" if best else ""), highlight=False, soft_wrap=True)


def _in_words(m: dict[str, float], task: str) -> str:
    loss = m["nll"] / max(m["count"], 1)
    if task == "lm":
        return f"perplexity {perplexity(m):8.1f}"
    parts = [f"loss {loss:.3f}"]
    parts += [f"root {percent(m, 'roots')}"] if m["roots"] else []
    parts += [f"vertices {percent(m, 'vertices')}"] if m["vertices"] > m["roots"] else []
    return " ".join(parts)


def percent(m: dict[str, float], name: str) -> str:
    """Accuracy at `name`, "roots" or "vertices"."""
    return f"{100 * m[f'{name}_right'] / m[name]:5.1f} %" if m[name] else "-"


def perplexity(m: dict[str, float]) -> float:
    """exp of the mean negative log-likelihood of a word."""
    return math.exp(min(m["nll"] / max(m["count"], 1), 700))


def majority(train: Graphs, graphs: Graphs, at_roots: bool) -> float | None:
    """The accuracy of always answering training's most frequent label; `None` where there are no labels."""
    assert train.label is not None and graphs.label is not None
    ours, theirs = train.label, graphs.label
    if at_roots:
        ours, theirs = ours[root_rows(train)], theirs[root_rows(graphs)]
    ours, theirs = ours[ours >= 0], theirs[theirs >= 0]
    return float((theirs == np.bincount(ours).argmax()).mean()) if len(ours) and len(theirs) else None


def result_table(data: Data, task: str, results: dict[str, dict[str, float]]) -> Table:
    """Scores of the best epoch beside those of guessing; `results` by part: "while training", "held-out", "test"."""
    table = Table(title="the best epoch", title_justify="left", title_style="bold")
    graphs = {"while training": data.train, "held-out": data.dev, "test": data.test}
    if task == "lm":
        for column in ("", "sentences", "words", "unigram perplexity", "perplexity"):
            table.add_column(column, justify="left" if not column else "right")
        for name, m in results.items():
            part = graphs[name]
            assert part is not None
            base = text.unigram_perplexity(data.train, part)
            table.add_row(name, f"{len(part)}", f"{int(m['count'])}", f"{base:.1f}", f"[bold]{perplexity(m):.1f}[/]")
        return table
    for column in ("", "where", "labels", "majority", "accuracy"):
        table.add_column(column, justify="left" if column in ("", "where") else "right")
    for name, m in results.items():
        part = graphs[name]
        assert part is not None
        for where in ("roots", "vertices"):
            base = majority(data.train, part, where == "roots")
            if m[where] and base is not None and not (where == "vertices" and m["vertices"] == m["roots"]):
                shown = "root" if where == "roots" else "all vertices"
                table.add_row(name, shown, f"{int(m[where])}", f"{100 * base:.1f} %", f"[bold]{percent(m, where)}[/]")
    return table


def describe(data: Data, labels: tuple[str, ...], task: str) -> str:
    """One line on the data."""
    parts = [f"{len(data.train)} graphs to train on, {len(data.dev)} held out"]
    parts += [f"{len(data.test)} to test"] if data.test is not None else []
    parts += [f"{data.train.num_vertices} vertices", f"{len(data.words)} words"]
    parts += [f"{len(labels)} labels"] if task != "lm" else []
    return escape(", ".join(parts))


def plot(path: Path, history: list[dict[str, Any]], task: str) -> None:
    """Writes the training curve: loss or perplexity, and for classification the accuracy, by epoch."""
    from matplotlib.figure import Figure  # needs no display; imported only where it is used

    figure = Figure(figsize=(9 if task != "lm" else 5, 3.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, 1 if task == "lm" else 2))
    epochs = [r["epoch"] for r in history]
    for part, colour, shown in (("train", "tab:gray", "train"), ("dev", "tab:blue", "held-out")):
        sums = [r[part] for r in history]
        if task == "lm":
            axes[0].plot(epochs, [perplexity(m) for m in sums], marker=".", color=colour, label=shown)
            continue
        axes[0].plot(epochs, [m["nll"] / max(m["count"], 1) for m in sums], marker=".", color=colour, label=shown)
        for name, style, where in (("roots", "-", "root"), ("vertices", ":", "all vertices")):
            if all(m[name] for m in sums):
                values = [100 * m[f"{name}_right"] / m[name] for m in sums]
                axes[1].plot(epochs, values, style, marker=".", color=colour, label=f"{shown}, {where}")
    axes[0].set(xlabel="epoch", ylabel="perplexity" if task == "lm" else "loss")
    if task != "lm":
        axes[1].set(xlabel="epoch", ylabel="accuracy, %")
    else:
        axes[0].set_yscale("log")
    for ax in axes:
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
