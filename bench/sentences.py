"""Sentences for pyramids, translation, lattices and taggers, drawn from a seed (NumPy only; also for Python 3.8).

Samples are dicts of arrays:

- sentences: `words`, `label`
- pairs: `source`, `target`, `labels` (one per target word)
- character lattices: `words`, `labels`, `spans` (first and last character of each word of the lexicon), `span_words`
- tagged sentences: `words`, `labels`, and, if rare words are spelled, `spellings`: the characters of each word that is -1
"""

from __future__ import annotations

import numpy as np

from bench.graphs import CLASSES, VOCAB

CHARACTERS = 100


def sentences(rng, count: int) -> list:
    """Draws sentences of a treebank's lengths, for pyramids: 19.2 words on average, standard deviation 9.3."""
    lengths = np.clip(np.rint(rng.gamma(4.26, 4.5, count)), 2, 52).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "label": int(rng.integers(CLASSES))} for n in lengths.tolist()]


def pairs(rng, count: int) -> list:
    """Draws sentence pairs with the lengths of a small English-Japanese corpus: 9.3 and 13.7 words on average."""
    source = np.clip(np.rint(rng.gamma(5.6, 1.66, count)), 2, 54).astype(int)
    target = np.clip(np.rint(source * rng.normal(1.47, 0.28, count)), 2, 66).astype(int)
    return [
        {"source": rng.integers(VOCAB, size=s), "target": rng.integers(VOCAB, size=t), "labels": rng.integers(CLASSES, size=t)}
        for s, t in np.stack([source, target], 1).tolist()
    ]


def characters(rng, count: int) -> list:
    """Draws character lattices: 44 characters on average, and a word of 2 to 4 characters at every second one."""
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
    """Draws sentences of WikiNER's lengths with a label per word: 24.5 words on average, standard deviation 11.9."""
    lengths = np.clip(np.rint(rng.gamma(4.24, 5.79, count)), 1, 144).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in lengths.tolist()]


def spelled(rng, count: int) -> list:
    """Draws the same with spelled rare words: one in eight, 7.5 letters on average, standard deviation 2.8.

    In WikiNER one word in eight is seen fewer than 5 times.
    """
    samples = tagged(rng, count)
    for sample in samples:
        rare = rng.random(len(sample["words"])) < 0.125
        sample["words"][rare] = -1
        letters = np.clip(np.rint(rng.gamma(7.0, 1.07, int(rare.sum()))), 1, 34).astype(int)
        sample["spellings"] = [rng.integers(CHARACTERS, size=n) for n in letters.tolist()]
    return samples
