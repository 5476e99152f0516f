"""Scores of numbers and of translations: errors, R2, BLEU and chrF."""

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from cavs._graphs.arguments import optional_module

MSG_SACREBLEU = (
    "bleu: the package sacrebleu is not installed. Write: pip install sacrebleu, or install cavs with the extra `nmt`."
)


class Errors(TypedDict):
    """The scores of predicted numbers; see [`cavs.data.errors`][]."""

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
    true, predicted = np.asarray(true, np.float64), np.asarray(predicted, np.float64)
    if true.shape != predicted.shape or true.ndim != 1:
        raise ValueError(f"errors: predicted: got shape {predicted.shape}, and true of {true.shape}; expected (N,) for both.")
    has = ~np.isnan(true)
    true, wrong = true[has], predicted[has] - true[has]
    rmse = math.sqrt(float(np.mean(wrong**2))) if len(true) else math.nan
    deviation = float(true.std()) if len(true) and (true != true[0]).any() else 0.0
    return {
        "count": len(true),
        "rmse": rmse,
        "mae": float(np.abs(wrong).mean()) if len(true) else math.nan,
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
        ValueError: there are more texts of one kind than of the other.
        ModuleNotFoundError: the package sacrebleu is missing.
    """
    for name, texts in (("translations", translations), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"bleu: {name}: got a str; expected one text per sentence. Write [text].")
    if len(translations) != len(references):
        raise ValueError(f"bleu: references: got {len(references)} texts; expected {len(translations)}, one per translation.")
    metrics = optional_module("sacrebleu.metrics", MSG_SACREBLEU)
    found: dict[str, float | str] = {}
    for name, metric in (("bleu", metrics.BLEU(tokenize="none", force=True)), ("chrf", metrics.CHRF())):
        found[name] = float(metric.corpus_score(list(translations), [list(references)]).score)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
