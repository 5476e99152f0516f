"""How a batch is computed within a memory budget: in parts (moDNN), and deep graphs in segments of levels."""

import json
import os
from typing import Any

import jax

from cavs._graphs.pytree import PyTree
from cavs._memory.batch_search import BatchGradient
from cavs._memory.bytes import text_of
from cavs._memory.fit import Verified
from cavs._memory.search import Choice


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
