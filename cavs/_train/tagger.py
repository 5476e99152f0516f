"""The model of the task `tag`: word vectors or spelled words, then a BiLSTM tagger."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cavs import vertex_programs
from cavs._graphs.pytree import PyTree
from cavs._train.chunks import Chunks
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights, init_table, model_as_json, model_from_json, read_rows, row_keys, vectors_of
from cavs._train.sentences import TagBatch


class TagMetrics(NamedTuple):
    """Sums over a batch: the terms of the loss, correct labels; true, predicted and correctly predicted entities."""

    nll: jax.Array
    count: jax.Array
    right: jax.Array
    entities: jax.Array
    guessed: jax.Array
    both: jax.Array


@dataclasses.dataclass(frozen=True)
class TagModel:
    """embedding, or spelling -> dropout -> BiLSTM -> tanh layer -> softmax over `labels`, at every word."""

    program: vertex_programs.BiLSTMTagger | vertex_programs.CharBiLSTMTagger
    num_words: int
    labels: tuple[str, ...]

    @staticmethod
    def create(config: Config, num_words: int, labels: tuple[str, ...], num_characters: int) -> "TagModel":
        """The model of a settled configuration. With 0 characters, no word is spelled."""
        assert config.embedding_size is not None
        shared: dict[str, Any] = {"labels": len(labels), "hidden": config.hidden, "inputs": config.embedding_size}
        shared |= {"mlp": config.hidden, "layers": config.layers, "dropout": config.dropout}
        if num_characters:
            spelled: dict[str, Any] = {"characters": num_characters, "char_inputs": config.char_size}
            return TagModel(vertex_programs.CharBiLSTMTagger(**shared, **spelled), num_words, labels)
        return TagModel(vertex_programs.BiLSTMTagger(**shared), num_words, labels)

    def init(self, key: jax.Array, vectors: Vectors | None = None) -> Weights:
        """The initial parameters and table."""
        program, words = jax.random.split(key)
        return Weights(self.program.init(program), init_table(words, self.num_words, self.program.inputs, vectors))

    def logits(self, params: PyTree, rows: jax.Array, batch: TagBatch[jax.Array], key: jax.Array | None = None) -> jax.Array:
        """(Vp, labels) logits. `rows` are the rows `batch.words` of the table. A `key` enables dropout."""
        x, keys = vectors_of(rows, batch.word), row_keys(key, batch.sched, batch.sample)
        if not isinstance(self.program, vertex_programs.CharBiLSTMTagger):
            return self.program.run(params, batch.sched, batch.back, x, key=keys)
        assert batch.spellings is not None
        sched, back, characters, spelled = batch.spellings
        vectors = self.program.vectors(params, sched, back, characters)
        return self.program.run(params, batch.sched, batch.back, x, vectors, spelled, key=keys)

    def objective(
        self, params: PyTree, rows: jax.Array, batch: TagBatch[jax.Array], key: jax.Array | None = None
    ) -> tuple[jax.Array, TagMetrics]:
        """The mean loss over the labelled words of a batch, and its metrics. `rows` and `key` as in `logits`."""
        logits = self.logits(params, rows, batch, key)
        has = (batch.label >= 0).astype(logits.dtype)
        nll = has * optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.label, 0))
        guess = jnp.argmax(logits, -1)
        right, count = jnp.vdot(has, (guess == batch.label).astype(has.dtype)), has.sum()
        chunks = Chunks.of(self.labels)
        found = (jnp.zeros((), jnp.int32),) * 3 if chunks is None else chunks.count(batch.label, guess, batch.sched.graph)
        return nll.sum() / jnp.maximum(count, 1), TagMetrics(nll.sum(), count, right, *found)

    def metrics(self, weights: Weights, batch: TagBatch[jax.Array]) -> TagMetrics:
        """The metrics without dropout."""
        return self.objective(weights.params, read_rows(weights.table, batch.words), batch)[1]

    def probabilities(self, weights: Weights, batch: TagBatch[jax.Array]) -> jax.Array:
        """(Vp, labels) the probabilities of the labels of every word."""
        return jax.nn.softmax(self.logits(weights.params, read_rows(weights.table, batch.words), batch))

    def describe(self) -> dict[str, Any]:
        """The model without its labels as JSON, which `from_json` restores."""
        return {name: value for name, value in model_as_json(self).items() if name != "labels"}

    @staticmethod
    def from_json(about: dict[str, Any], labels: list[str]) -> "TagModel":
        """Restores the model from what `describe` returned and its labels."""
        return model_from_json(TagModel, about, labels=tuple(labels))
