"""Values in JSON lines: `edge_attr` and `x` of each edge or vertex, and labels that are numbers to predict."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.counted import counted
from cavs._readers.features import nested_features
from cavs._readers.source import FormatError, Path, format_error


class Line(NamedTuple):
    """A line of a file with a graph."""

    path: Path
    number: int  # in the file, from 1
    text: str
    position: int  # the number of graphs before it

    def error(self, expected: str) -> FormatError:
        """Returns the error to raise."""
        return format_error(self.path, self.number, self.text, expected)

    def check_all_or_none(self, key: str, has: bool, before: bool) -> None:
        """Raises `FormatError` if only this line, or only those before it, have a key."""
        if has != before and self.position:
            raise self.error(f"{key!r} on every line or on none; the first {'has' if before else 'lacks'} it")


class RowValues:
    """The values of a key of all lines, in the order of the rows of `Graphs`.

    `key`: the key, for messages. `one`: what has a value: an "edge" or a "vertex".
    """

    def __init__(self, key: str, one: str):
        self.key, self.one = key, one
        self.parts: list[np.ndarray] = []
        self.given = False

    def add(self, line: Line, values: Any, count: int, order: Any = slice(None)) -> None:
        """Adds the values of a line, `None` if it lacks the key, for its `count` edges or vertices.

        `order`: the index that brings the values into the order of the rows. Raises `FormatError` if the values are not one
        number, or nested list of numbers of one shape, for each edge or vertex.
        """
        line.check_all_or_none(self.key, values is not None, self.given)
        if values is None:
            return
        self.given = True
        if type(values) is not list or len(values) != count:
            raise line.error(f"{self.key!r} to be a list of {counted(count, 'value')}, one per {self.one}")
        array = _numbers(values) if values else None
        if values and (array is None or self.parts and array.shape[1:] != self.parts[0].shape[1:]):
            raise line.error(f"{self.key!r} to be numbers, or lists of numbers of one shape, in all lines")
        if array is not None:
            self.parts.append(array[order])

    def array(self) -> np.ndarray | None:
        """(N, ...) int64 if all values are integers, else float64; `None` if no line has the key."""
        return np.concatenate(self.parts or [np.zeros(0)]) if self.given else None


class Features:
    """The values of `x` of all lines: a list with a value for each vertex, or an object of such lists, by name."""

    def __init__(self) -> None:
        self.of: dict[str, RowValues] = {}

    def add(self, line: Line, x: Any, count: int) -> None:
        """Adds the values of a line, as `RowValues.add`."""
        try:
            found = dict(_by_name(x, "x")) if x is not None else {}
        except (TypeError, RecursionError) as error:
            raise line.error(f"names without '/' as keys in 'x' ({error})") from error
        for name in [*self.of, *(name for name in found if name not in self.of)]:
            self.of.setdefault(name, RowValues(name, "vertex")).add(line, found.get(name), count)

    def arrays(self) -> Any:
        """The arrays, in the dicts of the file; `None` if no line has the key."""
        return nested_features({name: values.array() for name, values in self.of.items()}).get("x")


def _by_name(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(x, dict):
        yield name, x
        return
    for key, own in x.items():
        if "/" in key or not key:
            raise TypeError(f"got {key[:40]!r}")
        yield from _by_name(own, f"{name}/{key}")


def rows_for_json(rows: np.ndarray, name: str) -> list[object]:
    """The rows of `Graphs.edge_attr` or of `Graphs.x` for JSON. Raises `ValueError` if a value is not a finite real number."""
    if rows.dtype.kind == "c" or not np.isfinite(rows).all():
        raise ValueError(
            f"write_edges: {name}: got {rows.dtype} with values that are not finite real numbers; expected such "
            "numbers. Write cavs.io.save_npz, which stores any."
        )
    return (rows.astype(np.int64) if rows.dtype == bool else rows).tolist()


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


TargetShape: TypeAlias = tuple[int, ...] | None


def target_shape(values: Sequence[object]) -> TargetShape | str:
    """The shape of each value, if values are targets: decimals, lists of numbers, or null.

    Returns:
        The shape; `None` if the values are integers, strings or null, which are not (yet) targets; a text that describes the
        values if they are neither.
    """
    given = [value for value in values if value is not None]
    types = set(map(type, given))
    if not types & {float, list}:
        return None
    try:
        array = np.array(given)
    except ValueError:  # lists of different lengths
        return "lists of different lengths"
    if array.dtype.kind not in "iuf" or types & {list} and types != {list} or bool in types:
        return " and ".join(sorted(t.__name__ for t in types))
    return "an infinite number" if np.isinf(array).any() else array.shape[1:]


def targets(values: Sequence[object], shape: tuple[int, ...]) -> np.ndarray:
    """(N, *shape) float64, NaN for null. All values have the shape."""
    out = np.full((len(values), *shape), np.nan)
    given = [i for i, value in enumerate(values) if value is not None]
    out[given] = np.array([values[i] for i in given], np.float64).reshape(len(given), *shape)
    return out


def as_values(array: np.ndarray) -> list[object]:
    """The rows of an array for JSON, null for NaN."""
    missing = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    gone = np.flatnonzero(missing.any(tuple(range(1, missing.ndim))))
    values: list[object] = list(array.tolist())
    for i in gone.tolist():
        values[i] = None
    return values
