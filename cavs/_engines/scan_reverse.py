"""Engine `scan`, backward: tasks in reverse, in windows after each of which parameter gradients are batched (Cavs 3.5).

Mostly there is ONE window. Several bound the memory of the cut cotangents (`cavs.schedule(window=...)`): their tensors are
as large as a window, and a window's rows begin at its `base`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._engines.engine import BackwardLevels, Batch, Cotangents
from cavs._function.domains import EDGE, ROW, Domains
from cavs._function.equations import needed, reads
from cavs._function.evaluate import evaluate, turned_weights, value_at
from cavs._function.jaxprs import is_var
from cavs._function.split import Split
from cavs._schedule.schedule import Schedule
from cavs._stages.batched import eager_function, pull
from cavs._stages.cotangents import filled, floats, made, mask_rows, merged, put_rows, zero_cotangent
from cavs._stages.entrance import Memory, barred, entrance, fixed, kept_values, memory_of
from cavs._stages.lazy import Mine, Some, lazy_gradients
from cavs._stages.tensors import Rows, View, Zeros, get_rows, window, write


class _Kind(NamedTuple):
    """What the tasks of a kind read, besides cotangents of states."""

    number: int
    part: Split
    rows: Rows
    memory: Memory
    extra_cts: dict[int, Any]  # of what the lazy part reads, with slack
    turned: dict[Any, Any]
    eqns: list[Any]
    wanted: set[Any]
    stored: list[Any]  # cut cotangents that windows hold: without lazy batching only what the eager part waits for
    level: Domains  # of cut cotangents


def reverse(batch: Batch, saved: dict[str, Any], cotangents: Cotangents) -> BackwardLevels:
    """Runs the backward's loop over tasks."""
    plan, sched, _, all_rows, zeros = batch
    g, _, eager_cts, extra_cts, static_cts, ct_inputs = cotangents
    shape, options, one_window = sched.shape, plan.function.optimizations, sched.shape.windows[0] == 1
    found = [_kind(k, *of, saved, options.lazy) for k, of in enumerate(zip(batch.parts, all_rows, extra_cts, strict=True))]
    totals = list(static_cts)
    if not options.lazy:  # tasks add to them
        totals = [filled(total, statics) for total, statics in zip(static_cts, saved["statics"], strict=True)]
    loops = len(found) * len(shape.classes)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(sched.round_end).reshape(-1)])

    def one_round(r: Any, bases: list[tuple[Any, Any]], carry: Any) -> Any:
        for kind in reversed(found):
            for c in reversed(range(len(shape.classes) if shape.inner[kind.number] else 0)):
                begin = begins[r * loops + kind.number * len(shape.classes) + c]

                def step(state: Any, kind: _Kind = kind, c: int = c) -> Any:
                    t = state[0] - 1
                    return t, _task(kind, sched, *shape.classes[c], bases[kind.number], t, state[1], options)

                carry = lax.while_loop(lambda state, begin=begin: state[0] > begin, step, carry)
        return carry

    def rounds(last: Any, count: Any, bases: list[tuple[Any, Any]], tasks: Any, g: Any, totals: Any) -> Any:
        """`count` rounds back from `last`, those of a window; the cut cotangents that they leave come along."""
        cuts = [_empty(kind, sched, zeros) for kind in found]
        carry = tasks, (g, cuts, totals)
        tasks, (g, cuts, totals) = lax.fori_loop(0, count, lambda r, c: one_round(last - 1 - r, bases, c), carry)
        return tasks, g, [dict(zip(kind.stored, own, strict=True)) for kind, own in zip(found, cuts, strict=True)], totals

    tasks = jnp.asarray(sched.num_tasks, jnp.int32)
    if one_window:
        _, g, cuts, totals = rounds(sched.num_rounds, sched.num_rounds, [(0, 0)] * len(found), tasks, g, totals)
        for kind, own in zip(found, cuts, strict=True):
            k, rows = kind.number, kind.rows
            inside = {v: rows.inner_edges(x) if kind.level[v] == EDGE else rows.inner(x) for v, x in own.items()}
            view = View(rows.pad, rows.size, rows.edge_pad, rows.edges)
            now = lazy_gradients(kind.part, rows, view, kind.memory, inside) if options.lazy else {}
            ct_static, ct_pulled = saved["eager"][k](eager_cotangents(kind.part, eager_cts[k], inside))
            ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
            totals[k] = merged(totals[k], merged(now, floats(ct_static)))
        return BackwardLevels(g, totals, ct_inputs)

    # What the pushes ask of the eager part, in one batch; the windows add what the levels ask.
    for kind in found:
        k, rows = kind.number, kind.rows
        ct_static, ct_pulled = saved["eager"][k](eager_cts[k])
        totals[k] = filled(merged(totals[k], floats(ct_static)), kind.memory.statics)
        ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)

    def one_window_back(i: Any, carry: Any) -> Any:
        tasks, g, totals, ct_inputs = carry
        w = sched.num_windows - 1 - i
        first, last = sched.window_round[w], sched.window_round[w + 1]
        start, start_edge = sched.window_start[w], sched.window_edge[w]
        base = jnp.minimum(start, np.subtract(shape.inner, shape.window_rows))
        base_edge = jnp.minimum(start_edge, np.subtract(shape.edges, shape.window_edges))
        bases = [(base[k], base_edge[k]) for k in range(len(found))]
        tasks, g, cuts, totals = rounds(last, last - first, bases, tasks, g, totals)
        totals = list(totals)
        for kind, own in zip(found, cuts, strict=True):
            k = kind.number
            own_rows = _own_rows(kind, sched, w, bases[k])
            now, ct_pulled, vertex = _after_window(kind, sched, saved, own, bases[k], own_rows, options.lazy)
            ct_inputs = put_rows(ct_inputs, ct_pulled, vertex, kind.rows.count - base[k], add=True)
            totals[k] = merged(totals[k], now)
        return tasks, g, totals, ct_inputs

    carry = tasks, g, totals, made(ct_inputs)
    _, g, totals, ct_inputs = lax.fori_loop(0, sched.num_windows, one_window_back, carry)
    return BackwardLevels(g, totals, ct_inputs)


