"""BLEU and chrF of translations, by sacrebleu, which is an optional package."""

from cavs._train.config import TrainError

_MISSING = (
    "sacrebleu is not installed; the scores of a translator are its BLEU and chrF. Write: pip install sacrebleu (or "
    "install cavs with the extra `nmt`)."
)


def check_installed() -> None:
    """Raises a `TrainError` that tells how to install sacrebleu, if it is missing."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise TrainError(_MISSING) from error


def score(translations: list[str], references: list[str]) -> dict[str, tuple[float, str]]:
    """BLEU and chrF of whole texts, each with sacrebleu's signature. Words are those of the files: nothing is tokenised."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found = {}
    for name, metric in (("BLEU", BLEU(tokenize="none", force=True)), ("chrF", CHRF())):
        found[name] = float(metric.corpus_score(translations, [references]).score), str(metric.get_signature())
    return found
