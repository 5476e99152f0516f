"""The model: word vectors, a vertex program, and a softmax over its pushes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cavs import vertex_programs
from cavs._train.batches import Batch
from cavs._train.config import LARGEST, MOST, Config, TrainError
from cavs._train.embeddings import Vectors
from cavs._train.programs import PROGRAMS, Sizes, run_program
from cavs._train.softmax import softmax_loss
from cavs.vertex_programs._dropout import dropout

# Standard deviation of word vectors that are not given.
WORD_SCALE = 0.1


class Weights(NamedTuple):
    """What a model learns: `params`, and `table` (words, embedding_size), of which a batch reads a few rows."""

    params: Any
    table: Any


class Metrics(NamedTuple):
    """Sums over a batch: of the loss's terms, and of right answers at labelled vertices and at labelled roots."""

    nll: Any
    count: Any
    vertices_right: Any
    vertices: Any
    roots_right: Any
    roots: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """embedding -> dropout -> program -> h -> dropout -> softmax(h w + b), at every vertex or at the roots.

    Parameters: the table of word vectors (`num_words`, `embedding_size`), kept apart as only a few rows are read at a
    time, and a dict of the program's and the classifier's, `{"program": ..., "w": (H, C), "b": (C,)}`.
    """

    program: Any
    num_words: int
    embedding_size: int
    num_labels: int
    loss: str
    dropout: float

    @staticmethod
    def make(config: Config, num_words: int, num_labels: int, arity: int, inner_reads: bool) -> "Model":
        """The model of a settled configuration, for graphs of at most `arity` children."""
        assert config.program is not None and config.embedding_size is not None and config.loss is not None
        sizes = Sizes(config.hidden, config.embedding_size, config.layers, max(arity, 1), inner_reads)
        program = PROGRAMS[config.program].make(sizes)
        return Model(program, num_words, config.embedding_size, num_labels, config.loss, config.dropout)

    def init(self, key: Any, vectors: Vectors | None = None) -> Weights:
        """Initial parameters and table: word vectors normal with deviation 0.1 unless given, classifier Glorot uniform."""
        program, classifier, words = jax.random.split(key, 3)
        table = init_table(words, self.num_words, self.embedding_size, vectors)
        hidden = self.program.hidden
        w = jax.nn.initializers.glorot_uniform()(classifier, (hidden, self.num_labels), jnp.float32)
        return Weights({"program": self.program.init(program), "w": w, "b": jnp.zeros(self.num_labels, jnp.float32)}, table)

    def hidden(self, params: Any, rows: Any, batch: Batch, at: Any = None, key: Any = None) -> Any:
        """h of all vertices (Vp, H), or `at` some; `rows` are the table's rows `batch.words`. With `key`, dropout."""
        x = vectors_of(rows, batch.word)
        keys = (None, None) if key is None else jax.random.split(key)
        h = run_program(self.program, params["program"], batch.sched, dropout(x, self.dropout, keys[0]), at)
        return dropout(h, self.dropout, keys[1])

    def objective(self, params: Any, rows: Any, batch: Batch, key: Any = None, loss: str | None = None) -> tuple[Any, Metrics]:
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
        return value, Metrics(jnp.vdot(has, nll), count, *vertices, root_right.sum(), (root_label >= 0).astype(h.dtype).sum())

    def metrics(self, weights: Weights, batch: Batch) -> Metrics:
        """Metrics without dropout, at all vertices whatever the loss."""
        return self.objective(weights.params, read_rows(weights.table, batch), batch, loss="all")[1]

    def probabilities(self, weights: Weights, batch: Batch) -> Any:
        """(Vp, C) of every vertex."""
        h = self.hidden(weights.params, read_rows(weights.table, batch), batch)
        return jax.nn.softmax(h @ weights.params["w"] + weights.params["b"])

    def describe(self) -> dict[str, Any]:
        """As JSON; `Model.from_json` undoes it."""
        return model_as_json(self)

    @staticmethod
    def from_json(about: dict[str, Any]) -> "Model":
        """The model that `describe` told of."""
        return model_from_json(Model, about)


def weight_shapes(model: Any) -> Weights:
    """The shapes of what a model's `init` returns."""
    return jax.eval_shape(model.init, jax.random.key(0))


def model_as_json(model: Any) -> dict[str, Any]:
    """The fields of a model, its vertex program among them, as JSON."""
    program = {f.name: getattr(model.program, f.name) for f in dataclasses.fields(model.program) if f.name != "dtype"}
    others = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name != "program"}
    return {"program": type(model.program).__name__, "program_fields": program, **others}


def model_from_json(kind: Any, about: dict[str, Any], **fields: Any) -> Any:
    """The model of a class `kind` that `model_as_json` told of, with `fields` that it did not."""
    about = dict(about)
    name, its = about.pop("program"), about.pop("program_fields")
    program = getattr(vertex_programs, name, None)
    if not (isinstance(program, type) and dataclasses.is_dataclass(program)):
        raise TrainError(f"program is {name!r}, wanted a vertex program of cavs.")
    for field, value in (*its.items(), *about.items()):
        # `unknown` is a row, the others are sizes; from a file of a few bytes that asks for millions of layers nothing is made.
        least, most = 0 if field == "unknown" else 1, MOST.get(field, LARGEST)
        if type(value) is int and not least <= value <= most:
            raise TrainError(f"{field} is {value}, wanted {least} to {most}.")
    return kind(program(**its), **about, **fields)


def init_table(key: Any, num_words: int, size: int, vectors: Vectors | None) -> Any:
    """Word vectors, normal with deviation 0.1 unless given."""
    table = WORD_SCALE * jax.random.normal(key, (num_words, size), jnp.float32)
    return table if vectors is None else jnp.where(vectors.found[:, None], vectors.rows, table)


def vectors_of(rows: Any, ids: Any) -> Any:
    """The rows (V, size) of `rows` that `ids` (V,) name; zeros where these are -1."""
    return jnp.where((ids >= 0)[:, None], rows[ids], 0)


def read_rows(table: Any, batch: Any) -> Any:
    """The rows of the table that a batch reads (U, size); zeros in padding."""
    return table.at[batch.words].get(mode="fill", fill_value=0)
