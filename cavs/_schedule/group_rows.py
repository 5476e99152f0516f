"""Scripts for the persistent engine (VPPS, section III-B): which rows each virtual processor runs at each level.

Graphs are divided, in order, into `PARTS` parts of about equal work. The rows of a level are sorted by graph, so the rows of a
part at a level are contiguous. A group of thread blocks runs one or more parts. The scripts also contain the edges from
children to parents: in the backward pass, a vertex reads the cotangents that its parents wrote, without atomics, and the sums
are the same in every run.
"""

from typing import NamedTuple

import numpy as np

from cavs._graphs.facts import Widths
from cavs._graphs.segments import LONG_RUNS
from cavs._schedule.shape import PARTS, Shape

FEWEST_LEVELS = 32  # levels are padded to a power of two, at least to this one


class Scripted(NamedTuple):
    """Which of K batches have scripts (those in which exactly one kind has children), and the sizes of the scripts."""

    batch: np.ndarray  # (K,) bool: has scripts
    levels: np.ndarray  # (K,) levels of inner vertices, 0 without scripts
    forest: np.ndarray  # (K,) bool: no vertex has two parents
    widths: Widths  # of the graphs of all batches


def scripted(counts: np.ndarray, inner_count: np.ndarray, forest: np.ndarray, widths: Widths) -> Scripted:
    """Decides which of K batches have scripts.

    Args:
        counts: (K, levels, kinds) number of vertices.
        inner_count: (K, kinds) number of inner vertices.
        forest: (K,) bool, whether no vertex has two parents.
        widths: of the graphs of all batches.
    """
    batch = (inner_count > 0).sum(1) == 1
    deep = counts[:, 1:].any(2)
    levels = np.where(batch, deep.sum(1), 0)  # no level below a vertex is empty
    return Scripted(batch, levels, forest, widths)


def with_levels(shapes: list[Shape], which: list[int], found: Scripted) -> tuple[list[Shape], list[int]]:
    """Adds the levels of the scripts to shapes. Returns the shapes and the index of each batch's shape."""
    index: dict[tuple[int, int], int] = {}
    out = []
    for i, levels in zip(which, found.levels.tolist(), strict=True):
        n = levels and max(FEWEST_LEVELS, 1 << (levels - 1).bit_length())
        out.append(index.setdefault((i, n), len(index)))
    return [shapes[i]._replace(levels=n) for i, n in index], out


def part_starts(found: Scripted, padded: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """`part_start` of all batches with scripts, concatenated. `padded` (K,) levels, `batches` (K,) number of graphs."""
    levels, begin, count = found.widths
    # The part of a graph follows from the number of inner vertices before it, plus half of its own.
    work = (np.add.reduceat(count, begin) - count[begin]) * found.batch.repeat(batches)
    upto = np.zeros(len(work) + 1, np.int64)
    work.cumsum(out=upto[1:])
    before = upto[batches.cumsum() - batches]
    num_inner = np.maximum(upto[batches.cumsum()] - before, 1)
    done = np.maximum(upto[1:] - before.repeat(batches) - work // 2 - 1, 0)
    part = np.minimum(done * PARTS // num_inner.repeat(batches), PARTS - 1)
    size = (padded * PARTS + 1) * found.batch
    slot = (size.cumsum() - size).repeat(batches)
    # The parts of level 1 are counted from slot 1 on. Leaves are counted in slot 0 of their batch, which is then cleared.
    key = np.arange(0, PARTS * len(count), PARTS)
    key += (slot + part + 1 - PARTS - PARTS * begin).repeat(levels)
    key[begin] = slot
    if not found.batch.all():
        mine = found.batch.repeat(batches).repeat(levels)
        key, count = key[mine], count[mine]
    out = np.bincount(key, count, minlength=int(size.sum())).astype(np.int64)
    out[(size.cumsum() - size)[found.batch]] = 0
    out = out.cumsum()
    return out - before.repeat(size)


def parents_of_forests(rows: np.ndarray, num_edges: np.ndarray, child: np.ndarray) -> np.ndarray:
    """`parent_edge` of batches of forests, concatenated. `rows`, `num_edges` (K,); `child` (E,) rows of all batches."""
    out = np.full(int(rows.sum()), -1, np.int32)
    if len(child) < LONG_RUNS * len(rows):
        first = num_edges.cumsum() - num_edges
        out[child + (rows.cumsum() - rows).repeat(num_edges)] = np.arange(len(child)) - first.repeat(num_edges)
        return out
    number, row, edge = np.arange(num_edges.max(), dtype=np.int32), 0, 0
    for n, edges in zip(rows.tolist(), num_edges.tolist(), strict=True):
        out[row : row + n][child[edge : edge + edges]] = number[:edges]
        row, edge = row + n, edge + edges
    return out


def parents_of_dags(rows: np.ndarray, num_edges: np.ndarray, child: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`parent_edge`, `parent_first` and `parent_count` of batches with several parents per vertex, with the same arguments."""
    key = child + (rows.cumsum() - rows).repeat(num_edges)
    first = num_edges.cumsum() - num_edges
    count = np.bincount(key, minlength=int(rows.sum()))
    return (
        np.argsort(key, kind="stable") - first.repeat(num_edges),
        count.cumsum() - count - first.repeat(rows),
        count,
    )
