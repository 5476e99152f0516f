"""Finds the fewest parts of a batch that fit a memory budget, by compiling a few numbers of parts.

Before a batch is computed in parts, `check_parts` compares the loss of some samples at once and in two parts.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.choose import EngineError
from cavs._function.keep_options import MemoryOptions
from cavs._graphs.arguments import check_takes
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Jaxpr, all_equations
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.names import Names, check_known
from cavs._jaxpr.tunable import TunableRules, tuned
from cavs._memory.bytes import BudgetError, bytes_of
from cavs._memory.divided import Choice, DividedArrays, DividedGraphs, Loss
from cavs._memory.fit import MOST_COMPILED, compiled_step, values
from cavs._memory.sub_batches import checked_scalar
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
        budget: an amount of memory, as in [`cavs.memory.bytes_of`][]; "min" for parts of one graph.
        argument: named by errors.

    Returns:
        The number of parts, and the bytes that were measured for it.

    Raises:
        BudgetError: even parts of one graph do not fit. The message says how much they need.
        TypeError, ValueError: an argument is something else.
    """
    check_takes("fewest_parts: measure", measure, "parts")
    if isinstance(batch, bool) or not isinstance(batch, int | np.integer) or batch < 1:
        raise ValueError(f"fewest_parts: batch: got {batch!r}; expected an int >= 1, the graphs of a batch.")
    budget = budget if isinstance(budget, int) else bytes_of(budget, "fewest_parts") or "min"
    if isinstance(budget, str):
        return batch, measure(batch)
    parts, sizes = fewest(measure, (n for n in range(1, batch + 1) if batch % n == 0), budget, MOST_COMPILED + 2)
    if parts is None:
        least = -(-sizes[batch] // 1024)
        raise BudgetError(
            f"{argument}: got {budget} bytes; expected at least {least}KiB, for {batch} parts, or a smaller model."
        )
    return parts, sizes[parts]


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
        untried = [n for n in counts if n > failed and n not in known and (best is None or n < best)]
        likely = [n for n in untried if estimate(known, n) <= budget * (1 if best is None else _WORTH_TRYING)]
        if best is None and (not likely or len(known) >= most - 1):
            likely = untried[-1:]
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
        by_divisor = {choice.divisor: choice for choice in self.choices}
        divisor, _ = fewest(lambda n: self.measure(by_divisor[n]), by_divisor, budget)
        return by_divisor.get(divisor or 0)

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
        whole = self.data.in_parts(loss, choice)
        return lambda params, batch: checked_scalar("plan", whole(params, batch))

    def _note(self, choice: Choice, calls: list[TunableRules]) -> None:
        """Checks the names of values, and notes the engines that run."""
        check_known(self.names, {name for call in calls for name in call.names}, "plan")
        self.traced[choice] = {call.engine for call in calls if call.engine}


def check_parts(batch: BatchGradient, parts: int) -> None:
    """Computes the loss of some samples at once and in two parts. Raises a `ValueError` if they differ by more than rounding.

    The samples are those of two of the `parts` of the batch: without a derivative they need about the memory of one part.
    """
    at_once, in_two, count = batch.data.few(parts)
    losses: dict[int, float] = {}

    def noting(choice: Choice) -> Callable[[PyTree, PyTree], jax.Array]:
        loss = batch.loss_of(choice)

        def noted(params: PyTree, samples: PyTree) -> jax.Array:
            value = loss(params, samples)
            jax.debug.callback(lambda x: losses.update({choice.parts: float(x)}), value)
            return value

        return noted

    def both(params: PyTree, at_once: PyTree, in_two: PyTree) -> None:  # XLA computes nothing but the losses
        batch.program(noting(Choice()))(params, at_once)
        batch.program(noting(Choice(2)))(params, in_two)

    try:
        with jax.default_matmul_precision("highest"):
            traced, least = jax.jit(both).trace(batch.params, at_once, in_two), _LEAST
    except EngineError:  # its weights fit in less precision alone
        traced, least = jax.jit(both).trace(batch.params, at_once, in_two), _LEAST_ON_GPU
    # For what runs once, XLA for CPUs compiles in a third of the time.
    compiled = traced.lower().compile({"xla_backend_optimization_level": "0"} if Target.here().is_cpu else {})
    jax.block_until_ready(compiled(values(batch.params), at_once, in_two))
    jax.effects_barrier()
    whole, in_parts = losses[1], losses[2]
    made = [v.aval for e in all_equations(cast(Jaxpr, traced.jaxpr.jaxpr).eqns) for v in e.outvars]
    floats = {x.dtype for x in made if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)}
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
