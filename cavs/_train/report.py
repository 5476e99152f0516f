"""The output of a run: a progress bar, a line per epoch, a plot of the curve; and formatting of values for the tasks."""

import io
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._train import checkpoint
from cavs._train.data import Data

if TYPE_CHECKING:
    from cavs._step.step import Step
    from cavs._train.loop import Progress, Trainer
    from cavs._train.task import Task


# Seconds after which a log gets a line within an epoch.
SAY_EVERY = 30.0


class Screen:
    """Prints the progress of training to a console. The progress bar lives as long as the context.

    Args:
        console: the console.
        trainer: the run.
    """

    def __init__(self, console: Console, trainer: "Trainer"):
        self.console, self.task, self.epochs = console, trainer.task, trainer.config.epochs
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            _Compiling(trainer.step),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._id = self._bar.add_task("", total=trainer.steps * self.epochs, epoch=f"1/{self.epochs}", shown="")
        self._said = time.monotonic()

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, done: "Progress", steps: int, sums: dict[str, float]) -> None:
        """Advances the progress bar."""
        shown = f"loss {mean_nll(sums):.3f}" if sums else ""
        self._bar.update(
            self._id, completed=done.epoch * steps + done.step, epoch=f"{done.epoch + 1}/{self.epochs}", shown=shown
        )
        # A log has no progress bar.
        if not self.console.is_terminal and time.monotonic() - self._said > SAY_EVERY:
            self._print(f"epoch {done.epoch + 1:3d}, step {done.step} of {steps}  {done.seconds:.1f} s  {shown}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
        self._said = time.monotonic()

    def epoch(self, record: dict[str, Any], best: bool) -> None:
        """Prints the line of an epoch, or of an evaluation within it."""
        parts = [f"epoch {_epoch(record['epoch'])}", f"{record['seconds']:6.1f} s"]
        for name in ("train", "dev"):
            parts.append(f"{'held-out' if name == 'dev' else name} {self.task.shown(record[name])}")
        self._print("  ".join(parts) + ("  *" if best else ""))


class _Compiling(ProgressColumn):
    """Which shape of batches is being compiled. The others are compiled while the first one trains."""

    def __init__(self, step: "Step"):
        self.step = step
        super().__init__()

    def render(self, task: object) -> Text:
        now = self.step.compiling
        return Text("" if now is None else "compiling" if now == (1, 1) else f"compiling ({now[0]} of {now[1]})")


def _epoch(number: float) -> str:
    return f"{number:3d}" if isinstance(number, int) else f"{number:.2f}"


def mean_nll(sums: dict[str, float]) -> float:
    """The mean negative log-likelihood."""
    return sums["nll"] / max(sums["count"], 1)


def perplexity(sums: dict[str, float]) -> float:
    """The exponential of the mean negative log-likelihood of a word."""
    return math.exp(min(mean_nll(sums), 700))


def unigram_perplexity(train: Graphs, held_out: Graphs, num_labels: int) -> float:
    """The perplexity of a unigram model (training counts plus one): the baseline of a language model."""
    seen, words = train.label, held_out.label
    assert seen is not None and words is not None
    counts = np.bincount(seen[seen >= 0], minlength=num_labels) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[words[words >= 0]].mean()))


def percent(share: float | None) -> str:
    """Formats a fraction as a percentage, `None` as "-"."""
    return "-" if share is None else f"{100 * share:5.1f} %"


def describe(data: Data, task: "Task") -> str:
    """Describes the data in one line."""
    parts = [f"{counted(len(data.train), task.noun)} to train on, {len(data.dev)} held out"]
    parts += [f"{len(data.test)} to test"] if data.test is not None else []
    parts += [counted(data.train.num_vertices, "vertex"), counted(len(data.words), "word")]
    parts += [counted(len(data.labels), "label")] if data.labels is not data.words else []
    return escape(", ".join(parts))


def plot(path: Path, history: list[dict[str, Any]], task: "Task", best: float) -> None:
    """Writes a PNG of the training curve: the panels of the task over epochs, with a mark at the epoch `best`."""
    # Needs no display. Imported here because only this function needs it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    panels = task.panels
    figure = Figure(figsize=(1 + 4 * len(panels), 3.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    epochs = [record["epoch"] for record in history]
    for ax, panel in zip(axes, panels, strict=True):
        for part, colour, shown in (("train", "tab:gray", "train"), ("dev", "tab:blue", "held-out")):
            for name, style, value in panel.lines:
                values = [value(record[part]) for record in history]
                if None not in values:
                    ax.plot(epochs, values, style, marker=".", color=colour, label=shown + name)
        ax.set(xlabel="epoch", ylabel=panel.label, yscale="log" if panel.log else "linear")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel.log:
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        ax.axvline(best, color="tab:red", linestyle=":", linewidth=1, label=f"best epoch: {round(best, 2):g}")
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    checkpoint.write(path, picture.getvalue())
