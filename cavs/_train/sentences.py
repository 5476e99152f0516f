"""Sentences whose rare words are spelled: chains of words, chains of characters, and batches of both."""

import dataclasses
from typing import Any, Generic, NamedTuple, cast

import numpy as np

from cavs._feed.epochs import strata
from cavs._feed.settings import Sample, Source
from cavs._graphs.converters import from_lengths
from cavs._graphs.graphs import Graphs
from cavs._schedule.schedule import Schedule
from cavs._train.batches import A, Feed, distinct, labels_of, numbers_of
from cavs._train.data import UNKNOWN, with_labels


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Chains of words, and the spellings of the words that the table lacks, each in both directions.

    Attributes:
        words: one graph per sentence. `input_id` is the word's row of the table, or -1 if the word is spelled.
        back: the reversed chains. `input_id` is the graph of `spellings` that spells the word, or -1.
        spellings: one graph per distinct word, `input_id` a character. The first graph is a placeholder of one character.
            `None` if no word is spelled.
        spellings_back: the reversed chains of `spellings`, or `None`.
    """

    words: Graphs
    back: Graphs
    spellings: Graphs | None = None
    spellings_back: Graphs | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def num_vertices(self) -> int:
        """The total number of words."""
        return self.words.num_vertices

    @staticmethod
    def of(graphs: Graphs, words: tuple[str, ...], labels: tuple[str, ...], characters: tuple[str, ...]) -> "Sentences":
        """Converts the chains of `read_tagged`. Words not in `words` are spelled, or unknown if there are no `characters`."""
        assert graphs.vocab is not None and graphs.input_id is not None
        known = graphs.with_vocab(words, None if characters else UNKNOWN)
        known = known if known.label is None else with_labels(known, labels)
        if not characters:
            return Sentences(known, known.reversed())
        rows = set(words)
        rare = [i for i, word in enumerate(graphs.vocab) if word not in rows]
        number = np.full(len(graphs.vocab), -1, np.int32)
        number[rare] = 1 + np.arange(len(rare))
        index = {character: i for i, character in enumerate(characters)}
        texts = ["?", *(graphs.vocab[i] for i in rare)]
        ids = np.array([index.get(character, 0) for text in texts for character in text], np.int32)
        spellings = from_lengths([len(text) for text in texts], input_id=ids)
        back = dataclasses.replace(known.reversed(), input_id=number[graphs.input_id], vocab=None)
        return Sentences(known, back, spellings, spellings.reversed())


class Spellings(NamedTuple, Generic[A]):
    """The spelled words of a batch.

    Attributes:
        sched: the schedule of the spellings.
        back: the schedule of the reversed spellings.
        characters: (Cp,) the characters.
        spelled: (Vp,) the spelled word at each vertex of the batch; -1 if its word is not spelled.
    """

    sched: Schedule
    back: Schedule
    characters: A
    spelled: A


class TagBatch(NamedTuple, Generic[A]):
    """The input of one step, a pytree of int32 arrays. `words`, `word`, `label` and `sample` are as in `batches.StepInput`."""

    sched: Schedule
    back: Schedule
    words: A
    word: A
    label: A
    spellings: Spellings[A] | None
    sample: A


def feed(sentences: Sentences, num_words: int, batch: int) -> Feed:
    """Batches of sentences, as `TagBatch`. Typical batches of `batch` sentences determine the room for spelled words."""
    sources: list[Source] = [sentences.words, sentences.back]
    if sentences.spellings is not None and sentences.spellings_back is not None:
        typical = strata(np.diff(sentences.words.vertex_offsets), batch, np.random.default_rng(0))
        room = _power_of_two(max((len(_spelled_in(sentences.back[some[some >= 0]])[0]) for some in typical), default=8))
        sources += [
            (chains, lambda some: _filled(_spelled_in(sentences.back[some])[0], room))
            for chains in (sentences.spellings, sentences.spellings_back)
        ]

    def collate(sample: Sample) -> TagBatch[np.ndarray]:
        (some, turned, *of_spellings), (sched, back, *more) = cast(Any, (sample.graphs, sample.sched))
        words, word = distinct(some.input_id, sched.shape.vertices, num_words)
        spellings = None
        if of_spellings:
            chars, chars_back = more
            spelled = sched.pad(_spelled_in(turned)[1], -1)
            spellings = Spellings(chars, chars_back, chars.pad(of_spellings[0].input_id), spelled)
        label = sched.pad(labels_of(some, sample.present), -1)
        return TagBatch(sched, back, words, sched.pad(word, -1), label, spellings, numbers_of(sample))

    return Feed(sources, collate)


def _spelled_in(back: Graphs) -> tuple[np.ndarray, np.ndarray]:
    """The distinct spelled words of a batch, and the index of each vertex's word among them; -1 if it is not spelled."""
    assert back.input_id is not None
    found, index = np.unique(back.input_id, return_inverse=True)
    skip = int(len(found) > 0 and found[0] < 0)
    return found[skip:], index.astype(np.int32) - skip


def _filled(found: np.ndarray, room: int) -> np.ndarray:
    """Pads with the placeholder of one character up to `room` words, or to a power of two if there are more."""
    out = np.zeros(max(room, _power_of_two(len(found))), np.int64)
    out[: len(found)] = found
    return out


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
