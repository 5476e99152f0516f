"""`edge_attr` in JSON lines: a value for each edge of a graph."""

from typing import Any

import numpy as np

from cavs._graphs.counted import counted
from cavs._readers.source import Path, format_error


class EdgeValues:
    """The values of `edge_attr` of all lines, in the order of `Graphs.children`."""

    def __init__(self, path: Path):
        self.path = path
        self.parts: list[np.ndarray] = []
        self.given = False

    def add(self, number: int, line: str, graph: dict[str, Any], position: int, count: int) -> None:
        """Adds the values of a line.

        Args:
            number: the number of the line in the file.
            line: the line.
            graph: its object, of which the edges are valid.
            position: the number of graphs before it.
            count: the number of its edges.

        Raises:
            FormatError: the values are not one number, or nested list of numbers of one shape, for each edge.
        """
        if ("edge_attr" in graph) != self.given and position:
            first = "has" if self.given else "lacks"
            raise format_error(self.path, number, line, f"'edge_attr' on every line or on none; the first {first} it")
        if "edge_attr" not in graph:
            return
        self.given = True
        values = graph["edge_attr"]
        if type(values) is not list or len(values) != count:
            raise format_error(self.path, number, line, f"'edge_attr' to be a list of {counted(count, 'value')}, one per edge")
        array = _numbers(values) if values else None
        if values and (array is None or self.parts and array.shape[1:] != self.parts[0].shape[1:]):
            expected = "'edge_attr' to be numbers, or lists of numbers of one shape, in all lines"
            raise format_error(self.path, number, line, expected)
        if array is not None:
            order = np.argsort([parent for parent, _ in graph["edges"]], kind="stable") if "edges" in graph else slice(None)
            self.parts.append(array[order])

    def array(self) -> np.ndarray | None:
        """(E, ...) int64 if all values are integers, else float64; `None` if no line has the key."""
        return np.concatenate(self.parts or [np.zeros(0)]) if self.given else None


def edge_values_for_json(edge_attr: np.ndarray) -> list[object]:
    """The rows of `Graphs.edge_attr` for JSON.

    Raises:
        ValueError: a value is not a finite real number.
    """
    if edge_attr.dtype.kind == "c" or not np.isfinite(edge_attr).all():
        raise ValueError(
            f"write_edges: edge_attr: got {edge_attr.dtype} with values that are not finite real numbers; expected such "
            "numbers. Write cavs.io.save_npz, which stores any."
        )
    return (edge_attr.astype(np.int64) if edge_attr.dtype == bool else edge_attr).tolist()


def _numbers(values: list[Any]) -> np.ndarray | None:
    """int64 if all values are integers, else float64; `None` if they are not finite numbers of one shape."""
    try:
        objects = np.array(values, object)
        types = set(map(type, objects.ravel().tolist()))
        if types - {int, float}:
            return None
        array = objects.astype(np.int64 if types == {int} else np.float64)
    except (ValueError, OverflowError):  # lists of different lengths, or integers of more than 64 bits
        return None
    return array if np.isfinite(array).all() else None
