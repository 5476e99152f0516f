"""Engine `scan`, backward: tasks in reverse; then the parameter gradients of all of them are batched (Cavs 3.5)."""

from collections.abc import Callable, Collection
from typing import TypeAlias

import jax
import jax.numpy as jnp

from cavs._engines.engine import BackwardLevels, Batch, Cotangents
from cavs._engines.scan.rounds import Loop, Rounds, begins_of, rounds_back
from cavs._engines.scan.task import (
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
from cavs._function.split import Split
from cavs._jaxpr.hold_back import barrier, late_zero
from cavs._jaxpr.jaxprs import Env
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import (
    InputCotangents,
    filled,
    floats,
    mask_rows,
    merged,
    put_rows,
    take_rows,
)
from cavs._stages.entrance import memory_of, together
from cavs._stages.lazy import Direct, apart, lazy_block, lazy_gradients, lazy_gradients_in_blocks
from cavs._stages.operands import Operand, Products, in_parts
from cavs._stages.pulled import get_rows
from cavs._stages.saved import Saved
from cavs._stages.tensors import RowSpan, window

_WindowCarry: TypeAlias = tuple[jax.Array, StateCotangents, Totals, InputCotangents, list[list[jax.Array]]]


def backward_levels(
    batch: Batch,
    saved: Saved,
    cotangents: Cotangents,
    rounds: Callable[..., Rounds] | None = None,
    products: Products | None = None,
    eager: Collection[int] = (),
) -> BackwardLevels:
    """Runs the backward's loop over tasks, then the lazy batch and the transpose of the eager part.

    Args:
        batch: The batch.
        saved: What the forward saved.
        cotangents: The cotangents that are known before the levels run.
        rounds: Runs the rounds, and leaves that are kinds; `rounds_back` if not given. The arguments and results are the same.
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
    g, totals, ct_inputs, ct_edges = cotangents.states, list(cotangents.statics), cotangents.inputs, cotangents.edges
    if options.lazy:
        own = [k.rows.size > 0 and not is_leaf(k, sched) and _in_less(k.part, products) for k in kinds]
        kinds = [with_reuse(kind, own=of) for kind, of in zip(kinds, own, strict=True)]
    else:  # the tasks add to them
        totals = [filled(total, statics) for total, statics in zip(totals, saved.statics, strict=True)]
    run = rounds or rounds_back
    loop = Loop(sched, batch.zeros, kinds, begins_of(sched), options, run, products, eager)
    left, g, cuts, totals = run(loop, jnp.asarray(sched.num_tasks, jnp.int32), g, totals)
    totals = list(totals)
    inside = any(isinstance(x, jax.Array) for x in ct_inputs)  # then the rows of leaves, which may be few, are scattered
    for kind, own in zip(loop.kinds, cuts, strict=True):
        # XLA would gather the operands of the lazy gradients before the levels, and keep them while these run.
        where, tensors = (kind.rows.kids, kind.rows.edge_child), list(own.values())
        (kids, edge_child), tensors = barrier((where, tensors))
        if jax.default_backend() == "cpu":  # where XLA removes barriers; no task is left, but XLA does not know
            kids, edge_child = (x + late_zero([left]) for x in (kids, edge_child))
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


def _in_less(part: Split, products: Products | None) -> bool:
    """Whether the levels store cut cotangents in less memory. In engine `scan`, older versions of XLA would copy tensors."""
    return products is not None or part.forward.together is not None


def _direct(loop: Loop, kind: Kind, cuts: Env, g: StateCotangents) -> Direct | None:
    """Returns how the loop's engine computes lazy gradients from cut cotangents."""
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
