"""`cavs train --memory`: fits a training step into a budget, in as few parts as possible. Found by compiling."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cavs._feed.batches import stack_of
from cavs._feed.loader import Loader
from cavs._feed.settings import partial_stacks
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.bytes import bytes_of, memory_of_gpu, text_of
from cavs._memory.fit import compiled_step, compiler_options
from cavs._memory.search import FASTEST, Choice, Search, numbers_of_parts
from cavs._memory.table import columns
from cavs._train.batches import Feed
from cavs._train.config import Config, TrainError
from cavs._train.step import build_step, first_state, one_evaluation, one_step

if TYPE_CHECKING:
    from cavs._feed.settings import Sample
    from cavs._train.data import Data, Samples
    from cavs._train.task import Model, Task

_ENOUGH = 800  # bytes for each element of a state of each vertex: a batch that takes less fits, and is not compiled
_LITTLE = 4 << 30  # bytes of a step for which JAX need not take most of the GPU's memory at its start
EVALUATION_BATCHES = 4  # an evaluation batch has the size of this many training batches, if the memory suffices


class MemoryPlan(NamedTuple):
    """How the steps of a run are computed.

    Attributes:
        choice: the number of parts of a batch.
        evaluation: the samples of an evaluation batch.
        table: the plan as text; "" without a budget.
        compiler_options: for the step; as of `cavs.memory.BatchPlan`.
    """

    choice: Choice
    evaluation: int
    table: str = ""
    compiler_options: Mapping[str, Any] = MappingProxyType({})


class TrainingStep:
    """A training step for the largest batch of the data, and the memory that it needs: the work of a `Search`."""

    def __init__(self, config: Config, model: "Model", task: "Task", data: "Data"):
        self._config, self._model, self._task, self._data = config, model, task, data
        self.batch = min(config.batch, len(data.train))
        self.state = jax.eval_shape(lambda: first_state(model, config, None))
        self.options: Mapping[str, Any] = {}  # of the compiler
        self._sizes: dict[Choice, tuple[int, int]] = {}
        self._batches: dict[Choice, tuple[PyTree, Loader]] = {}

    def size(self, choice: Choice) -> tuple[int, int]:
        """The rows and the tasks of the largest batch."""
        if choice not in self._sizes:
            self._schedule(choice)
        return self._sizes[choice]

    def inputs(self, choice: Choice) -> int:
        """The bytes of the batches that are on the device at the same time."""
        batch, loader = self._schedule(choice)
        return loader.on_device * _bytes(batch)

    def measure(self, choice: Choice) -> int:
        """The bytes that XLA needs for a step: state, batches, and temporary memory. Compiles it."""
        batch, loader = self._schedule(choice)
        if (n := loader.steps) > 1:
            batch = stack_of(batch, n, partial_stacks(None))
        step = build_step(self._model, self._config, total_steps(self._config, loader), choice, self.options)
        found = step.lower(self.state, batch).compile().memory_analysis()
        if found is None:
            raise TrainError("--memory: this backend does not report how much memory a program needs. Write --memory none.")
        return found.temp_size_in_bytes + _bytes(self.state) + self.inputs(choice)

    def evaluation(self, part: "Samples", batch: int) -> int:
        """The bytes of an evaluation in batches of this many samples, including the state of the optimiser. Compiles it."""
        example = self._task.feed(self._model, part, batch).loader(batch).largest()
        _, found = compiled_step(one_evaluation(self._model), (self.state.weights, example), {})
        return found + _bytes(example) + _bytes(self.state)

    @property
    def noun(self) -> str:
        """What a sample is called."""
        return self._task.noun

    def largest(self) -> int:
        """The number of vertices of the largest sample."""
        sources = self._task.feed(self._model, self._data.train).sources
        return int(np.sum([np.diff(g.vertex_offsets) for g in sources if isinstance(g, Graphs)], 0).max())

    def _schedule(self, choice: Choice) -> tuple[PyTree, Loader]:
        """The largest batch as `jax.ShapeDtypeStruct`s, and the loader."""
        if choice not in self._batches:
            sizes: list[tuple[int, int]] = []
            feed = part_feed(self._task, self._model, self._data.train, self._config.batch, choice)

            def collate(sample: "Sample") -> PyTree:
                scheds: Any = sample.sched
                sizes.extend((sched.shape.vertices, int(sched.num_tasks)) for sched in scheds)
                return feed.collate(sample)

            loader = train_loader(Feed(feed.sources, collate), self._config, choice)
            batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loader.largest())
            self._batches[choice] = batch, loader
            self._sizes[choice] = sum(rows for rows, _ in sizes), sum(tasks for _, tasks in sizes)
        return self._batches[choice]


def part_feed(task: "Task", model: "Model", part: "Samples", batch: int, choice: Choice) -> Feed:
    """The batches of a part of the data; with a choice of several parts, those parts."""
    return task.feed(model, part, max(1, batch // choice.parts))


def train_loader(feed: Feed, config: Config, choice: Choice, mesh: Mesh | None = None) -> Loader:
    """The training batches, in parts if there are several, or divided over the devices of a mesh."""
    parts = None if choice.parts == 1 else choice.parts
    # Evaluations every few steps, and a last step within an epoch, need dispatches of single steps.
    steps = 1 if config.save_every or config.max_steps else None
    return feed.loader(config.batch, config.seed, steps, parts=parts, mesh=mesh)


def total_steps(config: Config, loader: Loader) -> int:
    """The number of batches of a whole run."""
    total = config.epochs * len(loader)
    return min(total, config.max_steps or total)


def plan_memory(config: Config, model: "Model", task: "Task", data: "Data") -> MemoryPlan:
    """The fastest plan within `--memory`; without it the whole batch, if that fits the GPU.

    Raises:
        TrainError: `--memory` is not an amount of memory, or nothing fits.
    """
    evaluation = EVALUATION_BATCHES * config.batch
    budget, gpu = budget_of(config.memory), memory_of_gpu() if config.devices == 1 else None
    whole = MemoryPlan(FASTEST, evaluation)
    if budget is None and gpu is None:
        return whole
    work = TrainingStep(config, model, task, data)
    if budget is None and work.largest() * work.batch * config.hidden * _ENOUGH < (gpu or 0):
        return whole
    wanted = budget or gpu or 0
    work.options = compiler_options(wanted, _bytes(work.state))
    search = Search(work, [Choice(n) for n in numbers_of_parts(work.batch)])
    chosen = search.smallest() if isinstance(wanted, str) else search.fastest(wanted)
    if chosen is None:
        raise TrainError(_too_small(work, search, int(wanted)))
    if budget is None and chosen == FASTEST:
        return whole
    evaluation = _evaluation(work, data, evaluation, search.known[chosen] if isinstance(wanted, str) else wanted)
    return MemoryPlan(chosen, evaluation, _table(work, search, chosen, wanted), work.options)


def needs_little(config: Config, data: "Data") -> bool:
    """Whether a training step surely needs little of a GPU's memory. Does not start JAX."""
    rows = 2 * min(config.batch, len(data.train)) * data.train.num_vertices / max(len(data.train), 1)
    table = len(data.words) * (config.embedding_size or config.hidden)
    return rows * (config.hidden * _ENOUGH + len(data.labels) * 8) + table * 16 < _LITTLE


