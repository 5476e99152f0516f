"""The model of the task `nmt`: word vectors, an encoder-decoder with attention, and a softmax over the target words."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights, init_table, model_as_json, model_from_json, read_rows, row_keys, selected, vectors_of
from cavs._train.parallel import PairBatch, Parallel
from cavs._train.softmax import softmax_loss
from cavs.vertex_programs import EncoderDecoder
from cavs.vertex_programs._dropout import dropout, split_key


class PairMetrics(NamedTuple):
    """Sums over a batch: the terms of the loss, and the words predicted correctly from the true words before them."""

    nll: jax.Array
    count: jax.Array
    right: jax.Array


@dataclasses.dataclass(frozen=True)
class Translator:
    """embedding -> dropout -> encoder-decoder -> dropout -> softmax(a w + b) over the target words."""

    program: EncoderDecoder
    num_words: int
    num_labels: int
    dropout: float
    unknown: int = 0  # the target word `<unk>`, which a translation never contains

    @staticmethod
    def create(config: Config, num_words: int, num_labels: int) -> "Translator":
        """The model of a settled configuration."""
        assert config.embedding_size is not None
        return Translator(EncoderDecoder(config.hidden, config.embedding_size), num_words, num_labels, config.dropout)

    def init(self, key: jax.Array, vectors: Vectors | None = None) -> Weights:
        """The initial parameters and table."""
        program, classifier, words = jax.random.split(key, 3)
        w = jax.nn.initializers.glorot_uniform()(classifier, (self.program.hidden, self.num_labels), jnp.float32)
        params = {"program": self.program.init(program), "w": w, "b": jnp.zeros(self.num_labels, jnp.float32)}
        return Weights(params, init_table(words, self.num_words, self.program.inputs, vectors))

    def hidden(self, params: PyTree, rows: jax.Array, batch: PairBatch[jax.Array], key: jax.Array | None = None) -> jax.Array:
        """a of the vertices `batch.at`, (R, H). `rows` are the rows `batch.words` of the table. A `key` enables dropout."""
        sides = zip(split_key(key, 2), (batch.source, batch.pairs), strict=True)
        of_source, of_pairs = (row_keys(k, sched, batch.sample) for k, sched in sides)
        keys = split_key(of_pairs, 2)
        x = dropout(vectors_of(rows, batch.x), self.dropout, of_source)
        y = dropout(vectors_of(rows, batch.y), self.dropout, keys[0])
        a = self.program.run(params["program"], batch.source, batch.pairs, x, y, select=batch.at)
        return jnp.asarray(dropout(a, self.dropout, selected(keys[1], batch.at)))

    def objective(
        self, params: PyTree, rows: jax.Array, batch: PairBatch[jax.Array], key: jax.Array | None = None
    ) -> tuple[jax.Array, PairMetrics]:
        """The mean loss over the target words of a batch, and its metrics. `rows` and `key` as in `hidden`."""
        a = self.hidden(params, rows, batch, key)
        has = (batch.label >= 0).astype(a.dtype)
        count = has.sum()
        value, nll, right = softmax_loss(a, params["w"], params["b"], batch.label, has / jnp.maximum(count, 1))
        return value, PairMetrics(jnp.vdot(has, nll), count, jnp.vdot(has, right.astype(has.dtype)))

    def metrics(self, weights: Weights, batch: PairBatch[jax.Array]) -> PairMetrics:
        """The metrics without dropout."""
        return self.objective(weights.params, read_rows(weights.table, batch.words), batch)[1]

    def translate(self, weights: Weights, source: Graphs, rows: np.ndarray, end: int) -> list[list[int]]:
        """Greedy translations: the most likely next word, given those before it, until the word `end`.

        One schedule serves all steps, because later words do not change earlier ones.

        Args:
            weights: the model's weights.
            source: chains whose `input_id` are rows of the table.
            rows: (C,) the row of the table of each target word.
            end: the target word that ends a translation. A translation has at most 2 n + 10 words for n source words.

        Returns:
            The target words of each translation, without `end`.
        """
        lengths = 2 * np.diff(source.vertex_offsets) + 10
        data = Parallel.of_rows(source, lengths, rows[end], -1)
        chains, pairs = cavs.schedule(data.chains), cavs.schedule(data.pairs)
        first = np.flatnonzero(data.targets)[np.cumsum(lengths) - lengths]
        x, y = chains.pad(data.chains.input_id, -1), pairs.pad(data.pairs.input_id, -1)
        running, words = np.ones(len(source), bool), []
        for t in range(int(lengths.max())):
            at = np.minimum(first + t, first + lengths - 1)
            best = np.asarray(_most_likely(self, weights, chains, pairs, x, y, at.astype(np.int32)))
            words.append(np.where(running, best, end))
            running &= (best != end) & (t + 1 < lengths)
            if not running.any():
                break
            y[(at + 1)[running]] = rows[best[running]]
        return [sentence[: (*sentence, end).index(end)] for sentence in np.stack(words, 1).tolist()]

    def describe(self) -> dict[str, Any]:
        """The model as JSON, which `from_json` restores."""
        return model_as_json(self)

    @staticmethod
    def from_json(about: dict[str, Any]) -> "Translator":
        """Restores the model from what `describe` returned."""
        return model_from_json(Translator, about)


@functools.partial(jax.jit, static_argnums=0)
def _most_likely(
    model: Translator, weights: Weights, source: Schedule, pairs: Schedule, x: jax.Array, y: jax.Array, at: jax.Array
) -> jax.Array:
    """The most likely word except `<unk>` after each of the rows `at`. `x` and `y` are rows of the whole table."""
    nothing = jnp.zeros(0, jnp.int32)  # `hidden` reads neither words nor labels, and without dropout no samples
    batch = PairBatch(source, pairs, nothing, x, y, at, nothing, nothing)
    a = model.hidden(weights.params, weights.table, batch)
    logits = a @ weights.params["w"] + weights.params["b"]
    return jnp.argmax(logits.at[:, model.unknown].set(-jnp.inf), -1)
