"""The VJP of `run`: Cavs Algorithm 1, backward. Tasks run in reverse; gather and scatter swap roles, as do pull and push.

Let s_v be the state that vertex v scatters and g_v its cotangent. F's recurrent part is s_v = R(P, x_v, {s_u : u child
of v}), with parameters P and eager rows x. Then, parents before children,

    g_u = (cotangent of u's push) + sum over parents v of u:  (dR/ds_u at v)^T g_v

is all that the levels must compute: each task reads the cotangents of its own vertices and adds to those of their children.
The cotangent of a parameter is a sum over all vertices, sum_v (dR/dP at v)^T g_v, which no level reads. So for each equation
y = f(a, p) of R that reads a parameter p, the levels store the cotangent of y in a dynamic tensor (a cut cotangent). After
the levels ONE transpose of f over all vertices computes p's gradient: for a weight, a single product A^T dY (lazy batching,
Cavs 3.5). The cotangents of the eager part's outputs are such rows, too.
"""

import jax
import jax.numpy as jnp

from cavs._engines.engine import Batch, Cotangents, Engine, Gradients, Job
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.hold_back import barrier
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import (
    Cotangent,
    add_rows,
    by_number,
    floats,
    made,
    mask_rows,
    no_rows,
    not_one,
    once,
    put_rows,
    rows_of_push,
    summed_rows,
    take_rows,
    zero_cotangent,
)
from cavs._stages.saved import Saved
from cavs._stages.tensors import Zeros, leaf_vertices, window

# Bytes of the cotangents of pushes up to which they are scattered into tensors of zeros: on a GPU, filling so few bytes with
# zeros takes less time than the additional kernels of `by_number`.
FEW_BYTES = 8 << 20


def backward(
    job: Job, sched: Schedule, engine: Engine, saved: Saved, select: jax.Array | None, cts: list[Cotangent]
) -> tuple[list[Cotangent], list[jax.Array | None]]:
    """Computes the cotangents of params and inputs.

    Returns:
        The cotangents of the leaves of params; and of the leaves of the inputs, (Vp, ...), then of the edges, (Ep, ...), `None`
        for integers.

    `saved`: what `_run.forward.forward` saved. `select`: (M,) ints, the vertices whose pushes were returned; `None` for all.
    `cts`: the cotangents of the leaves of the pushes, (Vp, ...), or (M, ...) with `select`.
    """
    after_forward = Schedule(barrier((sched.data, cts))[0], sched.shape)
    states = [x for i, x in enumerate(saved.states) if i not in job.plan.overwritten]
    # Other zeros than the forward's.
    batch = engine.batch(job, sched)._replace(zeros=Zeros(after_forward, states, start=1000))
    known = _no_cotangents(batch, saved, in_16_bits=engine.one_launch or sched.shape.forest)
    if (push_states := job.plan.push_states) is not None:
        known = _pushed_states_back(known, batch, push_states, engine, select, cts)
    else:
        if select is not None:
            cts = _of_all_vertices(batch, select, cts)
        with jax.named_scope("lazy"):
            known = _lazy_back(known, batch, saved, cts)
    known.states.update(_overwritten(batch, saved))
    with jax.named_scope("levels"):
        known = known._replace(inputs=no_rows(saved.inputs), edges=no_rows(saved.edges))
        levels = engine.backward_levels(batch, saved, known)
    with jax.named_scope("leaves"):
        leaves = [] if batch.has_leaves else _leaves_back(batch, saved, levels.states, cts)
    with jax.named_scope("levels"):
        gradients = levels.rest([x for of_params, _ in leaves for x in floats(of_params).values()])
    with jax.named_scope("leaves"):
        return _with_leaves(batch, engine, saved, gradients, leaves)


def _no_cotangents(batch: Batch, saved: Saved, in_16_bits: bool) -> Cotangents:
    """Returns the cotangents before the pushes have added to them.

    Unless those of 16-bit states may be `in_16_bits`, they are in float32, as many parents may add to a row.
    """
    return Cotangents(
        states={
            i: batch.zeros(b.shape, b.dtype if in_16_bits or b.dtype.itemsize >= 4 else jnp.float32)
            for i, b in enumerate(saved.states)
            if is_float(b) and i not in batch.plan.overwritten
        },
        row=None,
        eager=[[zero_cotangent(x) for x in rows] for rows in saved.eager_rows],
        extras=[[] for _ in batch.rows],
        statics=[{} for _ in batch.rows],
        inputs=[],
        edges=[],
    )


def _overwritten(batch: Batch, saved: Saved) -> dict[int, jax.Array]:
    """Returns the states that their cotangents will overwrite, with zeros at the roots, which no parent writes."""
    if not batch.plan.overwritten:
        return {}
    roots = jnp.asarray(batch.sched.row).at[jnp.asarray(batch.sched.roots)].get(mode="clip")
    return {i: saved.states[i].at[not_one(roots)].set(0) for i in batch.plan.overwritten}


def _pushed_states_back(
    known: Cotangents, batch: Batch, push_states: list[int], engine: Engine, select: jax.Array | None, cts: list[Cotangent]
) -> Cotangents:
    """Adds the cotangents of pushes to the cotangents of the pushed states; push j is state leaf `push_states[j]`."""
    row, g = jnp.asarray(batch.sched.row), known.states
    index = row if select is None else row.at[select].get(mode="clip")
    if engine.one_launch and sum(g[i].nbytes for i in set(push_states) if i in g) > FEW_BYTES:
        g, number = by_number(g, push_states, index, cts, batch.sched.shape.rows, unique=select is None)
        return known._replace(states=g, row=number)
    for i, ct in zip(push_states, cts, strict=True):
        add_rows(g, i, index, ct if select is None else once(ct, index, batch.sched.shape.rows))
    return known


