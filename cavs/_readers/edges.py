"""JSON lines, the general format: any graphs, one per line."""

import bisect
import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cavs._graphs.checks import INT32_MAX, CycleError
from cavs._graphs.counted import counted
from cavs._graphs.files import check_path
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._readers.json_values import (
    are_targets,
    as_values,
    check_finite,
    id_values,
    ids_of,
    rows_for_json,
    rows_of,
    targets_of,
)
from cavs._readers.names import arrays_by_name, leaves_by_name, nested
from cavs._readers.source import ASCII_SPACE, FormatError, Path, format_error, read_lines, write_bytes

Converted = TypeVar("Converted")
_KEYS = ("children", "edges", "num_vertices", "inputs", "labels", "kinds", "label", "edge_attr", "x")
_FIELDS = {"inputs": ("input_id", "vocab"), "labels": ("label", "label_names"), "kinds": ("kind", "kind_names")}

# The most vertices without an edge, an input, a label or a kind. A line of 40 bytes must not allocate gigabytes.
_MAX_BARE_VERTICES = 1000

_EXPECTED = {
    "children": "'children' to be a list of lists of integers, at least one list",
    "edges": "'edges' to be a list of pairs [parent, child] of integers",
}
_EXACT = "; integers that become float64 must be exact in it"
_ROWS = "{!r} to be numbers, or lists of numbers of one shape, in all lines" + _EXACT

JSONObject: TypeAlias = dict[str, Any]


def read_edges(path: Path) -> Graphs:
    """Reads graphs as JSON lines: one object per line, in UTF-8. Blank lines are skipped.

    ```json
    {"children": [[], [], [0, 1]], "inputs": ["not", "bad", null], "labels": [1, 0, 3]}
    {"edges": [[2, 0], [2, 1]], "num_vertices": 3, "kinds": ["leaf", "leaf", "inner"]}
    ```

    - `children` lists the children of each vertex in order, as vertex numbers from 0.
    - `edges` replaces `children`: pairs [parent, child], where the children of a vertex are in the order of the pairs.
    - `num_vertices` accompanies `edges`. It is at most 1000 more than the edges can name, unless `inputs`, `labels` or
      `kinds` has that length.
    - `inputs`, `labels` and `kinds` are optional and have one value per vertex.
    - `label` is optional, the label of the graph: a finite number or nested lists of numbers of one shape, which become
      `graph_label`. Null becomes NaN, also within lists.
    - `edge_attr` is optional, a list with one value per edge, in the order of `edges`, or of the children of vertex 0, of
      vertex 1, and so on: numbers, or nested lists of numbers of one shape. They become `edge_attr`.
    - `x` is optional, the features of the vertices: a list with one value per vertex, as of `edge_attr`, or an object of such
      lists.

    The values of `inputs`, of `labels` and of `kinds` are of one type in the whole file: integers >= 0, or strings, which
    become `vocab`, `label_names`, `kind_names` in the order of first appearance. An input or a label may be null, which
    becomes -1. If any of the `labels` is a number with decimals or a list of numbers, all of them are targets of a
    regression: they become (V, ...) float64, and null becomes NaN, also within lists. Each of these keys is on every line or
    on none. Integers that become float64 must be exact in it.

    Args:
        path: the file; it is decompressed if its name ends in `.gz`.

    Returns:
        The graphs.

    Raises:
        FormatError: a line is not a JSON object, has an unknown key, a list of a wrong length, values of different types, a
            vertex number out of range, or a cycle. The message names the line.
    """
    lines = [_load(path, n, text) for n, text in enumerate(read_lines(path), 1) if text.strip(ASCII_SPACE)]
    rows = list(map(_children, lines))
    sizes = list(map(len, rows))
    fields: dict[str, Any] = {}
    if parts := _column(lines, "label", [1] * len(lines), "graph"):
        convert = rows_of if all(type(value) is int for (value,) in parts) else targets_of
        expected = f"'label' to be a finite number, or lists of numbers of one shape, in all lines{_EXACT}"
        fields["graph_label"] = _joined(lines, parts, convert, expected)
    if parts := _column(lines, "edge_attr", [sum(map(len, kids)) for kids in rows], "edge"):
        in_order = [_by_parent(line.graph, values) for line, values in zip(lines, parts, strict=True)]
        fields["edge_attr"] = _joined(lines, in_order, rows_of, _ROWS.format("edge_attr"))
    features = {}
    for name in dict.fromkeys(key for line in lines for key in line.graph if key.split("/")[0] == "x"):
        features[name] = _joined(lines, _column(lines, name, sizes, "vertex"), rows_of, _ROWS.format(name))
    fields["x"] = nested(features).get("x")
    for key, (ids, names) in _FIELDS.items():
        parts = _column(lines, key, sizes, "vertex")
        if key == "labels" and are_targets(chain.from_iterable(parts)):
            fields[ids] = _joined(lines, parts, targets_of, f"'labels' to be of one type and shape in all lines{_EXACT}")
        elif parts:
            optional = key != "kinds"
            expected = f"{key!r} to be only int or str in all lines (integers >= 0, < 2**31){', or null' * optional}, not {{}}"
            expected += "; numbers to predict have a decimal point, such as -1.0" * (key == "labels")
            fields[ids], fields[names] = _joined(lines, parts, functools.partial(ids_of, optional=optional), expected)
    children = [child for kids in chain.from_iterable(rows) for child in kids]
    try:
        return Graphs.build(sizes, list(map(len, chain.from_iterable(rows))), children, **fields)
    except CycleError as error:
        raise lines[error.graph].error(f"a graph without a cycle; vertex {error.vertex} depends on itself") from None


