"""Scores of labels (the confusion matrix, F1), of the spans that tags mark, of numbers (R2), and of translations (BLEU)."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from cavs._graphs.arguments import optional_module
from cavs._graphs.checks import array_of, check_order
from cavs._readers.source import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MSG_SACREBLEU = (
    "bleu: the package sacrebleu is not installed. Write: pip install sacrebleu, or install cavs with the extra `nmt`."
)
MOST_NUMBERS = 24  # a picture of more labels shows colours only


@dataclasses.dataclass(frozen=True)
class ConfusionMatrix:
    """True labels against predicted ones.

    ```python
    found = cavs.data.ConfusionMatrix.of(("bad", "good"), true, predicted)
    found.accuracy, found.f1["good"], found.macro_f1
    ```

    Attributes:
        labels: the names of the C labels.
        counts: int[C, C]: rows are true labels, columns predicted ones.
    """

    labels: tuple[str, ...]
    counts: np.ndarray

    @staticmethod
    def of(labels: Sequence[str], true: ArrayLike, predicted: ArrayLike) -> "ConfusionMatrix":
        """Counts pairs of labels.

        Args:
            labels: the names of the labels.
            true: int[N], indices of `labels`; -1 for rows that do not count.
            predicted: int[N].

        Raises:
            ValueError: the arrays have other lengths, or a row that counts has a number that is no index of `labels`.
        """
        check_order("ConfusionMatrix.of: labels", labels)
        given, size = {"true": true, "predicted": predicted}, len(labels)
        true, predicted = (array_of(f"ConfusionMatrix.of: {name}", x) for name, x in given.items())
        if true.shape != predicted.shape:
            got = f"shape {predicted.shape}, and true of {true.shape}"
            raise ValueError(f"ConfusionMatrix.of: predicted: got {got}; expected (N,) for both.")
        has = true >= 0
        for name, x in (("true", true[has]), ("predicted", predicted[has])):
            if invalid := x[~np.isin(x, np.arange(size))].tolist():
                raise ValueError(f"ConfusionMatrix.of: {name}: got {invalid[0]}; expected an index of the {size} labels.")
        pairs = true[has].astype(np.int64) * size + predicted[has].astype(np.int64)
        return ConfusionMatrix(tuple(labels), np.bincount(pairs, minlength=size * size).reshape(size, size))

    @property
    def count(self) -> int:
        """The number of rows that count."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of right predictions."""
        return float(self.counts.trace() / max(self.count, 1))

    @property
    def majority(self) -> float:
        """The accuracy of always predicting the most frequent true label."""
        return float(self.counts.sum(1).max(initial=0) / max(self.count, 1))

    @property
    def f1(self) -> dict[str, float]:
        """The F1 of each label: 2 precision recall / (precision + recall), and 0 if it is neither true nor predicted."""
        return {name: found.f1 for name, found in self.found().items()}

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the labels that are true or predicted anywhere."""
        values = [found.f1 for found in self.found().values() if found.true + found.predicted]
        return float(np.mean(values)) if values else 0.0

    def found(self) -> "dict[str, Found]":
        """How often each label is true, predicted, and both."""
        arrays = (self.counts.sum(1), self.counts.sum(0), self.counts.diagonal())
        return {name: Found(*map(int, counts)) for name, *counts in zip(self.labels, *arrays, strict=True)}

    def as_json(self) -> dict[str, Any]:
        """All scores as a dict for JSON. `confusion[i][j]` counts the true label i that is predicted as j."""
        scores = {name: getattr(self, name) for name in ("count", "accuracy", "majority", "macro_f1")}
        labels = {name: {"count": found.true, **found.as_json()} for name, found in self.found().items()}
        return {**scores, "labels": labels, "confusion": self.counts.tolist()}

    def draw(self, ax: "Axes") -> None:
        """Draws the matrix into axes of matplotlib: the colour is the fraction of a true label, the numbers are counts."""
        share = self.counts / np.maximum(self.counts.sum(1, keepdims=True), 1)
        names = [printable(label)[:24] for label in self.labels]
        ax.imshow(share, cmap="Blues", vmin=0, vmax=1)
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel="predicted", ylabel="true", title=f"{100 * self.accuracy:.1f} % right")
        if len(names) <= MOST_NUMBERS:
            for (i, j), n in np.ndenumerate(self.counts):
                ax.text(j, i, str(n), ha="center", va="center", color="white" if share[i, j] > 0.5 else "black", fontsize=8)


class Found(NamedTuple):
    """How many labels or spans are true, predicted, and both."""

    true: int
    predicted: int
    both: int

    @property
    def precision(self) -> float:
        """The fraction of the predicted ones that are true."""
        return self.both / max(self.predicted, 1)

    @property
    def recall(self) -> float:
        """The fraction of the true ones that are predicted."""
        return self.both / max(self.true, 1)

    @property
    def f1(self) -> float:
        """2 precision recall / (precision + recall); 0 if there is nothing to count."""
        return 2 * self.both / (self.true + self.predicted) if self.true + self.predicted else 0.0

    def as_json(self) -> dict[str, Any]:
        """The counts and scores as a dict for JSON."""
        return {**self._asdict(), **{name: getattr(self, name) for name in ("precision", "recall", "f1")}}


_MARKS = frozenset("BIEOSLUM")
# The marks of a span: of IOBES, BILOU and BMES, which mark both ends; and of other schemes, as `conlleval` reads them.
_WHOLE, _ANY = "[SU]|B[IM]*[EL]", "[^O](?:(?<!E)[^OB])*"


def is_tagging(labels: Sequence[str]) -> bool:
    """Whether labels mark spans, as `O`, `B-PER`, `I-PER` do: IOB1, IOB2, IOE, IOBES, BILOU or BMES."""
    marks = [(name[0], name[2:]) if name[1:2] == "-" else (name, "") for name in labels]
    return any(mark != "O" for mark, _ in marks) and all((mark != "O") == bool(kind) and mark in _MARKS for mark, kind in marks)


def _marks(tags: Sequence[str]) -> list[tuple[str, str]]:
    """Splits tags into marks and types: `B-PER` into `B` and `PER`."""
    return [(tag[0], tag[2:]) if tag[1:2] == "-" else ("O", "") for tag in tags]


def _spans(tags: Sequence[str], pattern: str) -> Iterator[tuple[int, int, str]]:
    """Yields the spans (begin, end, type) of a sentence; the end is the number of the word after the last."""
    begin = 0
    for kind, run in itertools.groupby(_marks(tags), key=lambda mark: mark[1]):
        marks = "".join(mark for mark, _ in run)
        for span in re.finditer(pattern, marks):
            yield begin + span.start(), begin + span.end(), kind
        begin += len(marks)


def span_scores(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Found]:
    """Counts the spans that tags mark, such as entities: "all" of them, and those of each type.

    ```python
    found = cavs.data.span_scores([["B-PER", "I-PER", "O"]], [["B-PER", "O", "O"]])
    found["all"].f1, found["PER"].recall                              # 0.0, 0.0: both ends must be right
    ```

    Schemes IOB1, IOB2 and IOE are read as the CoNLL shared tasks' `conlleval` reads them. If the true tags are of IOBES, BILOU
    or BMES, only whole spans count, `B E`, `B I E` and `S`, as in seqeval's strict mode.

    Args:
        true: the true tags of each sentence, such as `O`, `B-PER`, `I-PER`.
        predicted: as many predicted tags.

    Returns:
        A [`cavs.data.Found`][] for "all" and for each type, with `precision`, `recall` and `f1`. A span counts in `both` if its
        ends and its type are right.

    Raises:
        TypeError: a sentence is a str or no sequence, or a tag is no str.
        ValueError: the sentences have other lengths, or the true tags mark no spans and are not O.
    """
    true, predicted = ([*sentences] for sentences in (true, predicted))
    for side, sentences in (("true", true), ("predicted", predicted)):
        for sentence in sentences:
            if isinstance(sentence, str) or not hasattr(sentence, "__len__"):
                got = f"span_scores: {side}: got a {type(sentence).__name__} in place of a sentence"
                raise TypeError(f"{got}; expected lists of tags. Write [tags].")
            if invalid := [tag for tag in sentence if not isinstance(tag, str)]:
                got = f"span_scores: {side}: got {invalid[0]!r:.40} among the tags"
                raise TypeError(f"{got}; expected str. Write [[names[i] for i in ids] for ids in {side}].")
    if [*map(len, true)] != [*map(len, predicted)]:
        got = f"sentences of {[*map(len, predicted)][:9]} tags"
        raise ValueError(f"span_scores: predicted: got {got}; expected {[*map(len, true)][:9]}, as in true.")
    marks = {mark for tags in true for mark, _ in _marks(tags)}
    if marks <= {"O"} and (invalid := [tag for tags in true for tag in tags if tag != "O"]):
        got = f"got {invalid[0]!r:.40} and no tag that marks a span"
        raise ValueError(f"span_scores: true: {got}; expected O, or a mark and a type. Write B-PER, and then I-PER.")
    pattern = _WHOLE if marks & set("SLUM") or {"B", "E"} <= marks else _ANY
    true_spans, predicted_spans = (
        {(number, *span) for number, tags in enumerate(side) for span in _spans(tags, pattern)} for side in (true, predicted)
    )
    both = true_spans & predicted_spans
    counts = [collections.Counter(span[-1] for span in spans) for spans in (true_spans, predicted_spans, both)]
    of_kinds = {kind: Found(*(count[kind] for count in counts)) for kind in sorted(counts[0] | counts[1])}
    total = {"all": Found(*(count.total() for count in counts))}
    return total | of_kinds | total  # the first, also if a type has its name


class Errors(TypedDict):
    """A dict with the scores of predicted numbers, as [`cavs.data.errors`][] returns it."""

    count: int
    rmse: float
    mae: float
    r2: float | None
    standard_deviation: float


def errors(true: ArrayLike, predicted: ArrayLike) -> Errors:
    """Scores predicted numbers.

    Args:
        true: float[N]; NaN where there is no number to predict.
        predicted: float[N].

    Returns:
        A dict: `count`, the numbers that count; `rmse`, the root of the mean squared error; `mae`, the mean absolute error;
        `standard_deviation` of the true numbers; and `r2`, 1 - (rmse / standard deviation)², which is `None` if all true
        numbers are equal.

    Raises:
        ValueError: the arrays have more than one axis, or other lengths.
    """
    given = {"true": true, "predicted": predicted}
    true, predicted = (array_of(f"errors: {name}", x).astype(np.float64) for name, x in given.items())
    if true.shape != predicted.shape or true.ndim != 1:
        raise ValueError(f"errors: predicted: got shape {predicted.shape}, and true of {true.shape}; expected (N,) for both.")
    has = ~np.isnan(true)
    true, difference = true[has], predicted[has] - true[has]
    rmse = math.sqrt(float(np.mean(difference**2))) if len(true) else math.nan
    deviation = float(true.std()) if len(true) and (true != true[0]).any() else 0.0
    return {
        "count": len(true),
        "rmse": rmse,
        "mae": float(np.abs(difference).mean()) if len(true) else math.nan,
        "r2": 1 - (rmse / deviation) ** 2 if deviation else None,
        "standard_deviation": deviation,
    }


def bleu(translations: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """Scores translations by BLEU and chrF, as sacrebleu computes them. The words of the texts are its tokens.

    Args:
        translations: one text per sentence.
        references: as many true translations.

    Returns:
        A dict: `bleu` and `chrf`, from 0 to 100, and sacrebleu's signature of each, `bleu_signature` and `chrf_signature`.

    Raises:
        TypeError: texts are a str.
        ValueError: there are no texts, or more of one kind than of the other.
        ModuleNotFoundError: the package sacrebleu is missing.
    """
    for name, texts in (("translations", translations), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"bleu: {name}: got a str; expected one text per sentence. Write [text].")
    if not len(translations):
        raise ValueError("bleu: translations: got no texts; expected at least one.")
    if len(translations) != len(references):
        raise ValueError(f"bleu: references: got {len(references)} texts; expected {len(translations)}, one per translation.")
    metrics = optional_module("sacrebleu.metrics", MSG_SACREBLEU)
    scores: dict[str, float | str] = {}
    for name, metric in (("bleu", metrics.BLEU(tokenize="none", force=True)), ("chrf", metrics.CHRF())):
        scores[name] = float(metric.corpus_score(list(translations), [list(references)]).score)
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores
