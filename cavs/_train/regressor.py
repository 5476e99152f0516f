"""The model of the task `regress`: word vectors, a vertex program, and a linear layer with one output; and its batches."""

import dataclasses
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.settings import Sample
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._schedule.schedule import Schedule
from cavs._train.batches import A, Feed, distinct, input_ids, numbers_of, one_of, padded_roots
from cavs._train.config import Config
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights, init_table, model_as_json, model_from_json, read_rows, row_keys, selected, vectors_of
from cavs._train.programs import PROGRAMS, Sizes, VertexProgram, run_program
from cavs.vertex_programs._dropout import dropout, split_key


class RegressBatch(NamedTuple, Generic[A]):
    """The input of one step. `sched`, `words`, `word`, `roots` and `sample` are as in `batches.StepInput`.

    Attributes:
        target: float32, NaN if there is none: (Vp,) of the vertices, (R,) of the roots, or (G,) of the graphs.
    """

    sched: Schedule
    words: A
    word: A
    roots: A
    target: A
    sample: A


class RegressMetrics(NamedTuple):
    """Sums over a batch: squared errors, targets, and the targets' distance from the training mean and its square."""

    nll: jax.Array
    count: jax.Array
    distance: jax.Array
    square: jax.Array


@dataclasses.dataclass(frozen=True)
class Regressor:
    """embedding -> dropout -> program -> h -> dropout -> mean + scale (h w + b), at vertices, roots, or the mean of roots.

    Attributes:
        at: "all" vertices, "root" or "graph".
        mean: the mean of the training targets.
        scale: their standard deviation.
    """

    program: VertexProgram
    num_words: int
    embedding_size: int
    at: str
    mean: float
    scale: float
    dropout: float

    @staticmethod
    def create(
        config: Config, num_words: int, arity: int, inner_reads: bool, at: str, mean: float, scale: float
    ) -> "Regressor":
        """The model of a settled configuration, for graphs of at most `arity` children per vertex."""
        assert config.program is not None and config.embedding_size is not None
        sizes = Sizes(config.hidden, config.embedding_size, config.layers, max(arity, 1), inner_reads)
        program = PROGRAMS[config.program].create(sizes)
        return Regressor(program, num_words, config.embedding_size, at, mean, scale, config.dropout)

    def init(self, key: jax.Array, vectors: Vectors | None = None) -> Weights:
        """Initial weights: the linear layer zero, so that the first prediction is the mean; the table as given or random."""
        program, words = jax.random.split(key)
        params = {
            "program": self.program.init(program),
            "w": jnp.zeros(self.program.hidden, jnp.float32),
            "b": jnp.zeros((), jnp.float32),
        }
        return Weights(params, init_table(words, self.num_words, self.embedding_size, vectors))

    def standardised(
        self, params: PyTree, rows: jax.Array, batch: RegressBatch[jax.Array], at: str, key: jax.Array | None = None
    ) -> jax.Array:
        """Predictions minus the mean, over the scale: (Vp,), (R,) or (G,). `rows` and `key` as in `SoftmaxModel.hidden`."""
        keys = split_key(row_keys(key, batch.sched, batch.sample), 2)
        x = jnp.asarray(dropout(vectors_of(rows, batch.word), self.dropout, keys[0]))
        select = None if at == "all" else batch.roots
        h = run_program(self.program, params["program"], batch.sched, x, select)
        values = jnp.asarray(dropout(h, self.dropout, selected(keys[1], select))) @ params["w"] + params["b"]
        if at != "graph":
            return values
        graphs = batch.sched.shape.graphs
        graph = batch.sched.graph.at[batch.roots].get(mode="fill", fill_value=graphs)
        sums, counts = (jax.ops.segment_sum(v, graph, graphs + 1)[:graphs] for v in (values, jnp.ones_like(values)))
        return sums / jnp.maximum(counts, 1)

    def objective(
        self, params: PyTree, rows: jax.Array, batch: RegressBatch[jax.Array], key: jax.Array | None = None
    ) -> tuple[jax.Array, RegressMetrics]:
        """The mean squared error of the standardised targets of a batch, and its metrics."""
        values = self.standardised(params, rows, batch, self.at, key)
        has = ~jnp.isnan(batch.target)
        distance = jnp.where(has, batch.target - self.mean, 0)
        error = jnp.where(has, values - distance / self.scale, 0)
        squares, count = jnp.vdot(error, error), has.sum().astype(error.dtype)
        metrics = RegressMetrics(self.scale**2 * squares, count, distance.sum(), jnp.vdot(distance, distance))
        return squares / jnp.maximum(count, 1), metrics

    def metrics(self, weights: Weights, batch: RegressBatch[jax.Array]) -> RegressMetrics:
        """The metrics without dropout."""
        return self.objective(weights.params, read_rows(weights.table, batch.words), batch)[1]

    def predictions(self, weights: Weights, batch: RegressBatch[jax.Array], at: str) -> jax.Array:
        """Predictions (Vp,), (R,) or (G,)."""
        rows = read_rows(weights.table, batch.words)
        return self.mean + self.scale * self.standardised(weights.params, rows, batch, at)

    def describe(self) -> dict[str, Any]:
        """The model as JSON, which `from_json` restores."""
        return model_as_json(self)

    @staticmethod
    def from_json(about: dict[str, Any]) -> "Regressor":
        """Restores the model from what `describe` returned."""
        return model_from_json(Regressor, about)


def feed(graphs: Graphs, num_words: int, at: str) -> Feed:
    """Batches of graphs with numbers as targets, as `RegressBatch`."""

    def collate(sample: Sample) -> RegressBatch[np.ndarray]:
        some, sched = one_of(sample)
        words, word = distinct(input_ids(some), sched.shape.vertices, num_words)
        roots = padded_roots(some, sched)
        if at == "graph":
            target = np.where(sample.present, np.nan if some.graph_label is None else some.graph_label, np.nan)
        else:
            label = np.full(some.num_vertices, np.nan) if some.label is None else some.label
            target = np.where(np.repeat(sample.present, np.diff(some.vertex_offsets)), label, np.nan)
            target = sched.pad(target, np.nan)
            target = np.append(target, np.nan)[roots] if at == "root" else target
        return RegressBatch(sched, words, sched.pad(word, -1), roots, target.astype(np.float32), numbers_of(sample))

    return Feed([graphs], collate)
