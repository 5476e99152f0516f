"""One direction of the recurrent part of a batch as a launch, or two if levels are very wide: its operands and results.

In the backward a vertex writes the cotangents of its children to rows of its own, by edge and by slot. The children gather and
add them. So no two thread blocks write to the same row, and sums have a fixed order.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.persistent.chip import LaunchOptions
from cavs._engines.persistent.launch_calls import run_launches
from cavs._engines.persistent.lower import (
    EDGE_CHILD,
    EDGE_COUNT,
    EDGE_PAD,
    NUM_CHILDREN,
    OF_PARENTS,
    PAD,
    PARENT,
    PARENT_COUNT,
    PARENT_FIRST,
    PARENT_SLOT,
    PUSHED_ROW,
    STATE_ROW,
    Recurrence,
)
from cavs._engines.persistent.wide_levels import count_wide_levels, launch_configs
from cavs._function.domains import EDGE
from cavs._function.evaluate import evaluate
from cavs._function.products import exponent_of, scale_to
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Var
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import mask_rows
from cavs._stages.entrance import fixed
from cavs._stages.tensors import Rows as KindRows, get_rows
from cavs.kernels import (
    COLUMNS,
    PRECISIONS,
    Index,
    IndexRole,
    LaunchConfig,
    Output,
    Tensor,
    TensorRole,
    constant_in_memory,
    num_blocks,
    persistent,
    rows_from_memory,
    rows_in_memory,
    segment_rows,
    stored_dtype,
    weight_in_memory,
)

# Bytes of states up to which XLA computes those of the leaves again for their twin, instead of reading them. On one H100
# (2026-11-27), a Tree-LSTM step then takes 6 us less at 5 MB (hidden 512, batch 64), and 27 us more at 40 MB (1024, 256).
RECOMPUTED_BYTES = 8 << 20


class LaunchArrays(NamedTuple):
    """The arrays that a launch reads."""

    statics: list[jax.Array]  # the static values of the kind
    tensors: dict[Tensor, jax.Array]  # what the program's sources name, by vertex or edge, (N, ...)
    states: list[jax.Array]  # the states, which a forward updates; none for a backward
    row: jax.Array | None = None  # as `Cotangents.row`


def launch(
    recurrence: Recurrence, rows: KindRows, sched: Schedule, options: LaunchOptions, inputs: LaunchArrays
) -> persistent.LaunchResults:
    """Runs all levels in one direction.

    Returns what `kernels.persistent.launches` does, with tensors as (N, ...), and with the twins of states.
    """
    program, states = recurrence.program, inputs.states
    configs, wide_rows = launch_configs(recurrence, options, sched.shape)
    constants, weights = _constants(recurrence, inputs.statics, [leaf_exponent(states[i], sched) for i in recurrence.scaled])
    integers = integers_of(recurrence, rows, sched, inner_row(sched), wide_rows if len(configs) > 1 else None, inputs.row)
    tensors = inputs.tensors | {NUM_CHILDREN: integers[EDGE_COUNT]}
    leaves = {Tensor(TensorRole.STATE, i): rows_in_memory(s, program, written=True) for i, s in enumerate(states)}
    int32s = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    read = program.tensors()
    tensors = {name: rows_in_memory(x, program) for name, x in tensors.items() if name in read}
    arrays = persistent.Arrays(tensors, constants, int32s, leaves, _outputs(recurrence, rows))
    ready = functools.partial(_ready, recurrence, sched.shape.pad + sum(sched.shape.leaves))
    out, lost = run_launches(recurrence, options, sched.shape, configs, weights, arrays, ready)
    for name, written in recurrence.written.items():
        out[name] = rows_from_memory(out[name], program, written.value.aval)
    for i, s in enumerate(states):
        like = jax.ShapeDtypeStruct(s.shape[1:], s.dtype)
        state, twin = Tensor(TensorRole.STATE, i), Tensor(TensorRole.STATE, i, half=True)
        out[state] = rows_from_memory(out[state], program, like)
        if twin in out:
            out[twin] = rows_from_memory(out[twin], program, jax.ShapeDtypeStruct(like.shape, out[twin].dtype))
    return out, lost


def inner_row(sched: Schedule) -> jax.Array:
    """Returns the row of the first vertex with children, also if a batch has none. These vertices follow the leaves.

    `sched.task_row[0]` is the same row, but 0 if a batch has no tasks.
    """
    return sched.shape.pad + jnp.asarray(sched.leaf_count).sum(dtype=jnp.int32)


def leaf_exponent(state: jax.Array, sched: Schedule, least: float = 0.0) -> jax.Array:
    """Returns the exponent of the largest number that the leaves of a batch scatter; see `exponent_of`.

    Padding does not count: it may be of a kind of which the batch has no leaves.

    `state`: (rows, ...). The rows of the leaves must have been written.
    """
    leaves = state[: sched.shape.pad + sum(sched.shape.leaves)]
    return exponent_of(mask_rows(leaves, jnp.arange(len(leaves)) < inner_row(sched)), least)


def _constants(
    recurrence: Recurrence, statics: list[jax.Array], exponents: list[jax.Array]
) -> tuple[dict[Tensor, jax.Array], dict[Var, jax.Array]]:
    """Returns the static values that the program reads, and the weights of its products.

    `exponents`: of the states that are scaled, those of the leaves.
    """
    part, program = recurrence.part, recurrence.program
    env = fixed(part, statics)
    if recurrence.factor is not None:
        env[recurrence.factor] = scale_to(functools.reduce(jnp.maximum, exponents), PRECISIONS[recurrence.precision].largest)
    evaluate(recurrence.static_eqns, env, {})
    values = {Tensor(TensorRole.STATIC, n): env[v] for n, v in enumerate(recurrence.statics) if v not in recurrence.weights}
    if len(program.scales) == 1 < len(values):  # else XLA searches the weight once for each element of the constants
        (name,) = program.scales.values()
        values[name] = barrier(values[name])
    constants = {name: constant_in_memory(x, program) for name, x in values.items()}
    return constants, {v: weight_in_memory(env[v], program) for v in recurrence.weights}


def _outputs(recurrence: Recurrence, rows: KindRows) -> dict[Tensor, Output]:
    """Returns the shapes of the tensors that a launch writes."""
    program, outputs = recurrence.program, {}
    for name, written in recurrence.written.items():
        width = max(1, num_blocks(written.value.aval, program.valid)) * program.unit
        if written.domain == EDGE:
            n = rows.edges + (2 * rows.edge_pad if written.base == EDGE_PAD else 0)
        else:
            n = rows.size + 2 * rows.pad if written.base == PAD else written.copies * rows.size
        sparse = name.role in OF_PARENTS
        base = None if sparse else written.base
        outputs[name] = Output(n, width, stored_dtype(written.value.aval), written.domain, base, sparse)
    return outputs


def _ready(
    recurrence: Recurrence, leaves: int, configs: Sequence[LaunchConfig], arrays: persistent.Arrays
) -> persistent.Arrays:
    """Returns the arrays of launches in these layouts, given `arrays` with states of which the first `leaves` rows are known.

    Adds the twins in half precision of what a launch updates or writes. Rows that products await are marked as not written.
    """
    program, half = recurrence.program, PRECISIONS[recurrence.precision]
    awaited = program.exchanged() if any(config.dataflow for config in configs) else set()
    row, tensors, outputs = arrays.integers[Index(IndexRole.SCALARS)][STATE_ROW], dict(arrays.tensors), dict(arrays.outputs)
    updated = {name: _begun(x, leaves, row, name in awaited) for name, x in arrays.updated.items()}
    scale = half.factor if recurrence.factor is None else half.factor * arrays.constants[recurrence.constant(recurrence.factor)]
    for twin, name in program.halves.items():
        if name in outputs:
            outputs[twin] = dataclasses.replace(outputs[name], dtype=half.dtype, sparse=True)
        elif name in updated:
            x = arrays.updated[name]
            if x.nbytes > RECOMPUTED_BYTES:
                x = updated[name] = barrier(updated[name])
            updated[twin] = _begun((x * scale).astype(half.dtype), leaves, row, twin in awaited)
    flows = awaited if not recurrence.forward else set()
    # Products that poll for a cut cotangent would take what it replaces for it.
    replaced = {kept: cut for kept, cut in recurrence.overwritten.items() if cut not in flows}
    updated |= {cut: tensors.pop(kept) for kept, cut in replaced.items()}
    outputs = {name: output for name, output in outputs.items() if name not in updated}
    return dataclasses.replace(arrays, tensors=tensors, updated=updated, outputs=outputs, replaced=replaced)


def _begun(x: jax.Array, leaves: int, row: jax.Array, awaited: bool) -> jax.Array:
    """Returns states of which the rows of the leaves are there. The launch writes the rows from `row` on."""
    if awaited:
        return jnp.where(jnp.arange(x.shape[0])[:, None] >= row, persistent.unwritten(x.shape, x.dtype), x)
    return lax.dynamic_update_slice(lax.empty(x.shape, x.dtype), x[:leaves], (0, 0))


def integers_of(
    recurrence: Recurrence,
    rows: KindRows,
    sched: Schedule,
    state_row: jax.Array,
    wide_rows: int | None,
    g_row: jax.Array | None,
) -> dict[Index, jax.Array]:
    """Returns the vectors of integers of a launch.

    The scalars are in the order of `kernels._program.arrays.NUM_LEVELS` and `_engines.persistent.lower.STATE_ROW`. The last is
    the number of wide levels, which have at least `wide_rows` vertices, if these have a launch of their own.
    """
    num_children, first_edge = rows.inner(rows.num_children), sched.first_edge[_inner_slice(sched, rows)]
    owner, size = rows.inner_edges(rows.edge_owner), rows.size
    last = jnp.maximum(rows.count - 1, 0)
    num_edges = first_edge[last] + num_children[last]
    slots = [k * size for k in range(max(recurrence.arity, 1))]
    scalars = [sched.num_levels, rows.count, num_edges, state_row, rows.pad, rows.edge_pad, *slots]
    if wide_rows is not None:
        scalars.append(count_wide_levels(sched.part_start, wide_rows))
    integers = {
        Index(IndexRole.SCALARS): jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        Index(IndexRole.PART_STARTS): sched.part_start,
        Index(IndexRole.FIRST_EDGE): first_edge,
        EDGE_COUNT: num_children,
        Index(IndexRole.EDGE_OWNER): owner,
        EDGE_CHILD: rows.inner_edges(rows.edge_child),
        **{Index(IndexRole.KID, k): rows.inner(rows.kids)[:, k] for k in range(recurrence.arity)},
    }
    if not recurrence.forward:
        integers |= parents(sched, rows, recurrence.arity, state_row, size)
        state_rows = state_row + jnp.arange(size, dtype=jnp.int32)
        integers[PUSHED_ROW] = state_rows if g_row is None else lax.dynamic_slice_in_dim(g_row, state_row, size)
    return integers


def _inner_slice(sched: Schedule, rows: KindRows) -> slice:
    """Returns where the vertices of a kind are among those with children of all kinds."""
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
    clamped = jnp.maximum(edge, 0)
    owner = get_rows(rows.inner_edges(rows.edge_owner), clamped)
    slot = clamped - get_rows(jnp.asarray(sched.first_edge[_inner_slice(sched, rows)]), jnp.minimum(owner, rows.size - 1))
    out[PARENT_SLOT] = jnp.where((edge < 0) | (slot >= arity), -1, slot * rows.size + owner)
    return out


def gathered(tensor: jax.Array, up: dict[Index, jax.Array], index: Index, n: int, interpret: bool) -> jax.Array:
    """Sums the cotangents that parents wrote to `tensor`, (rows, ...), for each of n vertices, in a fixed order.

    `up`: from `parents`. `index`: the place in `up` of the rows to read. `interpret`: whether the engine runs in Pallas'
    interpreter.
    """
    edge = up[index]
    if PARENT_FIRST not in up:
        return some_rows(tensor, edge)
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    first, count = up[PARENT_FIRST], up[PARENT_COUNT]
    if not interpret:
        # A kernel's operands must be aligned, and slices of the schedule may not be: copy them.
        operands = (jnp.concatenate([x, jnp.zeros(4, jnp.int32)]) for x in (edge, first, count))
        edge, first, count = barrier(tuple(operands))
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % COLUMNS)))
        total = segment_rows(flat, edge, first[:n], count[:n])
        return total[:, : tensor[0].size].reshape(n, *tensor.shape[1:])
    # `parent_edge` lists edges child after child: a sorted segment sum.
    at, ends = jnp.arange(edge.shape[0]), first + count
    child = jnp.clip(jnp.searchsorted(ends, at, side="right"), 0, n)
    total = jax.ops.segment_sum(some_rows(flat, edge), jnp.where(at < ends[-1], child, n), n, indices_are_sorted=True)
    return total.reshape(n, *tensor.shape[1:])


def some_rows(x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the rows of `x` with these numbers, zeros where a number is negative."""
    return mask_rows(get_rows(x, jnp.maximum(number, 0)), number >= 0)
