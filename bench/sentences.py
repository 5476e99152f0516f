"""Sentences of the bench, drawn from a seed: for pyramids, translation, lattices and taggers (NumPy only, Python 3.8 too).

Samples are dicts of arrays: sentences `words`, `label`; pairs `source`, `target`, `labels` (one a target word); character
lattices `words`, `labels`, `spans` (words of a lexicon: first and last character), `span_words`; tagged sentences `words`,
`labels`, and where rare words are spelled `spellings`, the characters of each word that is -1.
"""

from __future__ import annotations

import numpy as np

from bench.graphs import CLASSES, VOCAB

CHARACTERS = 100


def sentences(rng, count: int) -> list:
    """Sentences of a treebank's lengths, for pyramids: 19.2 words on average, standard deviation 9.3."""
    lengths = np.clip(np.rint(rng.gamma(4.26, 4.5, count)), 2, 52).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "label": int(rng.integers(CLASSES))} for n in lengths.tolist()]


def pairs(rng, count: int) -> list:
    """Sentence pairs with the lengths of a small English-Japanese corpus: 9.3 words on average, and 13.7."""
    source = np.clip(np.rint(rng.gamma(5.6, 1.66, count)), 2, 54).astype(int)
    target = np.clip(np.rint(source * rng.normal(1.47, 0.28, count)), 2, 66).astype(int)
    return [
        {"source": rng.integers(VOCAB, size=s), "target": rng.integers(VOCAB, size=t), "labels": rng.integers(CLASSES, size=t)}
        for s, t in np.stack([source, target], 1).tolist()
    ]


def characters(rng, count: int) -> list:
    """Character lattices: 44 characters on average, and a word of 2 to 4 characters from every second one."""
    samples = []
    for n in np.clip(np.rint(rng.gamma(3.0, 14.7, count)), 5, 211).astype(int).tolist():
        first = np.flatnonzero(rng.random(n) < 0.53)
        last = first + rng.choice([1, 2, 3], size=len(first), p=[0.7, 0.2, 0.1])
        spans = np.stack([first, last], 1)[last < n]
        samples.append(
            {
                "words": rng.integers(VOCAB, size=n),
                "labels": rng.integers(CLASSES, size=n),
                "spans": spans,
                "span_words": rng.integers(VOCAB, size=len(spans)),
            }
        )
    return samples


def tagged(rng, count: int) -> list:
    """Sentences with WikiNER's lengths, a label a word: 24.5 words on average, standard deviation 11.9."""
    lengths = np.clip(np.rint(rng.gamma(4.24, 5.79, count)), 1, 144).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in lengths.tolist()]


def spelled(rng, count: int) -> list:
    """The same where words seen fewer than 5 times are spelled, one in eight there: 7.5 letters, deviation 2.8."""
    samples = tagged(rng, count)
    for sample in samples:
        rare = rng.random(len(sample["words"])) < 0.125
        sample["words"][rare] = -1
        letters = np.clip(np.rint(rng.gamma(7.0, 1.07, int(rare.sum()))), 1, 34).astype(int)
        sample["spellings"] = [rng.integers(CHARACTERS, size=n) for n in letters.tolist()]
    return samples
