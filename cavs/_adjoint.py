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
import numpy as np
from jax import lax

from cavs._rows import EDGE, ROW, STATIC, bind, evaluate, is_float, is_var, matrix_product, needed, take, turned_weights
from cavs._schedule import Schedule
from cavs._split import ParamUse, Split
from cavs._tensors import Rows, Zeros, get_rows, recurrent_inputs, rows_of_kinds, window, write


def backward(
    plan: Any, sched: Schedule, kinds: tuple[str | None, ...], saved: dict[str, Any], at: Any, cts: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Cotangents of params and inputs (flat) from those of the pushes."""
    shape = sched.shape
    all_rows = rows_of_kinds(sched, plan.function.arity)
    parts: list[Split] = [plan.inner[name] for name in kinds]
    states = saved["states"]
    zeros = Zeros(sched, start=1000)  # others than the forward's
    g = {i: zeros(b.shape, b.dtype) for i, b in enumerate(states) if is_float(b)}

    # Cotangents of the pushes: straight to the states they are, or through the lazy part.
    push_states = plan.push_states
    eager_cts = [[_zero_ct(x) for x in rows] for rows in saved["eager_rows"]]
    extra_cts: list[list[Any]] = [[] for _ in kinds]
    static_cts: list[dict[int, Any]] = [{} for _ in kinds]
    if push_states is not None:
        index = jnp.asarray(sched.row) if at is None else jnp.asarray(sched.row).at[at].get(mode="clip")
        for i, ct in zip(push_states, cts, strict=True):
            if i in g:
                g[i] = g[i].at[index].add(ct, mode="promise_in_bounds")
        push_cts = None
    else:
        push_cts = cts
        if at is not None:
            push_cts = [
                jnp.zeros((shape.vertices, *a.shape), a.dtype).at[at].add(ct, mode="drop") if is_float(a) else ct
                for a, ct in zip(plan.push_avals, cts, strict=True)
            ]
        for k, rows in enumerate(all_rows):
            mine = [_rows_of_ct(ct, rows.vertex, rows.count) for ct in push_cts]
            ct_static, own, slots, child, eager_cts[k], extra_cts[k] = saved["lazy"][k](mine)
            static_cts[k] = dict(enumerate(ct_static))
            real = jnp.arange(rows.size) < rows.count
            for i, ct in enumerate(own):
                _add(g, i, jnp.where(real, rows.row, 0), ct)
            for (j, i), ct in zip(parts[k].slots, slots, strict=True):
                _add(g, i, jnp.where(real, rows.inner(rows.kids)[:, j], 0), ct)
            for i, ct in zip(parts[k].child, child, strict=True):
                _add(g, i, jnp.where(rows.inner_edges(rows.edge_owner) < rows.count, rows.inner_edges(rows.edge_child), 0), ct)

    g, cuts, eager_grads = _reverse_levels(sched, parts, all_rows, zeros, saved, g, extra_cts)

    # Lazy: parameters of the recurrent part, then the eager and the static part, each in one batch.
    ct_params: list[Any] = []
    ct_inputs = [jnp.zeros_like(x) if is_float(x) else None for x in saved["inputs"]]
    for k, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
        for i, ct in enumerate(lazy_gradients(part, rows, saved, k, cuts[k])):
            _accumulate(static_cts[k], i, ct)
        index = {v: i for i, v in enumerate(part.eager_outs)}
        for c, ct in eager_grads[k].items():
            i = index[part.cross[c]]
            eager_cts[k][i] = eager_cts[k][i] + ct
        ct_static, ct_pulled = saved["eager"][k](eager_cts[k])
        for i, ct in enumerate(ct_static):
            _accumulate(static_cts[k], i, ct)
        statics = saved["statics"][k]
        (ct,) = saved["static"][k]([static_cts[k].get(i, _zero_ct(x)) if is_float(x) else _zero_ct(x) for i, x in enumerate(statics)])
        ct_params = _sum(ct_params, ct)
        _put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)

    # Leaves.
    at_leaf = 0
    for k in range(len(kinds)):
        size, count = shape.leaves[k], sched.leaf_count[k]
        real = jnp.arange(size) < count
        vertex = sched.leaf_vertex[at_leaf : at_leaf + size]
        at_leaf += size
        mine = [
            _mask(window(g[i], sched.leaf_row[k], size), real) if i in g else _zero_ct(b[:size]) for i, b in enumerate(states)
        ]
        if push_cts is None:
            pushed = [_zero_ct(jax.ShapeDtypeStruct((size, *a.shape), a.dtype)) for a in plan.push_avals]
        else:
            pushed = [_rows_of_ct(ct, vertex, count) for ct in push_cts]
        ct, ct_pulled = saved["leaf"][k]((mine, pushed))
        ct_params = _sum(ct_params, ct)
        _put_rows(ct_inputs, ct_pulled, vertex, count)
    return ct_params, ct_inputs


def _reverse_levels(
    sched: Schedule,
    parts: list[Split],
    all_rows: list[Rows],
    zeros: Zeros,
    saved: dict[str, Any],
    g: dict[int, Any],
    extra_cts: list[list[Any]],
) -> tuple[dict[int, Any], list[dict[Any, Any]], list[dict[int, Any]]]:
    """The backward's loop over tasks. Returns the states' cotangents, cut cotangents and those of the crossing rows."""
    states = saved["states"]
    crossing = [
        [r.padded(x) for v, x in zip(p.eager_outs, e, strict=True) if v in p.cross]
        for p, r, e in zip(parts, all_rows, saved["eager_rows"], strict=True)
    ]
    extra_in = [
        {
            i: (r.padded_edges if p.role.level.get(p.extra[i]) == EDGE else r.padded)(cts[i])
            for i in (p.j_extra_cts if cts else ())
        }
        for p, r, cts in zip(parts, all_rows, extra_cts, strict=True)
    ]
    levels = [cut_levels(p) for p in parts]
    cuts = [[r.tensor(zeros, v.aval, lv[v] == EDGE) for v in p.cuts] for p, r, lv in zip(parts, all_rows, levels, strict=True)]

    turned = [
        turned_weights(p.joint.eqns, p.joint_level, dict(zip(p.j_statics, s, strict=False)))
        for p, s in zip(parts, saved["statics"], strict=True)
    ]

    def task(k: int, width: int, edges: int, t: Any, carry: Any) -> Any:
        g, cuts = carry
        part, rows, size = parts[k], all_rows[k], sched.task_size[t]
        shift = size - width  # backward windows END at the task's last row
        row, start = sched.task_row[t] + shift, rows.pad + sched.task_start[t] + shift
        edge_start = rows.edge_pad + sched.task_edge[t] + sched.task_edges[t] - edges
        results = [*part.ct_slots.values(), *part.ct_child.values(), *part.cuts]
        eqns, reads = needed(part.joint.eqns, results, part.available)
        wanted = {x for e in eqns for x in e.invars if is_var(x)} | set(reads)
        env = recurrent_inputs(part, rows, states, saved["statics"][k], crossing[k], start, edge_start, width, edges, wanted)
        kept = {
            v: window(b, edge_start, edges) if part.joint_level.get(v) == EDGE else window(b, start, width)
            for v, b in zip(part.keep, saved["kept"][k], strict=True)
        }
        kept |= {
            v: window(b, row, width) for v, b in zip(part.j_states, states, strict=True) if is_var(v) and v in wanted and v not in env
        }
        for i, v in enumerate(part.j_extra):
            if is_var(v) and v in wanted and v not in env:
                edge = part.role.level.get(part.extra[i]) == EDGE
                x = saved["extras"][k][i]
                kept[v] = window((rows.padded_edges if edge else rows.padded)(x), edge_start if edge else start, edges if edge else width)
        # Read by number, not as a slice: XLA would fuse a slice past the write below, and copy all of g for it.
        own = row + jnp.arange(width)
        for i, v in part.j_state_cts.items():
            kept[v] = get_rows(g[i], own)
        for i, v in part.j_extra_cts.items():
            edge = part.role.level.get(part.extra[i]) == EDGE
            if i in extra_in[k]:
                kept[v] = window(extra_in[k][i], edge_start if edge else start, edges if edge else width)
            else:
                kept[v] = jnp.zeros((edges if edge else width, *v.aval.shape), v.aval.dtype)
        env |= dict(zip(kept, lax.optimization_barrier(list(kept.values())), strict=True))
        segments = None
        if part.child:
            segments = window(rows.edge_owner, edge_start, edges) - (sched.task_start[t] + shift)
            segments = jnp.where(segments < 0, width, segments)
        evaluate(eqns, env, part.joint_level, segments, width, turned[k])

        def read(x: Any, level: int) -> Any:
            have = part.joint_level.get(x, STATIC) if is_var(x) else STATIC
            value = env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype)
            return take(value, level, have, edges if level == EDGE else width)

        # Row 0 of the cotangents belongs to no vertex: what windows hold beyond their task goes there, and is never read.
        mine = jnp.arange(width) >= -shift
        kids = window(rows.kids, start, width)
        to: dict[int, list[tuple[Any, Any]]] = {}
        for j, v in part.ct_slots.items():
            slot, i = part.slots[j]
            to.setdefault(i, []).append((jnp.where(mine, kids[:, slot], 0), read(v, ROW)))
        for j, v in part.ct_child.items():
            mine_edges = jnp.arange(edges) >= edges - sched.task_edges[t]
            index = jnp.where(mine_edges, window(rows.edge_child, edge_start, edges), 0)
            to.setdefault(part.child[j], []).append((index, read(v, EDGE)))
        g = dict(g)
        for i, pairs in to.items():
            index = jnp.concatenate([p[0] for p in pairs])
            g[i] = g[i].at[index].add(jnp.concatenate([p[1] for p in pairs]), mode="promise_in_bounds")
        new = [
            write(b, read(v, levels[k][v]), edge_start if levels[k][v] == EDGE else start)
            for v, b in zip(part.cuts, cuts[k], strict=True)
        ]
        return g, [new if j == k else c for j, c in enumerate(cuts)]

    num_classes = len(sched.shape.classes)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(sched.round_end).reshape(-1)])

    def one_round(r: Any, carry: Any) -> Any:
        for k in reversed(range(len(parts))):
            for c in reversed(range(num_classes)):
                width, edges = sched.shape.classes[c]
                begin = begins[(sched.num_rounds - 1 - r) * len(parts) * num_classes + k * num_classes + c]
                carry = lax.while_loop(
                    lambda tc, begin=begin: tc[0] > begin,
                    lambda tc, k=k, w=width, e=edges: (tc[0] - 1, task(k, w, e, tc[0] - 1, tc[1])),
                    carry,
                )
        return carry

    carry = (jnp.asarray(sched.num_tasks, jnp.int32), (g, cuts))
    _, (g, cuts) = lax.fori_loop(0, sched.num_rounds, one_round, carry)
    unpadded = [
        {v: r.inner_edges(x) if lv[v] == EDGE else r.inner(x) for v, x in zip(p.cuts, c, strict=True)}
        for p, r, c, lv in zip(parts, all_rows, cuts, levels, strict=True)
    ]
    eager = [
        {c: u[v] if is_var(v) else jnp.zeros((r.size, *v.aval.shape), v.aval.dtype) for c, v in p.ct_cross.items()}
        for p, r, u in zip(parts, all_rows, unpadded, strict=True)
    ]
    return g, unpadded, eager


def cut_levels(part: Split) -> dict[Any, int]:
    """Whether each cut cotangent has a value per vertex or per edge."""
    levels = {v: u.level for u in part.uses for v in u.cuts if is_var(v)}
    return levels | {v: ROW for v in part.ct_cross.values() if is_var(v)}


def lazy_gradients(part: Split, rows: Rows, saved: dict[str, Any], k: int, cuts: dict[Any, Any]) -> list[Any]:
    """Cotangents of the recurrent part's static values: one batched transpose per equation that reads them."""
    states, statics = saved["states"], saved["statics"][k]
    operands = [v for u in part.uses for v in u.operands.values() if is_var(v)]
    eqns, reads = needed(part.joint.eqns, operands, part.available)
    wanted = {x for e in eqns for x in e.invars if is_var(x)} | set(reads)
    env = dict(part.joint.consts) | dict(zip(part.j_statics, statics[: len(part.j_statics)], strict=True))
    env |= {
        j: x
        for j, x in zip(part.j_cross, [x for v, x in zip(part.eager_outs, saved["eager_rows"][k], strict=True) if v in part.cross], strict=True)
    }
    kids = rows.inner(rows.kids)
    env |= {v: get_rows(states[i], kids[:, s]) for v, (s, i) in zip(part.j_slots, part.slots, strict=True) if v in wanted}
    children = rows.inner_edges(rows.edge_child)
    env |= {v: get_rows(states[i], children) for v, i in zip(part.j_child, part.child, strict=True) if v in wanted}
    env[part.j_num_children] = rows.inner(rows.num_children)
    env |= {
        v: rows.inner_edges(b) if part.joint_level.get(v) == EDGE else rows.inner(b)
        for v, b in zip(part.keep, saved["kept"][k], strict=True)
        if v in wanted
    }
    env |= {v: get_rows(b, rows.row) for v, b in zip(part.j_states, states, strict=True) if is_var(v) and v in wanted and v not in env}
    env |= {v: x for v, x in zip(part.j_extra, saved["extras"][k], strict=True) if is_var(v) and v in wanted and v not in env}
    evaluate(eqns, env, part.joint_level, rows.inner_edges(rows.edge_owner), rows.size, real=rows.count)

    place = {v: i for i, v in enumerate(part.recurrent_statics)}
    totals: dict[int, Any] = {}
    for use in part.uses:
        n = rows.edges if use.level == EDGE else rows.size
        for i, ct in _transpose(part, use, place, statics, env, cuts, n):
            _accumulate(totals, i, ct)
    return [totals.get(i, _zero_ct(x)) for i, x in enumerate(statics)]


def _transpose(
    part: Split, use: ParamUse, place: dict[Any, int], statics: list[Any], env: dict[Any, Any], cuts: dict[Any, Any], n: int
) -> list[tuple[int, Any]]:
    """(static value, cotangent) for one equation, over all its rows at once."""
    level = part.role.level
    args, axes = [], []
    for i, x in enumerate(use.eqn.invars):
        static = not is_var(x) or level.get(x, STATIC) == STATIC
        axes.append(None if static else 0)
        if not is_var(x):
            args.append(x.val)
        elif static:
            args.append(statics[place[x]] if x in place else part.role.program.consts[x])
        elif i in use.operands:
            v = use.operands[i]
            value = env[v] if is_var(v) else jnp.asarray(v.val, v.aval.dtype)
            args.append(take(value, ROW, part.joint_level.get(v, STATIC) if is_var(v) else STATIC, n))
        else:  # its value does not matter for the gradient
            args.append(jnp.zeros((n, *x.aval.shape), x.aval.dtype))
    levels = [STATIC if a is None else use.level for a in axes]
    if (axis := matrix_product(use.eqn, levels)) is not None and is_var(use.cuts[0]):
        a, ct = args[0], cuts[use.cuts[0]]
        a, ct = a.reshape(-1, a.shape[-1]), ct.reshape(-1, ct.shape[-1])
        pair = (a, ct) if axis == 0 else (ct, a)
        return [(place[use.eqn.invars[1]], lax.dot_general(*pair, (((0,), (0,)), ((), ())), **_precision(use.eqn, args[1])))]

    def f(values: list[Any]) -> list[Any]:
        full = list(args)
        for i, x in zip(use.statics, values, strict=True):
            full[i] = x
        outs = jax.vmap(lambda *a: bind(use.eqn, a), in_axes=axes)(*full)
        return [o for o, v in zip(outs, use.eqn.outvars, strict=True) if is_float(v)]

    _, vjp = jax.vjp(f, [args[i] for i in use.statics])
    cotangents = [cuts[v] if is_var(v) else jnp.zeros((n, *v.aval.shape), v.aval.dtype) for v in use.cuts]
    (out,) = vjp(cotangents)
    return [(place[use.eqn.invars[i]], ct) for i, ct in zip(use.statics, out, strict=True)]


def _precision(eqn: Any, weight: Any) -> dict[str, Any]:
    return {"precision": eqn.params["precision"], "preferred_element_type": weight.dtype}


def _zero_ct(x: Any) -> Any:
    """The zero cotangent of an array or shape: of its dtype, or JAX's float0 for integers."""
    return jnp.zeros(x.shape, x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def _mask(ct: Any, real: Any) -> Any:
    return jnp.where(real.reshape(-1, *(1,) * (ct.ndim - 1)), ct, jnp.zeros((), ct.dtype))


def _rows_of_ct(ct: Any, vertex: Any, count: Any) -> Any:
    """Rows of a push's cotangent in schedule order, zero in padding."""
    if ct.dtype == jax.dtypes.float0:
        return np.zeros((vertex.shape[0], *ct.shape[1:]), jax.dtypes.float0)
    return _mask(get_rows(ct, vertex), jnp.arange(vertex.shape[0]) < count)


def _add(g: dict[int, Any], i: int, index: Any, ct: Any) -> None:
    if i in g:
        g[i] = g[i].at[index].add(ct, mode="promise_in_bounds")


def _accumulate(totals: dict[int, Any], i: int, ct: Any) -> None:
    if ct.dtype != jax.dtypes.float0:
        totals[i] = totals[i] + ct if i in totals else ct


def _sum(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y if x.dtype != jax.dtypes.float0 else x for x, y in zip(a, b, strict=True)] if a else list(b)


def _put_rows(ct_inputs: list[Any], ct_rows: list[Any], vertex: Any, count: Any) -> None:
    """pull's transpose: each vertex's cotangent to its row of the inputs."""
    for i, (total, ct) in enumerate(zip(ct_inputs, ct_rows, strict=True)):
        if total is not None and ct.shape[0]:
            index = jnp.where(jnp.arange(ct.shape[0]) < count, vertex, total.shape[0])
            ct_inputs[i] = total.at[index].set(ct, mode="drop", unique_indices=True)
