"""Scripts for the persistent engine (VPPS section III-C): which rows each virtual processor runs at each level.

Graphs are dealt into `PARTS` parts of about equal work, in order; a level's rows lie graph after graph, so a part's rows
at a level are contiguous, and a group of CTAs takes some parts. The reverse of the child edges comes along, so that the
backward reads what a vertex's parents left for it: no atomics, the same sums in every run.
"""

import jax
import numpy as np

from cavs._schedule import PARTS, Schedule, layout_of


def for_device(sched: Schedule) -> Schedule:
    """A schedule as the default device wants it: with scripts where JAX runs on a GPU."""
    return with_scripts(sched) if jax.default_backend() == "gpu" else sched


def with_scripts(sched: Schedule) -> Schedule:
    """A concrete schedule with its scripts appended; itself where more than one kind has children, or no vertex has."""
    shape, here = sched.shape, sched.host()
    kinds = [k for k, n in enumerate(here.inner_count.tolist()) if n]
    if shape.levels or len(kinds) != 1:
        return sched
    (kind,) = kinds
    before, edges_before = sum(shape.inner[:kind]), sum(shape.edges[:kind])
    count, num_tasks = int(here.inner_count[kind]), int(here.num_tasks)
    level = np.repeat(here.task_level[:num_tasks], here.task_size[:num_tasks]) - 1
    graph = here.graph[here.inner_vertex[before : before + count]]
    levels = int(level[-1]) + 1

    # Parts: by inner vertices of the graphs before a graph, and half of its own.
    work = np.bincount(graph, minlength=shape.graphs)
    part = np.minimum((np.cumsum(work) - work // 2 - 1).clip(0) * PARTS // count, PARTS - 1)
    padded = max(32, 1 << (levels - 1).bit_length())
    starts = np.zeros(padded * PARTS + 1, np.int64)
    np.cumsum(np.bincount(level * PARTS + part[graph], minlength=padded * PARTS), out=starts[1:])

    num_edges = int(here.num_children[before : before + count].sum())
    child = here.edge_child[edges_before : edges_before + num_edges]
    parents = np.bincount(child, minlength=shape.rows)
    forest = bool(parents.max(initial=0) <= 1)
    shape = shape._replace(levels=padded, forest=forest)
    layout = layout_of(shape)
    data = np.zeros(max(end for _, end, _ in layout.values()), np.int32)
    data[: len(here.data)] = here.data
    out = Schedule(data, shape)
    out.num_levels[...] = levels
    out.part_start[:] = starts
    if forest:
        out.parent_edge[:] = -1
        out.parent_edge[child] = np.arange(num_edges)
    else:
        out.parent_edge[:num_edges] = np.argsort(child, kind="stable")
        out.parent_count[:] = parents
        out.parent_first[:] = np.cumsum(parents) - parents
    return out
