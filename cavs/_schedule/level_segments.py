"""A batch in segments of levels, of which only the frontiers are kept: for deep chains and netlists.

The levels are cut into segments with about equal numbers of vertices. A vertex is in the frontier of a cut if it is below it
and has a parent above it. Each segment is a batch of its own, in which the vertices of the frontier below it are leaves of a
kind of their own, whose states are given. The segments of a batch have one shape, so that one compiled loop runs them all
(`_run.segments`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from cavs._graphs.flat import ranges
from cavs._graphs.graphs import Graphs
from cavs._schedule.batches import StackScheduler
from cavs._schedule.schedule import Integers, Schedule
from cavs._schedule.shape import Shape
from cavs._schedule.shape_choice import Kinds, Options, bucket, covers, few_shapes, kind_names, scheduled_kinds

GIVEN = "(given)"  # the kind of the frontier below a segment


class SegmentShape(NamedTuple):
    """The static part of the segments of a batch."""

    num_frontier: int  # rows of a frontier, padded
    shape: Shape  # of the schedule of each segment


class SegmentArrays(NamedTuple):
    """The integers of K segments, int32."""

    # (K, ...) the vector of each segment's schedule. The first vertices of its one graph are the frontier below it.
    data: Integers
    # (K, Vs) for each vertex of a segment its row in the inputs of the batch; Vp for the frontier, and in padding.
    vertex: Integers
    edge: Integers  # (K, Es) for each edge of a segment its row in the edges of the batch; Ep in padding
    frontier: Integers  # (K, num_frontier) the vertices of the segment that are the frontier above it, then padding
    segment: Integers  # (Vp,) the segment of each vertex of the batch; -1 in padding
    place: Integers  # (Vp,) its vertex number in that segment


@jax.tree_util.register_pytree_node_class
class SegmentedSchedule(Schedule):
    """A schedule whose levels run in segments. Created by [`cavs.schedule`][] with `segments=`.

    Attributes:
        segments: the integers of the segments.
        segment_shape: the static part of the segments.
    """

    def __init__(self, data: Integers, shape: Shape, segments: SegmentArrays, segment_shape: SegmentShape):
        super().__init__(data, shape)
        self.segments, self.segment_shape = segments, segment_shape

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.data, *self.segments), (self.shape, self.segment_shape)

    @classmethod
    def tree_unflatten(cls, shape: Any, children: tuple[Any, ...]) -> "SegmentedSchedule":
        return cls(children[0], shape[0], SegmentArrays(*children[1:]), shape[1])


class _Segment(NamedTuple):
    """A segment as a graph; its first vertices are the frontier below it."""

    own: np.ndarray  # flat rows of the vertices that it computes, ascending
    edges: np.ndarray  # flat rows of their edges
    num_children: np.ndarray  # of `own`
    children: np.ndarray  # vertex numbers within the segment
    frontier: np.ndarray  # the frontier above it, as vertex numbers within the segment


def in_segments(
    batches: list[tuple[Graphs, Schedule]], options: Options, count: int, like: SegmentShape | None = None
) -> list[SegmentedSchedule]:
    """Divides batches into segments of one shape.

    Args:
        batches: graphs with their schedules, which have one shape.
        options: as for the schedules.
        count: the number of segments.
        like: the shape to take if the segments fit it.
    """
    cuts = [_cut(graphs, count) for graphs, _ in batches]
    num_frontier = bucket(max(1, *(len(live) for cut in cuts for _, live in cut)))
    num_frontier = like.num_frontier if like is not None and like.num_frontier >= num_frontier else num_frontier
    segments = [s for (graphs, _), cut in zip(batches, cuts, strict=True) for s in _divided(graphs, cut, num_frontier)]
    graphs = _as_graphs(segments, [graphs for graphs, _ in batches], num_frontier, options.kinds)
    options = options._replace(kinds=True, fields=(), exact=False, shapes=None)
    singles = [np.array([i]) for i in range(len(segments))]
    ((shape,),) = few_shapes([(graphs, options)], [singles], 1)
    shape = like.shape if like is not None and like.num_frontier == num_frontier and covers(like.shape, shape) else shape
    data, out = StackScheduler(graphs, options).stack(singles, shape), []
    for b, (_, sched) in enumerate(batches):
        part = slice(b * count, (b + 1) * count)
        arrays = _arrays(segments[part], data[part], shape, sched.shape, num_frontier)
        out.append(SegmentedSchedule(sched.data, sched.shape, arrays, SegmentShape(num_frontier, shape)))
    return out


def _cut(graphs: Graphs, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each segment the flat rows of its vertices, ascending, and those of the frontier above it."""
    parents, children = graphs._edges
    level = graphs.height.astype(np.int64)
    leaf, last = level == 0, int(level.max(initial=0))
    first_parent = np.full(len(level), max(last, 1))
    np.minimum.at(first_parent, children, level[parents])
    level[leaf] = first_parent[leaf]  # a leaf belongs to its first parent: earlier, its state would only be stored
    width = np.bincount(level, minlength=last + 1)
    middle = width.cumsum() - width / 2
    segment = np.minimum((middle * count / max(len(level), 1)).astype(int), count - 1)[level]
    until = segment.copy()
    np.maximum.at(until, children, segment[parents])
    ends = np.bincount(segment, minlength=count).cumsum()
    cuts, live = [], np.zeros(0, int)
    for k, own in enumerate(np.split(np.argsort(segment, kind="stable"), ends[:-1])):
        live = np.concatenate([live, own])
        live = live[until[live] > k]
        cuts.append((own, live))
    return cuts


