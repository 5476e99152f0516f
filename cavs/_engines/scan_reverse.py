"""Engine `scan`, backward: tasks in reverse, in windows; after each window its parameter gradients are batched (Cavs 3.5).

Mostly there is ONE window. Several windows bound the memory of the cut cotangents (`cavs.schedule(window=...)`): their
tensors have the rows of one window, which begin at the window's base.
"""

from collections.abc import Callable, Collection
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._engines.engine import BackwardLevels, Batch, Cotangents
from cavs._engines.scan_rounds import Bases, Loop, Rounds, begins_of, rounds_back
from cavs._engines.scan_task import (
    Kind,
    StateCotangents,
    Totals,
    crossing_cts,
    eager_cotangents,
    is_leaf,
    kind_of,
    with_reuse,
    with_whole,
)
from cavs._function.domains import EDGE, ROW
from cavs._function.jaxprs import Env, Var, is_var
from cavs._function.split import Split
from cavs._schedule.schedule import Schedule
from cavs._stages.batched import eager_function, pull
from cavs._stages.cotangents import (
    Cotangent,
    InputCotangents,
    filled,
    floats,
    made,
    mask_rows,
    merged,
    put_rows,
    take_rows,
    zero_cotangent,
)
from cavs._stages.entrance import memory_of, together
from cavs._stages.lazy import Direct, Mine, Some, apart, lazy_gradients
from cavs._stages.lazy_blocks import lazy_block, lazy_gradients_in_blocks
from cavs._stages.operands import Operand, Products, in_parts
from cavs._stages.pulled import get_rows
from cavs._stages.saved import Saved
from cavs._stages.tensors import Index, RowSpan, Zeros, window, write

_WindowCarry: TypeAlias = tuple[jax.Array, StateCotangents, Totals, InputCotangents, list[list[jax.Array]]]


def backward_levels(
    batch: Batch,
    saved: Saved,
    cotangents: Cotangents,
    rounds: Callable[..., Rounds] | None = None,
    products: Products | None = None,
    eager: Collection[int] = (),
) -> BackwardLevels:
    """Runs the backward's loop over tasks, window after window.

    Args:
        batch: The batch.
        saved: What the forward saved.
        cotangents: The cotangents that are known before the levels run.
        rounds: Runs the rounds of a window, `rounds_back` if not given; the arguments and results are the same.
        products: Computes lazy gradients from operands where these lie. `None` for XLA.
        eager: The kinds whose transposes of the eager part read cut cotangents where these lie, as `where`.

    Returns:
        The cotangents after the levels and the eager part.
    """
    sched, options = batch.sched, batch.plan.function.optimizations
    of = zip(batch.parts, batch.rows, cotangents.extras, strict=True)
    kinds = [
        kind_of(k, p, rows, cts, memory_of(p, rows, saved, k), options.lazy, parts=_in_less(p, products))
        for k, (p, rows, cts) in enumerate(of)
    ]
    if not options.lazy:  # the tasks add to them
        pairs = zip(cotangents.statics, saved.statics, strict=True)
        cotangents = cotangents._replace(statics=[filled(total, statics) for total, statics in pairs])
    loop = Loop(sched, batch.zeros, kinds, begins_of(sched), options, rounds or rounds_back, products, eager)
    if sched.shape.windows[0] == 1:
        return _whole_back(loop, saved, cotangents, sched.num_rounds)
    count = len(batch.kinds)
    found = _windows_back(loop._replace(kinds=kinds[:count]), saved, cotangents)
    leaves = loop._replace(kinds=kinds[count:])
    return _whole_back(leaves, saved, cotangents._replace(**found._asdict()), 0) if batch.has_leaves else found


def _in_less(part: Split, products: Products | None) -> bool:
    """Whether the levels store cut cotangents in less memory. In engine `scan`, older versions of XLA would copy tensors."""
    return products is not None or part.forward.together is not None


