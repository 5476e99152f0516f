"""Engine `persistent`: the recurrent part of F as one launch in each direction, or two if levels are very wide
(`cavs.kernels.persistent`).

The rest is the same as in engine `scan`: the leaves and the eager and lazy parts are large products in XLA.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.chip import MEASURED, Layouts
from cavs._engines.engine import BackwardLevels, Batch, Cotangents, ForwardLevels, StagesInXla
from cavs._engines.indices import gathered, integers_of, parents, some_rows
from cavs._engines.lower import (
    EDGE_COUNT,
    EDGE_PAD,
    NUM_CHILDREN,
    PAD,
    PARENT,
    PARENT_SLOT,
    Recurrence,
    is_sparse,
    recurrence_of,
)
from cavs._engines.scan_task import eager_cotangents
from cavs._engines.widest import launch_configs
from cavs._function.domains import EDGE
from cavs._function.equations import is_float
from cavs._function.evaluate import evaluate
from cavs._function.jaxprs import Var
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import floats, merged, put_rows, take_rows
from cavs._stages.entrance import memory_of
from cavs._stages.lazy import lazy_gradients
from cavs._stages.saved import Saved
from cavs._stages.tensors import Rows as KindRows, RowSpan
from cavs.kernels import (
    PRECISIONS,
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


@dataclasses.dataclass(frozen=True)
class Persistent(StagesInXla):
    """Engine `persistent`: one kernel launch for all levels of a direction, or two if some levels are very wide.

    Attributes:
        interpret: Whether Pallas' interpreter runs the kernels: slow, on any machine; for tests.
        layouts: Overrides of the layouts on the chip, for tests and `bench tune`.
    """

    interpret: bool = False
    layouts: Layouts = MEASURED

    launches = True

    def forward_levels(
        self,
        batch: Batch,
        states: list[jax.Array],
        statics: list[list[jax.Array]],
        eager: list[list[jax.Array]],
        save: bool,
    ) -> ForwardLevels:
        """Runs the forward's levels of each kind in one launch, or in two."""
        return forward_launches(self, batch, states, statics, eager, save)

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels of each kind in one launch, or in two, and after it one lazy batch of all rows."""
        g, cuts, operands = backward_launches(self, batch, saved, cotangents)
        sched = batch.sched
        static_cts, ct_inputs, ct_edges = list(cotangents.statics), cotangents.inputs, cotangents.edges
        for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
            if not sched.shape.inner[k]:
                continue
            if cuts[k]:
                span, memory = RowSpan(rows.pad, rows.size, rows.edge_pad, rows.edges), memory_of(part, rows, saved, k)
                memory = memory._replace(kept=memory.kept[: len(part.forward.keep)])
                now = lazy_gradients(part, rows, span, memory, cuts[k], given=operands[k])
                static_cts[k] = merged(static_cts[k], now)
            ct_static, ct_pulled, ct_edge = saved.eager[k](eager_cotangents(part, cotangents.eager[k], cuts[k]))
            ct_edges = put_rows(ct_edges, ct_edge, rows.edge_row, rows.real_edges.sum())
            # One kind has children, so its rows follow one another.
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), sched.task_row[0], rows.count)
            static_cts[k] = merged(static_cts[k], floats(ct_static))
        return BackwardLevels(g, static_cts, ct_inputs, ct_edges)


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
    configs, wide_rows = launch_configs(recurrence, recurrence.precision, engine.interpret, sched.shape, engine.layouts)
    constants, weights = _constants(recurrence, statics)
    state_row = sched.task_row[0]
    integers = integers_of(recurrence, rows, sched, state_row, wide_rows if len(configs) > 1 else None, g_row)
    tensors = tensors | {NUM_CHILDREN: integers[EDGE_COUNT]}
    outputs = _outputs(recurrence, rows)
    updated = {Tensor(TensorRole.STATE, i): rows_in_memory(s, program, written=True) for i, s in enumerate(states or [])}
    awaited = program.exchanged() if any(config.dataflow for config in configs) else set()
    updated = {name: _begun(x, sched, state_row, name in awaited) for name, x in updated.items()}
    _add_twins(recurrence, updated, outputs, lambda twin, x: _begun(x, sched, state_row, twin in awaited))
    used = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    read = program.tensors()
    tensors = {name: rows_in_memory(x, program) for name, x in tensors.items() if name in read}
    flows = awaited if not recurrence.forward else set()
    replaced = {
        Tensor(TensorRole.REPLACED, m): Tensor(TensorRole.CUT, m) for m in recurrence.replaced if not recurrence.forward
    }
    # Products that poll for a cut cotangent would take what it replaces for it.
    replaced = {kept: by for kept, by in replaced.items() if by not in flows}
    updated |= {by: tensors.pop(kept) for kept, by in replaced.items()}
    outputs = {name: output for name, output in outputs.items() if name not in updated}
    arrays = persistent.Arrays(tensors, constants, used, updated, outputs, replaced)
    out, lost = persistent.launches(program, configs, weights, arrays, not recurrence.forward)
    for name, written in recurrence.written.items():
        out[name] = rows_from_memory(out[name], program, written.value.aval)
    for i, s in enumerate(states or []):
        like = jax.ShapeDtypeStruct(s.shape[1:], s.dtype)
        out[Tensor(TensorRole.STATE, i)] = rows_from_memory(out[Tensor(TensorRole.STATE, i)], program, like)
    return out, lost


def _constants(recurrence: Recurrence, statics: list[jax.Array]) -> tuple[dict[Tensor, jax.Array], dict[Var, jax.Array]]:
    """The static values that the program reads, and the weights of its products."""
    part, program = recurrence.part, recurrence.program
    env = dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))
    evaluate(recurrence.static_eqns, env, {})
    values = {Tensor(TensorRole.STATIC, n): env[v] for n, v in enumerate(recurrence.statics) if v not in recurrence.weights}
    constants = {name: constant_in_memory(x, program) for name, x in values.items()}
    return constants, {v: weight_in_memory(env[v], program) for v in recurrence.weights}


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


def _add_twins(
    recurrence: Recurrence,
    updated: dict[Tensor, jax.Array],
    outputs: dict[Tensor, Output],
    begun: Callable[[Tensor, jax.Array], jax.Array],
) -> None:
    """Adds the twins in half precision of what a launch updates or writes; `begun` is `_begun` of a twin."""
    half = PRECISIONS[recurrence.precision]
    for twin, name in recurrence.program.halves.items():
        if name in outputs:
            outputs[twin] = dataclasses.replace(outputs[name], dtype=half.dtype, sparse=True)
        elif name in updated:
            # The barrier keeps XLA from computing the leaves' states again for their twin.
            updated[name] = lax.optimization_barrier(updated[name])
            updated[twin] = begun(twin, (updated[name] * half.factor).astype(half.dtype))


def _begun(x: jax.Array, sched: Schedule, state_row: jax.Array, awaited: bool) -> jax.Array:
    """States of which the leaves' rows are known; the launch writes the rows after them, and those of no vertex."""
    if awaited:
        launched = jnp.arange(x.shape[0])[:, None] >= state_row
        return jnp.where(launched, persistent.unwritten(x.shape, x.dtype), x)
    there = sched.shape.pad + sum(sched.shape.leaves)
    return lax.dynamic_update_slice(lax.empty(x.shape, x.dtype), x[:there], (0, 0))


