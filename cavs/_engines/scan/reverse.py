"""Engine `scan`, backward: tasks in reverse; then the parameter gradients of all of them are batched (Cavs 3.5).

The rounds run in reverse. A round has a loop over tasks for each kind and each size of tasks.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.engine import BackwardLevels, Batch, Cotangents, Gradients
from cavs._engines.scan.task import (
    Cuts,
    Kind,
    StateCotangents,
    Totals,
    crossing_cts,
    eager_cotangents,
    empty_cuts,
    is_leaf,
    kind_of,
    run_task,
    with_reuse,
    with_whole,
)
from cavs._function.children import wide
from cavs._function.domains import EDGE, ROW
from cavs._function.split import Split
from cavs._function.vertex import Optimizations
from cavs._jaxpr.hold_back import barrier, late_zero
from cavs._jaxpr.jaxprs import Env, Var
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import filled, floats, mask_rows, merged, put_rows, take_rows
from cavs._stages.entrance import memory_of, together
from cavs._stages.lazy import Direct, lazy_block, lazy_gradients, lazy_gradients_in_blocks, not_joined
from cavs._stages.operands import Operand, Products, in_parts
from cavs._stages.saved import Saved
from cavs._stages.tensors import RowSpan, Zeros, get_rows, window

# The tasks that are left, the cotangents of states, for each kind the cut cotangents, and the cotangents of static values.
Rounds: TypeAlias = tuple[jax.Array, StateCotangents, list[Env], Totals]
_RoundCarry: TypeAlias = tuple[jax.Array, tuple[StateCotangents, Cuts, Totals]]  # begins with the number of tasks that are left


class Loop(NamedTuple):
    """What every round of the backward reads."""

    sched: Schedule
    zeros: Zeros
    kinds: list[Kind]
    options: Optimizations


def backward_levels(
    batch: Batch,
    saved: Saved,
    cotangents: Cotangents,
    rounds: Callable[..., Rounds] | None = None,
    products: Products | None = None,
    eager: Collection[int] = (),
) -> BackwardLevels:
    """Runs the backward's loop over tasks, then the lazy batch and the transpose of the eager part.

    `rounds`: runs the rounds, and leaves that are kinds, in place of `rounds_back`. `products`: computes lazy gradients from
    operands where these lie; `None` for XLA. `eager`: the kinds whose transposes of the eager part read cut cotangents where
    these lie, as `where`.
    """
    sched, options = batch.sched, batch.plan.function.optimizations
    per_kind = zip(batch.parts, batch.rows, cotangents.extras, strict=True)
    kinds = [
        kind_of(k, p, rows, cts, memory_of(p, rows, saved, k), in_parts=options.lazy and _in_less(p, products))
        for k, (p, rows, cts) in enumerate(per_kind)
    ]
    g, totals, ct_inputs, ct_edges = cotangents.states, list(cotangents.statics), cotangents.inputs, cotangents.edges
    if options.lazy:
        overwrite = [k.rows.size > 0 and not is_leaf(k, sched) and _in_less(k.part, products) for k in kinds]
        kinds = [with_reuse(kind, own=own) for kind, own in zip(kinds, overwrite, strict=True)]
    else:  # the tasks add to gradients, in 32 bits at least, and only that for which the eager part waits is stored
        kinds = [k._replace(stored=[v for v in k.stored if v in k.part.reverse.ct_cross.values()]) for k in kinds]
        filled_totals = (filled(total, statics) for total, statics in zip(totals, saved.statics, strict=True))
        totals = [{i: wide(x) for i, x in total.items()} for total in filled_totals]
    loop = Loop(sched, batch.zeros, kinds, options)
    tasks_left, g, cuts, totals = (rounds or rounds_back)(loop, jnp.asarray(sched.num_tasks, jnp.int32), g, totals)
    totals = [{i: x.astype(like[i].dtype) for i, x in total.items()} for total, like in zip(totals, saved.statics, strict=True)]
    scatter = any(isinstance(x, jax.Array) for x in ct_inputs)  # then the rows of leaves, which may be few, are scattered
    for kind, kind_cuts in zip(loop.kinds, cuts, strict=True):
        # XLA would gather the operands of the lazy gradients before the levels, and keep them while these run.
        indices, tensors = (kind.rows.kids, kind.rows.edge_child), list(kind_cuts.values())
        (kids, edge_child), tensors = barrier((indices, tensors))
        if batch.job.target.is_cpu:  # where XLA removes barriers; no task is left, but XLA does not know
            kids, edge_child = (x + late_zero([tasks_left]) for x in (kids, edge_child))
        k, rows = kind.number, kind.rows._replace(kids=kids, edge_child=edge_child)
        kind_cuts = dict(zip(kind_cuts, tensors, strict=True))
        cts = {v: rows.inner_edges(x) if kind.domains[v] == EDGE else rows.inner(x) for v, x in kind_cuts.items()}
        cts = {v: together([x], v.aval.shape) for v, x in cts.items()}
        cts |= {v: _rows_of_states(kind, sched, g[i]).astype(v.aval.dtype) for v, i in kind.own.items()}
        for v in (*kind.reused, *kind.own):  # padding holds what the forward kept, and other rows
            cts[v] = mask_rows(cts[v], rows.real_edges if kind.domains[v] == EDGE else rows.real)
        cts = with_whole(kind, cts)
        span = RowSpan(rows.pad, rows.size, rows.edge_pad, rows.edges)
        direct = None if products is None else Direct(products, _operands(kind, sched, kind_cuts, g))
        if not options.lazy:
            grads = {}
        elif direct is None and (block := lazy_block(kind.part, rows.size)):
            grads = lazy_gradients_in_blocks(kind.part, rows, kind.memory, cts, block)
        else:
            grads = lazy_gradients(kind.part, rows, span, kind.memory, cts, direct=direct)
        options_of_eager = {"where": crossing_cts(kind.part, direct.cuts)} if direct and k in eager else {}
        of_eager = eager_cotangents(kind.part, cotangents.eager[k], not_joined(cts, grads))
        ct_static, ct_pulled, ct_edge = saved.eager[k](of_eager, **options_of_eager)
        if scatter or not is_leaf(kind, sched):
            ct_inputs = put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
            scatter = scatter or any(isinstance(x, jax.Array) for x in ct_inputs)
        else:
            first = sched.leaf_row[k - len(sched.shape.kinds)]
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), first, rows.count)
        ct_edges = put_rows(ct_edges, ct_edge, rows.edge_row, rows.real_edges.sum())
        totals[k] = merged(totals[k], merged(grads, floats(ct_static)))
    return BackwardLevels(g, lambda _: Gradients(totals, ct_inputs, ct_edges))


def _in_less(part: Split, products: Products | None) -> bool:
    """Returns whether cut cotangents may be stored in parts, in less memory. Older versions of XLA would copy the tensors."""
    return products is not None or part.forward.together is not None


def _operands(kind: Kind, sched: Schedule, cuts: Env, g: StateCotangents) -> dict[Var, Operand]:
    """Returns where the products of lazy gradients find the cut cotangents of a kind."""
    start = {EDGE: kind.rows.edge_pad, ROW: kind.rows.pad}
    operands = {v: Operand(x, None, start[kind.domains[v]]) for v, x in cuts.items()}
    for v, i in kind.own.items():
        index, first = (None, kind.rows.row[0]) if len(sched.shape.kinds) == 1 else (kind.rows.row[:, None], 0)
        operands[v] = Operand(g[i], index, first)
    return operands | in_parts(kind.cuts.parts, operands)


def _rows_of_states(kind: Kind, sched: Schedule, g: jax.Array) -> jax.Array:
    """Returns the rows of a kind's vertices in a tensor of states. If there is one kind, they are contiguous."""
    rows = kind.rows
    return window(g, rows.row[0], rows.size) if len(sched.shape.kinds) == 1 else get_rows(g, rows.row)


