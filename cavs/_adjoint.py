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

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._lazy import lazy_gradients, mask_rows
from cavs._parts import eager_function, pull
from cavs._persistent import INTERPRET, reverse as persistent_reverse
from cavs._rows import EDGE, ROW, STATIC, evaluate, is_float, is_var, needed, take, turned_weights
from cavs._schedule import Schedule
from cavs._split import Split
from cavs._tensors import Rows, View, Zeros, get_rows, recurrent_inputs, rows_of_kinds, window, write


def backward(
    plan: Any, sched: Schedule, kinds: tuple[str | None, ...], engine: str, saved: dict[str, Any], at: Any, cts: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Cotangents of params and inputs (flat) from those of the pushes."""
    shape = sched.shape
    all_rows = rows_of_kinds(sched, plan.function.arity)
    parts: list[Split] = [plan.inner[name] for name in kinds]
    states = saved["states"]
    zeros = Zeros(sched, start=1000)  # others than the forward's
    g = {i: zeros(b.shape, b.dtype) for i, b in enumerate(states) if is_float(b)}

    # Cotangents of the pushes: straight to the states they are, or through the lazy part.
    push_states, push_cts = plan.push_states, None
    static_cts: list[dict[int, Any]] = [{} for _ in kinds]
    eager_cts = [[_zero_ct(x) for x in rows] for rows in saved["eager_rows"]]
    extra_cts: list[list[Any]] = [[] for _ in kinds]
    if push_states is not None:
        index = jnp.asarray(sched.row) if at is None else jnp.asarray(sched.row).at[at].get(mode="clip")
        for i, ct in zip(push_states, cts, strict=True):
            _add(g, i, index, ct)
    else:
        push_cts = cts
        if at is not None:
            push_cts = [
                jnp.zeros((shape.vertices, *a.shape), a.dtype).at[at].add(ct, mode="drop") if is_float(a) else ct
                for a, ct in zip(plan.push_avals, cts, strict=True)
            ]
        for k, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
            mine = [_rows_of_ct(ct, rows.vertex, rows.count) for ct in push_cts]
            ct_static, own, slots, child, eager_cts[k], extra_cts[k] = saved["lazy"][k](mine)
            static_cts[k] = _floats(ct_static)
            real = jnp.arange(rows.size) < rows.count
            for i, ct in enumerate(own):
                _add(g, i, jnp.where(real, rows.row, 0), ct)
            for (j, i), ct in zip(part.slots, slots, strict=True):
                _add(g, i, jnp.where(real, rows.inner(rows.kids)[:, j], 0), ct)
            for i, ct in zip(part.child, child, strict=True):
                owned = rows.inner_edges(rows.edge_owner) < rows.count
                _add(g, i, jnp.where(owned, rows.inner_edges(rows.edge_child), 0), ct)

    ct_inputs = [jnp.zeros_like(x) if is_float(x) else None for x in saved["inputs"]]
    reverse = _reverse_levels
    if engine != "scan":
        reverse = functools.partial(_reverse_launch, kinds=kinds, interpret=engine == INTERPRET)
    g, ct_inputs = reverse(plan, sched, parts, all_rows, zeros, saved, g, eager_cts, extra_cts, static_cts, ct_inputs)

    # Static parts and leaves.
    ct_params: list[Any] = []
    at_leaf = 0
    for k, size in enumerate(shape.leaves):
        statics = [static_cts[k].get(i, _zero_ct(x)) for i, x in enumerate(saved["statics"][k])]
        ct_params = _sum(ct_params, saved["static"][k](statics)[0])
        count = sched.leaf_count[k]
        real = jnp.arange(size) < count
        vertex = sched.leaf_vertex[at_leaf : at_leaf + size]
        at_leaf += size
        mine = [
            mask_rows(window(g[i], sched.leaf_row[k], size), real) if i in g else _zero_ct(b[:size])
            for i, b in enumerate(states)
        ]
        if push_cts is None:
            pushed = [_zero_ct(jax.ShapeDtypeStruct((size, *a.shape), a.dtype)) for a in plan.push_avals]
        else:
            pushed = [_rows_of_ct(ct, vertex, count) for ct in push_cts]
        ct, ct_pulled = saved["leaf"][k]((mine, pushed))
        ct_params = _sum(ct_params, ct)
        ct_inputs = _put_rows(ct_inputs, ct_pulled, vertex, count)
    return ct_params, ct_inputs


def _reverse_levels(
    plan: Any,
    sched: Schedule,
    parts: list[Split],
    all_rows: list[Rows],
    zeros: Zeros,
    saved: dict[str, Any],
    g: dict[int, Any],
    eager_cts: list[list[Any]],
    extra_cts: list[list[Any]],
    static_cts: list[dict[int, Any]],
    ct_inputs: list[Any],
) -> tuple[dict[int, Any], list[Any]]:
    """The backward's loop over tasks, in windows after each of which parameter gradients are batched.

    Returns the states' and the inputs' cotangents; adds those of static values to `static_cts`.
    """
    shape, states, lazy = sched.shape, saved["states"], plan.function.optimizations.lazy
    fusion, one_window = plan.function.optimizations.fusion, sched.shape.windows[0] == 1
    memory, extra_in = _memory(parts, all_rows, saved, extra_cts)
    levels = [cut_levels(p) for p in parts]
    # Without lazy batching only what the eager part waits for is stored.
    stored = [[v for v in p.cuts if lazy or v in p.ct_cross.values()] for p in parts]
    turned = [
        turned_weights(p.joint.eqns, p.joint_level, dict(zip(p.j_statics, s, strict=False)))
        for p, s in zip(parts, saved["statics"], strict=True)
    ]

    def empty_cuts() -> list[list[Any]]:
        sizes = zip(parts, all_rows, shape.window_rows, shape.window_edges, levels, stored, strict=True)
        return [
            [r._replace(size=n, edges=e).tensor(zeros, v.aval, lv[v] == EDGE) for v in own] for p, r, n, e, lv, own in sizes
        ]

    def task(k: int, width: int, edges: int, base: Any, base_edge: Any, t: Any, carry: Any) -> Any:
        g, cuts, totals = carry
        part, rows, size = parts[k], all_rows[k], sched.task_size[t]
        shift = size - width  # backward windows END at the task's last row
        row, start = sched.task_row[t] + shift, rows.pad + sched.task_start[t] + shift
        edge_start = rows.edge_pad + sched.task_edge[t] + sched.task_edges[t] - edges
        view = View(start, width, edge_start, edges)
        results = [*part.ct_slots.values(), *part.ct_child.values(), *part.cuts]
        eqns, reads = needed(part.joint.eqns, results, part.available)
        wanted = {x for e in eqns for x in e.invars if is_var(x)} | set(reads)
        env = recurrent_inputs(
            part, rows, states, memory[k]["statics"], memory[k]["crossing"], start, edge_start, width, edges, wanted
        )
        kept = {}
        for variables, tensors in ((part.keep, memory[k]["kept"]), (part.j_extra, memory[k]["extras"])):
            for v, b in zip(variables, tensors, strict=True):
                if is_var(v) and v in wanted and v not in env:
                    kept[v] = view.of_edges(b) if part.joint_level.get(v) == EDGE else view.rows(b)
        for v, b in zip(part.j_states, states, strict=True):
            if is_var(v) and v in wanted and v not in env and v not in kept:
                kept[v] = window(b, row, width)
        # Read by number, not as a slice: XLA would fuse a slice past the write below, and copy all of g for it.
        own = row + jnp.arange(width)
        for i, v in part.j_state_cts.items():
            kept[v] = get_rows(g[i], own)
        for i, v in part.j_extra_cts.items():
            edge = part.role.level.get(part.extra[i]) == EDGE
            if i in extra_in[k]:
                kept[v] = (view.of_edges if edge else view.rows)(extra_in[k][i])
            else:
                kept[v] = jnp.zeros((edges if edge else width, *v.aval.shape), v.aval.dtype)
        env |= dict(zip(kept, lax.optimization_barrier(list(kept.values())), strict=True))
        evaluate(eqns, env, part.joint_level, view.segments(rows) if part.child else None, width, turned[k], fusion=fusion)

        def read(x: Any, level: int) -> Any:
            have = part.joint_level.get(x, STATIC) if is_var(x) else STATIC
            value = env[x] if is_var(x) else jnp.asarray(x.val, x.aval.dtype)
            return take(value, level, have, edges if level == EDGE else width)

        # Row 0 of the cotangents belongs to no vertex: what windows hold beyond their task goes there, and is never read.
        mine, mine_edges = jnp.arange(width) >= -shift, jnp.arange(edges) >= edges - sched.task_edges[t]
        kids = view.rows(rows.kids)
        to: dict[int, list[tuple[Any, Any]]] = {}
        for j, v in part.ct_slots.items():
            slot, i = part.slots[j]
            to.setdefault(i, []).append((jnp.where(mine, kids[:, slot], 0), read(v, ROW)))
        for j, v in part.ct_child.items():
            index = jnp.where(mine_edges, view.of_edges(rows.edge_child), 0)
            to.setdefault(part.child[j], []).append((index, read(v, EDGE)))
        g = dict(g)
        for i, pairs in to.items():
            index = jnp.concatenate([p[0] for p in pairs])
            g[i] = g[i].at[index].add(jnp.concatenate([p[1] for p in pairs]), mode="promise_in_bounds")
        new = [
            write(b, read(v, levels[k][v]), edge_start - base_edge if levels[k][v] == EDGE else start - base)
            for v, b in zip(stored[k], cuts[k], strict=True)
        ]
        if not lazy:
            values = {v: read(v, levels[k][v]) for v in part.cuts}
            now = lazy_gradients(part, rows, view, memory[k], values, (mine, mine_edges))
            totals = [_merge(total, now if j == k else {}) for j, total in enumerate(totals)]
        return g, [new if j == k else c for j, c in enumerate(cuts)], totals

    num_classes = len(shape.classes)
    loops = len(parts) * num_classes
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(sched.round_end).reshape(-1)])

    def one_round(r: Any, base: Any, base_edge: Any, carry: Any) -> Any:
        for k in reversed(range(len(parts))):
            for c in reversed(range(num_classes if shape.inner[k] else 0)):
                width, edges = shape.classes[c]
                begin = begins[r * loops + k * num_classes + c]
                at = (0, 0) if one_window else (base[k], base_edge[k])
                carry = lax.while_loop(
                    lambda tc, begin=begin: tc[0] > begin,
                    lambda tc, k=k, w=width, e=edges, at=at: (tc[0] - 1, task(k, w, e, *at, tc[0] - 1, tc[1])),
                    carry,
                )
        return carry

    def after_window(
        k: int, base: Any, base_edge: Any, cuts: list[Any], first: Any = None, first_edge: Any = None
    ) -> tuple[dict[int, Any], list[Any], Any]:
        """The lazy batch of a window: cotangents of static values, of pulled rows, and the vertices that pulled them."""
        part, rows, size, edges = parts[k], all_rows[k], shape.window_rows[k], shape.window_edges[k]
        inside = dict(zip(stored[k], cuts, strict=True))
        inside = {
            v: x[rows.edge_pad : rows.edge_pad + edges] if levels[k][v] == EDGE else x[rows.pad : rows.pad + size]
            for v, x in inside.items()
        }
        if first is not None:  # a last window reaches back over rows of the one before: not its own
            mine = {ROW: jnp.arange(size) >= first - base, EDGE: jnp.arange(edges) >= first_edge - base_edge}
            inside = {v: mask_rows(x, mine[levels[k][v]]) for v, x in inside.items()}
        view = View(rows.pad + base, size, rows.edge_pad + base_edge, edges)
        totals = lazy_gradients(part, rows, view, memory[k], inside) if lazy else {}
        cross = {part.cross[c]: inside[v] for c, v in part.ct_cross.items() if is_var(v)}
        if one_window:
            vertex, (ct_static, ct_pulled) = rows.vertex, saved["eager"][k](_with_cross(part, eager_cts[k], cross))
        else:
            vertex = window(rows.vertex, base, size)
            fn = eager_function(part, window(rows.inner(rows.num_children), base, size))
            values, vjp = jax.vjp(fn, saved["statics"][k], pull(part, saved["inputs"], vertex))
            ct_static, ct_pulled = vjp([cross.get(v, _zero_ct(x)) for v, x in zip(part.eager_outs, values, strict=True)])
        return _merge(totals, _floats(ct_static)), ct_pulled, vertex

    tasks, rounds = jnp.asarray(sched.num_tasks, jnp.int32), sched.num_rounds
    totals = static_cts
    if not lazy:
        totals = [
            {i: total.get(i, _zero_ct(x)) for i, x in enumerate(saved["statics"][k]) if is_float(x)}
            for k, total in enumerate(static_cts)
        ]
    if one_window:
        carry = (tasks, (g, empty_cuts(), totals))
        carry = lax.fori_loop(0, rounds, lambda r, c: one_round(rounds - 1 - r, None, None, c), carry)
        _, (g, cuts, totals) = carry
        for k in range(len(parts)):
            now, ct_pulled, vertex = after_window(k, 0, 0, cuts[k])
            ct_inputs = _put_rows(ct_inputs, ct_pulled, vertex, all_rows[k].count)
            static_cts[k] = _merge(totals[k], now)
        return g, ct_inputs

    for k in range(len(parts)):
        # What the pushes ask of the eager part, in one batch; the windows add what the levels ask.
        ct_static, ct_pulled = saved["eager"][k](eager_cts[k])
        totals[k] = _merge(totals[k], _floats(ct_static))
        totals[k] = {i: totals[k].get(i, _zero_ct(x)) for i, x in enumerate(saved["statics"][k]) if is_float(x)}
        ct_inputs = _put_rows(ct_inputs, ct_pulled, all_rows[k].vertex, all_rows[k].count)

    def one(i: Any, carry: Any) -> Any:
        tasks, g, totals, ct_inputs = carry
        w = sched.num_windows - 1 - i
        first, last = sched.window_round[w], sched.window_round[w + 1]
        start, start_edge = sched.window_start[w], sched.window_edge[w]
        base = jnp.minimum(start, np.subtract(shape.inner, shape.window_rows))
        base_edge = jnp.minimum(start_edge, np.subtract(shape.edges, shape.window_edges))
        inner = (tasks, (g, empty_cuts(), totals))
        inner = lax.fori_loop(0, last - first, lambda r, c: one_round(last - 1 - r, base, base_edge, c), inner)
        tasks, (g, cuts, totals) = inner
        totals, ct_inputs = list(totals), list(ct_inputs)
        for k in range(len(parts)):
            now, ct_pulled, vertex = after_window(k, base[k], base_edge[k], cuts[k], start[k], start_edge[k])
            ct_inputs = _put_rows(ct_inputs, ct_pulled, vertex, all_rows[k].count - base[k], add=True)
            totals[k] = _merge(totals[k], now)
        return tasks, g, totals, ct_inputs

    _, g, totals, ct_inputs = lax.fori_loop(0, sched.num_windows, one, (tasks, g, totals, ct_inputs))
    static_cts[:] = totals
    return g, ct_inputs


def _with_cross(part: Split, eager_cts: list[Any], cross: dict[Any, Any]) -> list[Any]:
    return [ct + cross[v] if v in cross else ct for v, ct in zip(part.eager_outs, eager_cts, strict=True)]


def _memory(
    parts: list[Split], all_rows: list[Rows], saved: dict[str, Any], extra_cts: list[list[Any]]
) -> tuple[list[dict[str, Any]], list[dict[int, Any]]]:
    """What the forward saved for each kind, and the cotangents of extra values; both with slack."""
    memory = [
        {
            "states": saved["states"],
            "statics": saved["statics"][k],
            "crossing": [r.padded(x) for v, x in zip(p.eager_outs, saved["eager_rows"][k], strict=True) if v in p.cross],
            "kept": saved["kept"][k],
            "extras": [
                (r.padded_edges if p.role.level.get(v) == EDGE else r.padded)(x)
                for v, x in zip(p.extra, saved["extras"][k], strict=True)
            ],
        }
        for k, (p, r) in enumerate(zip(parts, all_rows, strict=True))
    ]
    extra_in = [
        {
            i: (r.padded_edges if p.role.level.get(p.extra[i]) == EDGE else r.padded)(cts[i])
            for i in (p.j_extra_cts if cts else ())
        }
        for p, r, cts in zip(parts, all_rows, extra_cts, strict=True)
    ]
    return memory, extra_in


def _reverse_launch(
    plan: Any,
    sched: Schedule,
    parts: list[Split],
    all_rows: list[Rows],
    zeros: Zeros,
    saved: dict[str, Any],
    g: dict[int, Any],
    eager_cts: list[list[Any]],
    extra_cts: list[list[Any]],
    static_cts: list[dict[int, Any]],
    ct_inputs: list[Any],
    kinds: tuple[str | None, ...],
    interpret: bool,
) -> tuple[dict[int, Any], list[Any]]:
    """`_reverse_levels` in one launch, and one lazy batch of all rows after it."""
    memory, _ = _memory(parts, all_rows, saved, [[] for _ in parts])
    g, cuts, operands = persistent_reverse(plan, sched, kinds, parts, all_rows, saved, g, extra_cts, interpret)
    for k, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
        if sched.shape.inner[k] and cuts[k]:
            view = View(rows.pad, rows.size, rows.edge_pad, rows.edges)
            static_cts[k] = _merge(static_cts[k], lazy_gradients(part, rows, view, memory[k], cuts[k], given=operands[k]))
        cross = {part.cross[c]: cuts[k][v] for c, v in part.ct_cross.items() if is_var(v) and cuts[k]}
        ct_static, ct_pulled = saved["eager"][k](_with_cross(part, eager_cts[k], cross))
        ct_inputs = _put_rows(ct_inputs, ct_pulled, rows.vertex, rows.count)
        static_cts[k] = _merge(static_cts[k], _floats(ct_static))
    return g, ct_inputs


def cut_levels(part: Split) -> dict[Any, int]:
    """Whether each cut cotangent has a value per vertex or per edge."""
    levels = {v: u.level for u in part.uses for v in u.cuts if is_var(v)}
    return levels | {v: ROW for v in part.ct_cross.values() if is_var(v)}


def _zero_ct(x: Any) -> Any:
    """The zero cotangent of an array or shape: of its dtype, or JAX's float0 for integers."""
    return jnp.zeros(x.shape, x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def _rows_of_ct(ct: Any, vertex: Any, count: Any) -> Any:
    """Rows of a push's cotangent in schedule order, zero in padding."""
    if ct.dtype == jax.dtypes.float0:
        return np.zeros((vertex.shape[0], *ct.shape[1:]), jax.dtypes.float0)
    return mask_rows(get_rows(ct, vertex), jnp.arange(vertex.shape[0]) < count)


def _add(g: dict[int, Any], i: int, index: Any, ct: Any) -> None:
    if i in g:
        g[i] = g[i].at[index].add(ct, mode="promise_in_bounds")


def _floats(cts: list[Any]) -> dict[int, Any]:
    return {i: ct for i, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0}


def _merge(a: dict[int, Any], b: dict[int, Any]) -> dict[int, Any]:
    return {i: a[i] + b[i] if i in a and i in b else a.get(i, b.get(i)) for i in sorted({*a, *b})}


def _sum(a: list[Any], b: list[Any]) -> list[Any]:
    return [x + y if x.dtype != jax.dtypes.float0 else x for x, y in zip(a, b, strict=True)] if a else list(b)


def _put_rows(ct_inputs: list[Any], ct_rows: list[Any], vertex: Any, count: Any, add: bool = False) -> list[Any]:
    """pull's transpose: each vertex's cotangent to its row of the inputs."""
    out = []
    for total, ct in zip(ct_inputs, ct_rows, strict=True):
        if total is not None and ct.shape[0]:
            index = jnp.where(jnp.arange(ct.shape[0]) < count, vertex, total.shape[0])
            place = total.at[index]
            total = (place.add if add else place.set)(ct, mode="drop", unique_indices=True)
        out.append(total)
    return out
