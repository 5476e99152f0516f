"""What a task of `cavs train` is, and the table of them. The loop, the optimiser and checkpoints are the same for all.

A task is one file, `task_NAME.py`, that ends in `TASK = ...`, a `Task`; and its name in `TASKS`. It says how files become
data, how data settles what the configuration left open, which model is trained (`model`: initial weights, loss, metrics),
how a batch is made, what the best epoch has most of, and what is shown and predicted.
"""

import abc
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import numpy as np
from rich.table import Table

from cavs._graphs.graphs import Graphs
from cavs._train import batches
from cavs._train.batches import Prepare
from cavs._train.config import ALIASES, TASKS, Config, TrainError, flag
from cavs._train.data import Data
from cavs._train.embeddings import Vectors

Sums = dict[str, float]


class Model(Protocol):
    """A model: a value of plain fields; what it learns are the `Weights` that `init` makes."""

    num_words: int

    def init(self, key: Any, vectors: Vectors | None = None) -> Any:
        """Initial `Weights`."""

    def objective(self, params: Any, rows: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        """The mean loss of a batch, and `metrics`; `rows` are those of the table that `batch.words` names. `key`: dropout."""
        ...

    def metrics(self, weights: Any, batch: Any) -> Any:
        """A NamedTuple of sums over a batch, without dropout; `nll` and `count`, the loss's terms, are among them."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel of the picture: `lines` are a suffix of the legend, a line style and the value, `None` where there is none."""

    label: str
    lines: tuple[tuple[str, str, Callable[[Sums], float | None]], ...]
    log: bool = False


class Task(abc.ABC):
    """One task. `defaults` of the configuration; `own` flags, which no other task takes; `foreign` ones it does not take."""

    defaults: ClassVar[dict[str, Any]] = {}
    own: ClassVar[tuple[str, ...]] = ()
    foreign: ClassVar[dict[str, str]] = {}
    needs_file: ClassVar[str | None] = None  # what a file holds, where one must be given
    inspectable: ClassVar[bool] = False  # whether `cavs inspect` reads these files
    noun: ClassVar[str] = "graphs"
    predicts: ClassVar[str] = "label graphs of your own"
    panels: ClassVar[tuple[Curve, ...]]

    @abc.abstractmethod
    def read(self, config: Config) -> tuple[Config, Data]:
        """All files of a run, and the configuration with what the data settles. **Raises:** `TrainError`."""

    @abc.abstractmethod
    def model(self, config: Config, data: Data) -> Model:
        """The model of a settled configuration."""

    @abc.abstractmethod
    def restore(self, about: dict[str, Any]) -> Model:
        """The model of a checkpoint's `model.json`."""

    @abc.abstractmethod
    def score(self, sums: Sums, config: Config) -> float:
        """What the best epoch has most of on held-out data."""

    @abc.abstractmethod
    def shown(self, sums: Sums) -> str:
        """Metrics in a few words."""

    @abc.abstractmethod
    def results(self, data: Data, results: dict[str, Sums]) -> Table:
        """Scores of the best epoch by part, "while training", "held-out", "test", beside those of guessing."""

    @abc.abstractmethod
    def predict(self, about: dict[str, Any], model: Any, weights: Any, path: str, vertices: bool) -> Iterator[tuple[Any, ...]]:
        """Cells of each line that `cavs predict` prints."""

    def sizes(self, part: Any) -> np.ndarray:
        """What each sample of a part of the data costs, in vertices: batches are made of equal sums."""
        graphs: Graphs = part
        return np.diff(graphs.vertex_offsets)

    def preparer(self, model: Any, part: Any, grid: np.ndarray) -> Prepare:
        """Makes the batches of a part of the data. `grid` holds such batches as are to come: of what sizes they are."""
        return functools.partial(batches.prepare, part, model.num_words)

    def parts(self, data: Data) -> dict[str, Any]:
        """The parts of the data by their names in `results`."""
        return {"while training": data.train, "held-out": data.dev, "test": data.test}


def find(name: str) -> Task:
    """The task of a name or its alias. **Raises:** `TrainError` that lists them."""
    name = ALIASES.get(name, name)
    if name not in TASKS:
        raise TrainError(f"--task is {name!r}, wanted one of {', '.join((*TASKS, *ALIASES))}.")
    return importlib.import_module(f"cavs._train.task_{name}").TASK


def configure(given: dict[str, Any]) -> Config:
    """The configuration: the task's defaults under what was given, checked.

    **Raises:** `TrainError` that names the flag.
    """
    name = given.get("task", Config.task)
    task = find(name)
    fields: dict[str, Any] = task.defaults | given | {"task": ALIASES.get(name, name)}
    config = Config(**fields)
    config.check()
    if config.train is None and task.needs_file is not None:
        raise TrainError(f"--task {config.task} needs {task.needs_file}: cavs train --task {config.task} FILE")
    asked = [field for field, value in given.items() if value is not None]
    for field in asked:
        if field in task.foreign:
            raise TrainError(f"{flag(field)} is {task.foreign[field]}")
        for other in TASKS:
            if other != config.task and field in find(other).own and field not in task.own:
                raise TrainError(f"{flag(field)} is for --task {other}; this is --task {config.task}.")
    return config
