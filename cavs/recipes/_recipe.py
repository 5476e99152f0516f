"""`Recipe`: the interface of a task, which `cavs.recipes.main` makes a command line of; and its optimiser."""

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import optax

import cavs
from cavs import vertex_programs as vp
from cavs.recipes._data import Data, read_graphs
from cavs.recipes._options import Mistake, RunOptions


class Recipe(abc.ABC):
    """A task: reads its files, defines the model and the loss, and says which scores and predictions are printed.

    Parameters are a dict. `"words"`, if there is such a key, is the table of word vectors: weight decay leaves it out, and
    `--embedding-lr` is its learning rate.

    Args:
        options: the options of the run.
        facts: the `Data.facts` that `read` returned, or that the folder of a run contains.

    Attributes:
        name: the name of the task, for `--task` and `model.json`.
        Options: the options of the recipe.
        noun: the word for a sample, in messages.
        needs: a description of the training file, in messages.
        shows: a description of `cavs predict`, for the last lines of a run.
    """

    name: ClassVar[str]
    Options: ClassVar[type[RunOptions]]
    noun: ClassVar[str] = "graph"
    needs: ClassVar[str] = "a file of graphs with labels"
    shows: ClassVar[str] = "label your own graphs"

    def __init__(self, options: Any, facts: dict[str, Any]):
        self.options, self.facts = options, facts

    @classmethod
    @abc.abstractmethod
    def read(cls, options: Any) -> Data:
        """Reads all files of a run. Raises a `Mistake` if a file does not fit the task."""

    @abc.abstractmethod
    def init(self, key: jax.Array, vectors: cavs.io.Vectors | None = None) -> dict[str, Any]:
        """Returns the initial parameters."""

    @abc.abstractmethod
    def collate(self, sample: Any) -> Any:
        """Returns the arrays of a batch for a [`cavs.data.Sample`][]. Graphs that are not `present` must not count."""

    @abc.abstractmethod
    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss of a batch and its metrics. Both are sums: the loss over the labels, the metrics over batches.

        Metrics contain "loss" and "count" (the number of labels), and may contain others.

        Args:
            params: the parameters.
            batch: the arrays that `collate` returned, on the device.
            key: PRNG key of the dropout; `None` disables it.
        """

    @abc.abstractmethod
    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        """Computes the printed scores from summed metrics, by name. A score is `None` if these data do not have it."""

    def score(self, sums: Mapping[str, float]) -> float:
        """Returns the score of held-out data, the highest for the best epoch. By default the negative mean loss."""
        return -sums["loss"] / max(sums["count"], 1)

    @abc.abstractmethod
    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        """Yields a dict from columns to cells for each line of `cavs predict`, in the order of the samples of a file.

        Args:
            params: the parameters.
            path: the file.
            vertices: whether to yield a line per vertex instead of a line per sample.
            probabilities: whether to add the cell "probabilities", a dict by label.

        Raises:
            Mistake: the file does not fit the model, or the task has no such predictions.
        """

    @abc.abstractmethod
    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        """Scores the labelled samples of a file. Returns numbers, texts, `cavs.data.ConfusionMatrix`es, or dicts of these."""

    @classmethod
    def graphs(cls, path: str) -> cavs.Graphs:
        """Reads the graphs of a file, for `cavs inspect`."""
        return read_graphs(path)

    @property
    def program(self) -> Any:
        """The vertex program that `facts` describe: "program", "size", and for others than chains "arity" and "reads"."""
        facts, options = self.facts, self.options
        sizes = vp.Sizes(options.hidden, facts["size"], options.layers, facts.get("arity", 1), facts.get("reads", True))
        return vp.create_program(facts["program"], sizes)

    def labels(self, graphs: cavs.Graphs, present: np.ndarray) -> np.ndarray:
        """Returns the label of each vertex for `collate`: -1 if it has none, or if its graph is not `present`."""
        label = np.int32(-1) if graphs.label is None else graphs.label
        return np.where(np.repeat(present, np.diff(graphs.vertex_offsets)), label, np.int32(-1))

    def sources(self, part: Any) -> Any:
        """Returns the data sets for a loader of a part of the data."""
        return [*part] if isinstance(part, tuple) else part

    def baseline(self, train: Any, part: Any) -> dict[str, float]:
        """Returns the scores of a trivial model on a part of the data, for the table at the end."""
        return {}

    def draw(self, ax: Any, params: Any, path: str) -> None:
        """Draws the picture of `cavs evaluate --out`, if `evaluate` returns no confusion matrix."""
        raise Mistake(f"--out: there is no picture of the scores of --task {self.name}. Omit --out.")

    def loader(self, part: Any, batch: int, **how: Any) -> cavs.data.Loader:
        """Returns a loader of a part of the data; `how` are further arguments of [`cavs.data.Loader`][]."""
        how = {"group": "balanced", "last": "pad", "kinds": False} | how
        return cavs.data.Loader(self.sources(part), batch, collate=self.collate, fields=("input_id",), **how)

    def in_order(self, part: Any, batch: int = 64, **how: Any) -> cavs.data.Loader:
        """Returns a loader of all samples in order, in batches of one shape, for `cavs.data.evaluate` and `predict`."""
        return self.loader(part, batch, seed=None, shapes=1, steps=1, **how)

    def held_out(self, params: Any, part: Any, loader: cavs.data.Loader) -> dict[str, float]:
        """Returns the summed metrics of a part of the data, given its loader."""
        return cavs.data.evaluate(self.sums, params, loader)

    def sums(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        """Returns the metrics of a batch, without dropout."""
        return self.loss(params, batch)[1]


def learning_rate(options: RunOptions, steps: int) -> optax.Schedule:
    """Returns the learning rate of each step: a linear warm-up, then the schedule, which ends with 0 after `steps` steps."""
    lr, rise, decay_steps = options.lr, options.warmup, max(steps - options.warmup, 1)
    falls = {"constant": optax.constant_schedule(lr), "linear": optax.linear_schedule(lr, 0.0, decay_steps)}
    fall = falls.get(options.schedule) or optax.cosine_decay_schedule(lr, decay_steps)
    return optax.join_schedules([optax.linear_schedule(lr / rise, lr + lr / rise, rise), fall], [rise]) if rise else fall


def optimizer(options: RunOptions, steps: int) -> optax.GradientTransformation:
    """Creates the optimiser of a run. Its state has the same structure for all options that `--resume` may change.

    Args:
        options: the options.
        steps: the number of steps of the whole run, at which the schedule of the learning rate ends.
    """

    def where(predicate: Callable[[str, Any], bool]) -> Any:
        return lambda params: {name: jax.tree.map(functools.partial(predicate, name), tree) for name, tree in params.items()}

    rules = {"sgd": optax.identity(), "adagrad": optax.scale_by_rss(0.0, 1e-10)}
    rule = rules.get(options.optimizer) or optax.scale_by_adam()
    decayed = where(lambda name, x: x.ndim > 1 and name != "words")
    decay = optax.masked(optax.add_decayed_weights(options.weight_decay), decayed)
    word_scale = 1.0 if options.embedding_lr is None else options.embedding_lr / options.lr
    return optax.chain(
        optax.clip_by_global_norm(options.clip or float("inf")),
        *((rule, decay) if options.optimizer == "adamw" else (decay, rule)),
        optax.masked(optax.scale(word_scale), where(lambda name, x: name == "words")),
        optax.scale_by_learning_rate(learning_rate(options, steps)),
    )
