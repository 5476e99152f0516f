"""True labels against predicted ones: accuracy, F1 of each label, and the confusion matrix as a table, JSON and a picture."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from cavs._readers.source import printable
from cavs._train.chunks import f1

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_COLUMNS = 12  # a matrix of more labels is in the JSON and in the picture only
LONGEST_NAME = 6  # of a column; labels are numbered if one is longer


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a classifier.

    Attributes:
        where: what was classified: "root", "all vertices", "words".
        labels: the C labels.
        confusion: (C, C) counts: rows are true labels, columns predicted ones.
    """

    where: str
    labels: tuple[str, ...]
    confusion: np.ndarray

    @staticmethod
    def of(where: str, labels: tuple[str, ...], true: np.ndarray, predicted: np.ndarray) -> "Scores":
        """Counts pairs of labels, as indices of `labels`. A true label of -1 is not counted."""
        has = true >= 0
        size = len(labels)
        pairs = true[has].astype(np.int64) * size + predicted[has]
        return Scores(where, labels, np.bincount(pairs, minlength=size * size).reshape(size, size))

    @property
    def count(self) -> int:
        """The number of labels."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return float(self.confusion.trace() / max(self.count, 1))

    @property
    def majority(self) -> float:
        """The accuracy of always predicting the most frequent label of these data."""
        return float(self.confusion.sum(1).max(initial=0) / max(self.count, 1))

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the labels that occur, as a true label or as a prediction."""
        values = [f1(t, p, b) for t, p, b in self._counts() if t + p]
        return float(np.mean(values)) if values else 0.0

    def _counts(self) -> list[tuple[int, int, int]]:
        """Of each label: how often it is true, predicted, and both."""
        arrays = (self.confusion.sum(1), self.confusion.sum(0), self.confusion.diagonal())
        return [*zip(*(a.tolist() for a in arrays), strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The scores as JSON. `confusion[i][j]` counts the true label i predicted as j."""
        each = {
            label: {"count": t, "precision": b / max(p, 1), "recall": b / max(t, 1), "f1": f1(t, p, b)}
            for label, (t, p, b) in zip(self.labels, self._counts(), strict=True)
        }
        return {
            "count": self.count,
            "accuracy": self.accuracy,
            "majority": self.majority,
            "macro_f1": self.macro_f1,
            "labels": each,
            "confusion": self.confusion.tolist(),
        }

    def summary(self) -> tuple[str, str]:
        """The name and the text of the line that summarises the scores."""
        return (
            f"accuracy, {self.where}",
            f"{100 * self.accuracy:.2f} % of {self.count:,} (most frequent label: {100 * self.majority:.2f} %); "
            f"macro F1 {100 * self.macro_f1:.2f}",
        )

    def tables(self) -> tuple[Table, ...]:
        """Counts, precision, recall and F1 of each label; and the confusion matrix, if there are few labels."""
        shown = [escape(printable(label)) for label in self.labels]
        each = Table(title=self.where, title_justify="left", title_style="bold")
        short = all(len(label) <= LONGEST_NAME for label in self.labels)
        columns = shown if short else [str(i + 1) for i in range(len(shown))]
        rows = shown if short else [f"{i + 1} {name}" for i, name in enumerate(shown)]
        matrix = Table(title=f"{self.where}: true (rows), predicted (columns)", title_justify="left", title_style="bold")
        for table, names in ((each, ("count", "precision", "recall", "F1")), (matrix, columns)):
            for name in ("", *names):
                table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for i, (t, p, b) in enumerate(self._counts()):
            each.add_row(shown[i], str(t), *(f"{100 * x:.1f}" for x in (b / max(p, 1), b / max(t, 1), f1(t, p, b))))
            matrix.add_row(rows[i], *map(str, self.confusion[i].tolist()))
        return (each, matrix) if len(shown) <= MOST_COLUMNS else (each,)

    def draw(self, ax: "Axes") -> None:
        """Draws the confusion matrix: the colour is the share of a true label, the numbers are counts."""
        share = self.confusion / np.maximum(self.confusion.sum(1, keepdims=True), 1)
        names = [printable(label)[:24] for label in self.labels]
        ax.imshow(share, cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel="predicted", ylabel="true", title=f"{self.where}: {100 * self.accuracy:.1f} % right")
        if len(names) <= 2 * MOST_COLUMNS:
            for (i, j), n in np.ndenumerate(self.confusion):
                ax.text(j, i, str(n), ha="center", va="center", color="white" if share[i, j] > 0.5 else "black", fontsize=8)


def with_unseen(labels: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of a model, followed by the labels of a file that the model does not know and so never predicts."""
    return tuple(dict.fromkeys((*labels, *given)))
