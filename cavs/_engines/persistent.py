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
from cavs._engines.engine import BackwardLevels, Cotangents, ForwardLevels
from cavs._engines.lower import (
    EDGE_CHILD,
    EDGE_COUNT,
    EDGE_PAD,
    NUM_CHILDREN,
    PAD,
    PARENT,
    PARENT_COUNT,
    PARENT_FIRST,
    PARENT_SLOT,
    PUSHED_ROW,
    Recurrence,
    is_sparse,
    recurrence_of,
)
from cavs._engines.scan_reverse import eager_cotangents
from cavs._engines.widest import launches, wide_levels
from cavs._function.domains import EDGE
from cavs._function.equations import is_float
from cavs._function.evaluate import evaluate
from cavs._function.jaxprs import Var
from cavs._function.split import Split
from cavs._function.trace import Plan
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import floats, merged, take_rows
from cavs._stages.entrance import memory_of
from cavs._stages.lazy import lazy_gradients
from cavs._stages.tensors import Rows as KindRows, View, Zeros, get_rows
from cavs.kernels import (
    COLUMNS,
    FACTOR,
    HALVES,
    Index,
    IndexRole,
    Output,
    Role,
    Tensor,
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
        plan: Plan,
        sched: Schedule,
        kinds: tuple[str | None, ...],
        all_rows: list[KindRows],
        zeros: Zeros,
        states: list[jax.Array],
        statics: list[list[jax.Array]],
        eager: list[list[jax.Array]],
        save: bool,
    ) -> ForwardLevels:
        """Runs the forward's levels of each kind in one launch, or in two."""
        return levels(self, plan, sched, kinds, all_rows, zeros, states, statics, eager, save)

    def reverse(
        self,
        plan: Plan,
        sched: Schedule,
        kinds: tuple[str | None, ...],
        all_rows: list[KindRows],
        zeros: Zeros,
        saved: dict[str, Any],
        cotangents: Cotangents,
    ) -> BackwardLevels:
        """Runs the backward's levels of each kind in one launch, or in two, and after it one lazy batch of all rows."""
        parts = [plan.inner[name] for name in kinds]
        g, cuts, operands = reverse(self, plan, sched, kinds, parts, all_rows, saved, cotangents)
        static_cts, ct_inputs = list(cotangents.statics), cotangents.inputs
        for k, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
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
    recurrence: Recurrence,
    rows: KindRows,
    sched: Schedule,
    statics: list[jax.Array],
    tensors: dict[Tensor, jax.Array],
    states: list[jax.Array] | None,
    g_row: jax.Array | None = None,
) -> tuple[dict[Tensor, jax.Array], jax.Array]:
    """Runs all levels in one direction.

    Args:
        engine: The engine.
        recurrence: What to run.
        rows: The rows of the kind.
        sched: The schedule.
        statics: The static values of the kind.
        tensors: What the program's sources name, by vertex or edge, (N, ...).
        states: If given, the states, which the launch updates.
        g_row: As `Cotangents.row`.

    Returns:
        The tensors written, (N, ...), by name, and the flag of `kernels.persistent.launches`.
    """
    program = recurrence.program
    configs, wide_rows = launches(recurrence, recurrence.precision, engine.interpret, sched.shape, engine.layouts)
    constants, weights = _constants(recurrence, statics)
    state_row = sched.task_row[0]
    integers = _integers(recurrence, rows, sched, state_row, wide_rows if len(configs) > 1 else None, g_row)
    tensors = tensors | {NUM_CHILDREN: integers[EDGE_COUNT]}
    outputs = _outputs(recurrence, rows)
    updated = {Tensor(Role.STATE, i): rows_in_memory(s, program, written=True) for i, s in enumerate(states or [])}
    for twin, name in program.halves.items():
        dtype = HALVES[recurrence.precision]
        if name in outputs:
            outputs[twin] = dataclasses.replace(outputs[name], dtype=dtype, sparse=True)
        elif name in updated:
            updated[twin] = (updated[name] * FACTOR[recurrence.precision]).astype(dtype)
    awaited = program.exchanged() if any(config.dataflow for config in configs) else set()
    updated = {name: _begun(x, sched, state_row, name in awaited) for name, x in updated.items()}
    used = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    read = program.tensors()
    tensors = {name: rows_in_memory(x, program) for name, x in tensors.items() if name in read}
    arrays = persistent.Arrays(tensors, constants, used, updated, outputs)
    out, lost = persistent.launches(program, configs, weights, arrays, not recurrence.forward)
    for name, written in recurrence.written.items():
        out[name] = rows_from_memory(out[name], program, written.value.aval)
    for i, s in enumerate(states or []):
        like = jax.ShapeDtypeStruct(s.shape[1:], s.dtype)
        out[Tensor(Role.STATE, i)] = rows_from_memory(out[Tensor(Role.STATE, i)], program, like)
    return out, lost


