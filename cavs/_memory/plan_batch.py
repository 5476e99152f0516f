"""How a batch is computed within a memory budget: in parts (moDNN), and deep graphs in segments of levels."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cavs._feed.settings import with_rows, with_sched
from cavs._function.arrays import as_array
from cavs._graphs.arguments import check_takes
from cavs._graphs.counted import counted
from cavs._graphs.files import check_path, read_whole, write_whole
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.names import names_of
from cavs._memory.bytes import BudgetError, bytes_of, bytes_of_arrays, memory_of_gpu, text_of
from cavs._memory.divided import Choice, Collate, DividedArrays, DividedGraphs, is_count, numbers_of_parts
from cavs._memory.fit import Verified, compiler_options
from cavs._memory.search import BatchGradient, check_parts


def plan(
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    batch: Any,
    budget: int | float | str | None = None,
    *,
    collate: Collate | None = None,
    axis: Any = 0,
    parts: int | None = None,
    segments: int | None = None,
    names: Mapping[str, str] | None = None,
) -> "BatchPlan":
    """Plans how the gradient of a batch is computed within a memory budget. With a budget, it compiles up to five steps.

    The batch is one of graphs, or of arrays with an axis of samples, such as images or token ids of any network. It may be
    computed in parts, one after another, whose gradients are added up (moDNN, section 5.1), and the levels of deep graphs in
    segments, of which only the frontiers are kept. The plan is the fastest that was compiled and fits: of the fewest parts. Two
    sizes and a line over 1 / parts suggest the next number of parts to compile.

    ```python
    plan = cavs.memory.plan(loss, params, graphs, "2GiB")             # loss(params, sched)
    print(plan)
    step = jax.jit(jax.value_and_grad(plan.loss), compiler_options=plan.compiler_options)
    value, grads = step(params, plan.batch(graphs))
    ```

    ```python
    plan = cavs.memory.plan(loss, params, (images, labels), "8GiB")   # loss(params, (images, labels)), any network
    ```

    Args:
        loss: `loss(params, batch)`, a scalar: a sum over the graphs or samples of the batch, or computed from
            [`cavs.data.total`][] and [`cavs.data.mean`][], which are over the whole batch.
        params: the parameters, or their `jax.ShapeDtypeStruct`s.
        batch: a batch of graphs; pass the largest one. Batches of as many graphs and about as many vertices need as much
            memory. Or a pytree of arrays, or of their `jax.ShapeDtypeStruct`s, with an axis of samples.
        budget: the temporary memory of forward and backward, apart from parameters, gradients and inputs, as XLA allocates it:
            bytes, `"2GiB"`, a fraction of the device's memory such as `0.5`, or `"min"` for the smallest plan. None: the
            fastest plan.
        collate: as in [`cavs.data.Loader`][]: `collate(sample)` returns the `batch` that `loss` gets, a pytree of NumPy arrays,
            for a part of the batch. By default `sample.sched`, which includes `input_id` and `label`, and of graphs with
            features `(sample.sched, sample.rows)`.
        axis: of arrays: the axis of samples, or a tree prefix of the batch, as `in_axes` of `jax.vmap`; `None` for arrays that
            all samples share.
        parts: the number of parts, if you choose it yourself. It divides the number of graphs or samples.
        segments: the number of segments of levels, as in [`cavs.schedule`][], if you choose it yourself. Otherwise large graphs
            of many levels run in segments if one at a time does not fit, on engine `scan`, or `native` on a CPU.
        names: how the backward gets values of the recurrent part of F that you named with `jax.ad_checkpoint.checkpoint_name`:
            `{"gates": "recompute"}` never keeps them, `"keep"` always does. If a product computes a value that is not kept, it
            runs again. Calls of [`cavs.run`][] that `loss` itself differentiates, or has inside a `jax.shard_map`, do not
            change.

    Returns:
        The plan, which prints as a table. If there is no budget and the batch does not fit the GPU, a warning contains the plan
        that does.

    Raises:
        BudgetError: the smallest plan does not fit the budget. The message says how much it needs.
        ValueError: `budget` is not an amount of memory; `axis`, `parts`, `segments` or `names` is invalid; or the loss would
            not be the same in parts. That is found by one comparison, on a few graphs or samples of the batch.
        TypeError: `loss` is no function of two arguments, `collate` none of one, or `batch` is neither [`cavs.Graphs`][] nor a
            pytree of arrays.
    """
    check_takes("plan: loss", loss, "params", "batch", write="cavs.memory.plan(loss, params, batch)")
    if collate is not None:
        check_takes("plan: collate", collate, "sample")
    amount = bytes_of(budget, "plan")
    data = divided(batch, collate, axis)
    parts, segments = (int(x) if isinstance(x, np.integer) else x for x in (parts, segments))
    if parts is not None and (not is_count(parts) or len(data) % parts):
        counts = numbers_of_parts(len(data))
        raise ValueError(f"plan: parts: got {parts!r} for {counted(len(data), data.noun)}; expected one of {counts}.")
    if segments is not None and not is_count(segments):
        raise ValueError(f"plan: segments: got {segments!r}; expected an int >= 1. Write segments=16.")
    ways = names_of(names, "plan", ("keep", "recompute"))
    params = _with_arrays(params, "plan: params")
    options = compiler_options(amount, bytes_of_arrays(params))
    gradient = BatchGradient(loss, params, data, ways, data.choices(parts, segments), options)
    batch_plan = BatchPlan(gradient, chosen(gradient, amount), amount)
    if amount is None and (limit := memory_of_gpu()) is not None and batch_plan.peak > limit:
        smaller = gradient.fastest(limit)
        hint = f"this plan does:\n{BatchPlan(gradient, smaller, limit)}" if smaller else "and no plan does."
        warnings.warn(
            f"plan: the batch needs {text_of(batch_plan.peak)}, which does not fit the GPU ({text_of(limit)}); {hint}\n"
            f"Write budget={limit}.",
            stacklevel=2,
        )
    return batch_plan


def load(
    path: str | os.PathLike[str],
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    batch: Any,
    *,
    collate: Collate | None = None,
    axis: Any = 0,
) -> "BatchPlan":
    """Reads a plan that `BatchPlan.save` wrote. Nothing is compiled.

    Args:
        path: the file.
        loss: as in [`cavs.memory.plan`][].
        params: the parameters.
        batch: a batch of as many graphs or samples as that of the plan.
        collate: see [`cavs.memory.plan`][].
        axis: see [`cavs.memory.plan`][].

    Returns:
        The plan. Its peak is that of this batch, compiled when you ask for it.

    Raises:
        ValueError: the file is not such a plan, or it is for another number of graphs or samples.
    """
    check_path("load", path)
    check_takes("load: loss", loss, "params", "batch", write="cavs.memory.load(path, loss, params, batch)")
    try:
        saved = json.loads(read_whole(path))
        choice, count = Choice(saved["parts"], saved["segments"]), saved["samples"]
        names, budget = names_of(saved["names"], "load", ("keep", "recompute")), bytes_of(saved["budget"], "load")
        if not all(map(is_count, (*choice, count))) or count % choice.parts:
            raise ValueError("its parts do not divide its samples")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"load: path: got {path}; expected a file that BatchPlan.save wrote. Write plan.save(path)."
        ) from error
    data = divided(batch, collate, axis)
    if len(data) != count:
        raise ValueError(
            f"load: batch: got {counted(len(data), data.noun)}; expected {count}, as in the plan. Write batch[:{count}]."
        )
    params = _with_arrays(params, "load: params")
    choices = sorted({choice, *data.choices(None, None)}, key=lambda choice: choice.divisor)
    gradient = BatchGradient(loss, params, data, names, choices, compiler_options(budget, bytes_of_arrays(params)))
    return BatchPlan(gradient, choice, budget)


def _with_arrays(params: PyTree, where: str) -> PyTree:
    """Returns the parameters, numbers as arrays. Raises a `TypeError`, which names the argument, for anything else."""
    return jax.tree.map(lambda x: x if hasattr(x, "shape") else as_array(x, where), params)


def divided(batch: Any, collate: Collate | None, axis: Any) -> DividedArrays | DividedGraphs:
    """Returns a batch as what is divided into parts."""
    if not isinstance(batch, Graphs) or not len(batch):
        return DividedArrays(batch, axis)
    return DividedGraphs(batch, collate or (with_sched if batch.x is None else with_rows))


def chosen(batch: BatchGradient, budget: int | str | None, argument: str = "plan: budget") -> Choice:
    """Returns the fastest choice within a budget, or the smallest. Errors name `argument`.

    Raises a `ValueError` if the loss would not be the same in parts.
    """
    if budget is None:
        choice = next(filter(batch.runs, batch.choices), batch.choices[0])
    else:
        choice = batch.smallest() if isinstance(budget, str) else batch.fastest(budget)
    if choice is None and not batch.sizes:  # no engine that the loss asks for can run it, and its error says why
        choice = batch.choices[0]
    if choice is not None:
        if choice.parts > 1:
            check_parts(batch, choice.parts)
        return choice
    assert isinstance(budget, int)  # the smallest choice fits any other one
    smallest = min(batch.sizes, key=batch.sizes.__getitem__)
    needed, size = batch.sizes[smallest], text_of(bytes_of_arrays(batch.params))
    raise BudgetError(
        f"{argument}: got {text_of(budget)}; expected at least {text_of(needed)}, for {smallest}. The parameters "
        f"take {size}, and so do their gradients{batch.data.cause}. Write {argument.split()[-1]}={needed}, or a smaller model."
    )


class BatchPlan:
    """How a batch is computed within a memory budget. Created by [`cavs.memory.plan`][]; prints as a table.

    Attributes:
        parts: the number of parts of a batch.
        segments: the number of segments of levels in which a part runs.
        time: the time relative to the fastest plan: a rough estimate.
        engines: the names of the engines that run.
        compiler_options: options for `jax.jit` with which the step was compiled. On a GPU, products within a budget of less
            than 512 MiB do not use cuBLAS, whose workspace takes 32 MiB. Steps take up to 9 % more time.
    """

    def __init__(self, batch: BatchGradient, choice: Choice, budget: int | str | None):
        self._batch, self._choice, self._budget = batch, choice, budget
        self.parts, self.segments = choice
        self.time = self._slowdown(choice)
        self.loss = batch.loss_of(choice)
        """The loss of all parts of a batch: a function of `(params, batch)`, to be differentiated under `jax.jit`."""
        self.compiler_options, self.engines = batch.options, batch.engines(choice)

    @property
    def peak(self) -> int:
        """The bytes of temporary memory that XLA allocates for the step. Compiles it, if there was no budget."""
        size = self._batch.measure(self._choice)
        assert size is not None, "its engines run it"
        return size

    def batch(self, batch: Any) -> PyTree:
        """Returns the argument of `loss` for a batch: schedules graphs in parts. Arrays stay as they are.

        Args:
            batch: graphs, or arrays like those of the plan; `parts` divides their number. If graphs are not larger than those
                of the plan and of later batches, nothing is compiled again.

        Returns:
            For graphs, a pytree of NumPy arrays with a leading axis of parts.

        Raises:
            ValueError: `parts` does not divide the number of graphs or samples.
        """
        return self._batch.data.arranged(batch, self._choice)

    def verify(self, run: bool = False) -> Verified:
        """Returns the memory of the loss and its gradient for the batch of the plan, compiled with `compiler_options`.

        Args:
            run: whether to run the step as well, and to read its peak from the GPU's allocator.
        """
        allocator = None
        if run:
            compiled, _ = self._batch.compiled(self._choice)
            jax.block_until_ready(compiled(self._batch.params, self.batch(self._batch.data.whole)))
            allocator = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        compiled = self.peak
        return Verified(self._batch.estimate(self._choice), compiled, allocator)

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """Returns (bytes, relative time, choice) of the plans down to the smallest, the fastest first. Compiles some of them.

        The bytes of the others are on a line over 1 / parts through those that were compiled. Times are estimated.
        """
        batch, smallest = self._batch, self._batch.smallest()
        choices = [choice for choice in batch.choices if choice.divisor <= smallest.divisor]
        return [(batch.sizes.get(choice) or batch.estimate(choice), self._slowdown(choice), choice) for choice in choices]

    def _slowdown(self, choice: Choice) -> float:
        data = self._batch.data
        return data.time(choice) / data.time(self._batch.choices[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the choices of the plan to a file, as JSON; [`cavs.memory.load`][] reads it."""
        check_path("BatchPlan.save", path)
        record: dict[str, Any] = self._choice._asdict() | {"names": dict(self._batch.names)}
        record |= {"samples": len(self._batch.data), "budget": self._budget, "bytes": self.peak, "engines": self.engines}
        write_whole(path, json.dumps(record, indent=1).encode())

    def __str__(self) -> str:
        data, budget = self._batch.data, self._budget
        limit = "no budget" if budget is None else f"budget {text_of(budget) if isinstance(budget, int) else budget}"
        head = (
            f"{data.text}, {self._choice}, engine {' and '.join(self.engines) or 'none'}: {text_of(self.peak)} of temporary "
            f"memory, compiled ({limit}), {self.time:.2f} times the time of the fastest plan, modelled"
        )
        compiled = sorted(self._batch.sizes, key=data.time)
        rows = [(str(choice), text_of(self._batch.sizes[choice]), f"{self._slowdown(choice):.2f}") for choice in compiled]
        return "\n".join([head, "compiled:", *columns([("plan", "bytes", "time, modelled"), *rows])])

    __repr__ = __str__


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows]