def _whole_back(loop: Loop, saved: Saved, cotangents: Cotangents, count: Index) -> BackwardLevels:
    """Runs `count` rounds as one window, and leaves that are kinds; then the lazy batch and the transpose of the eager part."""
    sched, g, totals, ct_inputs = loop.sched, cotangents.states, list(cotangents.statics), cotangents.inputs
    tasks, ct_edges = jnp.asarray(sched.num_tasks, jnp.int32), cotangents.edges
    if loop.options.lazy:
        own = [k.rows.size > 0 and not is_leaf(k, sched) and _in_less(k.part, loop.products) for k in loop.kinds]
        loop = loop._replace(kinds=[with_reuse(kind, own=of) for kind, of in zip(loop.kinds, own, strict=True)])
    left, g, cuts, totals = loop.rounds(loop, count, count, [(0, 0)] * len(loop.kinds), tasks, g, totals)
    inside = any(isinstance(x, jax.Array) for x in ct_inputs)  # then the rows of leaves, which may be few, are scattered
    for kind, own in zip(loop.kinds, cuts, strict=True):
        # XLA would gather the operands of the lazy gradients before the levels, and keep them while these run.
        where, tensors = (kind.rows.kids, kind.rows.edge_child), list(own.values())
        (kids, edge_child), tensors = lax.optimization_barrier((where, tensors))
        if jax.default_backend() == "cpu":  # where XLA removes barriers; no task is left, but XLA does not know
            kids, edge_child = (x + jnp.minimum(left, 0) for x in (kids, edge_child))
        k, rows, own = kind.number, kind.rows._replace(kids=kids, edge_child=edge_child), dict(zip(own, tensors, strict=True))
        cts = {v: rows.inner_edges(x) if kind.level[v] == EDGE else rows.inner(x) for v, x in own.items()}
        cts = {v: together([x], v.aval.shape) for v, x in cts.items()}
        cts |= {v: _rows_of_states(kind, sched, g[i]) for v, i in kind.own.items()}
        for v in (*kind.reused, *kind.own):  # padding holds what the forward kept, and other rows
            cts[v] = mask_rows(cts[v], rows.real_edges if kind.level[v] == EDGE else rows.real)
        cts = with_whole(kind, cts)
        span = RowSpan(rows.pad, rows.size, rows.edge_pad, rows.edges)
        direct = _direct(loop, kind, own, g)
        if not loop.options.lazy:
            now = {}
        elif direct is None and (block := lazy_block(kind.part, rows.size)):
            now = lazy_gradients_in_blocks(kind.part, rows, kind.memory, cts, block)
        else:
            now = lazy_gradients(kind.part, rows, span, kind.memory, cts, direct=direct)
        where = {"where": crossing_cts(kind.part, direct.cuts)} if direct and k in loop.eager else {}
        of_eager = eager_cotangents(kind.part, cotangents.eager[k], apart(cts, now))
        ct_static, ct_pulled, ct_edge = saved.eager[k](of_eager, **where)
        if inside or not is_leaf(kind, sched):
            ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
            inside = inside or any(isinstance(x, jax.Array) for x in ct_inputs)
        else:
            first = sched.leaf_row[k - len(sched.shape.kinds)]
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), first, rows.count)
        ct_edges = put_rows(ct_edges, ct_edge, rows.edge_row, rows.real_edges.sum())
        totals[k] = merged(totals[k], merged(now, floats(ct_static)))
    return BackwardLevels(g, totals, ct_inputs, ct_edges)