class _Line(NamedTuple):
    """A line of a file, and its graph: "label" is in a list, and features `x` are by name, such as "x/a"."""

    path: Path
    number: int  # in the file, from 1
    text: str
    graph: JSONObject

    def error(self, expected: str) -> FormatError:
        return format_error(self.path, self.number, self.text, expected)


def _column(lines: Sequence[_Line], key: str, counts: Sequence[int], noun: str) -> list[list[Any]]:
    """Returns the values of a key on each line; an empty list if no line has it.

    Raises `FormatError` if some lines lack the key, or the values of a line are not as many as its number in `counts`.
    """
    parts: list[Any] = [line.graph.get(key) for line in lines]
    for line, part in zip(lines, parts, strict=True):
        if (part is None) != (parts[0] is None):
            raise line.error(f"{key!r} on every line or on none; the first {'lacks' if parts[0] is None else 'has'} it")
    if not parts or parts[0] is None:
        return []
    for line, part, count in zip(lines, parts, counts, strict=True):
        if type(part) is not list or len(part) != count:
            raise line.error(f"{key!r} to be a list of {counted(count, 'value')}, one per {noun}")
    return parts


def _joined(
    lines: Sequence[_Line], parts: list[list[Any]], convert: Callable[[list[Any]], Converted], expected: str
) -> Converted:
    """Converts the values of all lines. An error of `convert` becomes one of the first line whose values do not fit."""

    def fails(count: int) -> ValueError | None:
        try:
            convert(list(chain.from_iterable(parts[:count])))
        except ValueError as error:
            return error
        return None

    try:
        return convert(list(chain.from_iterable(parts)))
    except ValueError:
        i = bisect.bisect_left(range(len(lines) - 1), True, key=lambda i: fails(i + 1) is not None)
    raise lines[i].error(expected.replace("{}", str(fails(i + 1))))


def _by_parent(graph: JSONObject, values: list[Any]) -> list[Any]:
    """The values of the edges of a line, in the order of the children."""
    if "edges" not in graph:
        return values
    return [value for _, value in sorted(zip(graph["edges"], values, strict=True), key=lambda edge: edge[0][0])]