def crossing_cts(part: Split, cuts: dict[Any, Any]) -> dict[Any, Any]:
    """The cotangents of eager values that the levels left among the cut cotangents."""
    return {part.recurrent.cross[c]: cuts[v] for c, v in part.reverse.ct_cross.items() if is_var(v) and v in cuts}


def eager_cotangents(part: Split, eager_cts: list[Any], cuts: dict[Any, Any]) -> list[Any]:
    """The eager part's cotangents: those of the pushes, and what the levels left."""
    cross = crossing_cts(part, cuts)
    return [ct + cross[v] if v in cross else ct for v, ct in zip(part.eager.outs, eager_cts, strict=True)]


def _kind(number: int, part: Split, rows: Rows, extra_cts: list[Any], saved: dict[str, Any], lazy: bool) -> _Kind:
    memory = memory_of(part, rows, saved, number)
    extra = [rows.padded_edges if level == EDGE else rows.padded for level in part.extra_domain]
    results = [*part.reverse.ct_slots.values(), *part.reverse.ct_child.values(), *part.reverse.cuts]
    eqns, available = needed(part.joint.program.eqns, results, part.joint.available)
    return _Kind(
        number=number,
        part=part,
        rows=rows,
        memory=memory,
        extra_cts={i: extra[i](extra_cts[i]) for i in (part.reverse.extra_cts if extra_cts else ())},
        turned=turned_weights(part.joint.program.eqns, part.joint.domain, fixed(part, memory.statics)),
        eqns=eqns,
        wanted=reads(eqns, available),
        stored=[v for v in part.reverse.cuts if lazy or v in part.reverse.ct_cross.values()],
        level=part.reverse.cut_domain,
    )


def _empty(kind: _Kind, sched: Schedule, zeros: Zeros) -> list[Any]:
    """Tensors of a window's cut cotangents."""
    shape = sched.shape
    rows = kind.rows._replace(size=shape.window_rows[kind.number], edges=shape.window_edges[kind.number])
    return [rows.tensor(zeros, v.aval, kind.level[v] == EDGE) for v in kind.stored]


