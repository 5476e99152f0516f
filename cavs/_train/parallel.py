"""Sentence pairs for translation: files of them, and batches of both graphs of an encoder-decoder."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cavs._graphs.converters import from_lengths
from cavs._graphs.flat import number_names
from cavs._graphs.graphs import Graphs
from cavs._readers import FormatError
from cavs._readers.source import read_lines
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import schedules
from cavs._train.batches import Prepare, distinct, labels_of, shapes_of, with_stand_ins
from cavs._train.config import TrainError
from cavs._train.data import UNKNOWN
from cavs.vertex_programs.encoder_decoder import sentence_pairs

END = "</s>"
SEPARATORS = ("\t", " ||| ")


def read_pairs(path: str) -> tuple[Graphs, Graphs]:
    """Chains of the source and of the target words of each line `source TAB target`, or `source ||| target`; blank lines
    are passed over. UTF-8, `.gz` by name.

    **Raises:** `TrainError` that names the line that is no pair.
    """
    sides: tuple[list[list[str]], list[list[str]]] = ([], [])
    for number, line in _lines(path):
        cells = next((line.split(s) for s in SEPARATORS if s in line), [line])
        if len(cells) != 2 or not all(cell.split() for cell in cells):
            raise TrainError(f"{path}: line {number} has {len(cells)} cells, wanted `source TAB target` (or ` ||| ` between).")
        for side, cell in zip(sides, cells, strict=True):
            side.append(cell.split())
    if not sides[0]:
        raise TrainError(f"{path} holds no pairs; wanted `source TAB target` a line.")
    return _chains(sides[0]), _chains(sides[1])


def read_sources(path: str) -> Graphs:
    """Chains of the words of each line; what follows a TAB or ` ||| ` is not read."""
    sentences = []
    for _, line in _lines(path):
        for separator in SEPARATORS:
            line = line.split(separator)[0]
        sentences.append(line.split())
    if not all(sentences) or not sentences:
        raise TrainError(f"{path} holds no sentences; wanted one a line.")
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
    """Sentence pairs as the two graphs of `EncoderDecoder`. `input_id` is a word's row of the table; targets read
    `</s> w1 ... wn` and have the `label` `w1 ... wn </s>`, an index of the target's words; sources have none (-1)."""

    chains: Graphs
    pairs: Graphs

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, index: Any) -> "Parallel":
        return Parallel(self.chains[index], self.pairs[index])

    @property
    def num_vertices(self) -> int:
        """Words of both sides, and the marks."""
        return self.pairs.num_vertices

    @property
    def targets(self) -> np.ndarray:
        """(V,) which vertices of the pairs are targets."""
        return self.pairs.height > 0

    @staticmethod
    def of(source: Graphs, target: Graphs, words: tuple[str, ...], labels: tuple[str, ...]) -> "Parallel":
        """From chains as `read_pairs` reads them."""
        source = source.with_vocab(words, UNKNOWN)
        row, label = target.with_vocab(words, UNKNOWN).input_id, target.with_vocab(labels, UNKNOWN).input_id
        assert row is not None and label is not None
        ends = target.vertex_offsets[1:]
        return Parallel.make(
            source,
            np.diff(target.vertex_offsets) + 1,
            np.insert(row, target.vertex_offsets[:-1], words.index(END)),
            np.insert(label, ends, labels.index(END)),
        )

    @staticmethod
    def make(source: Graphs, lengths: Any, row: Any, label: Any) -> "Parallel":
        """From the sources, the `lengths` (G,) of the targets, and what each target vertex reads and is labelled."""
        chains, pairs = sentence_pairs(np.diff(source.vertex_offsets), lengths)
        input_id, labels = np.full((2, pairs.num_vertices), -1, np.int32)
        input_id[pairs.height > 0], labels[pairs.height > 0] = row, label
        chains = dataclasses.replace(chains, input_id=source.input_id)
        return Parallel(chains, dataclasses.replace(pairs, input_id=input_id, label=labels))


class PairBatch(NamedTuple):
    """What one step sees; a pytree of integers: both schedules; `words` as in `batches.Batch`; `x` (Sp,), `y` (Vp,), what
    the words of sources and pairs are of these, -1 for nothing; `at` (R,) rows of the targets and their `label`, -1 in
    padding."""

    source: Schedule
    pairs: Schedule
    words: Any
    x: Any
    y: Any
    at: Any
    label: Any


def preparer(data: Parallel, grid: np.ndarray, num_words: int) -> Prepare:
    """Makes the batches of a part. For each -1 the shortest pair stands in, without labels.

    The shapes of schedules are chosen beforehand, from the batches `grid`: few, and the same however far a run has come.
    """
    sizes = np.diff(data.pairs.vertex_offsets)
    numbers, _ = with_stand_ins(grid, sizes)
    source_shapes, pair_shapes = shapes_of(data.chains, numbers), shapes_of(data.pairs, numbers)

    def prepare(grid: np.ndarray, workers: int = 0) -> Iterator[PairBatch]:
        numbers, presents = with_stand_ins(grid, sizes)
        sources = schedules(data.chains, numbers, shapes=source_shapes, workers=workers)
        targets = schedules(data.pairs, numbers, shapes=pair_shapes, workers=workers)
        for present, (chains, source), (pairs, sched) in zip(presents, sources, targets, strict=True):
            assert chains.input_id is not None and pairs.input_id is not None
            rows = source.shape.vertices + sched.shape.vertices
            words, ids = distinct(np.concatenate([chains.input_id, pairs.input_id]), rows, num_words)
            x, y = np.split(ids, [chains.num_vertices])
            at = np.flatnonzero(Parallel(chains, pairs).targets).astype(np.int32)
            label = labels_of(pairs, present)[at]
            room = sum(sched.shape.inner) - len(at)
            at, label = (np.append(ids, np.full(room, fill, np.int32)) for ids, fill in ((at, 0), (label, -1)))
            yield PairBatch(source, sched, words, source.pad(x, -1), sched.pad(y, -1), at, label)

    return prepare