def _table(work: TrainingStep, search: Search, chosen: Choice, budget: int | str) -> str:
    measured, inputs, state = search.known[chosen], work.inputs(chosen), _bytes(work.state)
    shown = text_of(budget) if isinstance(budget, int) else budget, f"{chosen.parts} x {work.batch // chosen.parts}"
    found = map(text_of, (measured, state, inputs, measured - state - inputs, min(search.known.values())))
    head = ("compiled", "weights, optimiser", "batches", "temporary", "smallest compiled")
    rows = [("budget", "parts", *head, "time"), (*shown, *found, f"{search.slowdown(chosen):.2f}")]
    return "\n".join(["memory of a training step:", *columns(rows)])


def budget_of(memory: str | int | float) -> int | str | None:
    """Reads `--memory`: an amount, a fraction of the device such as 0.5, "min", or "none". Raises a `TrainError`."""
    if memory == "none":
        return None
    fraction = isinstance(memory, str) and re.fullmatch(r"0?\.\d+|1\.0*", memory.strip())
    try:
        return bytes_of(float(memory) if fraction else memory)
    except ValueError as error:
        raise TrainError(
            f"--memory: got {memory!r}; expected bytes such as 2GiB, a fraction of the device such as 0.5, min, or none."
        ) from error


def _evaluation(work: TrainingStep, data: "Data", batch: int, limit: int) -> int:
    """The largest batch for evaluation that fits, among halves of halves. A batch needs at least what its share needs."""
    for part in (data.dev, data.test):
        while part is not None and batch > 1 and (needed := work.evaluation(part, batch)) > limit:
            state = _bytes(work.state)
            batch >>= max(1, math.floor(math.log2((needed - state) / max(limit - state, 1))))
            batch = max(batch, 1)
    return batch


def _too_small(work: TrainingStep, search: Search, budget: int) -> str:
    least = min(search.known, key=lambda choice: search.known[choice])
    floor = math.ceil(search.known[least] / 1024)
    return (
        f"--memory: got {text_of(budget)}; expected at least {text_of(1024 * floor)}, for {least}. Weights and the state of the "
        f"optimiser take {text_of(_bytes(work.state))}; the largest {work.noun} has {counted(work.largest(), 'vertex')}. Write "
        f"--memory {floor}KiB, or a smaller --hidden."
    )


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
