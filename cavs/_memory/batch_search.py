"""A batch in parts: its loss, and the memory of what is computed from it."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cavs._engines.choose import EngineError
from cavs._function.keep_options import MemoryOptions
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.names import Names, check_known
from cavs._jaxpr.tunable import TunableRules, tuned
from cavs._memory.divided_arrays import DividedArrays
from cavs._memory.divided_graphs import DividedGraphs
from cavs._memory.fit import compiled_step
from cavs._memory.search import Choice, Loss, estimate, fewest


@dataclasses.dataclass(eq=False)
class BatchGradient:
    """The gradient of a loss over one batch, or a training step, and the choices of how to compute it.

    Attributes:
        loss, params, names: as in `cavs.memory.plan`; with another `program`, `params` is its first argument.
        data: the batch.
        choices: from the fastest on; each divides the batch more than the one before.
        options: of the compiler.
        program: from the loss in parts to a function of `(params, batch)`.
        jit: returns a function with the method `lower`.
        sizes: the bytes of temporary memory of the choices that were compiled.
        traced: the engines that run, of the choices that were traced.
    """

    loss: Loss
    params: PyTree
    data: DividedArrays | DividedGraphs
    names: Names
    choices: list[Choice]
    options: dict[str, Any]
    program: Callable[[Loss], Callable[[PyTree, PyTree], Any]] = jax.value_and_grad
    jit: Callable[[Callable[..., Any]], Any] = jax.jit
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
            try:
                self.sizes[choice] = self.compiled(choice)[1]
            except EngineError:
                return None
        return self.sizes[choice]

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
