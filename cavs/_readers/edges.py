"""JSON lines, the general format: any graphs, one per line."""

import bisect
import functools
import json
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cavs._graphs.arguments import check_graphs
from cavs._graphs.checks import INT32_MAX, CycleError
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._readers.features import arrays_by_name, leaves_by_name, nested
from cavs._readers.json_values import are_targets, as_values, id_values, ids_of, rows_for_json, rows_of, targets_of
from cavs._readers.source import ASCII_SPACE, FormatError, Path, format_error, read_lines, write_bytes

Converted = TypeVar("Converted")
_KEYS = ("children", "edges", "num_vertices", "inputs", "labels", "kinds", "label", "edge_attr", "x")
_FIELDS = {"inputs": ("input_id", "vocab"), "labels": ("label", "label_names"), "kinds": ("kind", "kind_names")}

# The most vertices without an edge, an input, a label or a kind. A line of 40 bytes must not allocate gigabytes.
_MAX_BARE_VERTICES = 1000

_ROWS = "{!r} to be numbers, or lists of numbers of one shape, in all lines"

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
      `graph_label`.
    - `edge_attr` is optional, a list with one value per edge, in the order of `edges`, or of the children of vertex 0, of
      vertex 1, and so on: numbers, or nested lists of numbers of one shape. They become `edge_attr`.
    - `x` is optional, the features of the vertices: a list with one value per vertex, as of `edge_attr`, or an object of such
      lists.

    The values of `inputs`, of `labels` and of `kinds` are of one type in the whole file: integers >= 0, or strings, which
    become `vocab`, `label_names`, `kind_names` in the order of first appearance. An input or a label may be null, which
    becomes -1. If any of the `labels` is a number with decimals or a list of numbers, all of them are targets of a
    regression: they become (V, ...) float64, and null becomes NaN. Each of these keys is on every line or on none.

    Args:
        path: the file; it is decompressed if its name ends in `.gz`.

    Returns:
        The graphs.

    Raises:
        FormatError: a line is not a JSON object, has an unknown key, a list of a wrong length, values of different types, a
            vertex number out of range, or a cycle. The message names the line.
    """
    found = [(number, text) for number, text in enumerate(read_lines(path), 1) if text.strip(ASCII_SPACE)]
    lines = [_Line(path, number, text) for number, text in found]
    graphs = [_load(line) for line in lines]
    rows = [_children(line, graph) for line, graph in zip(lines, graphs, strict=True)]
    sizes, num_edges = list(map(len, rows)), [sum(map(len, own)) for own in rows]
    fields: dict[str, Any] = {}
    if parts := _column(lines, "label", [[graph["label"]] if "label" in graph else None for graph in graphs]):
        convert = rows_of if all(type(value) is int for (value,) in parts) else targets_of
        expected = "'label' to be a finite number, or lists of numbers of one shape, in all lines"
        fields["graph_label"] = _joined(lines, parts, convert, expected)
    if parts := _column(lines, "edge_attr", [graph.get("edge_attr") for graph in graphs], num_edges, "edge"):
        in_order = [_by_parent(graph, values) for graph, values in zip(graphs, parts, strict=True)]
        fields["edge_attr"] = _joined(lines, in_order, rows_of, _ROWS.format("edge_attr"))
    fields["x"] = _features(lines, [graph.get("x") for graph in graphs], sizes)
    for key, (ids, names) in _FIELDS.items():
        parts = _column(lines, key, [graph.get(key) for graph in graphs], sizes, "vertex")
        if parts is not None and key == "labels" and are_targets(chain.from_iterable(parts)):
            fields[ids] = _joined(lines, parts, targets_of, "'labels' to be of one type and shape in all lines")
        elif parts is not None:
            optional = key != "kinds"
            expected = f"{key!r} to be only int or str in all lines (integers >= 0, < 2**31){', or null' * optional}, not {{}}"
            fields[ids], fields[names] = _joined(lines, parts, functools.partial(ids_of, optional=optional), expected)
    children = [child for own in chain.from_iterable(rows) for child in own]
    try:
        return Graphs.build(sizes, list(map(len, chain.from_iterable(rows))), children, **fields)
    except CycleError as error:
        raise lines[error.graph].error(f"a graph without a cycle; vertex {error.vertex} depends on itself") from None


class _Line(NamedTuple):
    """A line of a file with a graph."""

    path: Path
    number: int  # in the file, from 1
    text: str

    def error(self, expected: str) -> FormatError:
        """Returns the error to raise."""
        return format_error(self.path, self.number, self.text, expected)


def _column(
    lines: Sequence[_Line], key: str, parts: list[Any], counts: Sequence[int] = (), one: str = ""
) -> list[list[Any]] | None:
    """Returns the values of a key on each line; `None` if no line has it.

    Raises `FormatError` if some lines lack the key, or the values of a line are not as many as its number in `counts`.
    """
    for line, part in zip(lines, parts, strict=True):
        if (part is None) != (parts[0] is None):
            raise line.error(f"{key!r} on every line or on none; the first {'lacks' if parts[0] is None else 'has'} it")
    if not parts or parts[0] is None:
        return None
    for line, part, count in zip(lines, parts, counts, strict=False):
        if type(part) is not list or len(part) != count:
            raise line.error(f"{key!r} to be a list of {counted(count, 'value')}, one per {one}")
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


def _features(lines: Sequence[_Line], xs: list[Any], sizes: list[int]) -> Any:
    """`Graphs.x` from the values of "x": lists with a value for each vertex, or objects of such lists, by name."""
    each: list[dict[str, Any]] = []
    for line, x in zip(lines, xs, strict=True):
        try:
            each.append({} if x is None else dict(leaves_by_name(x, "x")))
        except (TypeError, RecursionError) as error:
            raise line.error(f"names without '/' as keys in 'x' ({error})") from error
    arrays = {}
    for name in dict.fromkeys(chain.from_iterable(each)):
        parts = _column(lines, name, [found.get(name) for found in each], sizes, "vertex")
        arrays[name] = None if parts is None else _joined(lines, parts, rows_of, _ROWS.format(name))
    return nested(arrays).get("x")


def write_edges(graphs: Graphs, path: Path) -> None:
    """Writes graphs as JSON lines for [`cavs.io.read_edges`][].

    If there are names, the lines contain names instead of ids. Reading numbers them in the order of first appearance again,
    so names that no vertex has are lost.

    Args:
        graphs: the graphs.
        path: the file; it is compressed if its name ends in `.gz`.

    Raises:
        TypeError: `graphs` is something else.
        ValueError: `edge_attr` or `x` has values that are not finite real numbers.
    """
    check_graphs(graphs, "write_edges(graphs, path)")
    vertex_offsets, child_offsets = graphs.vertex_offsets.tolist(), graphs.child_offsets.tolist()
    children = graphs.children.tolist()
    ids = {key: (getattr(graphs, name), getattr(graphs, names)) for key, (name, names) in _FIELDS.items()}
    columns = {key: id_values(*of) for key, of in ids.items() if of[0] is not None}
    labels = None if graphs.graph_label is None else as_values(graphs.graph_label)
    edge_attr = None if graphs.edge_attr is None else rows_for_json(graphs.edge_attr, "edge_attr")
    features = {name: rows_for_json(rows, name) for name, rows in arrays_by_name(graphs.x, "write_edges").items()}
    lines = []
    for g, (start, stop) in enumerate(pairwise(vertex_offsets)):
        rows = [children[child_offsets[r] : child_offsets[r + 1]] for r in range(start, stop)]
        graph: JSONObject = {"children": rows} | {key: values[start:stop] for key, values in columns.items()}
        graph |= {} if labels is None else {"label": labels[g]}
        if edge_attr is not None:
            graph["edge_attr"] = edge_attr[child_offsets[start] : child_offsets[stop]]
        graph |= nested({name: rows[start:stop] for name, rows in features.items()})
        lines.append(json.dumps(graph, separators=(",", ":")) + "\n")
    write_bytes(path, "".join(lines).encode("ascii"))


def _load(line: _Line) -> JSONObject:
    try:
        graph = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        # RecursionError: brackets are nested thousands deep. ValueError is also raised for an integer of thousands of digits.
        raise line.error(f"a JSON object ({error})") from error
    if type(graph) is not dict:
        raise line.error("a JSON object: {...}")
    for key in graph:
        if key not in _KEYS:
            raise line.error(f"only the keys {', '.join(_KEYS)}, not {key[:40]!r}")
    return graph


def _children(line: _Line, graph: JSONObject) -> list[list[int]]:
    if ("children" in graph) == ("edges" in graph) or ("edges" in graph) != ("num_vertices" in graph):
        raise line.error("either 'children', or 'edges' with 'num_vertices'")
    if "children" in graph:
        rows, expected = graph["children"], "'children' to be a list of lists of integers, at least one list"
    else:
        rows, expected = graph["edges"], "'edges' to be a list of pairs [parent, child] of integers"
    if type(rows) is not list or set(map(type, rows)) - {list}:
        raise line.error(expected)
    flat = list(chain.from_iterable(rows))
    if set(map(type, flat)) - {int}:
        raise line.error(expected)
    if "children" in graph:
        n = len(rows)
        if not n:
            raise line.error(expected)
    else:
        if set(map(len, rows)) - {2}:
            raise line.error(expected)
        n = _num_vertices(line, graph)
    if flat and not (min(flat) >= 0 and max(flat) < n):
        raise line.error(f"vertex numbers from 0 to {n - 1}")
    if "children" in graph:
        return rows
    out: list[list[int]] = [[] for _ in range(n)]
    for parent, child in rows:
        out[parent].append(child)
    return out


def _num_vertices(line: _Line, graph: JSONObject) -> int:
    """The checked value of `num_vertices`, which accompanies `edges`."""
    n = graph["num_vertices"]
    lengths = [len(graph[key]) for key in _FIELDS if type(graph.get(key)) is list]
    most = min(max([2 * len(graph["edges"]) + _MAX_BARE_VERTICES, *lengths]), INT32_MAX)
    if type(n) is not int or not 1 <= n <= most:
        raise line.error(f"'num_vertices' to be an integer from 1 to {most} (see cavs.io.read_edges)")
    return n
