"""JSON lines, the general format: any graphs, one a line."""

import json
from itertools import chain, pairwise
from typing import Any

import numpy as np

from cavs._graphs.flat import INT32_MAX, ids_and_names, value_type
from cavs._graphs.graphs import Graphs
from cavs._readers.source import ASCII_SPACE, FormatError, Path, build_acyclic, format_error, read_lines, write_bytes

_KEYS = ("children", "edges", "num_vertices", "inputs", "labels", "kinds")
_FIELDS = {"inputs": ("input_id", "vocab"), "labels": ("label", "label_names"), "kinds": ("kind", "kind_names")}

# A line of 40 bytes must not ask for gigabytes: vertices without an edge, an input, a label or a kind.
_MAX_BARE_VERTICES = 1000


def read_edges(path: Path) -> Graphs:
    """Graphs as JSON lines: an object a line, UTF-8, `.gz` by name. Blank lines are passed over.

        {"children": [[], [], [0, 1]], "inputs": ["not", "bad", null], "labels": [1, 0, 3]}
        {"edges": [[2, 0], [2, 1]], "num_vertices": 3, "kinds": ["leaf", "leaf", "inner"]}

    `children` lists each vertex's children in order, as vertex numbers from 0. In its place `edges` may list pairs
    [parent, child], a vertex's children in the order they are written, with `num_vertices` (at most 1000 more than the
    edges can name, unless a list of that length stands beside it).

    `inputs`, `labels`, `kinds` are optional and have one entry a vertex: all integers >= 0 through the file, which stand
    for themselves, or all strings, which become `vocab`, `label_names`, `kind_names` by first appearance. An input or a
    label may be null: -1. A key of these is on every line or on none.

    **Raises:** `FormatError` that names the line, for what is not JSON, an unknown key, a list of another length, mixed
    types, a vertex number out of range, or a cycle.
    """
    lines = [(i + 1, line) for i, line in enumerate(read_lines(path)) if line.strip(ASCII_SPACE)]
    num_vertices: list[int] = []
    num_children: list[int] = []
    children: list[int] = []
    columns: dict[str, list[Any]] = {}
    types: dict[str, type] = {}
    for position, (number, line) in enumerate(lines):
        graph = _load(path, number, line)
        rows = _children(path, number, line, graph)
        n = len(rows)
        num_vertices.append(n)
        num_children.extend(map(len, rows))
        children.extend(chain.from_iterable(rows))
        for key in _FIELDS:
            values = graph.get(key)
            if (key in columns) != (values is not None) and position:
                first = "has" if key in columns else "lacks"
                raise format_error(path, number, line, f"{key!r} on every line or on none; the first {first} it")
            if values is None:
                continue
            if type(values) is not list or len(values) != n:
                raise format_error(path, number, line, f"{key!r} to be a list of {n} entries, one per vertex")
            found = value_type(values, optional=key != "kinds")
            if isinstance(found, str) or found is not None and types.setdefault(key, found) is not found:
                wanted = types[key].__name__ if key in types else "int or str"
                got = found if isinstance(found, str) else found.__name__
                null = "" if key == "kinds" else ", or null"
                raise format_error(
                    path, number, line, f"{key!r} to be all {wanted} through the file (integers >= 0, < 2**31){null}, not {got}"
                )
            columns.setdefault(key, []).extend(values)
    fields: dict[str, Any] = {}
    for key, values in columns.items():
        ids, names = _FIELDS[key]
        fields[ids], fields[names] = ids_and_names(values)

    def cycle_error(graph: int, vertex: int) -> FormatError:
        number, line = lines[graph]
        return format_error(path, number, line, f"a graph without a cycle; vertex {vertex} depends on itself")

    return build_acyclic(num_vertices, num_children, children, cycle_error, **fields)


def write_edges(graphs: Graphs, path: Path) -> None:
    """Writes graphs as JSON lines that `read_edges` reads, compressed where the name ends in `.gz`.

    The lines hold names rather than ids where there are names; reading numbers them by first appearance again, so names
    that no vertex has are lost.
    """
    vertex_offsets, child_offsets = graphs.vertex_offsets.tolist(), graphs.child_offsets.tolist()
    children = graphs.children.tolist()
    columns = {}
    for key, (ids, names) in _FIELDS.items():
        if getattr(graphs, ids) is not None:
            columns[key] = _values(getattr(graphs, ids), getattr(graphs, names))
    lines = []
    for start, stop in pairwise(vertex_offsets):
        rows = [children[child_offsets[r] : child_offsets[r + 1]] for r in range(start, stop)]
        graph = {"children": rows} | {key: values[start:stop] for key, values in columns.items()}
        lines.append(json.dumps(graph, separators=(",", ":")) + "\n")
    write_bytes(path, "".join(lines).encode("ascii"))


def _values(ids: np.ndarray, names: tuple[str, ...] | None) -> list[int | str | None]:
    return [None if i < 0 else i if names is None else names[i] for i in ids.tolist()]


def _load(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        graph = json.loads(line)
    except (ValueError, RecursionError) as error:
        # RecursionError: brackets nested thousands deep. ValueError also for an integer of thousands of digits.
        raise format_error(path, number, line, f"a JSON object ({error})") from error
    if type(graph) is not dict:
        raise format_error(path, number, line, "a JSON object: {...}")
    for key in graph:
        if key not in _KEYS:
            raise format_error(path, number, line, f"only the keys {', '.join(_KEYS)}, not {key[:40]!r}")
    return graph


def _children(path: Path, number: int, line: str, graph: dict[str, Any]) -> list[list[int]]:
    if ("children" in graph) == ("edges" in graph) or ("edges" in graph) != ("num_vertices" in graph):
        raise format_error(path, number, line, "either 'children', or 'edges' with 'num_vertices'")
    if "children" in graph:
        rows, what = graph["children"], "'children' to be a list of lists of integers, at least one list"
    else:
        rows, what = graph["edges"], "'edges' to be a list of pairs [parent, child] of integers"
    if type(rows) is not list or set(map(type, rows)) - {list}:
        raise format_error(path, number, line, what)
    flat = list(chain.from_iterable(rows))
    if set(map(type, flat)) - {int}:
        raise format_error(path, number, line, what)
    if "children" in graph:
        n = len(rows)
        if not n:
            raise format_error(path, number, line, what)
    else:
        n = graph["num_vertices"]
        if set(map(len, rows)) - {2}:
            raise format_error(path, number, line, what)
        beside = [len(graph[key]) for key in _FIELDS if type(graph.get(key)) is list]
        most = min(max([2 * len(rows) + _MAX_BARE_VERTICES, *beside]), INT32_MAX)
        if type(n) is not int or not 1 <= n <= most:
            raise format_error(path, number, line, f"'num_vertices' to be an integer from 1 to {most} (see read_edges)")
    if flat and not (min(flat) >= 0 and max(flat) < n):
        raise format_error(path, number, line, f"vertex numbers from 0 to {n - 1}")
    if "children" in graph:
        return rows
    out: list[list[int]] = [[] for _ in range(n)]
    for parent, child in rows:
        out[parent].append(child)
    return out
