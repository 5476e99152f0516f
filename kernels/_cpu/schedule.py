"""The library of the scheduler, `scheduler.so`: its structures as ctypes declares them, and its functions."""

import ctypes
import functools
from pathlib import Path

from cavs.kernels._cpu.build import SCHEDULER, SCHEDULER_SOURCE, version

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
# What `Status` in schedule.cpp says went wrong.
NO_ROOM, BAD_INDEX, BAD_GRAPHS, TOO_LARGE = -1, -2, -3, -4
# The numbers of `Layout` in schedule.cpp: sizes, then where each array of a schedule begins. The sizes of each kind follow.
LAYOUT = (
    *("length", "pad", "kinds", "classes", "vertices", "graphs", "tasks", "levels", "parts", "rows"),
    *("rooted", "forest", "arity"),
    *("most_children", "num_vertices", "num_tasks", "num_rounds", "leaf_count", "inner_count", "leaf_row"),
    *("leaf_vertex", "inner_vertex", "row", "graph_end", "edge_child", "first_edge", "num_children", "edge_owner", "task_row"),
    *("task_start", "task_size", "task_edge", "task_edges", "task_level", "round_end"),
    *("roots", "field 0", "field 1", "field 2", "num_levels", "part_start", "parent_edge", "parent_first"),
    "parent_count",
)


class GraphArrays(ctypes.Structure):
    """`Graphs` in schedule.cpp."""

    _fields_ = [
        *((name, _INT) for name in ("graphs", "vertices", "edges", "kinds")),
        *((name, _POINTER) for name in ("vertex_offsets", "child_offsets", "children", "height", "kind")),
        ("fields", _POINTER * 3),
    ]


class CutTables(ctypes.Structure):
    """`Cut` in schedule.cpp."""

    _fields_ = [
        *((name, _INT) for name in ("classes", "limited", "special", "large")),
        *((name, _POINTER) for name in ("widths", "pieces", "limits", "cost")),
    ]


_FUNCTIONS = {
    "cavs_read": [ctypes.POINTER(GraphArrays), ctypes.POINTER(_POINTER)],
    "cavs_forget": [_POINTER],
    "cavs_open": [_POINTER, _POINTER, _INT, _POINTER, ctypes.POINTER(_POINTER)],
    "cavs_cut": [_POINTER, ctypes.POINTER(CutTables), _POINTER],
    "cavs_write": [_POINTER, _POINTER, _POINTER],
    "cavs_close": [_POINTER],
    "cavs_schedule": [*(_POINTER, _POINTER, _POINTER, _INT, ctypes.POINTER(CutTables), _POINTER, _POINTER, _INT, _POINTER)],
}


@functools.cache
def schedule_library() -> ctypes.CDLL | None:
    """Loads the library. Returns `None` if it was not compiled from these sources: run `python -m cavs.kernels._cpu`."""
    try:
        library = ctypes.CDLL(str(Path(__file__).parent / SCHEDULER))
    except OSError:
        return None
    library.cavs_version.restype = ctypes.c_char_p
    if library.cavs_version().decode() != version(SCHEDULER_SOURCE):
        return None
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None if name in ("cavs_forget", "cavs_close") else _INT
    return library
