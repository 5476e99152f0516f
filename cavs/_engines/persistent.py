"""Engine `persistent`: the recurrent part of F, forward and backward, each as one launch, or two where levels are very wide
(`cavs.kernels.persistent`).

What is around it is the same as in engine `scan`: leaves, eager and lazy parts as large products in XLA.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.chip import MEASURED, Layouts
from cavs._engines.engine import BackwardLevels, Batch, Cotangents, ForwardLevels
from cavs._engines.lower import EDGE_PAD, PAD, Program, program_of
from cavs._engines.scan_reverse import eager_cotangents
from cavs._engines.widest import launches, wide_levels
from cavs._function.domains import EDGE
from cavs._function.equations import is_float
from cavs._function.evaluate import evaluate
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import floats, merged, take_rows
from cavs._stages.entrance import memory_of
from cavs._stages.lazy import lazy_gradients
from cavs._stages.tensors import Rows as KindRows, View, get_rows
from cavs.kernels import (
    COLUMNS,
    FACTOR,
    HALVES,
    constant_in_memory,
    num_blocks,
    persistent,
    rows_from_memory,
    rows_in_memory,
    segment_rows,
    stored_dtype,
    weight_in_memory,
)


@dataclasses.dataclass(frozen=True)
class Persistent:
    """Engine `persistent`: one kernel launch for all levels of a direction, or two if some levels are very wide.

    Attributes:
        interpret: Whether Pallas' interpreter runs the kernels: slow, on any machine; for tests.
        layouts: Overrides of the layouts on the chip, for tests and `bench tune`.
    """

    interpret: bool = False
    layouts: Layouts = MEASURED

    launches = True

    def levels(
        self,
        batch: Batch,
        states: list[jax.Array],
        statics: list[list[jax.Array]],
        eager: list[list[jax.Array]],
        save: bool,
    ) -> ForwardLevels:
        """Runs the forward's levels of each kind in one launch, or in two."""
        return levels(self, batch, states, statics, eager, save)

    def reverse(self, batch: Batch, saved: dict[str, Any], cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels of each kind in one launch, or in two, and after it one lazy batch of all rows."""
        g, cuts, operands = reverse(self, batch, saved, cotangents)
        sched = batch.sched
        static_cts, ct_inputs = list(cotangents.statics), cotangents.inputs
        for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
            if not sched.shape.inner[k]:
                continue
            if cuts[k]:
                view, memory = View(rows.pad, rows.size, rows.edge_pad, rows.edges), memory_of(part, rows, saved, k)
                now = lazy_gradients(part, rows, view, memory, cuts[k], given=operands[k])
                static_cts[k] = merged(static_cts[k], now)
            ct_static, ct_pulled = saved["eager"][k](eager_cotangents(part, cotangents.eager[k], cuts[k]))
            # One kind has children, so its rows follow one another.
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), sched.task_row[0], rows.count)
            static_cts[k] = merged(static_cts[k], floats(ct_static))
        return BackwardLevels(g, static_cts, ct_inputs)


def launch(
    engine: Persistent,
    program: Program,
    rows: KindRows,
    sched: Schedule,
    statics: list[Any],
    tensors: dict[str, Any],
    states: list[Any] | None,
    g_row: Any = None,
) -> tuple[dict[str, Any], Any]:
    """Runs all levels in one direction.

    `tensors` are what the sources name, by vertex or edge, (N, ...). Returns the tensors made, (N, ...), by name, the
    states under `state0` ... where they are given (updated), and the flag of `persistent.launches`. `g_row` as in `reverse`.
    """
    part, level = program.part, program.level
    precision = program.precision
    configs, wide_rows = launches(program, precision, engine.interpret, sched.shape, engine.layouts)
    env = dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))
    evaluate(program.static_eqns, env, {})
    statics_of = {f"static{n}": env[v] for n, v in enumerate(program.statics) if v not in program.weights}
    constants = {name: constant_in_memory(x, level) for name, x in statics_of.items()}
    weights = {v: weight_in_memory(env[v], level) for v in program.weights}

    num_children, first = rows.inner(rows.num_children), sched.first_edge[_inner_slice(sched, rows)]
    owner, size = rows.inner_edges(rows.edge_owner), rows.size
    state_row = sched.task_row[0]
    last = jnp.maximum(rows.count - 1, 0)
    num_edges = first[last] + num_children[last]
    slots = [k * size for k in range(max(program.arity, 1))]
    scalars = [sched.num_levels, rows.count, num_edges, state_row, rows.pad, rows.edge_pad, *slots]
    if len(configs) > 1:
        scalars.append(wide_levels(sched.part_start, wide_rows))
    integers = {
        "scalars": jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        "starts": sched.part_start,
        "first": first,
        "count": num_children,
        "edge_owner": owner,
        "edge_child": rows.inner_edges(rows.edge_child),
        **{f"kid{k}": rows.inner(rows.kids)[:, k] for k in range(program.arity)},
    }
    tensors = tensors | {"num_children": num_children}
    if not program.forward:
        integers |= parents(sched, rows, program.arity, state_row, size)
        own = state_row + jnp.arange(size, dtype=jnp.int32)
        integers["g_row"] = own if g_row is None else lax.dynamic_slice_in_dim(g_row, state_row, size)
    made = {}
    for name, (v, lv, base, copies) in program.made.items():
        width = max(1, num_blocks(v.aval, level.valid)) * level.unit
        n = rows.edges + (2 * rows.edge_pad if base == EDGE_PAD else 0) if lv == EDGE else copies * size
        if base == PAD:
            n = size + 2 * rows.pad
        sparse = name.startswith(("up", "edge_up"))
        made[name] = persistent.Made(n, width, stored_dtype(v.aval), lv, None if sparse else base, sparse)
    updated = {f"state{i}": rows_in_memory(s, level, written=True) for i, s in enumerate(states or [])}
    for twin, name in level.halves.items():
        if name in made:
            made[twin] = dataclasses.replace(made[name], dtype=HALVES[precision], sparse=True)
        elif name in updated:
            updated[twin] = (updated[name] * FACTOR[precision]).astype(HALVES[precision])
    awaited = level.exchanged() if any(config.dataflow for config in configs) else set()
    there = sched.shape.pad + sum(sched.shape.leaves)
    for name, x in updated.items():  # leaves are there; a launch writes the rows after them, and those of no vertex
        if name in awaited:
            made_here = jnp.arange(x.shape[0])[:, None] >= state_row
            updated[name] = jnp.where(made_here, persistent.unwritten(x.shape, x.dtype), x)
        else:
            updated[name] = lax.dynamic_update_slice(lax.empty(x.shape, x.dtype), x[:there], (0, 0))
    used = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    wanted = level.tensors()
    tensors = {name: rows_in_memory(x, level) for name, x in tensors.items() if name in wanted}
    arrays = persistent.Arrays(tensors, constants, used, updated, made)
    out, lost = persistent.launches(level, configs, weights, arrays, not program.forward)
    for name, (v, _, _, _) in program.made.items():
        out[name] = rows_from_memory(out[name], level, v.aval)
    for i, s in enumerate(states or []):
        out[f"state{i}"] = rows_from_memory(out[f"state{i}"], level, jax.ShapeDtypeStruct(s.shape[1:], s.dtype))
    return out, lost


def _inner_slice(sched: Schedule, rows: KindRows) -> slice:
    start = sum(sched.shape.inner[: rows.kind])
    return slice(start, start + rows.size)


def parents(sched: Schedule, rows: KindRows, arity: int, at: Any, size: int) -> dict[str, Any]:
    """Where vertices from row `at` of the dynamic tensors find what their parents left: by edge and by slot."""
    edge = jnp.asarray(sched.parent_edge)
    out = {}
    if sched.shape.forest:
        edge = lax.dynamic_slice_in_dim(edge, at, size)
    else:
        out["parent_first"] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_first), at, size)
        out["parent_count"] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_count), at, size)
    out["parent"] = edge
    known = jnp.maximum(edge, 0)
    owner = get_rows(rows.inner_edges(rows.edge_owner), known)
    slot = known - get_rows(jnp.asarray(sched.first_edge[_inner_slice(sched, rows)]), jnp.minimum(owner, rows.size - 1))
    out["parent_slot"] = jnp.where((edge < 0) | (slot >= arity), -1, slot * rows.size + owner)
    return out


def levels(
    engine: Persistent,
    batch: Batch,
    states: list[jax.Array],
    statics: list[list[jax.Array]],
    eager: list[list[jax.Array]],
    save: bool,
) -> ForwardLevels:
    """Launches the forward's levels of each kind that has vertices with children."""
    plan, sched, kinds, all_rows, zeros = batch
    kept, extras, gave_up = [], [], jnp.zeros(1, jnp.int32)
    for k, (name, rows) in enumerate(zip(kinds, all_rows, strict=True)):
        part = plan.inner[name]
        if not sched.shape.inner[k]:
            kept.append(
                [rows.tensor(zeros, v.aval, part.joint.domain.get(v) == EDGE) for v in (part.forward.keep if save else ())]
            )
            edge = [part.role.domain.get(v) == EDGE for v in part.recurrent.extra]
            tensors = [rows.tensor(zeros, v.aval, e) for v, e in zip(part.recurrent.extra, edge, strict=True)]
            extras.append([rows.inner_edges(x) if e else rows.inner(x) for x, e in zip(tensors, edge, strict=True)])
            continue
        made = program_of(plan, name, True, keep=save)
        crossing = [x for v, x in zip(part.eager.outs, eager[k], strict=True) if v in part.recurrent.cross]
        tensors = {f"cross{n}": x for n, x in enumerate(crossing)}
        out, lost = launch(engine, made, rows, sched, statics[k], tensors, states)
        states = [out[f"state{i}"] for i in range(len(states))]
        gave_up = gave_up + lost
        kept.append([out[f"kept{n}"] for n in range(len(made.kept))])
        extras.append([out[f"extra{n}"] for n in range(len(part.recurrent.extra))])
    return ForwardLevels(states, kept, extras, gave_up)


def reverse(
    engine: Persistent, batch: Batch, saved: dict[str, Any], cotangents: Cotangents
) -> tuple[dict[int, Any], list[dict[Any, Any]], list[dict[Any, Any]]]:
    """The backward's levels: the states' cotangents at leaves; of each kind the cut cotangents, and operands made again.

    The pushes' cotangents of states are in the states' rows, or by number if `cotangents.row` is given (`by_number`).
    """
    plan, sched, kinds, all_rows, _ = batch
    g, g_row, extra_cts = cotangents.states, cotangents.row, cotangents.extras
    cuts: list[dict[Any, Any]] = []
    operands: list[dict[Any, Any]] = []
    for k, (name, part, rows) in enumerate(zip(kinds, batch.parts, all_rows, strict=True)):
        cuts.append({})
        operands.append({})
        if not sched.shape.inner[k]:
            continue
        made = program_of(plan, name, False, sched.shape.forest)
        tensors = {f"g{i}": x for i, x in g.items() if i in made.pushed}
        tensors |= {f"state{i}": x for i, x in enumerate(saved["states"])}
        crossing = [x for v, x in zip(part.eager.outs, saved["eager_rows"][k], strict=True) if v in part.recurrent.cross]
        tensors |= {f"cross{n}": x for n, x in enumerate(crossing)}
        tensors |= {f"kept{n}": x for n, x in enumerate(saved["kept"][k])}
        tensors |= {f"extra{n}": x for n, x in enumerate(saved["extras"][k])}
        for i, v in part.reverse.extra_cts.items():
            edge = part.role.domain.get(part.recurrent.extra[i]) == EDGE
            zero = jnp.zeros((rows.edges if edge else rows.size, *v.aval.shape), v.aval.dtype)
            tensors[f"extra_ct{i}"] = extra_cts[k][i] if extra_cts[k] else zero
        out, lost = launch(engine, made, rows, sched, saved["statics"][k], tensors, None, g_row)
        cuts[k] = {v: out[f"cut{n}"] for n, v in enumerate(part.reverse.cuts)}
        operands[k] = {v: out[f"operand{n}"] for n, v in enumerate(made.operands)}
        leaves = sched.shape.pad + sum(sched.shape.leaves)
        up = parents(sched, rows, made.arity, 0, leaves)
        above, g = g, {}
        for i, state in enumerate(saved["states"]):
            if not is_float(state):
                continue
            if g_row is None:
                total = above[i][:leaves]
            elif i in above:
                total = _some_rows(above[i], g_row[:leaves])
            else:
                total = jnp.zeros((leaves, *state.shape[1:]), state.dtype)
            for tensor, index in ((f"up{i}", "parent_slot"), (f"edge_up{i}", "parent")):
                if tensor in out:
                    total = total + gathered(out[tensor], up, index, leaves, engine.interpret)
            g[i] = persistent.checked(total, lost)
    return g, cuts, operands


def gathered(tensor: Any, up: dict[str, Any], index: str, n: int, interpret: bool) -> Any:
    """The sum of what parents left in `tensor`, for n vertices; in a fixed order."""
    edge = up[index]
    if "parent_first" not in up:
        return _some_rows(tensor, edge)
    flat = tensor.reshape(tensor.shape[0], -1)
    first, count = up["parent_first"], up["parent_count"]
    if not interpret:
        # What follows from slices of the schedule is made anew: a kernel's operands must be aligned.
        operands = (jnp.concatenate([x, jnp.zeros(4, jnp.int32)]) for x in (edge, first, count))
        edge, first, count = lax.optimization_barrier(tuple(operands))
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % COLUMNS)))
        total = segment_rows(flat, edge, first[:n], count[:n])
        return total[:, : tensor[0].size].reshape(n, *tensor.shape[1:])
    # `parent_edge` lists edges child after child: a sorted segment sum.
    at, ends = jnp.arange(edge.shape[0]), first + count
    child = jnp.clip(jnp.searchsorted(ends, at, side="right"), 0, n)
    rows = jnp.where((edge >= 0)[:, None], get_rows(flat, jnp.maximum(edge, 0)), 0)
    total = jax.ops.segment_sum(rows, jnp.where(at < ends[-1], child, n), n, indices_are_sorted=True)
    return total.reshape(n, *tensor.shape[1:])


def _some_rows(x: Any, number: Any) -> Any:
    """Rows of `x` by number, zeros where that is negative."""
    return jnp.where((number >= 0).reshape(-1, *(1,) * (x.ndim - 1)), get_rows(x, jnp.maximum(number, 0)), 0)