def _constants(recurrence: Recurrence, statics: list[jax.Array]) -> tuple[dict[Tensor, jax.Array], dict[Var, jax.Array]]:
    """The static values that the program reads, and the weights of its products."""
    part, program = recurrence.part, recurrence.program
    env = dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))
    evaluate(recurrence.static_eqns, env, {})
    values = {Tensor(Role.STATIC, n): env[v] for n, v in enumerate(recurrence.statics) if v not in recurrence.weights}
    constants = {name: constant_in_memory(x, program) for name, x in values.items()}
    return constants, {v: weight_in_memory(env[v], program) for v in recurrence.weights}


def _integers(
    recurrence: Recurrence,
    rows: KindRows,
    sched: Schedule,
    state_row: jax.Array,
    wide_rows: int | None,
    g_row: jax.Array | None,
) -> dict[Index, jax.Array]:
    """The vectors of integers of a launch.

    The scalars are in the order of `kernels._program.arrays.NUM_LEVELS` and `_engines.lower.STATE_ROW`. The last is the number
    of wide levels, which have at least `wide_rows` vertices, if these have a launch of their own.
    """
    num_children, first = rows.inner(rows.num_children), sched.first_edge[_inner_slice(sched, rows)]
    owner, size = rows.inner_edges(rows.edge_owner), rows.size
    last = jnp.maximum(rows.count - 1, 0)
    num_edges = first[last] + num_children[last]
    slots = [k * size for k in range(max(recurrence.arity, 1))]
    scalars = [sched.num_levels, rows.count, num_edges, state_row, rows.pad, rows.edge_pad, *slots]
    if wide_rows is not None:
        scalars.append(wide_levels(sched.part_start, wide_rows))
    integers = {
        Index(IndexRole.SCALARS): jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        Index(IndexRole.PART_STARTS): sched.part_start,
        Index(IndexRole.FIRST_EDGE): first,
        EDGE_COUNT: num_children,
        Index(IndexRole.EDGE_OWNER): owner,
        EDGE_CHILD: rows.inner_edges(rows.edge_child),
        **{Index(IndexRole.KID, k): rows.inner(rows.kids)[:, k] for k in range(recurrence.arity)},
    }
    if not recurrence.forward:
        integers |= parents(sched, rows, recurrence.arity, state_row, size)
        own = state_row + jnp.arange(size, dtype=jnp.int32)
        integers[PUSHED_ROW] = own if g_row is None else lax.dynamic_slice_in_dim(g_row, state_row, size)
    return integers


def _outputs(recurrence: Recurrence, rows: KindRows) -> dict[Tensor, Output]:
    """The shapes of the tensors that a launch writes."""
    program, found = recurrence.program, {}
    for name, written in recurrence.written.items():
        width = max(1, num_blocks(written.value.aval, program.valid)) * program.unit
        if written.domain == EDGE:
            n = rows.edges + (2 * rows.edge_pad if written.base == EDGE_PAD else 0)
        else:
            n = rows.size + 2 * rows.pad if written.base == PAD else written.copies * rows.size
        sparse = is_sparse(name)
        base = None if sparse else written.base
        found[name] = Output(n, width, stored_dtype(written.value.aval), written.domain, base, sparse)
    return found


def _begun(x: jax.Array, sched: Schedule, state_row: jax.Array, awaited: bool) -> jax.Array:
    """States of which the leaves' rows are known; the launch writes the rows after them, and those of no vertex."""
    if awaited:
        launched = jnp.arange(x.shape[0])[:, None] >= state_row
        return jnp.where(launched, persistent.unwritten(x.shape, x.dtype), x)
    there = sched.shape.pad + sum(sched.shape.leaves)
    return lax.dynamic_update_slice(lax.empty(x.shape, x.dtype), x[:there], (0, 0))


def _inner_slice(sched: Schedule, rows: KindRows) -> slice:
    start = sum(sched.shape.inner[: rows.kind])
    return slice(start, start + rows.size)


def parents(sched: Schedule, rows: KindRows, arity: int, at: jax.Array | int, size: int) -> dict[Index, jax.Array]:
    """Returns where vertices from row `at` of the dynamic tensors find what their parents wrote: by edge and by slot."""
    edge = jnp.asarray(sched.parent_edge)
    out: dict[Index, jax.Array] = {}
    if sched.shape.forest:
        edge = lax.dynamic_slice_in_dim(edge, at, size)
    else:
        out[PARENT_FIRST] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_first), at, size)
        out[PARENT_COUNT] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_count), at, size)
    out[PARENT] = edge
    known = jnp.maximum(edge, 0)
    owner = get_rows(rows.inner_edges(rows.edge_owner), known)
    slot = known - get_rows(jnp.asarray(sched.first_edge[_inner_slice(sched, rows)]), jnp.minimum(owner, rows.size - 1))
    out[PARENT_SLOT] = jnp.where((edge < 0) | (slot >= arity), -1, slot * rows.size + owner)
    return out


