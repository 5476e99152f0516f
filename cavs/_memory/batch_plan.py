"""`plan`: how a batch is computed within a memory budget, in parts (moDNN) and with products that run again (Echo)."""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from cavs._function.costs import bytes_of_var
from cavs._function.jaxprs import Eqn
from cavs._function.lines import source_line
from cavs._function.names import names_of
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.batch_search import BatchGradient, Collate, schedule_parts, stacked
from cavs._memory.bytes import BudgetError, bytes_of, memory_of_gpu, text_of
from cavs._memory.search import KEEPINGS, Candidate, Choice, Search, choices_for, numbers_of_parts
from cavs._memory.table import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("leaves", "eager", "levels", "lazy")  # the scopes in `_run.forward` and `_run.adjoint`


def plan(
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    graphs: Graphs,
    budget: int | float | str | None = None,
    *,
    collate: Collate = lambda sample: sample.sched,
    parts: int | None = None,
    keep: str | None = None,
    names: Mapping[str, str] | None = None,
) -> "BatchPlan":
    """Plans how the gradient of a batch is computed within a memory budget. Nothing is compiled.

    The plan is the fastest that is predicted to fit. A batch may be computed in parts, one after another, whose gradients are
    added up (moDNN, section 5.1); and the backward of F may keep less, and run products again (Echo).

    ```python
    plan = cavs.memory.plan(loss, params, graphs, "2GiB")             # loss(params, sched)
    print(plan)
    step = jax.jit(jax.value_and_grad(plan.loss))
    value, grads = step(params, plan.batch(graphs))
    ```

    Args:
        loss: `loss(params, batch)`, a scalar that is a sum over the graphs of the batch. If it is a mean over the graphs,
            divide the plan's loss and gradients by `plan.parts`: all parts have the same number of graphs.
        params: the parameters, or their `jax.ShapeDtypeStruct`s.
        graphs: a batch; pass the largest one. Batches of as many graphs and about as many vertices need as much memory.
        budget: the temporary memory of forward and backward, apart from parameters, gradients and inputs: bytes, `"2GiB"`, a
            fraction of the device's memory such as `0.5`, or `"min"` for the smallest plan. None: the fastest plan.
        collate: as in [`cavs.data.Loader`][]: `collate(sample)` returns the `batch` that `loss` gets, a pytree of NumPy arrays,
            for a part of the batch. By default `sample.sched`, which includes `input_id` and `label`.
        parts: the number of parts, if you choose it yourself. It divides the number of graphs.
        keep: what the backward of F keeps, if you choose it yourself: `"fast"`, `"least"` (no more than needed without running
            a product again; engine `scan` then shares buffers), or `"window"` (products run again, and parameter gradients
            are batched over 256 vertices at a time).
        names: how the backward gets values of the recurrent part of F that you named with `jax.ad_checkpoint.checkpoint_name`:
            `{"gates": "recompute"}` never keeps them, `"keep"` always does. If a product computes a value that is not kept, it
            runs again.

    Returns:
        The plan, which prints as a table. If there is no budget and the batch does not fit the GPU, a warning contains the plan
        that does.

    Raises:
        BudgetError: no plan fits the budget. The message names the smallest one that does.
        ValueError: `budget` is not an amount of memory, or `parts`, `keep` or `names` is invalid.
        TypeError: `graphs` is not [`cavs.Graphs`][].
    """
    wanted = bytes_of(budget, "plan")
    if not isinstance(graphs, Graphs) or not len(graphs):
        got = "no graphs" if isinstance(graphs, Graphs) else f"a {type(graphs).__name__}"
        raise TypeError(f"plan: graphs: got {got}; expected a batch. Write graphs[:64] of cavs.read(...), for instance.")
    if keep is not None and keep not in KEEPINGS:
        raise ValueError(f"plan: keep: got {keep!r}; expected one of {', '.join(map(repr, KEEPINGS))}, or None.")
    counts = numbers_of_parts(len(graphs))
    if parts is not None and parts not in counts:
        raise ValueError(f"plan: parts: got {parts!r} for {len(graphs)} graphs; expected one of {counts}.")
    known = choices_for(len(graphs), graphs.num_vertices) if keep is None else [Choice(n, keep) for n in counts]
    choices = [choice for choice in known if parts in (None, choice.parts)]
    batch = BatchGradient(loss, params, graphs, collate, names_of(names, "plan", ("keep", "recompute")))
    search = Search(batch, choices)
    chosen = search.chosen(wanted)
    if chosen is None:
        raise BudgetError(_too_small(batch, search.smallest(), int(wanted or 0)))
    found = BatchPlan(batch, search, chosen, wanted)
    if wanted is None and (limit := memory_of_gpu()) is not None and found.peak > limit:
        smaller = search.fastest(limit)
        what = f"this plan does:\n{BatchPlan(batch, search, smaller, limit)}" if smaller else "and no plan does."
        warnings.warn(
            f"plan: the batch needs {text_of(found.peak)}, which does not fit the GPU ({text_of(limit)}); {what}\n"
            f"Write budget={limit}.",
            stacklevel=2,
        )
    return found


