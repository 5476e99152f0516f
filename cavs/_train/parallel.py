"""Sentence pairs for translation: reading them, and batches of both graphs of an encoder-decoder."""

import dataclasses
from typing import Any, Generic, NamedTuple, cast

import numpy as np

from cavs._feed.settings import Sample
from cavs._graphs.converters import from_lengths
from cavs._graphs.counted import counted
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError
from cavs._readers.source import read_lines
from cavs._schedule.schedule import Schedule
from cavs._train.batches import A, Feed, distinct, labels_of, numbers_of
from cavs._train.config import TrainError
from cavs._train.data import UNKNOWN
from cavs.vertex_programs.encoder_decoder import sentence_pairs

END = "</s>"
SEPARATORS = ("\t", " ||| ")


def read_pairs(path: str) -> tuple[Graphs, Graphs]:
    """Reads lines `source TAB target` or `source ||| target` as chains of source words and chains of target words.

    The file is UTF-8, and decompressed if its name ends in `.gz`. Blank lines are skipped.

    Raises:
        TrainError: a line is not a pair; the message names it.
    """
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    for number, line in _lines(path):
        cells = next((line.split(s) for s in SEPARATORS if s in line), [line])
        if len(cells) != 2 or not all(cell.split() for cell in cells):
            raise TrainError(
                f"{path}, line {number}: got {counted(len(cells), 'cell')}; expected `source TAB target` or "
                "`source ||| target`."
            )
        for side, cell in zip(sides, cells, strict=True):
            side.append(cell.split())
    if not sides[0]:
        raise TrainError(f"{path}: got no pairs; expected `source TAB target` on each line.")
    return _chains(sides[0]), _chains(sides[1])


def read_sources(path: str) -> Graphs:
    """Reads each line as a chain of words. Text after a TAB or ` ||| ` is ignored."""
    sentences = []
    for _, line in _lines(path):
        for separator in SEPARATORS:
            line = line.split(separator)[0]
        sentences.append(line.split())
    if not all(sentences) or not sentences:
        raise TrainError(f"{path}: got no sentences; expected one per line.")
    return _chains(sentences)


def _lines(path: str) -> list[tuple[int, str]]:
    try:
        return [(i, line) for i, line in enumerate(read_lines(path), 1) if line.strip()]
    except FormatError as error:
        raise TrainError(str(error)) from error


def _chains(sentences: list[list[str]]) -> Graphs:
    ids, names = number_names([word for words in sentences for word in words])
    return from_lengths([len(words) for words in sentences], input_id=ids, vocab=names)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Sentence pairs as the two graphs of `EncoderDecoder`.

    `input_id` is a word's row of the table. A target reads `</s> w1 ... wn`. Its `label` is `w1 ... wn </s>`, as an index of
    the target words. Source vertices have the label -1.
    """

    chains: Graphs
    pairs: Graphs

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, index: slice | np.ndarray) -> "Parallel":
        return Parallel(self.chains[index], self.pairs[index])

    @property
    def num_vertices(self) -> int:
        """The number of words of both sides, including `</s>`."""
        return self.pairs.num_vertices

    @property
    def targets(self) -> np.ndarray:
        """(V,) bool, which vertices of the pairs are target words."""
        return self.pairs.height > 0

    @staticmethod
    def of(source: Graphs, target: Graphs, words: tuple[str, ...], labels: tuple[str, ...]) -> "Parallel":
        """Converts the chains of `read_pairs`."""
        source = source.with_vocab(words, UNKNOWN)
        row, label = target.with_vocab(words, UNKNOWN).input_id, target.with_vocab(labels, UNKNOWN).input_id
        assert row is not None and label is not None
        ends = target.vertex_offsets[1:]
        return Parallel.of_rows(
            source,
            np.diff(target.vertex_offsets) + 1,
            np.insert(row, target.vertex_offsets[:-1], words.index(END)),
            np.insert(label, ends, labels.index(END)),
        )

    @staticmethod
    def of_rows(source: Graphs, lengths: np.ndarray, row: np.ndarray | int, label: np.ndarray | int) -> "Parallel":
        """Builds the pairs from the sources, the `lengths` (G,) of the targets, and the `row` and `label` of target words."""
        chains, pairs = sentence_pairs(np.diff(source.vertex_offsets), lengths)
        input_id, labels = np.full((2, pairs.num_vertices), -1, np.int32)
        input_id[pairs.height > 0], labels[pairs.height > 0] = row, label
        chains = dataclasses.replace(chains, input_id=source.input_id)
        return Parallel(chains, dataclasses.replace(pairs, input_id=input_id, label=labels))


class PairBatch(NamedTuple, Generic[A]):
    """The input of one step, a pytree of int32 arrays.

    Attributes:
        source: the schedule of the sources.
        pairs: the schedule of the pairs.
        words: (U,) as in `batches.StepInput`.
        x: (Sp,) the index into `words` of each vertex of the sources; -1 if it reads nothing.
        y: (Vp,) the same for the pairs.
        at: (R,) the rows of the target words.
        label: (R,) their labels; -1 in padding.
        sample: (G,) the number of each pair in the data set.
    """

    source: Schedule
    pairs: Schedule
    words: A
    x: A
    y: A
    at: A
    label: A
    sample: A


def feed(data: Parallel, num_words: int) -> Feed:
    """Batches of sentence pairs, as `PairBatch`."""

    def collate(sample: Sample) -> PairBatch[np.ndarray]:
        (chains, pairs), (source, sched) = cast(Any, (sample.graphs, sample.sched))
        rows = source.shape.vertices + sched.shape.vertices
        words, ids = distinct(np.concatenate([chains.input_id, pairs.input_id]), rows, num_words)
        x, y = np.split(ids, [chains.num_vertices])
        at = np.flatnonzero(Parallel(chains, pairs).targets).astype(np.int32)
        label = labels_of(pairs, sample.present)[at]
        room = sum(sched.shape.inner) - len(at)
        at, label = (np.append(ids, np.full(room, fill, np.int32)) for ids, fill in ((at, 0), (label, -1)))
        return PairBatch(source, sched, words, source.pad(x, -1), sched.pad(y, -1), at, label, numbers_of(sample))

    return Feed([data.chains, data.pairs], collate)