def _task(
    kind: _Kind, sched: Schedule, width: int, edges: int, base: tuple[Any, Any], t: Any, carry: Any, options: Any
) -> tuple[dict[int, Any], list[Any], list[Any]]:
    """One task: cotangents of the children's states, cut cotangents, and without lazy batching those of static values."""
    g, cuts, totals = carry
    part, rows, memory, level = kind.part, kind.rows, kind.memory, kind.part.joint.domain
    shift = sched.task_size[t] - width  # backward windows END at the task's last row
    row, start = sched.task_row[t] + shift, rows.pad + sched.task_start[t] + shift
    edge_start = rows.edge_pad + sched.task_edge[t] + sched.task_edges[t] - edges
    view = View(start, width, edge_start, edges)
    env = fixed(part, memory.statics)
    env |= barred(entrance(part, rows, view, memory.states, memory.crossing, kind.wanted))
    kept = kept_values(part, view, memory, kind.wanted, env)
    for v, x in zip(part.forward.states, memory.states, strict=True):
        if is_var(v) and v in kind.wanted and v not in env and v not in kept:
            kept[v] = window(x, row, width)
    # Read by number, not as a slice: XLA would fuse a slice past the write below, and copy all of g for it.
    own = row + jnp.arange(width)
    kept |= {v: get_rows(g[i], own) for i, v in part.reverse.state_cts.items()}
    for i, v in part.reverse.extra_cts.items():
        edge = part.extra_domain[i] == EDGE
        if i in kind.extra_cts:
            kept[v] = (view.of_edges if edge else view.rows)(kind.extra_cts[i])
        else:
            kept[v] = jnp.zeros((edges if edge else width, *v.aval.shape), v.aval.dtype)
    env |= barred(kept)
    segments = view.segments(rows) if part.gathers_all else None
    evaluate(kind.eqns, env, level, segments, width, kind.turned, fusion=options.fusion)

    # Row 0 of the cotangents belongs to no vertex: what windows hold beyond their task goes there, and is never read.
    mine, mine_edges = jnp.arange(width) >= -shift, jnp.arange(edges) >= edges - sched.task_edges[t]
    kids = view.rows(rows.kids)
    to: dict[int, list[tuple[Any, Any]]] = {}
    for j, v in part.reverse.ct_slots.items():
        slot, i = part.recurrent.slots[j]
        to.setdefault(i, []).append((jnp.where(mine, kids[:, slot], 0), value_at(v, ROW, width, env, level)))
    for j, v in part.reverse.ct_child.items():
        index = jnp.where(mine_edges, view.of_edges(rows.edge_child), 0)
        to.setdefault(part.recurrent.child[j], []).append((index, value_at(v, EDGE, edges, env, level)))
    g = dict(g)
    for i, pairs in to.items():
        index = jnp.concatenate([p[0] for p in pairs])
        g[i] = g[i].at[index].add(jnp.concatenate([p[1] for p in pairs]), mode="promise_in_bounds")

    values = {v: value_at(v, lv, edges if lv == EDGE else width, env, level) for v, lv in kind.level.items()}
    new = [
        write(b, values[v], edge_start - base[1] if kind.level[v] == EDGE else start - base[0])
        for v, b in zip(kind.stored, cuts[kind.number], strict=True)
    ]
    cuts, totals = list(cuts), list(totals)
    cuts[kind.number] = new
    if not options.lazy:
        own_rows = Mine(Some(mine, width - 1), Some(mine_edges, edges - 1))  # the window's last row is the task's
        now = lazy_gradients(part, rows, view, memory, values, own_rows)
        totals[kind.number] = merged(totals[kind.number], now)
    return g, cuts, totals


def _own_rows(kind: _Kind, sched: Schedule, w: Any, base: tuple[Any, Any]) -> Mine:
    """A window's own rows and edges: it may reach back over those of the window before, and on over those of the next."""
    k, rows, shape = kind.number, kind.rows, sched.shape
    last = w + 1 >= sched.num_windows
    ends = rows.count, rows.real_edges.sum()
    own = []
    for starts, end, size, begin in zip(
        (sched.window_start, sched.window_edge), ends, (shape.window_rows[k], shape.window_edges[k]), base, strict=True
    ):
        first = starts[w, k] - begin
        after = jnp.where(last, end, starts[jnp.minimum(w + 1, starts.shape[0] - 1), k]) - begin
        own.append(Some((jnp.arange(size) >= first) & (jnp.arange(size) < after), jnp.clip(first, 0, size - 1)))
    return Mine(*own)


def _after_window(
    kind: _Kind,
    sched: Schedule,
    saved: dict[str, Any],
    cuts: dict[Any, Any],
    base: tuple[Any, Any],
    own_rows: Mine,
    lazy: bool,
) -> tuple[dict[int, Any], list[Any], Any]:
    """The lazy batch of one window of several: cotangents of static values, of pulled rows, and the rows' vertices."""
    k, part, rows, shape = kind.number, kind.part, kind.rows, sched.shape
    size, edges = shape.window_rows[k], shape.window_edges[k]
    mine = {ROW: own_rows.rows.which, EDGE: own_rows.edges.which}
    part_of = {ROW: slice(rows.pad, rows.pad + size), EDGE: slice(rows.edge_pad, rows.edge_pad + edges)}
    inside = {v: mask_rows(x[part_of[kind.level[v]]], mine[kind.level[v]]) for v, x in cuts.items()}
    view = View(rows.pad + base[0], size, rows.edge_pad + base[1], edges)
    totals = lazy_gradients(part, rows, view, kind.memory, inside, own_rows) if lazy else {}
    vertex = window(rows.vertex, base[0], size)
    fn = eager_function(part, window(rows.inner(rows.num_children), base[0], size))
    values, vjp = jax.vjp(fn, saved["statics"][k], pull(part, saved["inputs"], vertex))
    cross = crossing_cts(part, inside)
    cts = [cross.get(v, zero_cotangent(x)) for v, x in zip(part.eager.outs, values, strict=True)]
    ct_static, ct_pulled = vjp(cts)
    return merged(totals, floats(ct_static)), ct_pulled, vertex