def _divided(graphs: Graphs, cut: list[tuple[np.ndarray, np.ndarray]], num_frontier: int) -> Iterator[_Segment]:
    """Yields the segments of a batch, from what `_cut` returns."""
    _, children = graphs._edges
    num_children, begins = np.diff(graphs.child_offsets), graphs.child_offsets[:-1]
    place = np.zeros(graphs.num_vertices, np.int64)  # the vertex number within the segment at hand
    for own, live in cut:
        place[own] = num_frontier + np.arange(len(own))
        edges = ranges(begins[own], num_children[own])
        yield _Segment(own, edges, num_children[own], place[children[edges]], place[live])
        place[live] = np.arange(len(live))


def _as_graphs(segments: list[_Segment], batches: list[Graphs], num_frontier: int, kinds: Kinds) -> Graphs:
    """Returns one graph for each segment."""
    zeros, per_batch = np.zeros(num_frontier, np.int64), len(segments) // len(batches)
    names = max((kind_names(graphs, kinds) for graphs in batches), key=len)
    kind = [scheduled_kinds(graphs, bool(kinds)) for graphs in batches]
    kind = [np.zeros(graphs.num_vertices, np.int64) if k is None else k for graphs, k in zip(batches, kind, strict=True)]
    return Graphs.build(
        [num_frontier + len(s.own) for s in segments],
        np.concatenate([x for s in segments for x in (zeros, s.num_children)]),
        np.concatenate([s.children for s in segments]),
        kind=np.concatenate([x for i, s in enumerate(segments) for x in (zeros + len(names), kind[i // per_batch][s.own])]),
        kind_names=(*names, GIVEN),
    )


def _arrays(segments: list[_Segment], data: np.ndarray, shape: Shape, batch_shape: Shape, num_frontier: int) -> SegmentArrays:
    """Returns the integers of the segments of one batch, whose schedules are `data`, for the batch's shape, `batch_shape`."""
    vertex = np.full((len(segments), shape.vertices), batch_shape.vertices, np.int32)
    edge = np.full((len(segments), shape.all_edges), batch_shape.all_edges, np.int32)
    frontier = np.zeros((len(segments), num_frontier), np.int32)
    segment, place = np.full(batch_shape.vertices, -1, np.int32), np.zeros(batch_shape.vertices, np.int32)
    for k, s in enumerate(segments):
        vertex[k, num_frontier : num_frontier + len(s.own)] = s.own
        edge[k, : len(s.edges)] = s.edges
        frontier[k, : len(s.frontier)] = s.frontier
        segment[s.own], place[s.own] = k, num_frontier + np.arange(len(s.own))
    return SegmentArrays(data, vertex, edge, frontier, segment, place)