def rounds_back(loop: Loop, tasks: jax.Array, g: StateCotangents, totals: Totals) -> Rounds:
    rounds = jnp.asarray(loop.sched.num_rounds, jnp.int32)
    # (rounds * kinds * classes + 1,) the first task of each loop, and the end of the last
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(loop.sched.round_end).reshape(-1)])
    carry = tasks, (g, [empty_cuts(kind, loop.zeros) for kind in loop.kinds], totals)
    tasks, (g, cuts, totals) = lax.fori_loop(0, rounds, lambda r, c: _round_back(loop, begins, rounds - 1 - r, c), carry)
    return tasks, g, [dict(zip(kind.stored, cts, strict=True)) for kind, cts in zip(loop.kinds, cuts, strict=True)], totals


def _round_back(loop: Loop, begins: jax.Array, r: jax.Array, carry: _RoundCarry) -> _RoundCarry:
    """Runs round r: for each kind and each class of task sizes, a loop over its tasks."""
    classes = loop.sched.shape.classes
    for kind in reversed(loop.kinds):
        for c in reversed(range(len(classes) if loop.sched.shape.inner[kind.number] else 0)):
            begin = begins[r * (len(loop.kinds) * len(classes)) + kind.number * len(classes) + c]

            def step(state: _RoundCarry, kind: Kind = kind, c: int = c) -> _RoundCarry:
                t = state[0] - 1
                return t, run_task(kind, loop.sched, classes[c], t, state[1], loop.options)

            carry = lax.while_loop(lambda state, begin=begin: state[0] > begin, step, carry)
    return carry