def levels(
    engine: Persistent,
    plan: Plan,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    all_rows: list[KindRows],
    zeros: Zeros,
    states: list[jax.Array],
    statics: list[list[jax.Array]],
    eager: list[list[jax.Array]],
    save: bool,
) -> ForwardLevels:
    """The forward's levels: states; per kind what the backward keeps and the lazy part reads; and a flag for `checked`."""
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
        made = recurrence_of(plan, name, True, keep=save)
        crossing = [x for v, x in zip(part.eager.outs, eager[k], strict=True) if v in part.recurrent.cross]
        tensors = {Tensor(Role.CROSSING, n): x for n, x in enumerate(crossing)}
        out, lost = launch(engine, made, rows, sched, statics[k], tensors, states)
        states = [out[Tensor(Role.STATE, i)] for i in range(len(states))]
        gave_up = gave_up + lost
        kept.append([out[Tensor(Role.KEPT, n)] for n in range(len(made.kept))])
        extras.append([out[Tensor(Role.EXTRA, n)] for n in range(len(part.recurrent.extra))])
    return ForwardLevels(states, kept, extras, gave_up)


def reverse(
    engine: Persistent,
    plan: Plan,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    parts: list[Split],
    all_rows: list[KindRows],
    saved: dict[str, Any],
    cotangents: Cotangents,
) -> tuple[dict[int, Any], list[dict[Any, Any]], list[dict[Any, Any]]]:
    """The backward's levels: the states' cotangents at leaves; of each kind the cut cotangents, and operands made again.

    The pushes' cotangents of states are in the states' rows, or by number if `cotangents.row` is given (`by_number`).
    """
    g, g_row, extra_cts = cotangents.states, cotangents.row, cotangents.extras
    cuts: list[dict[Any, Any]] = []
    operands: list[dict[Any, Any]] = []
    for k, (name, part, rows) in enumerate(zip(kinds, parts, all_rows, strict=True)):
        cuts.append({})
        operands.append({})
        if not sched.shape.inner[k]:
            continue
        made = recurrence_of(plan, name, False, sched.shape.forest)
        tensors = {Tensor(Role.PUSHED, i): x for i, x in g.items() if i in made.pushed}
        tensors |= {Tensor(Role.STATE, i): x for i, x in enumerate(saved["states"])}
        crossing = [x for v, x in zip(part.eager.outs, saved["eager_rows"][k], strict=True) if v in part.recurrent.cross]
        tensors |= {Tensor(Role.CROSSING, n): x for n, x in enumerate(crossing)}
        tensors |= {Tensor(Role.KEPT, n): x for n, x in enumerate(saved["kept"][k])}
        tensors |= {Tensor(Role.EXTRA, n): x for n, x in enumerate(saved["extras"][k])}
        for i, v in part.reverse.extra_cts.items():
            edge = part.role.domain.get(part.recurrent.extra[i]) == EDGE
            zero = jnp.zeros((rows.edges if edge else rows.size, *v.aval.shape), v.aval.dtype)
            tensors[Tensor(Role.EXTRA_COTANGENT, i)] = extra_cts[k][i] if extra_cts[k] else zero
        out, lost = launch(engine, made, rows, sched, saved["statics"][k], tensors, None, g_row)
        cuts[k] = {v: out[Tensor(Role.CUT, n)] for n, v in enumerate(part.reverse.cuts)}
        operands[k] = {v: out[Tensor(Role.OPERAND, n)] for n, v in enumerate(made.operands)}
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
            for tensor, index in ((Tensor(Role.TO_SLOT, i), PARENT_SLOT), (Tensor(Role.TO_EDGE, i), PARENT)):
                if tensor in out:
                    total = total + gathered(out[tensor], up, index, leaves, engine.interpret)
            g[i] = persistent.checked(total, lost)
    return g, cuts, operands


def gathered(tensor: jax.Array, up: dict[Index, jax.Array], index: Index, n: int, interpret: bool) -> jax.Array:
    """The sum of what parents left in `tensor`, for n vertices; in a fixed order."""
    edge = up[index]
    if PARENT_FIRST not in up:
        return _some_rows(tensor, edge)
    flat = tensor.reshape(tensor.shape[0], -1)
    first, count = up[PARENT_FIRST], up[PARENT_COUNT]
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


def _some_rows(x: jax.Array, number: jax.Array) -> jax.Array:
    """Rows of `x` by number, zeros where that is negative."""
    return jnp.where((number >= 0).reshape(-1, *(1,) * (x.ndim - 1)), get_rows(x, jnp.maximum(number, 0)), 0)