def _of_all_vertices(batch: Batch, select: jax.Array, cts: list[Cotangent]) -> list[Cotangent]:
    """Spreads the cotangents of the selected pushes, (M, ...), to the pushes of all vertices, (Vp, ...)."""
    return [
        summed_rows(jnp.asarray(ct), select, batch.sched.shape.vertices) if is_float(a) else ct
        for a, ct in zip(batch.plan.push_avals, cts, strict=True)
    ]


def _lazy_back(known: Cotangents, batch: Batch, saved: Saved, cts: list[Cotangent]) -> Cotangents:
    """Transposes the lazy part: from cotangents of the pushes, (Vp, ...), to cotangents of all that the lazy part reads."""
    g = known.states
    for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
        ct_pushes = [rows_of_push(ct, rows.vertex, rows.count) for ct in cts]
        ct_static, ct_states, slots, child, known.eager[k], known.extras[k] = saved.lazy[k](ct_pushes)
        known.statics[k] = floats(ct_static)
        real = rows.real
        for i, ct in enumerate(ct_states):
            add_rows(g, i, jnp.where(real, rows.row, 0), ct)
        for (j, i), ct in zip(part.recurrent.slots, slots, strict=True):
            add_rows(g, i, jnp.where(real, rows.inner(rows.kids)[:, j], 0), ct)
        for i, ct in zip(part.recurrent.child, child, strict=True):
            add_rows(g, i, jnp.where(rows.real_edges, rows.inner_edges(rows.edge_child), 0), ct)
    return known


def _leaves_back(
    batch: Batch, saved: Saved, g: dict[int, jax.Array], cts: list[Cotangent]
) -> list[tuple[list[Cotangent], list[Cotangent]]]:
    """Transposes F at the leaves. Returns for each kind the cotangents of the params, and of the pulled rows.

    `g`: the cotangents of the states. `cts`: the cotangents of the pushes, (Vp, ...); not read if every push is a scattered
    state.
    """
    sched, plan, cotangents = batch.sched, batch.plan, []
    for k, (size, vertex) in enumerate(zip(sched.shape.leaves, leaf_vertices(sched), strict=True)):
        count = sched.leaf_count[k]
        real = jnp.arange(size) < count
        ct_states = [
            mask_rows(window(g[i], sched.leaf_row[k], size), real).astype(b.dtype) if i in g else zero_cotangent(b[:size])
            for i, b in enumerate(saved.states)
        ]
        if plan.push_states is None:
            ct_pushes = [rows_of_push(ct, vertex, count) for ct in cts]
        else:
            ct_pushes = [zero_cotangent(jax.ShapeDtypeStruct((size, *a.shape), a.dtype)) for a in plan.push_avals]
        of_params, of_rows = saved.leaf[k]((ct_states, ct_pushes))
        cotangents.append((_if_any(of_params, count), of_rows))
    return cotangents


def _with_leaves(
    batch: Batch, engine: Engine, saved: Saved, gradients: Gradients, leaves: list[tuple[list[Cotangent], list[Cotangent]]]
) -> tuple[list[Cotangent], list[jax.Array | None]]:
    """Transposes the static parts, and adds what the leaves contribute, if they were no level. Returns as `backward`.

    `gradients`: what levels contribute. `leaves`: from `_leaves_back`.
    """
    sched, ct_inputs = batch.sched, gradients.inputs
    ct_params: list[Cotangent] = []
    has_inner = any(isinstance(x, jax.Array) for x in ct_inputs)
    for k, (transpose, rows) in enumerate(zip(saved.static, batch.rows, strict=True)):
        statics = [gradients.statics[k].get(i, zero_cotangent(x)) for i, x in enumerate(saved.statics[k])]
        ct_params = _sum(ct_params, _if_any(transpose(statics)[0], rows.count))
    for k, (of_params, of_rows) in enumerate(leaves):
        ct_params, count = _sum(ct_params, of_params), sched.leaf_count[k]
        # If the rows of inner vertices are there already, the rows of the leaves, which may be few, are scattered between them.
        if has_inner and not engine.one_launch:
            ct_inputs = put_rows(ct_inputs, of_rows, leaf_vertices(sched)[k], count)
        else:
            ct_inputs = take_rows(ct_inputs, of_rows, jnp.asarray(sched.row), sched.leaf_row[k], count)
    return ct_params, [*made(ct_inputs), *made(gradients.edges)]


def _if_any(cts: list[Cotangent], count: jax.Array) -> list[Cotangent]:
    """Returns zeros for a kind without vertices in this batch, whatever F computes on its rows, or from parameters alone."""
    return [x if x.dtype == jax.dtypes.float0 else jnp.where(count > 0, x, jnp.zeros_like(x)) for x in cts]


def _sum(a: list[Cotangent], b: list[Cotangent]) -> list[Cotangent]:
    """Returns the sum of two cotangents of params; an empty list is zero."""
    return [x + y if x.dtype != jax.dtypes.float0 else x for x, y in zip(a, b, strict=True)] if a else list(b)
