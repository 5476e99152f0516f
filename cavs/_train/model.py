"""The model of the tasks `classify` and `lm`: word vectors, a vertex program, and a softmax over its pushes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from cavs import vertex_programs
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule
from cavs._train.batches import StepInput
from cavs._train.config import LARGEST, MOST, Config, TrainError
from cavs._train.embeddings import Vectors
from cavs._train.programs import PROGRAMS, Sizes, VertexProgram, run_program
from cavs._train.softmax import softmax_loss
from cavs.vertex_programs._dropout import Key, RowKeys, dropout, split_key

# The standard deviation of random word vectors.
WORD_SCALE = 0.1

M = TypeVar("M")


class Weights(NamedTuple):
    """The weights of a model: `params`, and `table` (words, embedding_size). A batch reads a few rows of the table."""

    params: PyTree
    table: jax.Array


class SoftmaxMetrics(NamedTuple):
    """Sums over a batch: the terms of the loss, and the correct predictions at labelled vertices and at labelled roots."""

    nll: jax.Array
    count: jax.Array
    vertices_right: jax.Array
    vertices: jax.Array
    roots_right: jax.Array
    roots: jax.Array


@dataclasses.dataclass(frozen=True)
class SoftmaxModel:
    """embedding -> dropout -> program -> h -> dropout -> softmax(h w + b), at every vertex or at the roots.

    The parameters are a dict of the program's and the classifier's, `{"program": ..., "w": (H, C), "b": (C,)}`, and the
    table of word vectors (`num_words`, `embedding_size`), which is separate because a step reads only a few of its rows.
    """

    program: VertexProgram
    num_words: int
    embedding_size: int
    num_labels: int
    loss: str
    dropout: float

    @staticmethod
    def create(config: Config, num_words: int, num_labels: int, arity: int, inner_reads: bool) -> "SoftmaxModel":
        """The model of a settled configuration, for graphs of at most `arity` children per vertex."""
        assert config.program is not None and config.embedding_size is not None and config.loss is not None
        sizes = Sizes(config.hidden, config.embedding_size, config.layers, max(arity, 1), inner_reads)
        program = PROGRAMS[config.program].create(sizes)
        return SoftmaxModel(program, num_words, config.embedding_size, num_labels, config.loss, config.dropout)

    def init(self, key: jax.Array, vectors: Vectors | None = None) -> Weights:
        """Initial weights: the classifier Glorot uniform, word vectors as given or normal with standard deviation 0.1."""
        program, classifier, words = jax.random.split(key, 3)
        table = init_table(words, self.num_words, self.embedding_size, vectors)
        hidden = self.program.hidden
        w = jax.nn.initializers.glorot_uniform()(classifier, (hidden, self.num_labels), jnp.float32)
        return Weights({"program": self.program.init(program), "w": w, "b": jnp.zeros(self.num_labels, jnp.float32)}, table)

    def hidden(
        self,
        params: PyTree,
        rows: jax.Array,
        batch: StepInput[jax.Array],
        select: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """h of all vertices (Vp, H), or of the vertices `select`.

        Args:
            params: the dense parameters.
            rows: (U, embedding_size) rows `batch.words` of the table.
            batch: the batch.
            select: (M,) rows of vertices.
            key: PRNG key of the dropout; `None` disables it.
        """
        x = vectors_of(rows, batch.word)
        keys = split_key(row_keys(key, batch.sched, batch.sample), 2)
        x = jnp.asarray(dropout(x, self.dropout, keys[0]))
        h = run_program(self.program, params["program"], batch.sched, x, select)
        return jnp.asarray(dropout(h, self.dropout, selected(keys[1], select)))

    def objective(
        self,
        params: PyTree,
        rows: jax.Array,
        batch: StepInput[jax.Array],
        key: jax.Array | None = None,
        loss: str | None = None,
    ) -> tuple[jax.Array, SoftmaxMetrics]:
        """The mean loss over the labelled vertices (or roots) of a batch, and its metrics. `key` as in `hidden`."""
        root_label = batch.label.at[batch.roots].get(mode="fill", fill_value=-1)
        at_roots = (loss or self.loss) == "root"
        label = root_label if at_roots else batch.label
        h = self.hidden(params, rows, batch, batch.roots if at_roots else None, key)
        has = (label >= 0).astype(h.dtype)
        count = has.sum()
        value, nll, right = softmax_loss(h, params["w"], params["b"], label, has / jnp.maximum(count, 1))
        right = has * right
        root_right = right if at_roots else right.at[batch.roots].get(mode="fill", fill_value=0)
        nothing = jnp.zeros((), h.dtype)
        vertices = (nothing, nothing) if at_roots else (right.sum(), count)
        return value, SoftmaxMetrics(
            jnp.vdot(has, nll), count, *vertices, root_right.sum(), (root_label >= 0).astype(h.dtype).sum()
        )

    def metrics(self, weights: Weights, batch: StepInput[jax.Array]) -> SoftmaxMetrics:
        """The metrics without dropout, at all vertices even if the loss is only at the roots."""
        return self.objective(weights.params, read_rows(weights.table, batch.words), batch, loss="all")[1]

    def probabilities(self, weights: Weights, batch: StepInput[jax.Array]) -> jax.Array:
        """(Vp, C) probabilities of the labels at every vertex."""
        h = self.hidden(weights.params, read_rows(weights.table, batch.words), batch)
        return jax.nn.softmax(h @ weights.params["w"] + weights.params["b"])

    def describe(self) -> dict[str, Any]:
        """The model as JSON, which `from_json` restores."""
        return model_as_json(self)

    @staticmethod
    def from_json(about: dict[str, Any]) -> "SoftmaxModel":
        """Restores the model from what `describe` returned."""
        return model_from_json(SoftmaxModel, about)


def weight_shapes(model: Any) -> Weights:
    """The shapes and dtypes of what `model.init` returns."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def model_as_json(model: Any) -> dict[str, Any]:
    """The fields of a model as JSON, including those of its vertex program."""
    program = {f.name: getattr(model.program, f.name) for f in dataclasses.fields(model.program) if f.name != "dtype"}
    others = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name != "program"}
    return {"program": type(model.program).__name__, "program_fields": program, **others}


