"""The fewest parts of a batch that fit a memory budget, found by compiling a few numbers of parts."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import jax

from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._memory.bytes import BudgetError
from cavs._memory.fit import MOST_COMPILED

_WORTH_TRYING = 1.1  # fewer parts than those that fit are compiled if they are estimated to need this share of the budget
FEW = 16  # samples that are compared even if a part has fewer

Loss: TypeAlias = Callable[[PyTree, PyTree], jax.Array]


def fewest_parts(measure: Callable[[int], int], batch: int, budget: int | str) -> tuple[int, int]:
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
        raise BudgetError(f"fewest_parts: budget: got {budget} bytes; expected at least {least}KiB, for {batch} parts.")
    return found, known[found]


def fewest(
    measure: Callable[[int], int | None], counts: Iterable[int], budget: int, most: int = MOST_COMPILED
) -> tuple[int | None, dict[int, int]]:
    """Finds the fewest parts that fit a budget, among `counts`.

    The fewest parts that are estimated to fit are measured next and correct the estimates, until no others could be better. The
    last ones to be measured are the most parts.

    Args:
        measure: compiles a number of parts, and returns the bytes that it needs; `None` if it cannot be computed.
        counts: the numbers of parts to choose from.
        budget: bytes.
        most: how many are measured at most.

    Returns:
        The number of parts, `None` if nothing fits; and the bytes of all numbers that were measured.
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


class Choice(NamedTuple):
    """One way to compute a batch: the number of its parts, and of the segments of levels in which a part runs."""

    parts: int = 1
    segments: int = 1

    @property
    def divisor(self) -> int:
        """How often the batch is divided. Segments divide levels as parts divide graphs."""
        return self.parts * self.segments

    def __str__(self) -> str:
        return counted(self.parts, "part") + (f" in {self.segments} segments of levels" if self.segments > 1 else "")


def numbers_of_parts(count: int) -> list[int]:
    """Returns the numbers of parts to try for so many graphs: the divisors nearest the powers of two."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return sorted({min(divisors, key=lambda n, p=p: abs(math.log2(n) - p)) for p in range(count.bit_length() + 1)})
