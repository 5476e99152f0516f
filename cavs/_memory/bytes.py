"""Amounts of memory, such as `"2GiB"`: read from and written as text."""

import math
import os
import re

import jax
import numpy as np

from cavs._graphs.pytree import PyTree

_UNITS = (
    {"": 1, "b": 1}
    | {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
    | {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}
)
_EXPECTED = (
    "expected bytes as an int, a text such as '2GiB' or '512 MB', a fraction of the device's memory such as 0.5, 'min' or None"
)


class BudgetError(ValueError):
    """No plan fits the budget. The message names the smallest budget that a plan fits, and what needs the most memory."""


def bytes_of(budget: int | float | str | None, function: str = "bytes_of", argument: str = "budget") -> int | str | None:
    """Reads an amount of memory.

    Args:
        budget: bytes as an `int`; a text such as `"2GiB"` or `"512 MB"`; as a `float`, a fraction 0 < x <= 1 of the first
            device's memory, on a CPU of the machine's memory; either of these numbers as a text; `"min"`; or None.
        function: named by errors.
        argument: named by errors.

    Returns:
        The number of bytes; `"min"` and None unchanged.

    Raises:
        ValueError: if `budget` is none of these.
    """
    if budget is None or isinstance(budget, str) and budget == "min":
        return budget
    original, budget = budget, budget.item() if isinstance(budget, np.generic) else budget
    if isinstance(budget, str) and (match := re.fullmatch(r"\s*(\d*\.?\d+)\s*([a-z]*)\s*", budget.lower())):
        number, unit = match.groups()
        if unit in _UNITS:
            budget = float(number) if "." in number and not unit else int(float(number) * _UNITS[unit])
    if isinstance(budget, float) and 0 < budget <= 1:
        device, memory = jax.devices()[0], memory_of_gpu()
        if memory is None and device.platform == "cpu" and hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if memory is None:
            raise ValueError(
                f"{function}: {argument}: got a fraction; expected bytes, as {device} does not say how much memory it has. "
                f"Write {argument}='2GiB'."
            )
        return int(budget * memory)
    elif isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    raise ValueError(f"{function}: {argument}: got {original!r}; {_EXPECTED}. Write {argument}='2GiB'.")


def memory_of_gpu() -> int | None:
    """Returns the bytes that JAX may allocate on the first device; `None` if it is not a GPU, or does not report it."""
    device = jax.devices()[0]
    return None if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def text_of(number: float) -> str:
    """Returns bytes as a text, such as "1.50 GiB"."""
    power = min(4, int(math.log(number, 1024))) if number >= 1024 else 0
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def bytes_of_arrays(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
