"""Sentences of which rare words are spelled: chains of words and chains of characters, and batches of both."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cavs._graphs.converters import from_lengths
from cavs._graphs.graphs import Graphs
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import schedules
from cavs._train.batches import Prepare, distinct, labels_of, shapes_of, with_stand_ins
from cavs._train.data import UNKNOWN, with_labels


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Chains of words in both directions; and, in both directions, the spellings of words that the table lacks.

    - `words`: a graph a sentence; `input_id` is the word's row of the table, or -1 where it is spelled.
    - `back`: the same turned round; `input_id` is the graph of `spellings` that spells the word, else -1.
    - `spellings`, `spellings_back`: a graph a distinct word, `input_id` a character. The first is a stand-in of one
      character. `None` where words are not spelled.
    """

    words: Graphs
    back: Graphs
    spellings: Graphs | None = None
    spellings_back: Graphs | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def num_vertices(self) -> int:
        """Words in all."""
        return self.words.num_vertices

    @staticmethod
    def of(graphs: Graphs, words: tuple[str, ...], labels: tuple[str, ...], characters: tuple[str, ...]) -> "Sentences":
        """From chains as `read_tagged` reads them. What `words` lacks is spelled; where there are no `characters`, unknown."""
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


class Spellings(NamedTuple):
    """The spelled words of a batch: schedules of both directions, `characters` (Cp,), and `spelled` (Vp,), which of these
    words each vertex is, -1 where it is none."""

    sched: Schedule
    back: Schedule
    characters: Any
    spelled: Any


class TagBatch(NamedTuple):
    """What one step sees; a pytree of integers. `words`, `word`, `label` as in `batches.Batch`."""

    sched: Schedule
    back: Schedule
    words: Any
    word: Any
    label: Any
    spellings: Spellings | None


def preparer(sentences: Sentences, grid: np.ndarray, num_words: int) -> Prepare:
    """Makes the batches of a part. For each -1 the shortest sentence stands in, without labels.

    The shapes of schedules are chosen beforehand, from the batches `grid`: few, whatever comes, and the same however far a
    run has come, so that going on changes no bit. Both directions of chains have the same shape.
    """
    sizes = np.diff(sentences.words.vertex_offsets)
    numbers, _ = with_stand_ins(grid, sizes)
    word_shapes = shapes_of(sentences.words, numbers)
    room, spelling_shapes = 8, ()
    if sentences.spellings is not None:
        found = [_spelled_in(sentences.back[some])[0] for some in numbers]
        room = _power_of_two(max(map(len, found), default=8))
        filled = np.array([_filled(some, room) for some in found], int).reshape(-1, room)
        spelling_shapes = shapes_of(sentences.spellings, filled)

    def prepare(grid: np.ndarray, workers: int = 0) -> Iterator[TagBatch]:
        numbers, presents = with_stand_ins(grid, sizes)
        forward = schedules(sentences.words, numbers, shapes=word_shapes, workers=workers)
        backward = schedules(sentences.back, numbers, shapes=word_shapes, workers=workers)
        spelled: Iterator[Spellings | None] = itertools.repeat(None)
        if sentences.spellings is not None:
            backward, to_spell = itertools.tee(backward)
            spelled = spell(to_spell, workers)
        for present, (some, sched), (_, back), spellings in zip(presents, forward, backward, spelled, strict=False):
            assert some.input_id is not None
            words, word = distinct(some.input_id, sched.shape.vertices, num_words)
            yield TagBatch(sched, back, words, sched.pad(word, -1), sched.pad(labels_of(some, present), -1), spellings)

    def spell(batches: Iterator[tuple[Graphs, Schedule]], workers: int) -> Iterator[Spellings]:
        words, ahead, ahead_back = itertools.tee(((back, *_spelled_in(turned)) for turned, back in batches), 3)
        assert sentences.spellings is not None and sentences.spellings_back is not None
        forward, backward = (
            schedules(chains, (_filled(found, room) for _, found, _ in some), shapes=spelling_shapes, workers=workers)
            for chains, some in ((sentences.spellings, ahead), (sentences.spellings_back, ahead_back))
        )
        for (sched, _, spelled), (chains, chars), (_, back) in zip(words, forward, backward, strict=True):
            yield Spellings(chars, back, chars.pad(chains.input_id), sched.pad(spelled, -1))

    return prepare


def _spelled_in(back: Graphs) -> tuple[np.ndarray, np.ndarray]:
    """The distinct spelled words of a batch, and which of them each vertex is, -1 where it is none."""
    assert back.input_id is not None
    found, index = np.unique(back.input_id, return_inverse=True)
    skip = int(len(found) > 0 and found[0] < 0)
    return found[skip:], index.astype(np.int32) - skip


def _filled(found: np.ndarray, room: int) -> np.ndarray:
    """With stand-ins up to `room`, or where there are more, a power of two: single characters, which cost little."""
    out = np.zeros(max(room, _power_of_two(len(found))), np.int64)
    out[: len(found)] = found
    return out


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
