"""The interface of a task of `cavs train`. The loop, the optimiser and checkpoints are the same for all tasks.

A task is one file, `task_NAME.py`, that ends with `TASK = ...`, an instance of `Task`, and whose name is in `config.TASKS`. A
task reads files into data, completes the configuration from the data, creates the model (`model`: initial weights, loss,
metrics) and its batches, scores an epoch, and formats results and predictions.
"""

import abc
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import jax
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._graphs.suggest import suggestion
from cavs._train import batches
from cavs._train.batches import IN_ORDER, Feed
from cavs._train.config import ALIASES, TASKS, Config, TrainError, flag
from cavs._train.data import Data, Samples
from cavs._train.embeddings import Vectors
from cavs._train.model import Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Sums: TypeAlias = dict[str, float]  # summed metrics by name, on the host
Cells: TypeAlias = tuple[object, ...]  # the cells of a line that `cavs predict` prints


class Predictions(NamedTuple):
    """The output of `cavs predict`.

    Attributes:
        columns: the name of each cell of a row.
        rows: the cells of each line. A cell is a string, a number, or a list of pairs (word, tag).
        labels: if given, each row has one more cell: the probabilities of these labels.
    """

    columns: tuple[str, ...]
    rows: Iterable[Cells]
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The output of `cavs evaluate`.

    Attributes:
        values: all scores as JSON.
        lines: the name and the text of each fact that is printed.
        tables: the tables below them.
        pictures: functions that draw a picture into given axes.
    """

    values: dict[str, Any]
    lines: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...] = ()
    pictures: "tuple[Callable[[Axes], None], ...]" = ()


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of `cavs predict`: a line per vertex, and the probabilities of all labels."""

    vertices: bool = False
    probabilities: bool = False


class Metrics(Protocol):
    """A NamedTuple of scalars: sums over a batch. The terms of the loss, `nll` and `count`, are among them."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    # NamedTuples have a method of this name, which a field replaces.
    @property
    def count(self) -> Any: ...

    def __iter__(self) -> Iterator[jax.Array]: ...


class Model(Protocol):
    """A model: a frozen dataclass of sizes. `init` creates the `Weights` that it learns."""

    @property
    def num_words(self) -> int:
        """The rows of the table of word vectors."""
        ...

    def init(self, key: jax.Array, vectors: Vectors | None = None) -> Weights:
        """The initial weights."""
        ...

    def objective(
        self, params: PyTree, rows: jax.Array, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[jax.Array, Metrics]:
        """The mean loss of a batch, and its metrics.

        Args:
            params: the dense parameters.
            rows: (U, size) the rows `batch.words` of the table.
            batch: a batch of the task, on the device.
            key: PRNG key of the dropout; `None` disables it.
        """
        ...

    def metrics(self, weights: Weights, batch: PyTree) -> Metrics:
        """The metrics of a batch, without dropout."""
        ...

    def describe(self) -> dict[str, Any]:
        """The model as JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel of the plot.

    Attributes:
        label: the label of the vertical axis.
        lines: for each line a suffix for the legend, a line style, and its value for the summed metrics of an epoch, or `None`.
        log: whether the vertical axis is logarithmic.
    """

    label: str
    lines: tuple[tuple[str, str, Callable[[Sums], float | None]], ...]
    log: bool = False


class Task(abc.ABC):
    """A task.

    Attributes:
        defaults: values of the configuration that differ from the defaults of `Config`.
        own: fields that no other task accepts.
        foreign: fields that this task does not accept, each with the end of an error message.
        needs_file: the expected content of the training file; `None` if the file is optional.
        noun: what a sample is called.
        predicts: what `cavs predict` does, for the last lines of a run.
        panels: the panels of the plot.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    own: ClassVar[tuple[str, ...]] = ()
    foreign: ClassVar[dict[str, str]] = {}
    needs_file: ClassVar[str | None] = None
    noun: ClassVar[str] = "graph"
    predicts: ClassVar[str] = "label your own graphs"
    panels: ClassVar[tuple[Curve, ...]]

    @abc.abstractmethod
    def read(self, config: Config) -> tuple[Config, Data]:
        """Reads all files of a run, and completes the configuration from the data. Raises a `TrainError`."""

    @abc.abstractmethod
    def model(self, config: Config, data: Data) -> Model:
        """The model of a complete configuration."""

    @abc.abstractmethod
    def restore(self, about: dict[str, Any]) -> Model:
        """The model described by a checkpoint's `model.json`."""

    @abc.abstractmethod
    def score(self, sums: Sums, config: Config) -> float:
        """The score on held-out data: the best epoch has the highest."""

    @abc.abstractmethod
    def shown(self, sums: Sums) -> str:
        """The metrics as a few words."""

    @abc.abstractmethod
    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        """A table of the best epoch's scores on each part of the data, beside those of a trivial baseline."""

    @abc.abstractmethod
    def predict(self, about: dict[str, Any], model: Any, weights: Weights, path: str, asked: Asked) -> Predictions:
        """Returns the output of `cavs predict` for the samples of a file. Raises a `TrainError`."""

    @abc.abstractmethod
    def evaluate(self, about: dict[str, Any], model: Any, weights: Weights, path: str) -> Evaluation:
        """The scores on the labelled samples of a file. Raises a `TrainError`."""

    @abc.abstractmethod
    def graphs(self, path: str) -> Graphs:
        """The graphs of a file, for `cavs inspect`. Raises a `TrainError` or a `FormatError`."""

    def feed(self, model: Any, part: Samples, batch: int = IN_ORDER) -> Feed:
        """Returns the feed from which a loader creates batches of about `batch` samples of a part."""
        return batches.feed(part, model.num_words)

    def parts(self, data: Data) -> dict[str, Samples]:
        """The parts of the data, by their names in `results`."""
        return {"while training": data.train, "held-out": data.dev, "test": data.test}


def refuse(asked: Asked, task: str, *fields: str) -> None:
    """Raises a `TrainError` if `cavs predict` is asked for something that a task does not have."""
    for field in fields:
        if getattr(asked, field):
            raise TrainError(f"{flag(field)}: not valid with a model of --task {task}. Omit it.")


def find_task(name: str) -> Task:
    """The task of a name or an alias. Raises a `TrainError` that lists the names."""
    name = ALIASES.get(name, name)
    if name not in TASKS:
        names = (*TASKS, *ALIASES)
        raise TrainError(f"--task: got {name!r}; expected one of {', '.join(names)}. {suggestion(name, names)}".rstrip())
    return importlib.import_module(f"cavs._train.task_{name}").TASK


def configure(given: dict[str, Any]) -> Config:
    """The configuration: the values in `given`, else the task's defaults. Raises a `TrainError` that names the wrong flag."""
    name = given.get("task", Config.task)
    task = find_task(name)
    fields: dict[str, Any] = task.defaults | given | {"task": ALIASES.get(name, name)}
    config = Config(**fields)
    config.check()
    if config.train is None and task.needs_file is not None:
        raise TrainError(
            f"FILE: got nothing; --task {config.task} expects {task.needs_file}. Write: cavs train --task {config.task} FILE"
        )
    asked = [field for field, value in given.items() if value is not None]
    for field in asked:
        if field in task.foreign:
            raise TrainError(f"{flag(field)}: not valid with --task {config.task}: {task.foreign[field]}")
        for other in TASKS:
            if other != config.task and field in find_task(other).own and field not in task.own:
                raise TrainError(f"{flag(field)}: not valid with --task {config.task}; only with --task {other}.")
    return config
