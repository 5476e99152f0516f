"""Validation of arguments, above all of `Graphs.build` and `graphs[index]`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cavs._graphs.counted import counted
from cavs._graphs.flat import heights, offsets

INT32_MAX = 2**31 - 1


def check_type(argument: str, value: object, kind: Any, expected: str) -> None:
    """Raises `TypeError` if `value` is no `kind`: a type, or a union of types.

    `argument` names it in the message, such as "Log: loader". `expected` may end with what to write.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{argument}: got a {type(value).__name__}; expected {expected}.")


def check_bool(argument: str, value: object) -> None:
    """Raises `TypeError` if `value` is no bool: a text such as "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{argument}: got {value!r:.80}; expected True or False.")


def array_of(name: str, value: Any) -> np.ndarray:
    """Returns `value` as an array.

    Raises `ValueError` if it is lists of different lengths, or a part of it is masked, and `TypeError` if it is no array of
    NumPy, such as keys of `jax.random`.
    """
    argument = name.rpartition(" ")[2]
    if np.ma.is_masked(value):
        raise ValueError(f"{name}: got an array with masked values; expected all values. Write {argument}.filled(np.nan).")
    try:
        return np.asarray(value)
    except TypeError as error:
        got = f"{type(value).__name__} ({str(error).partition(chr(10))[0]})"
        raise TypeError(f"{name}: got a {got:.300}; expected an array of numbers.") from error
    except ValueError as error:
        raise ValueError(
            f"{name}: got lists or arrays of different shapes; expected one array, or rows of one shape. For a list of one "
            f"array per graph write np.concatenate({argument})."
        ) from error


def integers(name: str, value: ArrayLike | Iterable[int], dtype: DTypeLike = np.int64) -> np.ndarray:
    """Returns `value` as a 1-d array of `dtype`.

    Raises `ValueError` if `value` is not a 1-d array of integers, or does not fit `dtype`. The message begins with `name`.
    """
    array = array_of(name, value)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        names = array.dtype.kind in "UO" and array.ndim == 1
        hint = " Number the names: write names, ids = np.unique(array, return_inverse=True)." if names else ""
        raise ValueError(f"{name}: got dtype {array.dtype} and shape {array.shape}; expected a 1-d array of integers.{hint}")
    out = array.astype(dtype)
    if (out != array).any():
        i = int(np.argmax(out != array))
        raise ValueError(f"{name}[{i}]: got {array[i]}; expected an integer that fits {np.dtype(dtype).name}.")
    return out


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raises `ValueError` if `value` is none of some texts."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument}: got {value!r:.200}; expected one of {', '.join(map(repr, choices))}.")


def check_total(name: str, counts: np.ndarray) -> None:
    """Raises `ValueError` if one of some non-negative counts of vertices or edges, or their sum, is 2^31 or more.

    Schedules store rows as int32. The check also protects from overflow: with a sum that overflows, NumPy would write outside
    its arrays.
    """
    # Each count first: if all of them pass, their sum cannot overflow int64.
    large = np.flatnonzero(counts > INT32_MAX)
    if len(large) or counts.sum() > INT32_MAX:
        got = f"{name}[{large[0]}]: got {counts[large[0]]}" if len(large) else f"{name}: got a sum of {counts.sum()}"
        raise ValueError(f"{got}; expected a sum below 2**31. Split the graphs into several `Graphs`.")


def checked_sizes(name: str, value: ArrayLike | Sequence[int]) -> np.ndarray:
    """Returns the number of vertices of each graph as int64[G].

    Raises `ValueError` if a number is below 1, or as `integers` and `check_total` do. The message begins with `name`.
    """
    sizes = integers(name, value)
    if (sizes < 1).any():
        g = int(np.argmax(sizes < 1))
        raise ValueError(f"{name}: got {counted(int(sizes[g]), 'vertex')} for graph {g}; expected at least 1.")
    check_total(name, sizes)
    return sizes


Index: TypeAlias = int | np.integer | slice | ArrayLike


class CycleError(ValueError):
    """A graph has a cycle, through a vertex. Readers name the line of the file instead."""

    graph: int
    vertex: int


def _on_cycle(height: np.ndarray, child_offsets: np.ndarray, children: np.ndarray) -> int:
    """Returns a row on a cycle. Rows with a negative height are on one or above one, so they have a child of that kind."""
    row, seen = int(np.argmax(height < 0)), set[int]()
    while row not in seen:
        seen.add(row)
        row = next(c for c in children[child_offsets[row] : child_offsets[row + 1]].tolist() if height[c] < 0)
    return row


def checked_structure(
    num_vertices: ArrayLike | Sequence[int], num_children: ArrayLike | Sequence[int], children: ArrayLike | Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Validates these arguments of `Graphs.build`. Raises `ValueError` as it does.

    Returns the first fields of `Graphs`: `vertex_offsets`, `child_offsets`, `children` and `height`.
    """
    n = checked_sizes("num_vertices", num_vertices)
    counts = integers("num_children", num_children)
    kids = integers("children", children, np.int32)
    vertex_offsets = offsets(n)
    num_rows = int(vertex_offsets[-1])
    if len(counts) != num_rows or (counts < 0).any():
        raise ValueError(
            f"num_children: got {counted(len(counts), 'value')}, the smallest {counts.min(initial=0)}; expected "
            f"{counted(num_rows, 'value')} >= 0, one per vertex."
        )
    check_total("num_children", counts)
    child_offsets = offsets(counts)
    if len(kids) != child_offsets[-1]:
        raise ValueError(f"children: got {counted(len(kids), 'value')}; expected {child_offsets[-1]}, the sum of num_children.")
    owner = np.repeat(np.arange(num_rows), counts)
    graph = np.repeat(np.arange(len(n)), n)
    bad = np.flatnonzero((kids < 0) | (kids >= n[graph[owner]]))
    if len(bad):
        g, v = vertex_at(vertex_offsets, int(owner[bad[0]]))
        raise ValueError(
            f"children: got child {kids[bad[0]]} of vertex {v} of graph {g}; expected a vertex number within the graph, "
            f"0 to {n[g] - 1}."
        )
    rows = kids + vertex_offsets[graph[owner]]
    height = heights(owner, rows, counts)
    if (height < 0).any():
        graph, vertex = vertex_at(vertex_offsets, _on_cycle(height, child_offsets, rows))
        error = CycleError(
            f"children: got a cycle in graph {graph}, through vertex {vertex}; expected a directed acyclic graph, in which no "
            "vertex depends on itself."
        )
        error.graph, error.vertex = graph, vertex
        raise error
    return vertex_offsets, child_offsets, kids, height


