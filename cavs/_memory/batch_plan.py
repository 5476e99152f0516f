"""How a batch is computed within a memory budget: in parts (moDNN), and deep graphs in segments of levels."""

import json
import os
from typing import TYPE_CHECKING, Any

import jax

from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.batch_search import BatchGradient, schedule_parts, stacked
from cavs._memory.bytes import text_of
from cavs._memory.fit import Verified
from cavs._memory.search import Choice, Search
from cavs._memory.table import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BatchPlan:
    """How a batch is computed within a memory budget. Created by [`cavs.memory.plan`][]; prints as a table.

    Attributes:
        parts: the number of parts of a batch.
        segments: the number of segments of levels in which a part runs.
        time: the time relative to the fastest plan: a rough estimate.
        engines: the names of the engines that run.
        compiler_options: options for `jax.jit` with which the step was compiled. On a GPU, products within a budget of less than
            512 MiB do not use cuBLAS, whose workspace takes 32 MiB. Steps take up to 9 % more time.
    """

    def __init__(self, batch: BatchGradient, search: Search, choice: Choice, budget: int | str | None):
        self._batch, self._search, self._choice, self._budget = batch, search, choice, budget
        self.parts, self.segments = choice
        self.time = search.slowdown(choice)
        self.loss = batch.loss_of(choice)
        """The loss of all parts of a batch: a function of `(params, batch)`, to be differentiated under `jax.jit`."""
        self.compiler_options, self.engines = batch.options, batch.engines(choice)
        self._like = batch.first(choice)[2]

    @property
    def peak(self) -> int:
        """The bytes of temporary memory that XLA allocates for the step. Compiles it, if there was no budget."""
        found = self._search.measure(self._choice)
        assert found is not None, "a choice that no engine runs is not planned"
        return found

    def batch(self, graphs: Graphs) -> PyTree:
        """Schedules a batch in parts.

        Args:
            graphs: the batch, whose number of graphs `parts` divides. If it is not larger than the batch of the plan and later
                batches, nothing is compiled again.

        Returns:
            The argument of `loss`: a pytree of NumPy arrays with a leading axis of parts.

        Raises:
            ValueError: `parts` does not divide the number of graphs.
        """
        parts = list(schedule_parts(graphs, self._choice, self._like))
        self._like = parts[0][2]
        return stacked(parts, self._batch.collate)

    def verify(self, run: bool = False) -> Verified:
        """Returns the memory of the loss and its gradient for the batch of the plan, compiled with `compiler_options`.

        Args:
            run: whether to run the step as well, and to read its peak from the GPU's allocator.
        """
        most = None
        if run:
            compiled, _ = self._batch.compiled(self._choice)
            jax.block_until_ready(compiled(self._batch.params, self.batch(self._batch.graphs)))
            most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return Verified(round(self._search.estimates.get(self._choice, self.peak)), self.peak, most)

    def fitted(self) -> "BatchPlan":
        """Returns this plan. It fits its budget as it is, because `cavs.memory.plan` compiles what it chooses."""
        return self

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """Returns (bytes, relative time, choice) of the best plans, the fastest first.

        The bytes of those that were not compiled are on a line over 1 / parts through those that were. Compiles the smallest.
        """
        self._search.measure(self._choice)
        self._search.smallest()
        return self._search.frontier()

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the frontier: estimated time against the budget, with this plan.

        Args:
            path: a file to write, such as "plan.svg"; its suffix selects the format.

        Returns:
            The figure, which a notebook shows.
        """
        from cavs._memory.plot import plot_frontier

        points = [(size, time, str(choice)) for size, time, choice in self.frontier()]
        return plot_frontier(points, (self.peak, self.time), "time, relative to the fastest", path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the choices of the plan to a file, as JSON; [`cavs.memory.load`][] reads it."""
        found: dict[str, Any] = self._choice._asdict() | {"names": dict(self._batch.names)}
        found |= {"graphs": len(self._batch.graphs), "budget": self._budget, "bytes": self.peak, "engines": self.engines}
        with open(path, "w") as file:
            json.dump(found, file, indent=1)

    def __str__(self) -> str:
        graphs, budget, search = self._batch.graphs, self._budget, self._search
        asked = "no budget" if budget is None else f"budget {text_of(budget) if isinstance(budget, int) else budget}"
        known = ((str(c), text_of(search.known[c]), f"{search.slowdown(c):.2f}") for c in search.choices if c in search.known)
        lines = [
            f"{counted(len(graphs), 'graph')}, {counted(graphs.num_vertices, 'vertex')}, {self._choice}, engine "
            f"{' and '.join(self.engines) or 'none'}: {text_of(self.peak)} of temporary memory ({asked}), about {self.time:.2f} "
            "times the time of the fastest plan",
            "compiled:",
        ]
        return "\n".join([*lines, *columns([("plan", "bytes", "time, estimated"), *known])])

    __repr__ = __str__
