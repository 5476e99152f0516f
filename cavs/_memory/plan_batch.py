"""How a batch is computed within a memory budget: in parts (moDNN), and deep graphs in segments of levels.

The fewest parts that fit a budget are found by compiling a few numbers of parts. Before a batch is computed in parts,
`check_parts` compares the loss of some samples at once and in two parts.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.choose import EngineError
from cavs._feed.settings import with_rows, with_sched
from cavs._function.keep_options import MemoryOptions
from cavs._graphs.arguments import check_takes
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Jaxpr, bodies_in
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.names import Names, check_known, names_of
from cavs._jaxpr.tunable import TunableRules, tuned
from cavs._memory.divided import Choice, Collate, DividedArrays, DividedGraphs, Loss, numbers_of_parts
from cavs._memory.fit import (
    MOST_COMPILED,
    BudgetError,
    Verified,
    bytes_of,
    bytes_of_arrays,
    compiled_step,
    compiler_options,
    memory_of_gpu,
    text_of,
    values,
)
from cavs.kernels import Target

# A larger relative difference is none of rounding, nor so many steps of the coarsest dtype.
_LEAST, _LEAST_ON_GPU, _ROUNDINGS = 1e-4, 1e-2, 4
_WORTH_TRYING = 1.1  # fewer parts than those that fit are compiled if they are estimated to need this share of the budget


def fewest_parts(
    measure: Callable[[int], int], batch: int, budget: int | str, argument: str = "fewest_parts: budget"
) -> tuple[int, int]:
    """Finds the fewest parts of a batch with which a training step fits a budget, by compiling a few of them.

    What a step needs is nearly a + b / parts, so a line through two numbers of parts predicts the others.

    ```python
    def measure(parts):                                               # bytes of the step, with state and batches
        batch = cavs.data.Loader(graphs, 64, parts=parts, steps=1).largest()
        return step(parts).lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    parts, needed = cavs.memory.fewest_parts(measure, 64, cavs.memory.bytes_of("2GiB"))
    ```

    Args:
        measure: compiles the step of a batch in this many parts, and returns the bytes that it needs.
        batch: the graphs of a batch. The parts have equally many.
        budget: bytes; "min" for parts of one graph.
        argument: named by errors.

    Returns:
        The number of parts, and the bytes that were measured for it.

    Raises:
        BudgetError: even parts of one graph do not fit. The message says how much they need.
    """
    if not isinstance(budget, int):
        return batch, measure(batch)
    found, known = fewest(measure, (n for n in range(1, batch + 1) if batch % n == 0), budget, MOST_COMPILED + 2)
    if found is None:
        least = -(-known[batch] // 1024)
        raise BudgetError(
            f"{argument}: got {budget} bytes; expected at least {least}KiB, for {batch} parts, or a smaller model."
        )
    return found, known[found]


def fewest(
    measure: Callable[[int], int | None], counts: Iterable[int], budget: int, most: int = MOST_COMPILED
) -> tuple[int | None, dict[int, int]]:
    """Finds the fewest parts that fit a budget of bytes, among `counts`. Measures at most `most` of them.

    The fewest parts that are estimated to fit are measured next and correct the estimates, until no others could be better. The
    last ones to be measured are the most parts. Returns the number of parts, `None` if nothing fits; and the bytes of all
    numbers that were measured.

    `measure`: compiles a number of parts, and returns the bytes that it needs; `None` if it cannot be computed.
    """
    counts, known, best = sorted(counts), dict[int, int](), None
    while len(known) < most or best is None:
        failed = max((n for n, size in known.items() if size > budget), default=0)
        left = [n for n in counts if n > failed and n not in known and (best is None or n < best)]
        likely = [n for n in left if estimate(known, n) <= budget * (1 if best is None else _WORTH_TRYING)]
        if best is None and (not likely or len(known) >= most - 1):
            likely = left[-1:]
        if not likely:
            break
        size = measure(likely[0])
        if size is None:
            counts.remove(likely[0])
        else:
            known[likely[0]] = size
            best = likely[0] if size <= budget else best
    return best, known


def estimate(known: dict[int, int], n: int) -> float:
    """Estimates the bytes of n parts from those of other numbers of parts.

    Memory is a part that does not depend on the parts (gradients, for instance), and another that is divided by their number: a
    line over 1 / n through the two sizes next to n. Through one size alone, half of a batch needs half of it.
    """
    below, above = sorted(k for k in known if k < n), sorted(k for k in known if k > n)
    pair = [below[-1], above[0]] if below and above else [*below[-2:], *above[:2]]
    if len(pair) < 2:
        return known[pair[0]] * pair[0] / n if pair else 0
    a, b = pair
    slope = (known[a] - known[b]) / (1 / a - 1 / b)
    return max(0.0, known[b] + slope * (1 / n - 1 / b))


@dataclasses.dataclass(eq=False)
class BatchGradient:
    """The gradient of a loss over one batch, or a training step, and the choices of how to compute it."""

    loss: Loss  # as in `cavs.memory.plan`
    params: PyTree  # as in `cavs.memory.plan`, or the first argument of another `program`
    data: DividedArrays | DividedGraphs  # the batch
    names: Names  # as in `cavs.memory.plan`
    choices: list[Choice]  # from the fastest on; each divides the batch more than the one before
    options: dict[str, Any]  # of the compiler
    # From the loss in parts to a function of `(params, batch)`.
    program: Callable[[Loss], Callable[[PyTree, PyTree], Any]] = jax.value_and_grad
    jit: Callable[[Callable[..., Any]], Any] = jax.jit  # returns a function with the method `lower`
    # The bytes of temporary memory of the choices that were compiled, and the engines that run of those that were traced.
    sizes: dict[Choice, int] = dataclasses.field(default_factory=dict)
    traced: dict[Choice, set[str]] = dataclasses.field(default_factory=dict)

    def fastest(self, budget: int) -> Choice | None:
        """Returns the fastest choice that fits a budget, as far as it is compiled; `None` if nothing fits."""
        by = {choice.divisor: choice for choice in self.choices}
        found, _ = fewest(lambda n: self.measure(by[n]), by, budget)
        return by.get(found or 0)

    def smallest(self) -> Choice:
        """Returns the smallest of three choices: the one that divides the batch the most, the one before, and the fastest."""
        runs = (choice for choice in reversed(self.choices) if self.measure(choice) is not None)
        return min([*itertools.islice(runs, 2), self.choices[0]], key=lambda choice: self.measure(choice) or np.inf)

    def estimate(self, choice: Choice) -> int:
        """Returns the bytes of a choice that other choices suggest."""
        known = {other.divisor: size for other, size in self.sizes.items() if other != choice}
        return round(estimate(known, choice.divisor)) or self.sizes[choice]

    def measure(self, choice: Choice) -> int | None:
        """Returns the bytes of temporary memory as compiled; `None` if the engine that the loss asks for cannot run it."""
        if choice not in self.sizes:
            with contextlib.suppress(EngineError):
                self.sizes[choice] = self.compiled(choice)[1]
        return self.sizes.get(choice)

    def compiled(self, choice: Choice) -> tuple[Any, int]:
        """Compiles the program. Returns it, and the bytes of its temporary memory."""
        return compiled_step(self.compiles(choice), (self.params, self.data.structs(choice)), self.options)

    @memoized
    def compiles(self, choice: Choice) -> Any:
        """Returns what `jit` returns for a choice."""
        return self.jit(self.program(self.loss_of(choice)))

    def runs(self, choice: Choice) -> bool:
        """Returns whether the engine that the loss asks for can run a choice."""
        with contextlib.suppress(EngineError):
            return self.engines(choice) is not None
        return False

    def engines(self, choice: Choice) -> list[str]:
        """Returns the names of the engines that run. Raises an `EngineError` if the one that the loss asks for cannot."""
        if choice not in self.traced:
            jax.eval_shape(self.program(self.loss_of(choice)), self.params, self.data.structs(choice))
        return sorted(self.traced[choice])

    def loss_of(self, choice: Choice) -> Loss:
        """Returns the loss of all parts of a batch, whose derivative keeps what `names` say."""
        loss = tuned(self.loss, MemoryOptions(False, self.names, choice.parts > 1), lambda calls: self._note(choice, calls))
        return self.data.in_parts(loss, choice)

    def _note(self, choice: Choice, calls: list[TunableRules]) -> None:
        """Checks the names of values, and notes the engines that run."""
        check_known(self.names, {name for call in calls for name in call.names}, "plan")
        self.traced[choice] = {call.engine for call in calls if call.engine}


def check_parts(batch: BatchGradient, parts: int) -> None:
    """Computes the loss of some samples at once and in two parts. Raises a `ValueError` if they differ by more than rounding.

    The samples are those of two of the `parts` of the batch: without a derivative they need about the memory of one part.
    """
    one, two, count = batch.data.few(parts)
    found: dict[int, float] = {}

    def noting(choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
        loss = batch.loss_of(choice)

        def noted(params: PyTree, few: PyTree) -> jax.Array:
            value = loss(params, few)
            jax.debug.callback(lambda x: found.update({choice.parts: float(x)}), value)
            return value

        return noted

    def both(params: PyTree, one: PyTree, two: PyTree) -> None:  # XLA computes nothing but the losses
        batch.program(noting(Choice()))(params, one)
        batch.program(noting(Choice(2)))(params, two)

    try:
        with jax.default_matmul_precision("highest"):
            traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST
    except EngineError:  # its weights fit in less precision alone
        traced, least = jax.jit(both).trace(batch.params, one, two), _LEAST_ON_GPU
    # For what runs once, XLA for CPUs compiles in a third of the time.
    compiled = traced.lower().compile({"xla_backend_optimization_level": "0"} if Target.here().is_cpu else {})
    jax.block_until_ready(compiled(values(batch.params), one, two))
    jax.effects_barrier()
    whole, in_parts = found[1], found[2]
    floats = {dtype for dtype in _dtypes(traced.jaxpr.jaxpr) if jnp.issubdtype(dtype, jnp.inexact)}
    tolerance = max(least, _ROUNDINGS * max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0))
    noun = batch.data.noun
    if np.isfinite([whole, in_parts]).any() and not abs(whole - in_parts) <= tolerance * (abs(whole) + abs(in_parts)):
        raise ValueError(
            f"plan: loss: got {whole:.6g} for {counted(count, noun)} at once, and {in_parts:.6g} in two parts; expected a sum "
            f"over {noun}s, or a loss of cavs.data.total and cavs.data.mean, which are over the whole batch. Write "
            "cavs.data.mean(losses) for losses.mean(). Write cavs.data.total(losses) for losses.sum() to square it or to add "
            f"a regulariser. Random masks must follow from keys of {noun}s or vertices. If the loss needs all {noun}s at once, "
            "as batch statistics do, write parts=1, or a step without memory."
        )


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Returns the dtypes of all values of a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
        for body in bodies_in(eqn):
            yield from _dtypes(body)


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
    wanted = bytes_of(budget, "plan")
    data = divided(batch, collate, axis)
    counts = numbers_of_parts(len(data))
    if parts is not None and parts not in counts:
        raise ValueError(f"plan: parts: got {parts!r} for {counted(len(data), data.noun)}; expected one of {counts}.")
    if segments is not None and (not isinstance(segments, int) or segments < 1):
        raise ValueError(f"plan: segments: got {segments!r}; expected an int >= 1. Write segments=16.")
    ways = names_of(names, "plan", ("keep", "recompute"))
    params = _with_arrays(params)
    options = compiler_options(wanted, bytes_of_arrays(params))
    gradient = BatchGradient(loss, params, data, ways, data.choices(parts, segments), options)
    found = BatchPlan(gradient, chosen(gradient, wanted), wanted)
    if wanted is None and (limit := memory_of_gpu()) is not None and found.peak > limit:
        smaller = gradient.fastest(limit)
        what = f"this plan does:\n{BatchPlan(gradient, smaller, limit)}" if smaller else "and no plan does."
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
    with open(path) as file:
        try:
            found = json.load(file)
            choice = Choice(found["parts"], found["segments"])
            names, count, budget = map(found.get, ("names", "samples", "budget"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"load: path: got {path}; expected a file that BatchPlan.save wrote. Write plan.save(path)."
            ) from error
    data = divided(batch, collate, axis)
    if len(data) != count:
        raise ValueError(
            f"load: batch: got {counted(len(data), data.noun)}; expected {count}, as in the plan. Write batch[:{count}]."
        )
    ways, params = names_of(names, "load", ("keep", "recompute")), _with_arrays(params)
    choices = sorted({choice, *data.choices(None, None)}, key=lambda choice: choice.divisor)
    gradient = BatchGradient(loss, params, data, ways, choices, compiler_options(budget, bytes_of_arrays(params)))
    return BatchPlan(gradient, choice, budget)


def _with_arrays(params: PyTree) -> PyTree:
    """Returns the parameters, numbers as arrays."""
    return jax.tree.map(lambda x: x if hasattr(x, "shape") else jnp.asarray(x), params)


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
        found = next(filter(batch.runs, batch.choices), batch.choices[0])
    else:
        found = batch.smallest() if isinstance(budget, str) else batch.fastest(budget)
    if found is None and not batch.sizes:  # no engine that the loss asks for can run it, and its error says why
        found = batch.choices[0]
    if found is not None:
        if found.parts > 1:
            check_parts(batch, found.parts)
        return found
    assert isinstance(budget, int)  # the smallest choice fits any other one
    least = min(batch.sizes, key=batch.sizes.__getitem__)
    needed, own = batch.sizes[least], text_of(bytes_of_arrays(batch.params))
    raise BudgetError(
        f"{argument}: got {text_of(budget)}; expected at least {text_of(needed)}, for {least}. The parameters "
        f"take {own}, and so do their gradients{batch.data.cause}. Write {argument.split()[-1]}={needed}, or a smaller model."
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
        found = self._batch.measure(self._choice)
        assert found is not None, "its engines run it"
        return found

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
        most = None
        if run:
            compiled, _ = self._batch.compiled(self._choice)
            jax.block_until_ready(compiled(self._batch.params, self.batch(self._batch.data.whole)))
            most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        compiled = self.peak
        return Verified(self._batch.estimate(self._choice), compiled, most)

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """Returns (bytes, relative time, choice) of the plans down to the smallest, the fastest first. Compiles some of them.

        The bytes of the others are on a line over 1 / parts through those that were compiled. Times are estimated.
        """
        batch, last = self._batch, self._batch.smallest()
        each = [choice for choice in batch.choices if choice.divisor <= last.divisor]
        return [(batch.sizes.get(choice) or batch.estimate(choice), self._slowdown(choice), choice) for choice in each]

    def _slowdown(self, choice: Choice) -> float:
        data = self._batch.data
        return data.time(choice) / data.time(self._batch.choices[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the choices of the plan to a file, as JSON; [`cavs.memory.load`][] reads it."""
        found: dict[str, Any] = self._choice._asdict() | {"names": dict(self._batch.names)}
        found |= {"samples": len(self._batch.data), "budget": self._budget, "bytes": self.peak, "engines": self.engines}
        with open(path, "w") as file:
            json.dump(found, file, indent=1)

    def __str__(self) -> str:
        data, budget = self._batch.data, self._budget
        limit = "no budget" if budget is None else f"budget {text_of(budget) if isinstance(budget, int) else budget}"
        head = (
            f"{data.text}, {self._choice}, engine {' and '.join(self.engines) or 'none'}: {text_of(self.peak)} of temporary "
            f"memory, compiled ({limit}), {self.time:.2f} times the time of the fastest plan, modelled"
        )
        known = sorted(self._batch.sizes, key=data.time)
        rows = [(str(choice), text_of(self._batch.sizes[choice]), f"{self._slowdown(choice):.2f}") for choice in known]
        return "\n".join([head, "compiled:", *columns([("plan", "bytes", "time, modelled"), *rows])])

    __repr__ = __str__


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows]