def forward_launches(
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
        made = recurrence_of(plan, name, True, sched.shape.forest, save)
        crossing = [x for v, x in zip(part.eager.outs, eager[k], strict=True) if v in part.recurrent.cross]
        tensors = {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(crossing)}
        out, lost = launch(engine, made, rows, sched, statics[k], tensors, states)
        states = [out[Tensor(TensorRole.STATE, i)] for i in range(len(states))]
        gave_up = gave_up + lost
        # First the kept values one by one, empty if they lie side by side in one of the tensors after them.
        nothing = jnp.zeros((0,))
        kept.append([out.get(Tensor(TensorRole.KEPT, n), nothing) for n in range(len(made.kept))])
        kept[-1] += [out[Tensor(TensorRole.REPLACED, m)] for m in made.replaced]
        extras.append([out[Tensor(TensorRole.EXTRA, n)] for n in range(len(part.recurrent.extra))])
    return ForwardLevels(states, kept, extras, gave_up)


def backward_launches(
    engine: Persistent, batch: Batch, saved: Saved, cotangents: Cotangents
) -> tuple[dict[int, jax.Array], list[dict[Var, jax.Array]], list[dict[Var, jax.Array]]]:
    """Launches the backward's levels of each kind that has vertices with children.

    The pushes' cotangents of states lie in the states' rows, or if `cotangents.row` is given, in the rows that it names.

    Returns:
        The cotangents of the states at leaves; for each kind the cut cotangents; and for each kind the operands of parameter
        gradients that the launch computed again.
    """
    plan, sched, kinds, all_rows, _ = batch
    g, g_row, extra_cts = cotangents.states, cotangents.row, cotangents.extras
    cuts: list[dict[Var, jax.Array]] = []
    operands: list[dict[Var, jax.Array]] = []
    for k, (name, part, rows) in enumerate(zip(kinds, batch.parts, all_rows, strict=True)):
        cuts.append({})
        operands.append({})
        if not sched.shape.inner[k]:
            continue
        made = recurrence_of(plan, name, False, sched.shape.forest)
        tensors = {Tensor(TensorRole.PUSHED, i): x for i, x in g.items() if i in made.pushed}
        tensors |= {Tensor(TensorRole.STATE, i): x for i, x in enumerate(saved.states)}
        crossing = [x for v, x in zip(part.eager.outs, saved.eager_rows[k], strict=True) if v in part.recurrent.cross]
        tensors |= {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(crossing)}
        kept = part.forward.keep
        tensors |= {Tensor(TensorRole.KEPT, n): x for n, x in enumerate(saved.kept[k][: len(kept)])}
        tensors |= {Tensor(TensorRole.REPLACED, m): x for m, x in zip(made.replaced, saved.kept[k][len(kept) :], strict=True)}
        tensors |= {Tensor(TensorRole.EXTRA, n): x for n, x in enumerate(saved.extras[k])}
        for i, v in part.reverse.extra_cts.items():
            edge = part.role.domain.get(part.recurrent.extra[i]) == EDGE
            zero = jnp.zeros((rows.edges if edge else rows.size, *v.aval.shape), v.aval.dtype)
            tensors[Tensor(TensorRole.EXTRA_COTANGENT, i)] = extra_cts[k][i] if extra_cts[k] else zero
        out, lost = launch(engine, made, rows, sched, saved.statics[k], tensors, None, g_row)
        cuts[k] = {v: out[Tensor(TensorRole.CUT, n)] for n, v in enumerate(part.reverse.cuts)}
        operands[k] = {v: out[Tensor(TensorRole.OPERAND, n)] for n, v in enumerate(made.operands)}
        leaves = sched.shape.pad + sum(sched.shape.leaves)
        up = parents(sched, rows, made.arity, 0, leaves)
        above, g = g, {}
        for i, state in enumerate(saved.states):
            if not is_float(state):
                continue
            if g_row is None:
                total = above[i][:leaves]
            elif i in above:
                total = some_rows(above[i], g_row[:leaves])
            else:
                total = jnp.zeros((leaves, *state.shape[1:]), state.dtype)
            for tensor, index in ((Tensor(TensorRole.TO_SLOT, i), PARENT_SLOT), (Tensor(TensorRole.TO_EDGE, i), PARENT)):
                if tensor in out:
                    total = total + gathered(out[tensor], up, index, leaves, engine.interpret)
            g[i] = persistent.checked(total, lost)
    return g, cuts, operands
