"""Cases that only `pytest -m slow` runs: they take long, and others check the same property on smaller or other ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], count: int) -> list[Any]:
    """Returns the values of a `parametrize`, of which all but `count`, evenly spread, are marked as slow."""
    values = list(values)
    kept = {i * len(values) // count for i in range(count)}
    return [x if i in kept else slow(x) for i, x in enumerate(values)]


def only(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values of a `parametrize`, of which all but those in `kept` are marked as slow."""
    values, kept = list(values), list(kept)
    assert all(x in values for x in kept)
    return [x if x in kept else slow(x) for x in values]


def slow(value: Any) -> Any:
    """Returns a value, or a tuple of them, marked as slow."""
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
