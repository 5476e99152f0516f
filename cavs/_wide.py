"""Wide levels of engine `persistent`: one large product each, before the launch in the forward and after it in the backward.

A launch reads weights once, and each vertex's rows as often as a group has CTAs. Where a level has many rows that is more than
a product costs that cuts rows and columns alike (see `_chip.wide_levels`). Heights are narrower the higher they are, so these
are the lowest levels, and the launch runs the rest. The tensors are the same; XLA updates them in place.

A level's window is as long as `Shape.wide` has it and begins at the level's first row, in both directions. In the forward what
it writes beyond its level is overwritten by the levels that come after; in the backward it computes these rows again, from
what was read there the first time, but where a vertex may have edges beyond the window: then it leaves them as they are.
"""

from typing import Any

import jax.numpy as jnp

from cavs._cotangents import mask_rows
from cavs._entrance import Memory, crossing, entrance, fixed, kept_values, slots_together
from cavs._rows import EDGE, ROW, evaluate, is_var, needed, reads, value_at
from cavs._schedule import PARTS, Schedule
from cavs._split import Split
from cavs._tensors import Rows, View, window, write


def first_of(sched: Schedule, rows: Rows, level: int) -> tuple[Any, Any]:
    """First inner row and first edge of a level, counted from 0, of the one kind that has children."""
    if level == 0:
        return 0, 0
    start = sched.part_start[level * PARTS]
    return start, jnp.sum(rows.inner_edges(rows.edge_owner) < start, dtype=jnp.int32)


def _view(sched: Schedule, rows: Rows, level: int) -> View:
    start, edge = first_of(sched, rows, level)
    size, edges = sched.shape.wide[level]
    return View(rows.pad + start, size, rows.edge_pad + edge, edges)


def _before(rows: Rows, view: View, end: Any) -> dict[int, Any]:
    """Which rows of a view, and which edges by their owner, lie before inner row `end`."""
    row = view.start - rows.pad + jnp.arange(view.size)
    return {ROW: row < end, EDGE: view.of_edges(rows.edge_owner) < end}


def forward(
    part: Split, sched: Schedule, rows: Rows, levels: int, statics: list[Any], eager: list[Any], states: list[Any], keep: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The lowest `levels`: the states, and tensors as `_persistent.launch` makes them of what is kept and what the lazy part
    reads."""
    joint, level = part.joint, part.joint_level
    stored = {f"extra{n}": (v, EDGE if lv == EDGE else ROW) for n, (v, lv) in enumerate(zip(part.j_extra, part.extra_level))}
    stored |= {f"kept{n}": (v, EDGE if level.get(v) == EDGE else ROW) for n, v in enumerate(keep)}
    targets = [*part.j_states, *(v for v, _ in stored.values())]
    side_by_side = [e.outvars[0] for e in joint.eqns if e.primitive.name in ("concatenate", "stack")]
    rows_crossing, tensors = crossing(part, rows, eager), {}
    for n in range(levels):
        view = _view(sched, rows, n)
        given = slots_together(part, rows, view, states, side_by_side)
        eqns, _ = needed(joint.eqns, targets, set(given))
        env = fixed(part, statics) | given | entrance(part, rows, view, states, rows_crossing, reads(eqns, targets))
        segments = view.segments(rows) if part.gathers_all else None
        evaluate(eqns, env, level, segments, view.size)
        own = [value_at(v, ROW, view.size, env, level) for v in part.j_states]
        states = [write(x, value, sched.task_row[0] + view.start - rows.pad) for x, value in zip(states, own, strict=True)]
        real = _before(rows, view, rows.count)
        for name, (v, lv) in stored.items():
            size, total, pad, start = _extent(rows, view, lv)
            value = mask_rows(value_at(v, lv, size, env, level), real[lv])
            base = pad if name.startswith("kept") else 0
            if n:
                tensors[name] = write(tensors[name], value, base + start)
            else:  # filled and written at once
                after = total + base - size
                tensors[name] = jnp.pad(value, ((base, after), *((0, 0),) * (value.ndim - 1)))
    return states, tensors


def _extent(rows: Rows, view: View, level: int) -> tuple[int, int, int, Any]:
    """Of rows or edges: how many a view has, how many there are, how much slack, and where the view begins."""
    if level == EDGE:
        return view.edges, rows.edges, rows.edge_pad, view.edge_start - rows.edge_pad
    return view.size, rows.size, rows.pad, view.start - rows.pad


def reverse(
    part: Split,
    sched: Schedule,
    rows: Rows,
    levels: int,
    memory: Memory,
    tensors: dict[str, Any],
    operands: list[Any],
    cotangents: Any,
    extra_cts: dict[int, Any],
) -> dict[str, Any]:
    """The lowest `levels`, from what the launch left in `tensors` for those above: the tensors, with their rows.

    `cotangents(tensors, start, n)` are those of states, by number, of n vertices from row `start` of the dynamic tensors;
    `extra_cts` those of what the lazy part reads.
    """
    level, out = part.joint_level, dict(tensors)
    arity = max((k for k, _ in part.slots), default=-1) + 1
    results = [*part.ct_slots.values(), *part.ct_child.values(), *part.cuts, *operands]
    eqns, available = needed(part.joint.eqns, results, part.available)
    wanted = reads(eqns, [*available, *results])
    for n in reversed(range(levels)):
        view = _view(sched, rows, n)
        first = sched.task_row[0] + view.start - rows.pad
        g = cotangents(out, first, view.size)
        env = fixed(part, memory.statics) | entrance(part, rows, view, memory.states, memory.crossing, wanted)
        env |= kept_values(part, view, memory, wanted, env)
        for v, x in zip(part.j_states, memory.states, strict=True):
            if is_var(v) and v in wanted and v not in env:
                env[v] = window(x, first, view.size)
        env |= {v: g[i] for i, v in part.j_state_cts.items()}
        for i, v in part.j_extra_cts.items():
            size, _, _, start = _extent(rows, view, part.extra_level[i])
            env[v] = window(extra_cts[i], start, size)
        evaluate(eqns, env, level, view.segments(rows) if part.gathers_all else None, view.size)
        mine = _before(rows, view, sched.part_start[(n + 1) * PARTS] if part.gathers_all else rows.count)

        def put(name: str, v: Any, lv: int, offset: int = 0, view: View = view, env: Any = env, mine: Any = mine) -> None:
            size, _, _, start = _extent(rows, view, lv)
            value = value_at(v, lv, size, env, level)
            others = window(out[name], offset + start, size) if part.gathers_all else jnp.zeros((), value.dtype)
            out[name] = write(out[name], jnp.where(mine[lv].reshape(-1, *(1,) * (value.ndim - 1)), value, others), offset + start)

        for i in {part.slots[j][1] for j in part.ct_slots}:
            of_slot = {part.slots[j][0]: v for j, v in part.ct_slots.items() if part.slots[j][1] == i}
            for slot in range(arity):
                if slot in of_slot:
                    put(f"up{i}", of_slot[slot], ROW, slot * rows.size)
                else:
                    zero = jnp.zeros((view.size, *memory.states[i].shape[1:]), memory.states[i].dtype)
                    out[f"up{i}"] = write(out[f"up{i}"], zero, slot * rows.size + view.start - rows.pad)
        for j, v in part.ct_child.items():
            put(f"edge_up{part.child[j]}", v, EDGE)
        for k, v in enumerate(part.cuts):
            put(f"cut{k}", v, part.cut_level[v])
        for k, v in enumerate(operands):
            put(f"operand{k}", v, EDGE if level.get(v) == EDGE else ROW)
    return out