def write_edges(graphs: Graphs, path: Path) -> None:
    """Writes graphs as JSON lines for [`cavs.io.read_edges`][].

    If there are names, the lines contain names instead of ids. Reading numbers them in the order of first appearance again,
    so names that no vertex has are lost. If all labels are NaN, they become -1.

    Args:
        graphs: the graphs.
        path: the file; it is compressed if its name ends in `.gz`.

    Raises:
        TypeError: `graphs` is something else.
        ValueError: `edge_attr` or `x` has values that are not finite real numbers, or a label other values than these and NaN;
            or integers of 2**63 and more, or lists of labels with integers that float64 rounds; or there are no values to show
            the shape of a row, as of edges if no graph has one.
    """
    check_graphs(graphs, "write_edges(graphs, path)")
    check_path("write_edges", path, "Write write_edges(graphs, path).")
    if not len(graphs):
        return write_bytes(path, b"")  # without lines, which hold the fields
    for name in ("label", "graph_label"):
        if (rows := getattr(graphs, name)) is not None:
            check_finite(rows, name, or_nan=True)
    vertex_offsets, child_offsets = graphs.vertex_offsets.tolist(), graphs.child_offsets.tolist()
    children = graphs.children.tolist()
    ids = {key: (getattr(graphs, name), getattr(graphs, names)) for key, (name, names) in _FIELDS.items()}
    columns = {key: id_values(values, names) for key, (values, names) in ids.items() if values is not None}
    labels = None if graphs.graph_label is None else as_values(graphs.graph_label)
    edge_attr = None if graphs.edge_attr is None else rows_for_json(graphs.edge_attr, "edge_attr")
    features = {name: rows_for_json(rows, name) for name, rows in arrays_by_name(graphs.x, "write_edges").items()}
    lines = []
    for g, (start, stop) in enumerate(pairwise(vertex_offsets)):
        rows = [children[child_offsets[r] : child_offsets[r + 1]] for r in range(start, stop)]
        graph: JSONObject = {"children": rows} | {key: values[start:stop] for key, values in columns.items()}
        if labels is not None:
            graph["label"] = labels[g]
        if edge_attr is not None:
            graph["edge_attr"] = edge_attr[child_offsets[start] : child_offsets[stop]]
        graph |= nested({name: rows[start:stop] for name, rows in features.items()})
        lines.append(json.dumps(graph, separators=(",", ":")) + "\n")
    write_bytes(path, "".join(lines).encode("ascii"))


def _load(path: Path, number: int, text: str) -> _Line:
    line = _Line(path, number, text, {})

    def unique(pairs: list[tuple[str, Any]]) -> JSONObject:
        members = dict(pairs)
        if len(members) < len(pairs):  # JSON would keep the last of equal keys
            repeated = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            raise line.error(f"each key once, not {repeated[:40]!r} again")
        return members

    try:
        graph = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        # RecursionError: brackets are nested thousands deep. ValueError is also raised for an integer of thousands of digits.
        raise line.error(f"a JSON object ({error})") from error
    if type(graph) is not dict:
        raise line.error("a JSON object: {...}")
    for key in graph:
        if key not in _KEYS:
            raise line.error(f"only the keys {', '.join(_KEYS)}, not {key[:40]!r}")
    if "label" in graph:
        graph["label"] = [graph["label"]]
    x = graph.pop("x", None)
    try:
        graph |= {} if x is None else leaves_by_name(x, "x")
    except (TypeError, RecursionError) as error:
        raise line.error(f"names without '/' as keys in 'x' ({error})") from error
    return line._replace(graph=graph)


def _children(line: _Line) -> list[list[int]]:
    graph = line.graph
    if ("children" in graph) == ("edges" in graph) or ("edges" in graph) != ("num_vertices" in graph):
        raise line.error("either 'children', or 'edges' with 'num_vertices'")
    key = "children" if "children" in graph else "edges"
    rows: Any = graph[key]
    are_lists = type(rows) is list and set(map(type, rows)) <= {list}
    flat = list(chain.from_iterable(rows)) if are_lists else []
    fits = are_lists and (set(map(len, rows)) <= {2} if key == "edges" else len(rows) > 0)
    if not fits or set(map(type, flat)) - {int}:
        raise line.error(_EXPECTED[key])
    n = len(rows) if key == "children" else _num_vertices(line)
    if flat and not (min(flat) >= 0 and max(flat) < n):
        raise line.error(f"vertex numbers from 0 to {n - 1}")
    if key == "children":
        return rows
    children: list[list[int]] = [[] for _ in range(n)]
    for parent, child in rows:
        children[parent].append(child)
    return children


def _num_vertices(line: _Line) -> int:
    """The checked value of `num_vertices`, which accompanies `edges`."""
    n = line.graph["num_vertices"]
    lengths = [len(line.graph[key]) for key in _FIELDS if type(line.graph.get(key)) is list]
    most = min(max([2 * len(line.graph["edges"]) + _MAX_BARE_VERTICES, *lengths]), INT32_MAX)
    if type(n) is not int or not 1 <= n <= most:
        raise line.error(f"'num_vertices' to be an integer from 1 to {most} (see cavs.io.read_edges)")
    return n
