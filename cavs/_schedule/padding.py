"""The padding of a schedule: rows of vertices, and rows that are computed or allocated for them."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cavs._graphs.counted import counted

Schedule: TypeAlias = Any  # with its integers in host memory; its module imports this one


class Filled(NamedTuple):
    """Rows of a stage."""

    vertices: int  # that the stage computes
    rows: int  # that it computes for them

    def __str__(self) -> str:
        share = f" ({100 * (1 - self.vertices / self.rows):.1f} % padding)" if self.rows else ""
        return f"{self.vertices} of {counted(self.rows, 'row')}{share}"


class KindPadding(NamedTuple):
    """The padding of the vertices of one kind."""

    leaves: Filled  # one batch
    batches: Filled  # vertices with children in the eager and in the lazy part: one batch each, of all rows that are allocated
    levels: Filled  # vertices with children in the tasks of the levels


def task_table(sched: Schedule) -> dict[str, np.ndarray]:
    """Returns facts about each task that runs, where the leaves of each kind are one task and come first.

    Returns:
        (tasks,) ints: `level`, `kind`, the number of vertices (`size`), and the number to which they are padded (`width`).
    """
    tasks, rounds, shape = int(sched.num_tasks), int(sched.num_rounds), sched.shape
    kinds, widths = len(shape.kinds), [w for w, _ in shape.classes]
    per_loop = np.diff(np.asarray(sched.round_end)[:rounds].ravel(), prepend=0)
    leaves = np.array(shape.leaves) > 0

    def of_tasks(of_leaves: np.ndarray, of_loops: np.ndarray) -> np.ndarray:
        return np.concatenate([of_leaves, np.repeat(np.tile(of_loops, rounds), per_loop).astype(int)])

    return {
        "level": np.concatenate([np.zeros(leaves.sum(), int), np.asarray(sched.task_level)[:tasks]]),
        "kind": of_tasks(np.flatnonzero(leaves), np.repeat(np.arange(kinds), len(widths))),
        "size": np.concatenate([np.asarray(sched.leaf_count)[leaves], np.asarray(sched.task_size)[:tasks]]),
        "width": of_tasks(np.array(shape.leaves)[leaves], np.tile(widths, kinds)),
    }


def padding_of(sched: Schedule) -> list[KindPadding]:
    """Returns the padding of each kind."""
    table, shape, found = task_table(sched), sched.shape, []
    for kind, (leaves, inner) in enumerate(zip(sched.leaf_count.tolist(), sched.inner_count.tolist(), strict=True)):
        rows = int(table["width"][(table["kind"] == kind) & (table["level"] > 0)].sum())
        found.append(KindPadding(Filled(leaves, shape.leaves[kind]), Filled(inner, shape.inner[kind]), Filled(inner, rows)))
    return found


def in_total(found: list[KindPadding]) -> KindPadding:
    """Returns the padding of all kinds together."""
    return KindPadding(*(Filled(*map(sum, zip(*stage, strict=True))) for stage in zip(*found, strict=True)))


def explain_padding(sched: Schedule) -> str:
    """Returns the padding of each kind and level as lines of text."""
    table, found, lines = task_table(sched), padding_of(sched), []
    for kind, (name, one) in enumerate(zip(sched.shape.kinds, found, strict=True)):
        lines += [f"Kind {name!r}:"] * bool(name)
        lines.append(f"leaves, one batch: {one.leaves}")
        lines.append(f"vertices with children, one batch in each of the eager and the lazy part: {one.batches}")
        lines.append(f"vertices with children, in tasks: {one.levels}")
        for level in np.unique(table["level"][(table["kind"] == kind) & (table["level"] > 0)]).tolist():
            mine = (table["kind"] == kind) & (table["level"] == level)
            widths = table["width"][mine].tolist()
            tasks = " + ".join(f"{widths.count(w)} x {w}" if widths.count(w) > 1 else f"{w}" for w in dict.fromkeys(widths))
            lines.append(f"  level {level}: {Filled(int(table['size'][mine].sum()), sum(widths))}, tasks {tasks}")
    return "\n".join(lines)
