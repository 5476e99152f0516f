"""One direction of the recurrent part of a batch as a launch, or two if levels are very wide: its operands and results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.persistent.beside import run_launches
from cavs._engines.persistent.chip import LaunchOptions
from cavs._engines.persistent.indices import integers_of
from cavs._engines.persistent.lower import EDGE_COUNT, EDGE_PAD, NUM_CHILDREN, PAD, STATE_ROW, Recurrence, is_sparse
from cavs._engines.persistent.wide_levels import launch_configs
from cavs._function.domains import EDGE
from cavs._function.evaluate import evaluate
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Var
from cavs._schedule.schedule import Schedule
from cavs._stages.tensors import Rows as KindRows
from cavs.kernels import (
    PRECISIONS,
    Index,
    IndexRole,
    LevelProgram,
    Output,
    Tensor,
    TensorRole,
    constant_in_memory,
    num_blocks,
    persistent,
    rows_from_memory,
    rows_in_memory,
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
    recurrence: Recurrence, rows: KindRows, sched: Schedule, how: LaunchOptions, given: LaunchArrays
) -> persistent.LaunchResults:
    """Runs all levels in one direction.

    Returns what `kernels.persistent.launches` does, with tensors as (N, ...), and with the twins of states.
    """
    program, states = recurrence.program, given.states
    configs, wide_rows = launch_configs(recurrence, how, sched.shape)
    constants, weights = _constants(recurrence, given.statics)
    state_row = sched.task_row[0]
    integers = integers_of(recurrence, rows, sched, state_row, wide_rows if len(configs) > 1 else None, given.row)
    tensors = given.tensors | {NUM_CHILDREN: integers[EDGE_COUNT]}
    outputs = _outputs(recurrence, rows)
    leaves = {Tensor(TensorRole.STATE, i): rows_in_memory(s, program, written=True) for i, s in enumerate(states)}
    awaited = program.exchanged() if any(config.dataflow for config in configs) else set()
    updated = {name: _begun(x, sched, state_row, name in awaited) for name, x in leaves.items()}
    _add_twins(recurrence, leaves, updated, outputs, lambda twin, x: _begun(x, sched, state_row, twin in awaited))
    used = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    read = program.tensors()
    tensors = {name: rows_in_memory(x, program) for name, x in tensors.items() if name in read}
    flows = awaited if not recurrence.forward else set()
    # Products that poll for a cut cotangent would take what it replaces for it.
    replaced = {kept: by for kept, by in recurrence.overwritten.items() if by not in flows}
    updated |= {by: tensors.pop(kept) for kept, by in replaced.items()}
    fresh = {name: output for name, output in outputs.items() if name not in updated}
    arrays = persistent.Arrays(tensors, constants, used, updated, fresh, replaced)
    polled = functools.partial(_polled, program, outputs)
    out, lost = run_launches(recurrence, how, sched.shape, configs, weights, arrays, polled)
    for name, written in recurrence.written.items():
        out[name] = rows_from_memory(out[name], program, written.value.aval)
    for i, s in enumerate(states):
        like = jax.ShapeDtypeStruct(s.shape[1:], s.dtype)
        state, twin = Tensor(TensorRole.STATE, i), Tensor(TensorRole.STATE, i, half=True)
        out[state] = rows_from_memory(out[state], program, like)
        if twin in out:
            out[twin] = rows_from_memory(out[twin], program, jax.ShapeDtypeStruct(like.shape, out[twin].dtype))
    return out, lost


def _constants(recurrence: Recurrence, statics: list[jax.Array]) -> tuple[dict[Tensor, jax.Array], dict[Var, jax.Array]]:
    """Returns the static values that the program reads, and the weights of its products."""
    part, program = recurrence.part, recurrence.program
    env = dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))
    evaluate(recurrence.static_eqns, env, {})
    values = {Tensor(TensorRole.STATIC, n): env[v] for n, v in enumerate(recurrence.statics) if v not in recurrence.weights}
    constants = {name: constant_in_memory(x, program) for name, x in values.items()}
    return constants, {v: weight_in_memory(env[v], program) for v in recurrence.weights}


def _outputs(recurrence: Recurrence, rows: KindRows) -> dict[Tensor, Output]:
    """Returns the shapes of the tensors that a launch writes."""
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


def _add_twins(
    recurrence: Recurrence,
    leaves: dict[Tensor, jax.Array],
    updated: dict[Tensor, jax.Array],
    outputs: dict[Tensor, Output],
    begun: Callable[[Tensor, jax.Array], jax.Array],
) -> None:
    """Adds the twins in half precision of what a launch updates or writes.

    `leaves`: what is updated, before it is `_begun`. `begun`: `_begun` of a twin.
    """
    half = PRECISIONS[recurrence.precision]
    for twin, name in recurrence.program.halves.items():
        if name in outputs:
            outputs[twin] = dataclasses.replace(outputs[name], dtype=half.dtype, sparse=True)
        elif name in updated:
            x = leaves[name]
            if x.nbytes > RECOMPUTED_BYTES:
                x = updated[name] = barrier(updated[name])
            updated[twin] = begun(twin, (x * half.factor).astype(half.dtype))


def _begun(x: jax.Array, sched: Schedule, state_row: jax.Array, awaited: bool) -> jax.Array:
    """Returns states with the leaves' rows filled. The launch writes the rows after them."""
    if awaited:
        return _unwritten_from(x, state_row)
    there = sched.shape.pad + sum(sched.shape.leaves)
    return lax.dynamic_update_slice(lax.empty(x.shape, x.dtype), x[:there], (0, 0))


def _unwritten_from(x: jax.Array, row: jax.Array) -> jax.Array:
    """Returns states of which products await the rows from `row` on."""
    launched = jnp.arange(x.shape[0])[:, None] >= row
    return jnp.where(launched, persistent.unwritten(x.shape, x.dtype), x)


def _polled(program: LevelProgram, outputs: Mapping[Tensor, Output], arrays: persistent.Arrays) -> persistent.Arrays:
    """Returns the arrays of a launch whose products await what `program` exchanges, given those of one that has barriers.

    Rows that a launch writes are marked as not written, and cut cotangents that are awaited replace no kept values.

    `outputs`: all tensors that the launch writes, also those that `arrays` updates.
    """
    awaited, row = program.exchanged(), arrays.integers[Index(IndexRole.SCALARS)][STATE_ROW]
    apart = {kept: by for kept, by in arrays.replaced.items() if by in awaited}
    updated = {name: x for name, x in arrays.updated.items() if name not in apart.values()}
    return dataclasses.replace(
        arrays,
        tensors=arrays.tensors | {kept: arrays.updated[by] for kept, by in apart.items()},
        updated={name: _unwritten_from(x, row) if name in awaited else x for name, x in updated.items()},
        outputs={name: output for name, output in outputs.items() if name not in updated},
        replaced={kept: by for kept, by in arrays.replaced.items() if kept not in apart},
    )
