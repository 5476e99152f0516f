"""The fastest way to compute a batch within a memory budget, found by compiling: at most five ways are compiled."""

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cavs._engines.choose import EngineError
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs

MOST_COMPILED = 5
# A choice with fewer parts than one that fits is compiled if it is estimated to need this share of the budget, or less.
_WORTH_TRYING = 1.1
# Times decide in which order choices are tried: a task takes as long as so many rows, whatever its size.
_ROWS_PER_TASK = {"cpu": 16, "gpu": 256}
SEGMENTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
SMALLEST_SEGMENT = 64  # vertices: with fewer, the loop over segments takes more time than it saves memory
LEVELS_OF_SEGMENT = 4
# Segments take longer: the forward runs twice, and on a GPU on engine `scan` rather than a faster one (chains of 5,000 steps).
_IN_SEGMENTS = {"cpu": 1.7, "gpu": 20}


class Choice(NamedTuple):
    """One way to compute a batch: the number of its parts, and of the segments of levels in which a part runs."""

    parts: int = 1
    segments: int = 1

    def __str__(self) -> str:
        segments = f" in {self.segments} segments of levels" if self.segments > 1 else ""
        return counted(self.parts, "part") + segments


FASTEST = Choice()


class Work(Protocol):
    """A computation that must fit into a budget."""

    def size(self, choice: Choice) -> tuple[int, int]:
        """Returns the rows and the tasks of all parts of a batch."""
        ...

    def measure(self, choice: Choice) -> int:
        """Compiles one choice. Returns the bytes that XLA allocates for it."""
        ...


@dataclasses.dataclass(eq=False)
class Search:
    """The choices for one batch, and the bytes of those that were compiled."""

    work: Work
    choices: list[Choice]
    known: dict[Choice, int] = dataclasses.field(default_factory=dict)
    estimates: dict[Choice, float] = dataclasses.field(default_factory=dict)  # of those that were compiled, made before

    def __post_init__(self) -> None:
        self.choices = sorted(self.choices, key=self.time)

    def time(self, choice: Choice) -> float:
        """Returns the estimated time, in rows."""
        rows, tasks = self.work.size(choice)
        device = "cpu" if jax.default_backend() == "cpu" else "gpu"
        return (_IN_SEGMENTS[device] if choice.segments > 1 else 1) * (rows + tasks * _ROWS_PER_TASK[device])

    def slowdown(self, choice: Choice) -> float:
        """Returns the estimated time, relative to the fastest choice."""
        return self.time(choice) / self.time(self.choices[0])

    def measure(self, choice: Choice) -> int | None:
        """Compiles a choice, once. Returns its bytes; `None`, and it is removed, if the engine of the loss cannot run it.

        Raises:
            EngineError: it was the last choice.
        """
        if choice not in self.known:
            estimate = self.estimate(choice)
            try:
                self.known[choice] = self.work.measure(choice)
            except EngineError:
                self.choices.remove(choice)
                if not self.choices:
                    raise
                return None
            self.estimates[choice] = estimate if len(self.known) > 1 else self.known[choice]
        return self.known[choice]

    def fastest(self, budget: float) -> Choice | None:
        """Returns the fastest choice that fits the budget as far as it is known; `None` if nothing fits.

        The fastest choice that is estimated to fit is compiled next, and corrects the estimates, until none is left that could
        be better. The last one to be compiled is the smallest.
        """
        best = min((c for c, size in self.known.items() if size <= budget), key=self.time, default=None)
        while len(self.known) < MOST_COMPILED or best is None:
            untried = [c for c in self.choices if self._may_fit(c, budget)]
            if best is not None:
                untried = [c for c in untried if self.time(c) < self.time(best)]
            share = 1 if best is None else _WORTH_TRYING
            likely = [c for c in untried if self.estimate(c) <= share * budget]
            if best is None and untried and (not likely or len(self.known) >= MOST_COMPILED - 1):
                likely = [max(untried, key=_divided)]
            if not likely:
                break
            size = self.measure(likely[0])
            if size is not None and size <= budget:
                best = likely[0]
        return best

    def smallest(self) -> Choice:
        """Returns the smallest choice of three: the one that divides the batch the most, half of these parts, and the fastest."""
        while self.measure(least := max(self.choices, key=_divided)) is None:
            pass
        halved = [c for c in self.choices if c.segments == least.segments and 2 * c.parts <= least.parts]
        for choice in {max(halved, key=_divided, default=least), self.choices[0]}:
            self.measure(choice)
        return min(self.known, key=lambda c: (self.known[c], self.time(c)))

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """Returns (bytes, relative time, choice) of the best choices, the fastest first. Estimates unless compiled."""
        best: list[tuple[int, float, Choice]] = []
        for choice in self.choices:
            size = round(self.estimate(choice))
            if not best or size < best[-1][0]:
                best.append((size, self.slowdown(choice), choice))
        return best

    def estimate(self, choice: Choice) -> float:
        """Returns the bytes of a choice: as compiled, or from the others that were compiled.

        Memory is a part that does not depend on the parts (gradients, for instance), and another that is divided by their
        number: a line over 1 / parts through the two sizes next to it. Segments divide the levels as parts divide the batch,
        and have a line of their own.
        """
        if choice in self.known or not self.known:
            return self.known.get(choice, 0)
        alike = {_divided(c)[0]: size for c, size in self.known.items() if _alike(c, choice)}
        others = {_divided(c)[0]: size for c, size in self.known.items()}
        return _on_line(alike or others, _divided(choice)[0])

    def _may_fit(self, choice: Choice, budget: float) -> bool:
        """Whether a choice was not compiled, and no larger one was and did not fit."""
        failed = (_divided(c)[0] for c, size in self.known.items() if size > budget and _alike(c, choice))
        return choice not in self.known and _divided(choice)[0] > max(failed, default=0)


def _divided(choice: Choice) -> tuple[int, int]:
    """How often a choice divides the batch."""
    return choice.parts * choice.segments, choice.parts


def _alike(a: Choice, b: Choice) -> bool:
    return (a.segments > 1) == (b.segments > 1)


def _on_line(known: dict[int, int], n: int) -> float:
    """Reads a line over 1 / n through the two known sizes next to n. Through one size: half of a batch needs half of it."""
    below, above = sorted(k for k in known if k <= n), sorted(k for k in known if k > n)
    pair = [*below[-1:], *above[:1]] if below and above else [*below[-2:], *above[:2]]
    if len(pair) == 1:
        return known[pair[0]] * pair[0] / n
    a, b = pair
    slope = (known[a] - known[b]) / (1 / a - 1 / b)
    return max(0.0, known[b] + slope * (1 / n - 1 / b))


def with_segments(choices: list[Choice], graphs: Graphs) -> list[Choice]:
    """Adds the choices in which large graphs of many levels run in segments."""
    vertices, levels = int(np.diff(graphs.vertex_offsets).max(initial=0)), int(graphs.height.max(initial=0))
    counts = [n for n in SEGMENTS if SMALLEST_SEGMENT * n <= vertices and LEVELS_OF_SEGMENT * n <= levels]
    return choices + [c._replace(segments=n) for c in choices for n in counts]


def numbers_of_parts(count: int) -> list[int]:
    """Returns the numbers of parts to try for so many graphs: the divisors nearest the powers of two."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return sorted({min(divisors, key=lambda n, p=p: abs(math.log2(n) - p)) for p in range(count.bit_length() + 1)})
