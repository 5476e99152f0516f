"""Cavs on the applications of `bench.cells`: `bench.ours` with several graphs per sample.

An encoder-decoder has chains and attention graphs. A tagger has chains in both directions, and possibly the chains of letters
of its rare words.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench.cells import TAGGERS
from bench.ours import NO_WORD, Cavs, graphs_of, make_step
from bench.sentences import CHARACTERS
from cavs.vertex_programs import DAGNN, TDLSTM, TDRNN, BiLSTMTagger, CharBiLSTMTagger, EncoderDecoder, LatticeLSTM, RvNN

ROOM = 8  # minimum number of spellings per batch; rounded up to a power of two, so that batches share compiled code


def program(cell: str, hidden: int, embed: int, classes: int) -> Any:
    """Returns the ready vertex program of a cell."""
    return {
        "td_rnn": lambda: TDRNN(hidden),
        "td_lstm": lambda: TDLSTM(hidden),
        "rvnn": lambda: RvNN(hidden, embed),
        "bilstm": lambda: BiLSTMTagger(classes, hidden, embed, mlp=hidden),
        "char_bilstm": lambda: CharBiLSTMTagger(classes, hidden, embed, CHARACTERS, embed // 4, mlp=hidden),
        "encoder_decoder": lambda: EncoderDecoder(hidden, embed),
        "lattice_lstm": lambda: LatticeLSTM(hidden, embed),
        "dagnn": lambda: DAGNN(hidden, embed),
    }[cell]()


@dataclasses.dataclass(frozen=True)
class Samples:
    """A data set in memory.

    Attributes:
        graphs: The graphs to schedule for each batch. The loss is taken at all vertices with a label. Graphs with
            `input_id` read words from the embedding.
        spellings: Chains of letters in both directions, or none. Graph 0 is padding.
        first: The index of the first spelling of each sample, and the number of spellings.
        room: The number of spellings in every batch.
    """

    graphs: tuple[cavs.Graphs, ...]
    spellings: tuple[cavs.Graphs, ...] = ()
    first: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, int))
    room: int = 0

    def sources(self) -> Any:
        """Returns the data sets of a loader."""
        if len(self.graphs) == 1 and not self.spellings:
            return self.graphs[0]
        return [*self.graphs, *((g, self._spelled) for g in self.spellings)]

    def _spelled(self, index: np.ndarray) -> np.ndarray:
        """Returns the indices of the spellings of a batch, padded with graph 0."""
        counts = self.first[index + 1] - self.first[index]
        found = np.zeros(self.room, int)
        found[: counts.sum()] = np.arange(counts.sum()) + (self.first[index] - counts.cumsum() + counts).repeat(counts)
        return found


def read(cell: str, batches: list[list[dict[str, Any]]]) -> Samples:
    """Reads all samples of these batches."""
    samples = [g for batch in batches for g in batch]
    if cell == "encoder_decoder":
        source, target = ([len(g[k]) for g in samples] for k in ("source", "target"))
        chains, pairs = EncoderDecoder.graphs(source, target)
        none = [np.full(n, -1) for n in source]
        words, labels = ([x for n, g in zip(none, samples, strict=True) for x in (n, g[k])] for k in ("target", "labels"))
        return Samples((_with(chains, [g["source"] for g in samples]), _with(pairs, words, labels)))
    if cell == "lattice_lstm":
        words = [x for g in samples for x in (g["words"], g["span_words"])]
        labels = [x for g in samples for x in (g["labels"], np.full(len(g["spans"]), -1))]
        graphs = LatticeLSTM.graphs([len(g["words"]) for g in samples], [g["spans"] for g in samples])
        return Samples((_with(graphs, words, labels),))
    if cell in TAGGERS:
        chains = cavs.from_lengths([len(g["words"]) for g in samples])
        both = (_with(chains, [g["words"] for g in samples], [g["labels"] for g in samples]), chains.reversed())
        return Samples(both, *_spellings(batches)) if cell == "char_bilstm" else Samples(both)
    if cell in ("td_rnn", "td_lstm"):
        words = np.concatenate([g["words"] for g in samples])
        graphs = TDRNN.graphs([len(g["words"]) for g in samples], words=words)
        label = np.full(graphs.num_vertices, -1)
        label[graphs.vertex_offsets[1:] - 1] = [g["label"] for g in samples]
        return Samples((_with(graphs, [graphs.input_id], [label]),))
    graphs = graphs_of(samples)
    return Samples((_with(RvNN.add_kinds(graphs) if cell == "rvnn" else graphs, [graphs.input_id], [graphs.label]),))


def _with(graphs: cavs.Graphs, words: list[Any], labels: list[Any] | None = None) -> cavs.Graphs:
    """Returns the graphs with words (-1 for no word) and labels."""
    ids = np.concatenate(words).astype(np.int32)
    label = None if labels is None else np.concatenate(labels).astype(np.int32)
    return dataclasses.replace(graphs, input_id=np.where(ids < 0, np.int32(NO_WORD), ids), label=label)


def _spellings(batches: list[list[dict[str, Any]]]) -> tuple[tuple[cavs.Graphs, cavs.Graphs], np.ndarray, int]:
    """Returns `spellings`, `first` and `room` of `Samples`."""
    letters = [np.zeros(1, int), *(s for batch in batches for g in batch for s in g["spellings"])]
    first = np.cumsum([1, *(len(g["spellings"]) for batch in batches for g in batch)])
    most = max(sum(len(g["spellings"]) for g in batch) for batch in batches)
    chains = cavs.from_lengths([len(s) for s in letters], input_id=np.concatenate(letters))
    return (chains, chains.reversed()), first, max(ROOM, 1 << (most - 1).bit_length())


class CavsApplication(Cavs):
    """One application, trained like `Cavs`."""

    def __init__(
        self, cell: str, params: dict[str, np.ndarray], threads: int = 2, device: str = "cpu", engine: str | None = None
    ):
        (hidden, classes), embed = params["out_w"].shape, params["embed"].shape[1]
        self._cell, self._everywhere = cell, cell in (*TAGGERS, "encoder_decoder", "lattice_lstm")
        self._policy, self._F = "batching", None  # there may be several functions, and each chooses its engine
        self._begin(params, _nested({k: jnp.array(v) for k, v in params.items() if k != "embed"}), device)
        one = make_step(_loss(program(cell, hidden, embed, classes), self._everywhere, engine), _parts)
        self._step = cavs.data.step(tune=0)(one)

    def params(self) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in (_flat(self._state[0]) | {"embed": self._state[1]}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[np.ndarray]:
        """Reads a data set once. Returns the indices of the samples of each batch."""
        start = time.perf_counter()
        self._data = read(self._cell, batches).sources()
        self.reading = (time.perf_counter() - start) / len(batches)
        return self._chosen([len(b) for b in batches])


def _parts(batch: Any) -> tuple[Any, ...]:
    """Returns the schedules of a batch, and the words of each kind of graphs that reads words."""
    scheds = batch if isinstance(batch, tuple) else (batch,)
    return scheds, tuple(jnp.where(s.input_id < 0, NO_WORD, s.input_id) for s in _readers(scheds))


def _readers(scheds: tuple[cavs.Schedule, ...]) -> list[cavs.Schedule]:
    """Returns the schedules of graphs that read words, not letters."""
    return [s for s in scheds if "input_id" in s.shape.fields][: 1 if len(scheds) == 4 else None]


def _letters(words: cavs.Schedule, spellings: cavs.Schedule) -> tuple[jax.Array, jax.Array]:
    """Returns the letters of a batch, and the spelling of each word (-1 for none)."""
    rare = words.input_id == NO_WORD
    return jnp.maximum(spellings.input_id, 0), jnp.where(rare, jnp.cumsum(rare) - 1, -1)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nests a flat dict: `encoder.w` becomes `w` in `encoder`."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        at, (*parts, last) = out, name.split(".")
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
    return out


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in nested.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _loss(ready: Any, everywhere: bool, engine: str | None) -> Any:
    """Returns the mean loss over the labels, as a function for `make_step`."""

    def loss(params: Any, rows: tuple[Any, ...], batch: tuple[Any, ...]) -> Any:
        scheds, _ = batch
        logits = _logits(ready, params, rows, scheds, everywhere, engine)
        labelled = next(s for s in scheds if "label" in s.shape.fields)
        labels = labelled.label if everywhere else labelled.label[labelled.roots]
        of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1, mode="clip")[:, 0]
        return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

    return loss


def _logits(ready: Any, params: Any, rows: Any, scheds: Any, everywhere: bool, engine: str | None) -> jax.Array:
    if isinstance(ready, (BiLSTMTagger, CharBiLSTMTagger)):
        out = {"w": params["mlp_w"], "b": params["mlp_b"], "v": params["out_w"], "c": params["out_b"]}
        tagger = {"bilstm": [{k: params[k] for k in ("forward", "backward")}], **out}
        (sched, back, *of_spellings), (x,) = scheds, rows
        if isinstance(ready, BiLSTMTagger):
            return ready.run(tagger, sched, back, x)
        mine = {"tagger": tagger, "spell": [params["spell"]], "characters": params["characters"]}
        letters, of_word = _letters(sched, of_spellings[0])
        vectors = ready.vectors(mine, of_spellings[0], of_spellings[1], letters)
        return ready.run(mine, sched, back, x, vectors, of_word)
    if isinstance(ready, EncoderDecoder):
        (source, pairs), (x, y) = scheds, rows
        h = ready.run(params, source, pairs, x, y)
    else:
        F = ready.vertex_function()
        h = cavs.run(F, params, scheds[0], rows[0], select=None if everywhere else scheds[0].roots, engine=engine)
    return h @ params["out_w"] + params["out_b"]