def load(
    path: str | os.PathLike[str],
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    graphs: Graphs,
    *,
    collate: Collate = lambda sample: sample.sched,
) -> "BatchPlan":
    """Reads a plan that `BatchPlan.save` wrote, without planning again.

    Args:
        path: the file.
        loss: as in [`cavs.memory.plan`][], and so are the other arguments.
        params: the parameters.
        graphs: a batch of as many graphs as that of the plan.
        collate: see [`cavs.memory.plan`][].

    Returns:
        The plan. Its peak is predicted for this batch.

    Raises:
        ValueError: the file is not such a plan, or it is for another number of graphs.
    """
    with open(path) as file:
        try:
            found = json.load(file)
            parts, keep, names, count, budget = (found[k] for k in ("parts", "keep", "names", "graphs", "budget"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"load: path: got {path}; expected a file that BatchPlan.save wrote. Write plan.save(path)."
            ) from error
    if len(graphs) != count:
        raise ValueError(f"load: graphs: got {len(graphs)} graphs; expected {count}, as in the plan. Write graphs[:{count}].")
    batch = BatchGradient(loss, params, graphs, collate, names_of(names, "load", ("keep", "recompute")))
    search = Search(batch, choices_for(len(graphs), graphs.num_vertices))
    return BatchPlan(batch, search, search.candidate(Choice(parts, keep)), budget)


class Verified(NamedTuple):
    """The temporary memory of a step.

    Attributes:
        predicted: bytes as planned.
        compiled: bytes that XLA allocates for the compiled step.
        allocator: the most bytes that this process has had on the GPU, after the step has run; the step alone only in a new
            process. `None` on a CPU, or if it did not run.
    """

    predicted: int
    compiled: int
    allocator: int | None


def _too_small(batch: BatchGradient, least: Candidate, budget: int) -> str:
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch.params))
    sizes = np.diff(batch.graphs.vertex_offsets)
    return (
        f"plan: budget: got {text_of(budget)}; expected at least {text_of(least.peak.bytes)}, for {least.choice.parts} parts. "
        f"The parameters take {text_of(weights)}, and so do their gradients; the largest graph has {sizes.max()} vertices. "
        f"Write budget={least.peak.bytes}, or a smaller width of the model."
    )


class BatchPlan:
    """How a batch is computed within a memory budget. Created by [`cavs.memory.plan`][]; prints as a table.

    Attributes:
        parts: the number of parts of a batch.
        keep: what the backward of F keeps: `"fast"`, `"least"` or `"window"`.
        peak: predicted bytes of temporary memory.
        time: predicted time, relative to the fastest plan. An estimate.
        engines: the names of the engines that run.
    """

    def __init__(self, batch: BatchGradient, search: Search, chosen: Candidate, budget: int | str | None):
        self._batch, self._search, self._chosen, self._budget = batch, search, chosen, budget
        (self.parts, self.keep), self.peak = chosen.choice, chosen.peak.bytes
        self.time = search.slowdown(chosen)
        self.loss = batch.loss_of(chosen.choice)
        """The loss of all parts of a batch: a function of `(params, batch)`, to be differentiated under `jax.jit`."""
        self._shape = batch.first(chosen.choice)[2].shape
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
        parts = list(schedule_parts(graphs, self._chosen.choice, self._shape))
        self._shape = parts[0][2].shape
        return stacked(parts, self._batch.collate)

    def verify(self, run: bool = False) -> Verified:
        """Compiles the loss and its gradient for the batch of the plan, and compares the memory with the prediction.

        Args:
            run: whether to run the step as well, and to read its peak from the GPU's allocator.

        Raises:
            RuntimeError: the backend does not report the memory of a program.
        """
        lowered = jax.jit(jax.value_and_grad(self.loss)).lower(self._batch.params, self._batch.structs(self._chosen.choice))
        compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise RuntimeError("verify: this backend does not report how much memory a program needs.")
        most = None
        if run:
            jax.block_until_ready(compiled(self._batch.params, self.batch(self._batch.graphs)))
            most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return Verified(self.peak, analysis.temp_size_in_bytes, most)

    def fitted(self) -> "BatchPlan":
        """Returns a plan that fits the budget when it is compiled: this one, or a smaller one if XLA needs more than predicted.

        Each attempt compiles a program. The later ones are planned with the error of the earlier ones.

        Raises:
            BudgetError: after three attempts, none fits.
        """
        if not isinstance(self._budget, int):
            return self
        plan, budget = self, self._budget
        for _ in range(3):
            measured = plan.verify().compiled
            if measured <= budget:
                return plan
            smaller = self._search.fastest(min(budget * plan.peak / measured, plan.peak - 1))
            if smaller is None:
                break
            plan = BatchPlan(self._batch, self._search, smaller, budget)
        raise BudgetError(
            f"fitted: budget: got {text_of(budget)}; XLA needs {text_of(measured)} for {plan.parts} parts, where "
            f"{text_of(plan.peak)} were predicted. Write a larger budget, or parts=."
        )

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

        points = [(peak, time, f"{choice.parts} x {choice.keep}") for peak, time, choice in self.frontier()]
        return plot_frontier(points, (self.peak, self.time), "time, relative to the fastest", path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the choices of the plan to a file, as JSON; [`cavs.memory.load`][] reads it."""
        found: dict[str, Any] = {"parts": self.parts, "keep": self.keep, "names": dict(self._batch.names)}
        found |= {"graphs": len(self._batch.graphs), "budget": self._budget, "predicted": self.peak, "engines": self.engines}
        with open(path, "w") as file:
            json.dump(found, file, indent=1)

    def __str__(self) -> str:
        graphs, budget = self._batch.graphs, self._budget
        asked = "no budget" if budget is None else f"budget {text_of(budget) if isinstance(budget, int) else budget}"
        lines = [
            f"{len(graphs)} graphs, {graphs.num_vertices} vertices, parts={self.parts}, keep={self.keep!r}, "
            f"engine {' and '.join(self.engines) or 'none'}: predicted peak {text_of(self.peak)} of temporary memory "
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
