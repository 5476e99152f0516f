"""Batches whose graphs nobody has looked at yet: where a schedule carries all that a step reads, they are never selected."""

import functools
from typing import Any

import numpy as np

from cavs._graphs import Graphs, consecutive


class Pass:
    """Consecutive batches of `graphs[index]`, of `counts` graphs each; `arrays`, of all of them, where they are known."""

    def __init__(self, graphs: Graphs, index: np.ndarray | slice, counts: np.ndarray, arrays: tuple[Any, ...] | None):
        self._graphs, self._index, self._counts, self._arrays = graphs, index, counts, arrays

    @functools.cached_property
    def batches(self) -> list[Graphs]:
        of, arrays = self._graphs, self._arrays
        names = (getattr(of, name) for name in ("vocab", "kind_names", "label_names"))
        together = of[self._index] if arrays is None else Graphs(*arrays, *names)
        return list(consecutive(together, self._counts))


class LaterGraphs(Graphs):
    """Batch `number` of a pass. It becomes a `Graphs` as any other when it is asked for the first of its attributes."""

    def __init__(self, of: Pass, number: int):
        object.__setattr__(self, "_later", (of, number))

    def __getattribute__(self, name: str) -> Any:
        mine = object.__getattribute__(self, "__dict__")
        later = mine.get("_later")
        if later is not None:  # None where another thread was faster
            of, number = later
            mine.update(vars(of.batches[number]))
            object.__setattr__(self, "__class__", Graphs)
            mine.pop("_later", None)
        return object.__getattribute__(self, name)