def model_from_json(kind: Callable[..., M], about: dict[str, Any], **fields: object) -> M:
    """Restores a model of the class `kind` from what `model_as_json` returned and the remaining `fields`."""
    about = dict(about)
    name, its = about.pop("program"), about.pop("program_fields")
    program = getattr(vertex_programs, name, None)
    if not (isinstance(program, type) and dataclasses.is_dataclass(program)):
        raise TrainError(f"program: got {name!r}; expected a vertex program of cavs.")
    for field, value in (*its.items(), *about.items()):
        # `unknown` is a row number; the other fields are sizes. A small file must not make cavs allocate millions of layers.
        least, most = 0 if field == "unknown" else 1, MOST.get(field, LARGEST)
        if type(value) is int and not least <= value <= most:
            raise TrainError(f"{field}: got {value}; expected {least} to {most}.")
    return kind(program(**its), **about, **fields)


def init_table(key: jax.Array, num_words: int, size: int, vectors: Vectors | None) -> jax.Array:
    """The initial word vectors: as given, or normal with standard deviation 0.1."""
    table = WORD_SCALE * jax.random.normal(key, (num_words, size), jnp.float32)
    return table if vectors is None else jnp.where(vectors.found[:, None], vectors.rows, table)


def vectors_of(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows (V, size) of `rows` at `ids` (V,); zeros where an id is -1."""
    return jnp.where((ids >= 0)[:, None], rows[ids], 0)


def row_keys(key: jax.Array | None, sched: Schedule, sample: jax.Array) -> RowKeys | None:
    """A key for each of the Vp vertices, which depends on `key`, the vertex, and the number (G,) of its graph in the data set.

    The dropout mask of a vertex is therefore the same in any batch, and in any part of a batch.
    """
    if key is None:
        return None
    graph = jnp.minimum(sched.graph, sched.shape.graphs - 1)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), sched.graph_end[:-1]])
    return RowKeys(key, sample[graph], jnp.arange(sched.shape.vertices) - start[graph])


def selected(keys: Key | None, select: jax.Array | None) -> Key | None:
    """The keys of the vertices `select`; all of them for `None`."""
    if select is None or not isinstance(keys, RowKeys):
        return keys
    return RowKeys(keys.key, keys.first[select], keys.second[select])


def read_rows(table: jax.Array, words: jax.Array) -> jax.Array:
    """The rows (U, size) of the table at `words` (U,); zeros where an index is out of range (padding)."""
    return table.at[words].get(mode="fill", fill_value=0)
