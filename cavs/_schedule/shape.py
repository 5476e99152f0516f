"""The static `Shape` of a schedule, and where each integer array lies in the schedule's vector."""

import functools
import math
from typing import NamedTuple, TypeAlias

from cavs._schedule.memory import ALIGNED
from cavs.kernels import PARTS as PARTS

Slot: TypeAlias = tuple[int, int, tuple[int, ...]]  # begin and end in the vector, shape of the array

FIELDS = ("input_id", "label", "kind")  # fields of `Graphs` that a schedule can include
# Computed instead of stored if all inner vertices have the same number of children.
OF_ARITY = ("first_edge", "num_children", "edge_owner", "task_edge", "task_edges")


class Shape(NamedTuple):
    """The static part of a schedule. Schedules of equal shape share compiled code."""

    vertices: int  # rows of inputs and pushes, padded
    leaves: tuple[int, ...]  # leaf rows of each kind, padded
    inner: tuple[int, ...]  # inner rows of each kind, padded
    edges: tuple[int, ...]  # edges below the inner rows of each kind, padded
    tasks: int  # number of tasks, padded
    graphs: int  # number of graphs; exact, unless `Exported.serve` padded it with graphs that have no vertices
    classes: tuple[tuple[int, int], ...]  # (vertices, edges) to which tasks are padded, widest first
    kinds: tuple[str, ...]  # names of the kinds; `("",)` if there is only one
    rooted: bool  # whether every graph has exactly one root
    fan_in: int  # the largest number of children; 8 if it is more than 4
    arity: int  # number of children of every inner vertex of the data set, at most 4; 0 if it varies
    fields: tuple[str, ...] = ()  # fields of the graphs that the schedule includes
    levels: int = 0  # levels of inner vertices in the scripts of engine `persistent`, padded; 0 without scripts
    forest: bool = True  # whether no vertex has two parents
    mixed: tuple[int, ...] = ()  # the kinds of vertices with children, if tasks mix them; they all count as the first kind then

    @property
    def pad(self) -> int:
        """Rows before the vertices of every dynamic tensor, which are zeros, and after them: the width of the widest task."""
        return max(w for w, _ in self.classes)

    @property
    def most_children(self) -> int:
        """An upper bound on the number of children of a vertex: the room for edges in the narrowest task."""
        per_vertex = {edges // width for width, edges in self.classes}
        return min(per_vertex) if len(per_vertex) == 1 else self.classes[-1][1]

    @property
    def all_edges(self) -> int:
        """Edges of all kinds, padded: the rows of padded edges."""
        return sum(self.edges)

    @property
    def rows(self) -> int:
        """Rows of the dynamic tensors of scattered states."""
        return 2 * self.pad + sum(self.leaves) + sum(self.inner)


@functools.lru_cache(maxsize=256)
def slots_of(shape: Shape) -> dict[str, Slot]:
    """Maps the name of each integer array to its slot in the vector of a schedule of this shape."""
    kinds, inner, edges = len(shape.kinds), sum(shape.inner), sum(shape.edges)
    fields = {
        "num_vertices": (),
        "num_tasks": (),
        "num_rounds": (),
        "leaf_count": (kinds,),
        "inner_count": (kinds,),
        "leaf_row": (kinds,),
        "leaf_vertex": (sum(shape.leaves),),
        "inner_vertex": (inner,),
        "row": (shape.vertices,),
        "graph_end": (shape.graphs,),
        "edge_child": (edges,),
        "first_edge": (inner,),
        "num_children": (inner,),
        "edge_owner": (edges,),
        "task_row": (shape.tasks,),
        "task_start": (shape.tasks,),
        "task_size": (shape.tasks,),
        "task_edge": (shape.tasks,),
        "task_edges": (shape.tasks,),
        "task_level": (shape.tasks,),
        "round_end": (shape.tasks, kinds * len(shape.classes)),
        "roots": (shape.graphs,),
        **dict.fromkeys(shape.fields, (shape.vertices,)),
    }
    if shape.arity:
        fields = {name: dims for name, dims in fields.items() if name not in OF_ARITY}
    if shape.levels:
        fields |= {"num_levels": (), "part_start": (shape.levels * PARTS + 1,), "parent_edge": (shape.rows,)}
        if not shape.forest:
            fields |= {"parent_edge": (edges,), "parent_first": (shape.rows,), "parent_count": (shape.rows,)}
    slots, offset = {}, 0
    for name, dims in fields.items():
        begin, offset = offset, offset + math.prod(dims)
        slots[name] = (begin, offset, dims)
    return slots


def length_of(shape: Shape) -> int:
    """Returns the number of integers of the vector, with padding."""
    used = max(end for _, end, _ in slots_of(shape).values())
    return -(-used // ALIGNED) * ALIGNED
