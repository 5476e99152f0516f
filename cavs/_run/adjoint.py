"""The VJP of `run`: Cavs Algorithm 1, backward. Tasks are replayed in reverse; gather and scatter, pull and push swap roles.

Let s_v be the state that vertex v scatters and g_v its cotangent. F's recurrent part is s_v = R(P, x_v, {s_u : u child
of v}), with parameters P and eager rows x. Then, parents before children,

    g_u = (cotangent of u's push) + sum over parents v of u:  (dR/ds_u at v)^T g_v

is all that the levels must compute: each task reads its own g, and adds to its children's. A parameter's cotangent is a
sum over all vertices, sum_v (dR/dP at v)^T g_v, on which nothing waits. Each equation y = f(a, p) of R that reads a
parameter p leaves the cotangent of y in a dynamic tensor (its cut cotangent), and after the levels ONE transpose of f
over all vertices at once gives p's gradient: a single product A^T dY for a weight (lazy batching, Cavs 3.5). The eager
part's cotangents are such rows too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cavs._engines.engine import Batch, Cotangents, Engine
from cavs._function.equations import is_float
from cavs._function.split import Split
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import (
    add_rows,
    by_number,
    floats,
    made,
    mask_rows,
    no_rows,
    put_rows,
    rows_of_push,
    take_rows,
    zero_cotangent,
)
from cavs._stages.tensors import Zeros, leaf_vertices, rows_of_kinds, window

FEW_BYTES = 8 << 20  # of pushes' cotangents: filling as many with zeros is faster on a GPU than a few kernels more


def backward(
    plan: Any,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    engine: Engine,
    saved: dict[str, Any],
    select: Any,
    cts: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Cotangents of params and inputs (flat) from those of the pushes; `saved` is from `_run.forward.forward`."""
    shape, states, push_states = sched.shape, saved["states"], plan.push_states
    all_rows = rows_of_kinds(sched, plan.function.arity)
    parts: list[Split] = [plan.inner[name] for name in kinds]
    zeros = Zeros(sched, start=1000)  # others than the forward's
    g = {i: zeros(b.shape, b.dtype) for i, b in enumerate(states) if is_float(b)}
    g_row = None  # which rows of g belong to the states' rows, where not the same

    # Cotangents of the pushes: straight to the states they are, or through the lazy part.
    static_cts: list[dict[int, Any]] = [{} for _ in kinds]
    eager_cts = [[zero_cotangent(x) for x in rows] for rows in saved["eager_rows"]]
    extra_cts: list[list[Any]] = [[] for _ in kinds]
    if push_states is not None:
        index = jnp.asarray(sched.row) if select is None else jnp.asarray(sched.row).at[select].get(mode="clip")
        if engine.launches and sum(g[i].nbytes for i in set(push_states) if i in g) > FEW_BYTES:
            g, g_row = by_number(g, push_states, index, cts, shape.rows, unique=select is None)
        else:
            for i, ct in zip(push_states, cts, strict=True):
                add_rows(g, i, index, ct)
    else:
        if select is not None:
            cts = [
                jnp.zeros((shape.vertices, *a.shape), a.dtype).at[select].add(ct, mode="drop") if is_float(a) else ct
                for a, ct in zip(plan.push_avals, cts, strict=True)
            ]
        for k, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
            mine = [rows_of_push(ct, rows.vertex, rows.count) for ct in cts]
            ct_static, own, slots, child, eager_cts[k], extra_cts[k] = saved["lazy"][k](mine)
            static_cts[k] = floats(ct_static)
            real = rows.real
            for i, ct in enumerate(own):
                add_rows(g, i, jnp.where(real, rows.row, 0), ct)
            for (j, i), ct in zip(part.recurrent.slots, slots, strict=True):
                add_rows(g, i, jnp.where(real, rows.inner(rows.kids)[:, j], 0), ct)
            for i, ct in zip(part.recurrent.child, child, strict=True):
                add_rows(g, i, jnp.where(rows.real_edges, rows.inner_edges(rows.edge_child), 0), ct)

    # The levels, and the eager part.
    ct_inputs = no_rows(saved["inputs"])
    so_far = Cotangents(g, g_row, eager_cts, extra_cts, static_cts, ct_inputs)
    g, static_cts, ct_inputs = engine.reverse(Batch(plan, sched, kinds, all_rows, zeros), saved, so_far)

    # A kind without vertices in this batch adds nothing, whatever F makes of its rows (`_stages.tensors`).
    counts = [rows.count for rows in all_rows]
    static_cts = [
        {i: jnp.where(n > 0, ct, jnp.zeros_like(ct)) for i, ct in own.items()}
        for n, own in zip(counts, static_cts, strict=True)
    ]

    # Static parts and leaves.
    inside = any(isinstance(x, jax.Array) for x in ct_inputs)
    ct_params: list[Any] = []
    for k, (size, vertex) in enumerate(zip(shape.leaves, leaf_vertices(sched), strict=True)):
        statics = [static_cts[k].get(i, zero_cotangent(x)) for i, x in enumerate(saved["statics"][k])]
        ct_params = _sum(ct_params, saved["static"][k](statics)[0])
        count = sched.leaf_count[k]
        real = jnp.arange(size) < count
        mine = [
            mask_rows(window(g[i], sched.leaf_row[k], size), real) if i in g else zero_cotangent(b[:size])
            for i, b in enumerate(states)
        ]
        if push_states is None:
            pushed = [rows_of_push(ct, vertex, count) for ct in cts]
        else:
            pushed = [zero_cotangent(jax.ShapeDtypeStruct((size, *a.shape), a.dtype)) for a in plan.push_avals]
        ct, ct_pulled = saved["leaf"][k]((mine, pushed))
        ct = [x if x.dtype == jax.dtypes.float0 else jnp.where(count > 0, x, jnp.zeros_like(x)) for x in ct]
        ct_params = _sum(ct_params, ct)
        if inside and not engine.launches:  # inner vertices have theirs: leaves, which may be few, are put between them
            ct_inputs = put_rows(ct_inputs, ct_pulled, vertex, count)
        else:
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), sched.leaf_row[k], count)
    return ct_params, made(ct_inputs)


def _sum(a: list[Any], b: list[Any]) -> list[Any]:
    """The sum of params' cotangents; an empty list is zero."""
    return [x + y if x.dtype != jax.dtypes.float0 else x for x, y in zip(a, b, strict=True)] if a else list(b)
