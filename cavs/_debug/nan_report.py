"""The result of `find_nan`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NanReport:
    """The origin of a NaN, as [`cavs.debug.find_nan`][] found it. `print` shows it.

    Attributes:
        where: "params", "inputs" or "edges" if it was there before F ran, "forward", "loss" if the user's loss produced it, or
            "gradient".
        symbol: the array that contains it: `"state['h']"`, `"push"`, `"gradient of params['w']"`, ...
        row: the flat row of the vertex, or `None`.
        graph: the graph of the vertex, or `None`.
        vertex: the vertex within its graph, or `None`.
        level: the height of the vertex, or `None`.
        equation: the equation that produced the NaN from operands without one, with the ranges of its operands; `None` if F
            did not produce it.
        source: the line of the program that contains this equation, or `None`.
    """

    where: str
    symbol: str
    row: int | None = None
    graph: int | None = None
    vertex: int | None = None
    level: int | None = None
    equation: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        at = "" if self.row is None else f" at vertex {self.vertex} of graph {self.graph} (row {self.row}, level {self.level})"
        lines = [f"{self.where}: {self.symbol} is the first NaN{at}", *filter(None, (self.equation, self.source))]
        return "\n  ".join(lines)
