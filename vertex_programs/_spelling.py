"""Sentences whose rare words are spelled: the graphs of `CharBiLSTMTagger`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import cavs


def spelled_chains(graphs: cavs.Graphs, words: Sequence[str], letters: Sequence[str]) -> tuple[cavs.Graphs, ...]:
    """Builds the graphs of a tagger that spells the words that a table of word vectors lacks.

    Args:
        graphs: Chains of words.
        words: The words of the table.
        letters: The letters, the first of which stands for all others; empty if no word is spelled. An unknown word is then
            `<unk>`, which is one of `words`.

    Returns:
        The chains, whose `input_id` is an index of `words`, or -1 if the word is spelled; and the reversed chains. If words are
        spelled, also the chains of their letters, one graph per distinct word after a placeholder of one letter; and those
        reversed. `input_id` of the reversed chains of words is then the graph that spells the word, or -1.
    """
    known = graphs.with_vocab(words, None if letters else "<unk>")
    if not letters:
        return known, known.reversed()
    assert graphs.vocab is not None and graphs.input_id is not None
    rows, index = set(words), {letter: i for i, letter in enumerate(letters)}
    rare = [i for i, word in enumerate(graphs.vocab) if word not in rows]
    number = np.full(len(graphs.vocab), -1, np.int32)
    number[rare] = 1 + np.arange(len(rare))
    texts = ["?", *(graphs.vocab[i] for i in rare)]
    ids = np.array([index.get(letter, 0) for text in texts for letter in text], np.int32)
    spelled = cavs.from_lengths([len(text) for text in texts], input_id=ids)
    back = dataclasses.replace(known.reversed(), input_id=number[graphs.input_id], vocab=None)
    return known, back, spelled, spelled.reversed()


def spelled_sources(chains: Sequence[cavs.Graphs], batch: int) -> list[Any]:
    """Returns the data sets for a `cavs.data.Loader`, given the graphs that `spelled_chains` returned.

    Args:
        chains: The graphs.
        batch: The number of sentences in a batch. Typical batches determine the room for spelled words.
    """
    if len(chains) == 2:
        return [*chains]
    words, back, spelled, spelled_back = chains
    starts = range(0, len(back), batch)
    room = _power_of_two(max((len(spelled_in(back[i : i + batch])[0]) for i in starts), default=8))

    def pick(index: np.ndarray) -> np.ndarray:
        spellings = spelled_in(back[index])[0]
        out = np.zeros(max(room, _power_of_two(len(spellings))), np.int64)  # the rest is the placeholder
        out[: len(spellings)] = spellings
        return out

    return [words, back, (spelled, pick), (spelled_back, pick)]


def spelled_in(back: cavs.Graphs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct spelled words of a batch, and the index of each vertex's word among them, or -1.

    Args:
        back: The reversed chains of words of the batch.
    """
    assert back.input_id is not None
    distinct, index = np.unique(back.input_id, return_inverse=True)
    skip = int(len(distinct) > 0 and distinct[0] < 0)
    return distinct[skip:], index.astype(np.int32) - skip


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
