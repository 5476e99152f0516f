"""JSON lines, the general format: any graphs, one per line."""

import json
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from cavs._graphs.arguments import check_graphs
from cavs._graphs.checks import INT32_MAX
from cavs._graphs.counted import counted
from cavs._graphs.flat import ids_and_names, value_type
from cavs._graphs.graphs import Graphs
from cavs._readers.features import flat_features, nested_features
from cavs._readers.json_values import Features, Line, RowValues, TargetShape, as_values, rows_for_json, target_shape, targets
from cavs._readers.source import ASCII_SPACE, FormatError, Path, build_acyclic, read_lines, write_bytes

_KEYS = ("children", "edges", "num_vertices", "inputs", "labels", "kinds", "label", "edge_attr", "x")
_FIELDS = {"inputs": ("input_id", "vocab"), "labels": ("label", "label_names"), "kinds": ("kind", "kind_names")}

# The most vertices without an edge, an input, a label or a kind. A line of 40 bytes must not allocate gigabytes.
_MAX_BARE_VERTICES = 1000

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
    lines = [Line(path, number, text, position) for position, (number, text) in enumerate(found)]
    num_vertices: list[int] = []
    num_children: list[int] = []
    children: list[int] = []
    columns: dict[str, list[Any]] = {}
    types: dict[str, type] = {}
    label_shape: TargetShape = None
    graph_labels, edge_values, features = _GraphLabels(), RowValues("edge_attr", "edge"), Features()
    for line in lines:
        graph = _load(line)
        rows = _children(line, graph)
        n = len(rows)
        num_vertices.append(n)
        num_children.extend(map(len, rows))
        children.extend(chain.from_iterable(rows))
        graph_labels.add(line, graph)
        order = np.argsort([parent for parent, _ in graph["edges"]], kind="stable") if "edges" in graph else slice(None)
        edge_values.add(line, graph.get("edge_attr"), sum(map(len, rows)), order)
        features.add(line, graph.get("x"), n)
        for key in _FIELDS:
            values = graph.get(key)
            line.check_all_or_none(key, values is not None, key in columns)
            if values is None:
                continue
            if type(values) is not list or len(values) != n:
                raise line.error(f"{key!r} to be a list of {counted(n, 'value')}, one per vertex")
            if key == "labels":
                label_shape = _joined(line, values, label_shape, types.get(key))
                if label_shape is not None:
                    columns.setdefault(key, []).extend(values)
                    continue
            found = value_type(values, optional=key != "kinds")
            if isinstance(found, str) or found is not None and types.setdefault(key, found) is not found:
                expected = types[key].__name__ if key in types else "int or str"
                got = found if isinstance(found, str) else found.__name__
                null = "" if key == "kinds" else ", or null"
                raise line.error(f"{key!r} to be only {expected} in all lines (integers >= 0, < 2**31){null}, not {got}")
            columns.setdefault(key, []).extend(values)
    fields: dict[str, Any] = {}
    for key, values in columns.items():
        ids, names = _FIELDS[key]
        if key == "labels" and label_shape is not None:
            fields[ids] = targets(values, label_shape)
        else:
            fields[ids], fields[names] = ids_and_names(values)
    fields |= {"graph_label": graph_labels.array(), "edge_attr": edge_values.array(), "x": features.arrays()}

    def cycle_error(graph: int, vertex: int) -> FormatError:
        return lines[graph].error(f"a graph without a cycle; vertex {vertex} depends on itself")

    return build_acyclic(num_vertices, num_children, children, cycle_error, **fields)


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
    columns = {}
    for key, (ids, names) in _FIELDS.items():
        array = getattr(graphs, ids)
        if array is not None:
            columns[key] = (
                _values(array, getattr(graphs, names)) if array.dtype == np.int32 and array.ndim == 1 else as_values(array)
            )
    labels = None if graphs.graph_label is None else as_values(graphs.graph_label)
    edge_attr = None if graphs.edge_attr is None else rows_for_json(graphs.edge_attr, "edge_attr")
    x = {} if graphs.x is None else dict(flat_features(graphs.x, "x", "write_edges"))
    features = {name: rows_for_json(rows, name) for name, rows in x.items()}
    lines = []
    for g, (start, stop) in enumerate(pairwise(vertex_offsets)):
        rows = [children[child_offsets[r] : child_offsets[r + 1]] for r in range(start, stop)]
        graph: JSONObject = {"children": rows} | {key: values[start:stop] for key, values in columns.items()}
        graph |= {} if labels is None else {"label": labels[g]}
        if edge_attr is not None:
            graph["edge_attr"] = edge_attr[child_offsets[start] : child_offsets[stop]]
        graph |= nested_features({name: rows[start:stop] for name, rows in features.items()})
        lines.append(json.dumps(graph, separators=(",", ":")) + "\n")
    write_bytes(path, "".join(lines).encode("ascii"))


class _GraphLabels:
    """The values of `label`, one per line."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.shape: TargetShape = None

    def add(self, line: Line, graph: JSONObject) -> None:
        line.check_all_or_none("label", "label" in graph, bool(self.values))
        if "label" not in graph:
            return
        value = graph["label"]
        right = value is None or type(value) is int or isinstance(target_shape([value]), tuple)
        if not right or value is not None and self.shape not in (None, np.shape(value)):
            raise line.error("'label' to be a finite number, or lists of numbers of one shape, in all lines")
        self.shape = np.shape(value) if value is not None else self.shape
        self.values.append(value)

    def array(self) -> np.ndarray | None:
        """(G, ...) int64 if all labels are integers, else float64."""
        if not self.values:
            return None
        if set(map(type, self.values)) == {int}:
            return np.array(self.values)
        return targets(self.values, self.shape or ())


def _joined(line: Line, values: list[Any], known: TargetShape, ids: type | None) -> TargetShape:
    """The shape of the targets of all lines up to this one; `None` if labels are ids so far."""
    found = target_shape(values)
    if found is None:
        plain = known is not None and (known == () or all(v is None for v in values))
        if known is None or plain and {type(v) for v in values} <= {int, type(None)}:
            return known
    elif not isinstance(found, str) and known in (None, found) and (ids is None or ids is int and found == ()):
        return found
    raise line.error("'labels' to be of one type and shape in all lines")


def _values(ids: np.ndarray, names: tuple[str, ...] | None) -> list[int | str | None]:
    return [None if i < 0 else i if names is None else names[i] for i in ids.tolist()]


def _load(line: Line) -> JSONObject:
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


def _children(line: Line, graph: JSONObject) -> list[list[int]]:
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


def _num_vertices(line: Line, graph: JSONObject) -> int:
    """The checked value of `num_vertices`, which accompanies `edges`."""
    n = graph["num_vertices"]
    lengths = [len(graph[key]) for key in _FIELDS if type(graph.get(key)) is list]
    most = min(max([2 * len(graph["edges"]) + _MAX_BARE_VERTICES, *lengths]), INT32_MAX)
    if type(n) is not int or not 1 <= n <= most:
        raise line.error(f"'num_vertices' to be an integer from 1 to {most} (see cavs.io.read_edges)")
    return n
