"""Shapes for batches that are not known yet, and the schedule of such a batch in the smallest of them.

A server cannot compile for each batch that it receives. It compiles for a few sizes in advance, a ladder, and pads each batch
to the next one. The number of graphs is padded, too, with graphs that have no vertices.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from cavs._graphs.counted import counted
from cavs._graphs.graphs import SMALL_FAN_IN, Graphs
from cavs._schedule.batches import sorted_batch
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape
from cavs._schedule.shape_choice import Kinds, NoRoom, Options, counts_of, kind_names, shape_for, sums
from cavs._schedule.tasks import Cut

SAMPLES = 256  # batches of each number of graphs that are sampled


def ladder(graphs: Graphs, most_graphs: int, count: int, options: Options) -> tuple[Shape, ...]:
    """Returns at most `count` shapes, ascending, whose sizes grow by a constant factor.

    Any batch of at most `most_graphs` graphs fits the last one if none of them is larger than the largest graph of the data set
    in any respect: leaves, inner vertices and edges of each kind, children of a vertex, levels.

    `graphs`: the data set, not empty. `most_graphs`: the number of graphs of all shapes. `count`: the most shapes.
    """
    names, counts = counts_of(graphs, options.kinds)
    rng, singles = np.random.default_rng(0), graphs._facts.sizes
    sizes = sorted({1, most_graphs, *(1 << k for k in range(most_graphs.bit_length()))})
    batches = [rng.integers(0, len(graphs), n) for n in sizes for _ in range(SAMPLES)]
    sample = sums(counts, batches)
    total = sample[:, :2].sum((1, 2))
    largest = most_graphs * counts.max(1)
    top = int(largest[:2].sum())
    steps = np.geomspace(min(np.quantile(singles, 0.25), top), top, count) if count > 1 else [top]
    maxima = [sample[total <= step].max(0) for step in steps[:-1] if (total <= step).any()]
    shapes = [shape_for(graphs, names, most, most_graphs, options) for most in (*maxima, largest)]
    return tuple(sorted(dict.fromkeys(shapes), key=lambda s: s.vertices))


def schedule_into(graphs: Graphs, shapes: Sequence[Shape]) -> Schedule | None:
    """Schedules a batch in the smallest of a ladder's shapes that has room for it; `None` if none has.

    The schedule has the shape's number of graphs. Those after the graphs of the batch have no vertices; their roots are the
    first graph's.
    """
    adapted = _as_in(graphs, shapes[0])
    if adapted is None:
        return None
    first = shapes[0]
    with sorted_batch(adapted, len(first.kinds), _kinds_of(first), first.fields) as batch:
        for shape in shapes:
            with contextlib.suppress(NoRoom):
                batch.cut(Cut(shape.classes))
                return Schedule(batch.write(shape), shape)
    return None


def _as_in(graphs: Graphs, shape: Shape) -> Graphs | None:
    """Returns the graphs with the arity and the kinds of a ladder's shapes; `None` if theirs differ."""
    if _differences(graphs, shape):
        return None
    kind = graphs.kind if shape.kinds != ("",) else None
    if kind is not None and graphs.kind_names not in (None, shape.kinds):
        kind = np.array([shape.kinds.index(n) if n in shape.kinds else -1 for n in graphs.kind_names], np.int32)[kind]
    if graphs._arity == shape.arity and kind is graphs.kind and graphs.kind_names in (None, shape.kinds):
        return graphs
    adapted = dataclasses.replace(graphs, kind=kind, kind_names=None if kind is None else shape.kinds)
    return adapted._of_data(shape.arity, shape.mixed)


def _kinds_of(shape: Shape) -> Kinds:
    """Returns the option `kinds` of a schedule of this shape."""
    return "mixed" if shape.mixed else shape.kinds != ("",)


def _differences(graphs: Graphs, shape: Shape) -> list[str]:
    """Says what keeps these graphs from any shape of a ladder of which `shape` is one, whatever their sizes."""
    facts, differences = graphs._facts, []
    arities = np.unique(facts.num_children[facts.num_children > 0])
    if shape.arity and not (arities == shape.arity).all():
        arity = int(arities[arities != shape.arity][0])
        differences.append(f"a vertex with {counted(arity, 'child')}; expected {shape.arity} at each vertex that has any")
    most = min(shape.most_children, shape.fan_in) if shape.fan_in <= SMALL_FAN_IN else shape.most_children
    if not shape.arity and (fan_in := int(facts.fan_in.max(initial=0))) > most:
        differences.append(f"a vertex with {counted(fan_in, 'child')}; expected at most {most}")
    if shape.rooted and (facts.roots != 1).any():
        differences.append("a graph with several roots; expected one root per graph")
    if shape.forest and graphs.num_vertices - int(facts.roots.sum()) != graphs.num_edges:
        differences.append("a vertex with two parents; expected trees")
    missing = [field for field in shape.fields if getattr(graphs, field) is None]
    differences += [f"no {field} of the vertices, which the forward reads" for field in missing]
    if shape.kinds == ("",):
        return differences
    if graphs.kind is None:
        return [*differences, f"vertices without kinds; expected the kinds {', '.join(shape.kinds)}"]
    names = kind_names(graphs, True)
    used, inner = ([names[k] for k in np.unique(kind)] for kind in (graphs.kind, graphs.kind[graphs.height > 0]))
    known = shape.kinds if graphs.kind_names else tuple(map(str, range(len(shape.kinds))))
    unknown = [name for name in used if name not in known]
    differences += [f"the kind {name!r}; expected one of {', '.join(shape.kinds)}" for name in unknown[:1]]
    misplaced = [name for name in inner if shape.mixed and name not in [known[k] for k in shape.mixed]]
    mixed = ", ".join(shape.kinds[k] for k in shape.mixed)
    differences += [f"children at a vertex of kind {name!r}; expected them at {mixed} only" for name in misplaced[:1]]
    return differences


def why_not(graphs: Graphs, shapes: Sequence[Shape]) -> str:
    """Returns which numbers of a batch are too large for all shapes of a ladder, as a part of an error message."""
    reasons = _differences(graphs, shapes[0])
    if reasons:
        return _all(reasons)
    largest = shapes[-1]
    adapted = _as_in(graphs, largest)
    assert adapted is not None
    names, counts = counts_of(adapted, _kinds_of(largest))
    needed = [("graphs", len(graphs), largest.graphs)]
    rooms = {"leaves": largest.leaves, "vertices with children": largest.inner, "edges": largest.edges}
    for (noun, room), totals in zip(rooms.items(), counts.sum(1).tolist(), strict=True):
        by_kind = zip(names, totals, room, strict=True)
        needed += [(noun + (f" of kind {name!r}" if name else ""), n, most) for name, n, most in by_kind]
    reasons = [f"{n} {noun}; expected at most {most}" for noun, n, most in needed if n > most]
    if not reasons:
        levels = int(graphs.height.max(initial=0)) + 1
        room = counted(largest.levels, "level") if largest.levels else counted(largest.tasks, "task")
        reasons = [f"{counted(levels, 'level')}; expected fewer, which fit {room}"]
    return _all(reasons)


def _all(reasons: list[str]) -> str:
    """Joins texts of the form "3 leaves; expected at most 2"."""
    return reasons[0] if len(reasons) == 1 else " and ".join(f"{reason.replace('; ', ' (', 1)})" for reason in reasons)
