"""`fewest_parts`: the fewest parts of a batch whose compiled training step fits a budget."""

from collections.abc import Callable

from cavs._memory.bytes import BudgetError


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
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    known: dict[int, int] = {}

    def bytes_of(n: int) -> int:
        return known[n] if n in known else known.setdefault(n, measure(n))

    if not isinstance(budget, int):
        return counts[-1], bytes_of(counts[-1])
    if bytes_of(1) <= budget:
        return 1, known[1]
    if bytes_of(counts[-1]) > budget:
        least = -(-known[counts[-1]] // 1024)
        raise BudgetError(f"fewest_parts: budget: got {budget} bytes; expected at least {least}KiB, for {batch} parts.")
    low, high = 0, len(counts) - 1  # counts[high] fits, and counts[low] does not
    while high - low > 1:
        a, b = counts[low], counts[high]
        slope = (known[a] - known[b]) / (1 / a - 1 / b)
        line = [known[b] + slope * (1 / n - 1 / b) for n in counts[low + 1 : high]]
        guess = low + 1 + next((i for i, x in enumerate(line) if x <= budget), len(line) - 1)
        guess = guess if len(known) < 4 else (low + high) // 2  # if the line misleads
        low, high = (low, guess) if bytes_of(counts[guess]) <= budget else (guess, high)
    return counts[high], known[counts[high]]