def checked_fields(vertex_offsets: np.ndarray, num_edges: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Validates the optional arguments of `Graphs.build`, and returns all optional fields of `Graphs`.

    Arrays that the caller can change are copied. Raises `ValueError` and `TypeError` as `Graphs.build` does.
    """
    num_vertices, label = int(vertex_offsets[-1]), fields.get("label")
    label = None if label is None else array_of("label", label)
    if label is not None and label.shape[:1] == (len(vertex_offsets) - 1,) != (num_vertices,):
        raise ValueError(
            f"label: got {counted(len(label), 'value')}; expected {num_vertices}, one per vertex. For one per graph write "
            "graph_label=label."
        )

    def ids(name: str, names: tuple[str, ...] | None) -> np.ndarray | None:
        if fields.get(name) is None:
            return None
        array = integers(name, fields[name], np.int32)
        if len(array) != num_vertices:
            raise ValueError(f"{name}: got {counted(len(array), 'value')}; expected {num_vertices}, one per vertex.")
        low, high = 0 if name == "kind" else -1, INT32_MAX if names is None else len(names) - 1
        bad = np.flatnonzero((array < low) | (array > high))
        if len(bad):
            g, v = vertex_at(vertex_offsets, int(bad[0]))
            raise ValueError(f"{name}: got {array[bad[0]]} at vertex {v} of graph {g}; expected {low} to {high}.")
        return array

    names: dict[str, tuple[str, ...] | None] = {}
    for name in ("vocab", "kind_names", "label_names"):
        if isinstance(value := fields.get(name), str):
            raise TypeError(f"{name}: got {value!r}; expected a list of names. Write {name}=[{value!r}].")
        check_type(name, value, Iterable | None, "a list of names")
        check_order(name, value)
        names[name] = None if value is None else tuple(value)
        if not_str := [x for x in names[name] or () if not isinstance(x, str)]:
            got = f"{not_str[0]!r:.40} among the names"
            raise TypeError(f"{name}: got {got}; expected str. Write {name}=[str(x) for x in names].")
    labels = names["label_names"]
    return names | {
        "kind": ids("kind", names["kind_names"]),
        "label": ids("label", labels) if are_ids(label) else _values("label", label, num_vertices, labels),
        "input_id": ids("input_id", names["vocab"]),
        "graph_label": _values("graph_label", fields.get("graph_label"), len(vertex_offsets) - 1),
        "edge_attr": _values("edge_attr", fields.get("edge_attr"), num_edges),
        "x": jax.tree.map(lambda leaf: _values("x", leaf, num_vertices), fields.get("x")),
    }


def check_order(name: str, given: object) -> None:
    """Raises `ValueError` for a dict from names to other numbers than their places, which number the names.

    Raises `TypeError` for a set.
    """
    if isinstance(given, set | frozenset):
        raise TypeError(f"{name}: got a set, whose order is another one in each process; expected a list of names.")
    numbers = [*given.values()] if isinstance(given, Mapping) else []
    if all(isinstance(i, int | np.integer) for i in numbers) and numbers != [*range(len(numbers))]:
        argument = name.rpartition(" ")[2]
        raise ValueError(
            f"{name}: got a dict whose numbers are not 0, 1, 2, ... in its order; expected a list of names, whose places are "
            f"their numbers. Write sorted({argument}, key={argument}.get) if the numbers of the dict are 0, 1, 2, ..."
        )


def are_ids(label: ArrayLike | None) -> bool:
    """Whether labels are one integer per vertex, rather than numbers of another dtype or arrays."""
    return label is None or np.ndim(label) == 1 and (np.size(label) == 0 or np.issubdtype(np.asarray(label).dtype, np.integer))


def _values(name: str, value: ArrayLike | None, count: int, names: tuple[str, ...] | None = None) -> np.ndarray | None:
    """Validates labels that are no ids, values of edges or features: (count, ...) numbers of any dtype, or `None`."""
    if value is None:
        return None
    array, noun = array_of(name, value), {"graph_label": "graph", "edge_attr": "edge"}.get(name, "vertex")
    if array.dtype.kind not in "biufc" and array.dtype.isbuiltin != 2:  # 2: bfloat16 and others that ml_dtypes registers
        hint = " Number the names: write label_names, label = np.unique(array, return_inverse=True)." if name == "label" else ""
        raise ValueError(f"{name}: got dtype {array.dtype}; expected numbers.{hint}")
    if array.shape[:1] != (count,):
        hint = " Write np.asarray(rows) for nested lists." if name == "x" and not array.ndim else ""
        raise ValueError(f"{name}: got shape {array.shape}; expected ({count}, ...), one row per {noun}.{hint}")
    if names is not None:
        raise ValueError(
            f"label_names: got names, but the labels are {array.dtype}{list(array.shape[1:])}; expected indices of names."
        )
    # JAX refuses arrays of another byte order.
    return _unshared(array) if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _unshared(array: np.ndarray) -> np.ndarray:
    """Returns a copy if the caller can change the array. A read-only one, such as a memory map of mode "r", may be large."""
    view: Any = array
    while isinstance(view, np.ndarray) and not view.flags.writeable:
        view = view.base  # a read-only view may be of an array that can change
    return array.copy() if isinstance(view, np.ndarray) else array


def checked_index(index: Index, count: int) -> slice | np.ndarray:
    """Validates an index into `count` graphs.

    Returns a slice of step 1 with 0 <= start <= stop <= count, or graph numbers (K,) int64 from 0 to count - 1. Raises
    `IndexError` if a graph number is out of range, or the index is of another type or shape.
    """
    if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
        i = int(index)
        if not -count <= i < count:
            raise IndexError(f"index: got graph {i}; expected an index into {counted(count, 'graph')}.")
        return slice(i % count, i % count + 1)
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        return slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)
    array = np.asarray(index)
    if array.ndim == 0 and array.dtype.kind in "iu":
        return checked_index(int(array), count)
    if array.dtype == bool:
        if array.shape != (count,):
            raise IndexError(f"index: got a boolean array of shape {array.shape}; expected ({count},), one value per graph.")
        array = np.flatnonzero(array)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise IndexError(
            f"index: got dtype {array.dtype} and shape {array.shape}; expected an int, a slice, or a 1-d array of integers "
            "or booleans."
        )
    low, high = (int(array.min()), int(array.max())) if array.size else (0, -1)  # of Python, which do not wrap around
    if low < -count or high >= count:
        raise IndexError(f"index: got graphs {low} to {high}; expected indices into {counted(count, 'graph')}.")
    array = array.astype(np.int64)
    return np.where(array < 0, array + count, array)


def vertex_at(vertex_offsets: np.ndarray, row: int) -> tuple[int, int]:
    """Returns (graph, vertex within the graph) of a flat row, for error messages."""
    graph = int(np.searchsorted(vertex_offsets, row, side="right")) - 1
    return graph, int(row - vertex_offsets[graph])