def _windows_back(loop: Loop, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
    """Runs window after window, each followed by its lazy batch and the transpose of its rows of the eager part.

    An eager part that reads edges has sums over all edges of a vertex, so it is transposed at once after the last window.
    """
    sched, shape, totals, ct_inputs = loop.sched, loop.sched.shape, list(cotangents.statics), cotangents.inputs
    tasks = jnp.asarray(sched.num_tasks, jnp.int32)
    # The pushes' cotangents of the eager part, in one batch of all vertices; the windows add those of the levels.
    for kind in loop.kinds:
        k, rows, ct_static = kind.number, kind.rows, []
        if not kind.part.eager.reads_edges:
            ct_static, ct_pulled, _ = saved.eager[k](cotangents.eager[k])
            ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
        totals[k] = filled(merged(totals[k], floats(ct_static)), kind.memory.statics)

    def window_back(i: jax.Array, carry: _WindowCarry) -> _WindowCarry:
        tasks, g, totals, ct_inputs, crossing = carry
        w = sched.num_windows - 1 - i
        first, last = sched.window_round[w], sched.window_round[w + 1]
        start, start_edge = sched.window_start[w], sched.window_edge[w]
        base = jnp.minimum(start, np.subtract(shape.inner, shape.window_rows))
        base_edge = jnp.minimum(start_edge, np.subtract(shape.edges, shape.window_edges))
        bases: Bases = [(base[k], base_edge[k]) for k in range(len(loop.kinds))]
        tasks, g, cuts, totals = loop.rounds(loop, last, last - first, bases, tasks, g, totals)
        totals, crossing = list(totals), list(crossing)
        for kind, own in zip(loop.kinds, cuts, strict=True):
            k = kind.number
            own_rows = _own_rows(kind, sched, w, bases[k])
            inside = _inside(kind, sched, own, own_rows)
            if loop.options.lazy:
                span, direct = _span(kind, sched, bases[k]), _direct(loop, kind, own, g)
                now = lazy_gradients(kind.part, kind.rows, span, kind.memory, inside, own_rows, direct=direct)
                totals[k] = merged(totals[k], now)
            if kind.part.eager.reads_edges:
                crossing[k] = _with_window(kind, crossing[k], inside, bases[k])
            else:
                now, ct_pulled, vertex = _eager_of_window(kind, sched, saved, inside, bases[k])
                ct_inputs = put_rows(ct_inputs, ct_pulled, vertex, kind.rows.count - base[k], add=True)
                totals[k] = merged(totals[k], now)
        return tasks, g, totals, ct_inputs, crossing

    carry = tasks, cotangents.states, totals, made(ct_inputs), [_no_crossing(kind, loop.zeros) for kind in loop.kinds]
    _, g, totals, ct_inputs, crossing = lax.fori_loop(0, sched.num_windows, window_back, carry)
    ct_edges = cotangents.edges
    for kind, own in zip(loop.kinds, crossing, strict=True):
        if kind.part.eager.reads_edges:
            k, rows, cuts = kind.number, kind.rows, dict(zip(_collected(kind), own, strict=True))
            ct_static, ct_pulled, ct_edge = saved.eager[k](eager_cotangents(kind.part, cotangents.eager[k], cuts))
            ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
            ct_edges = put_rows(ct_edges, ct_edge, rows.edge_row, rows.real_edges.sum())
            totals[k] = merged(totals[k], floats(ct_static))
    return BackwardLevels(g, totals, ct_inputs, ct_edges)


def _direct(loop: Loop, kind: Kind, cuts: Env, g: StateCotangents) -> Direct | None:
    """Returns how the loop's engine computes lazy gradients from the cut cotangents of a window."""
    if loop.products is None:
        return None
    start = {EDGE: kind.rows.edge_pad, ROW: kind.rows.pad}
    found = {v: Operand(x, None, start[kind.level[v]]) for v, x in cuts.items()}
    for v, i in kind.own.items():
        index, first = (None, kind.rows.row[0]) if len(loop.sched.shape.kinds) == 1 else (kind.rows.row[:, None], 0)
        found[v] = Operand(g[i], index, first)
    return Direct(loop.products, found | in_parts(kind.cuts.parts, found))


def _rows_of_states(kind: Kind, sched: Schedule, g: jax.Array) -> jax.Array:
    """Returns the rows of a kind's vertices in a tensor of states. If there is one kind, they are contiguous."""
    rows = kind.rows
    return window(g, rows.row[0], rows.size) if len(sched.shape.kinds) == 1 else get_rows(g, rows.row)


def _collected(kind: Kind) -> list[Var]:
    """Returns the cotangents of what crosses to the recurrent part, if the windows collect them, each once."""
    cts = kind.part.reverse.ct_cross.values() if kind.part.eager.reads_edges else ()
    return list(dict.fromkeys(v for v in cts if is_var(v)))


def _no_crossing(kind: Kind, zeros: Zeros) -> list[jax.Array]:
    """Returns zeros for what the windows collect."""
    rows = kind.rows._replace(pad=0, edge_pad=0)
    return [rows.tensor(zeros, v.aval, kind.level[v] == EDGE) for v in _collected(kind)]


def _with_window(kind: Kind, crossing: list[jax.Array], inside: Env, base: tuple[Index, Index]) -> list[jax.Array]:
    """Adds the cotangents of a window to those of all rows of the kind."""
    out = []
    for v, x in zip(_collected(kind), crossing, strict=True):
        at = base[1] if kind.level[v] == EDGE else base[0]
        out.append(write(x, window(x, at, inside[v].shape[0]) + inside[v], at))
    return out


def _own_rows(kind: Kind, sched: Schedule, w: jax.Array, base: tuple[Index, Index]) -> Mine:
    """Returns which rows and edges belong to window w: its tensors also cover some of the windows before and after it."""
    k, rows, shape = kind.number, kind.rows, sched.shape
    last = w + 1 >= sched.num_windows
    ends = rows.count, rows.real_edges.sum()
    own = []
    for starts, end, size, begin in zip(
        (sched.window_start, sched.window_edge), ends, (shape.window_rows[k], shape.window_edges[k]), base, strict=True
    ):
        first = starts[w, k] - begin
        after = jnp.where(last, end, starts[jnp.minimum(w + 1, starts.shape[0] - 1), k]) - begin
        own.append(Some((jnp.arange(size) >= first) & (jnp.arange(size) < after), jnp.clip(first, 0, max(size - 1, 0))))
    return Mine(*own)


def _inside(kind: Kind, sched: Schedule, cuts: Env, own_rows: Mine) -> Env:
    """Returns the cut cotangents of one of several windows without slack, zero in rows that are not the window's."""
    k, rows, shape = kind.number, kind.rows, sched.shape
    size, edges = shape.window_rows[k], shape.window_edges[k]
    mine = {ROW: own_rows.rows.which, EDGE: own_rows.edges.which}
    part_of = {ROW: slice(rows.pad, rows.pad + size), EDGE: slice(rows.edge_pad, rows.edge_pad + edges)}
    return with_whole(kind, {v: mask_rows(x[part_of[kind.level[v]]], mine[kind.level[v]]) for v, x in cuts.items()})


def _span(kind: Kind, sched: Schedule, base: tuple[Index, Index]) -> RowSpan:
    """Returns the rows and edges of one of several windows."""
    k, rows, shape = kind.number, kind.rows, sched.shape
    return RowSpan(rows.pad + base[0], shape.window_rows[k], rows.edge_pad + base[1], shape.window_edges[k])


def _eager_of_window(
    kind: Kind, sched: Schedule, saved: Saved, inside: Env, base: tuple[Index, Index]
) -> tuple[dict[int, jax.Array], list[Cotangent], jax.Array]:
    """Runs the transpose of the eager part for one of several windows.

    Returns:
        The cotangents of static values, those of the pulled rows, and the vertices of these rows.
    """
    k, part, rows, size = kind.number, kind.part, kind.rows, sched.shape.window_rows[kind.number]
    vertex = window(rows.vertex, base[0], size)
    fn = eager_function(part, window(rows.inner(rows.num_children), base[0], size))
    values, vjp = jax.vjp(lambda statics, pulled: fn(statics, pulled, []), saved.statics[k], pull(part, saved.inputs, vertex))
    cross = crossing_cts(part, inside)
    cts = [cross.get(v, zero_cotangent(x)) for v, x in zip(part.eager.outs, values, strict=True)]
    ct_static, ct_pulled = vjp(cts)
    return floats(ct_static), ct_pulled, vertex
