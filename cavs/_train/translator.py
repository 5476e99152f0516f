"""The model of the task `nmt`: word vectors, an encoder-decoder with attention, a softmax over the target's words."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._graphs.graphs import Graphs
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights, init_table, model_as_json, model_from_json, read_rows, vectors_of
from cavs._train.parallel import PairBatch, Parallel
from cavs._train.softmax import softmax_loss
from cavs.vertex_programs import EncoderDecoder
from cavs.vertex_programs._dropout import dropout


class PairMetrics(NamedTuple):
    """Sums over a batch: of the loss's terms, and of words predicted rightly from the words before."""

    nll: Any
    count: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Translator:
    """embedding -> dropout -> encoder-decoder -> dropout -> softmax(a w + b) over the target's words."""

    program: EncoderDecoder
    num_words: int
    num_labels: int
    dropout: float
    unknown: int = 0  # of the target's words: never written

    @staticmethod
    def make(config: Config, num_words: int, num_labels: int) -> "Translator":
        """The model of a settled configuration."""
        assert config.embedding_size is not None
        return Translator(EncoderDecoder(config.hidden, config.embedding_size), num_words, num_labels, config.dropout)

    def init(self, key: Any, vectors: Vectors | None = None) -> Weights:
        """Initial parameters and table."""
        program, classifier, words = jax.random.split(key, 3)
        w = jax.nn.initializers.glorot_uniform()(classifier, (self.program.hidden, self.num_labels), jnp.float32)
        params = {"program": self.program.init(program), "w": w, "b": jnp.zeros(self.num_labels, jnp.float32)}
        return Weights(params, init_table(words, self.num_words, self.program.inputs, vectors))

    def hidden(self, params: Any, rows: Any, batch: PairBatch, key: Any = None) -> Any:
        """a of the vertices `batch.at`, (R, H); `rows` are the table's rows `batch.words`. With `key`, dropout."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        x, y = (dropout(vectors_of(rows, ids), self.dropout, k) for ids, k in zip((batch.x, batch.y), keys, strict=False))
        a = self.program.run(params["program"], batch.source, batch.pairs, x, y, select=batch.at)
        return dropout(a, self.dropout, keys[2])

    def objective(self, params: Any, rows: Any, batch: PairBatch, key: Any = None) -> tuple[Any, PairMetrics]:
        """The mean loss over the target words of a batch, and its metrics. `key` as in `hidden`."""
        a = self.hidden(params, rows, batch, key)
        has = (batch.label >= 0).astype(a.dtype)
        count = has.sum()
        value, nll, right = softmax_loss(a, params["w"], params["b"], batch.label, has / jnp.maximum(count, 1))
        return value, PairMetrics(jnp.vdot(has, nll), count, jnp.vdot(has, right.astype(has.dtype)))

    def metrics(self, weights: Weights, batch: PairBatch) -> PairMetrics:
        """Metrics without dropout."""
        return self.objective(weights.params, read_rows(weights.table, batch), batch)[1]

    def translate(self, weights: Weights, source: Graphs, rows: np.ndarray, end: int) -> list[list[int]]:
        """Greedy translations, as numbers of target words: the likeliest word, given those before, until the mark `end`.

        `source`: chains of rows of the table; `rows` (C,) the row of each target word. A translation has at most twice as
        many words as its source and ten more. One schedule for all steps: later words do not change earlier ones.
        """
        lengths = 2 * np.diff(source.vertex_offsets) + 10
        data = Parallel.make(source, lengths, rows[end], -1)
        chains, pairs = cavs.schedule(data.chains), cavs.schedule(data.pairs)
        first = np.flatnonzero(data.targets)[np.cumsum(lengths) - lengths]
        x, y = chains.pad(data.chains.input_id, -1), pairs.pad(data.pairs.input_id, -1)
        running, words = np.ones(len(source), bool), []
        for t in range(int(lengths.max())):
            at = np.minimum(first + t, first + lengths - 1)
            best = np.asarray(_likeliest(self, weights, chains, pairs, x, y, at.astype(np.int32)))
            words.append(np.where(running, best, end))
            running &= (best != end) & (t + 1 < lengths)
            if not running.any():
                break
            y[(at + 1)[running]] = rows[best[running]]
        return [sentence[: (*sentence, end).index(end)] for sentence in np.stack(words, 1).tolist()]

    def describe(self) -> dict[str, Any]:
        """As JSON; `from_json` undoes it."""
        return model_as_json(self)

    @staticmethod
    def from_json(about: dict[str, Any]) -> "Translator":
        """The model that `describe` told of."""
        return model_from_json(Translator, about)


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(model: Translator, weights: Weights, source: Any, pairs: Any, x: Any, y: Any, at: Any) -> Any:
    """The likeliest word, but for the unknown one, after each of the rows `at`; `x`, `y` are rows of the whole table."""
    batch = PairBatch(source, pairs, None, x, y, at, None)
    a = model.hidden(weights.params, weights.table, batch)
    logits = a @ weights.params["w"] + weights.params["b"]
    return jnp.argmax(logits.at[:, model.unknown].set(-jnp.inf), -1)
