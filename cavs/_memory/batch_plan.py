"""How a batch is computed within a memory budget: in parts (moDNN), and with products that run again (Echo)."""

import json
import os
import re
from typing import TYPE_CHECKING, Any

import jax

from cavs._function.costs import bytes_of_var
from cavs._function.jaxprs import Eqn
from cavs._function.lines import source_line
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.batch_search import BatchGradient, schedule_parts, stacked
from cavs._memory.bytes import text_of
from cavs._memory.fit import Verified, compiler_options, smaller_plan
from cavs._memory.search import FASTEST, Candidate, Choice, Search, in_segments
from cavs._memory.table import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("leaves", "eager", "levels", "lazy")  # the scopes in `_run.forward` and `_run.adjoint`


class BatchPlan:
    """How a batch is computed within a memory budget. Created by [`cavs.memory.plan`][]; prints as a table.

    Attributes:
        parts: the number of parts of a batch.
        keep: what the backward of F keeps: `"fast"`, `"least"` or `"window"`.
        segments: the number of segments of levels in which a part runs.
        peak: predicted bytes of temporary memory.
        time: predicted time, relative to the fastest plan. An estimate.
        engines: the names of the engines that run.
        compiler_options: options for `jax.jit` with which a small step needs the memory that is predicted. On a GPU, if less
            than 512 MiB is predicted and there is a budget or you chose parts, segments or what is kept, products do not use
            cuBLAS, whose workspace takes 32 MiB. Steps take up to 9 % more time.
    """

    def __init__(self, batch: BatchGradient, search: Search, chosen: Candidate, budget: int | str | None):
        self._batch, self._search, self._chosen, self._budget = batch, search, chosen, budget
        (self.parts, self.keep, self.segments), self.peak = chosen.choice, chosen.peak.bytes
        self.time = search.slowdown(chosen)
        self.loss = batch.loss_of(chosen.choice)
        """The loss of all parts of a batch: a function of `(params, batch)`, to be differentiated under `jax.jit`."""
        self.compiler_options = compiler_options(budget is not None or chosen.choice != FASTEST, self.peak)
        self._like = batch.first(chosen.choice)[2]
        self.engines = sorted(batch.engines[chosen.choice])

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
        parts = list(schedule_parts(graphs, self._chosen.choice, self._like))
        self._like = parts[0][2]
        return stacked(parts, self._batch.collate)

    def verify(self, run: bool = False) -> Verified:
        """Compiles the loss and its gradient for the batch of the plan with `compiler_options`, and compares their memory.

        Args:
            run: whether to run the step as well, and to read its peak from the GPU's allocator.

        Raises:
            RuntimeError: the backend does not report the memory of a program.
        """
        lowered = jax.jit(jax.value_and_grad(self.loss)).lower(self._batch.params, self._batch.structs(self._chosen.choice))
        compiled = lowered.compile(self.compiler_options)
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise RuntimeError("verify: this backend does not report how much memory a program needs.")
        most = None
        if run:
            jax.block_until_ready(compiled(self._batch.params, self.batch(self._batch.graphs)))
            most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return Verified(self.peak, analysis.temp_size_in_bytes, most)

    def fitted(self) -> "BatchPlan":
        """Returns a plan that fits the budget when it is compiled.

        That is this one, or a smaller one if XLA needs more than the budget, or a faster one if XLA needs less than predicted.
        Each attempt compiles a program, six at most.

        Raises:
            BudgetError: the smallest plan does not fit.
        """
        if not isinstance(budget := self._budget, int):
            return self
        if (found := self.verify()).compiled <= budget:
            return self._faster(budget, found.compiled)

        def plan(most: int | None) -> tuple[BatchPlan, int] | None:
            found = self._search.smallest() if most is None else self._search.fastest(most)
            return found and (BatchPlan(self._batch, self._search, found, budget), found.peak.bytes)

        return smaller_plan(self, found, budget, BatchPlan.verify, plan)

    def _faster(self, budget: int, measured: int) -> "BatchPlan":
        """Returns a faster plan that fits, if the error of this prediction suggests one; otherwise this plan."""
        found = self._search.fastest(budget * max(1.0, self.peak / measured))
        if found is None or found.time >= self._chosen.time:
            return self
        faster = BatchPlan(self._batch, self._search, found, budget)
        return faster if faster.verify().compiled <= budget else self

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """Returns (predicted peak in bytes, relative time, choice) of the best plans, the fastest first."""
        return self._search.frontier()

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the frontier: predicted time against the budget, with this plan.

        Args:
            path: a file to write, such as "plan.svg"; its suffix selects the format.

        Returns:
            The figure, which a notebook shows.
        """
        from cavs._memory.plot import plot_frontier

        points = [
            (peak, time, f"{choice.parts} x {choice.keep}{in_segments(choice)}") for peak, time, choice in self.frontier()
        ]
        return plot_frontier(points, (self.peak, self.time), "time, relative to the fastest", path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the choices of the plan to a file, as JSON; [`cavs.memory.load`][] reads it."""
        found: dict[str, Any] = self._chosen.choice._asdict() | {"names": dict(self._batch.names)}
        found |= {"graphs": len(self._batch.graphs), "budget": self._budget, "predicted": self.peak, "engines": self.engines}
        with open(path, "w") as file:
            json.dump(found, file, indent=1)

    def __str__(self) -> str:
        graphs, budget = self._batch.graphs, self._budget
        asked = "no budget" if budget is None else f"budget {text_of(budget) if isinstance(budget, int) else budget}"
        engines = f"engine {' and '.join(self.engines) or 'none'}"
        lines = [
            f"{counted(len(graphs), 'graph')}, {counted(graphs.num_vertices, 'vertex')}, parts={self.parts}, keep={self.keep!r}"
            f"{in_segments(self._chosen.choice)}, {engines}: predicted peak {text_of(self.peak)} of temporary memory "
            f"({asked}), {self.time:.2f} times the time of the fastest plan",
            "alive at the peak:",
        ]
        alive = sorted(self._chosen.peak.alive, key=lambda pair: -bytes_of_var(pair[0]))[:12]
        rows = [
            (text_of(bytes_of_var(v)), v.aval.str_short(short_dtypes=True), e.primitive.name, _part(e), source_line(e) or "")
            for v, e in alive
        ]
        return "\n".join([*lines, *columns([("bytes", "type", "result of", "part of run", "line"), *rows])])

    __repr__ = __str__


def _part(e: Eqn) -> str:
    """The part of `run` that an equation belongs to."""
    return next((name for name in re.split("[/()]", str(e.source_info.name_stack)) if name in _PARTS), "")
