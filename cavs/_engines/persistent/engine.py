"""Engine `persistent`: the recurrent part of F as one launch in each direction, or two if levels are very wide
(`cavs.kernels.persistent`).

The rest is the same as in engine `scan`: the leaves and the eager and lazy parts are large products in XLA.
"""

import dataclasses

import jax
import jax.numpy as jnp

from cavs._engines.engine import BackwardLevels, Batch, Cotangents, ForwardLevels, StagesInXla
from cavs._engines.persistent.bounds import powers_of_operands, state_bounds
from cavs._engines.persistent.chip import MEASURED, Layouts
from cavs._engines.persistent.halved import halved_states
from cavs._engines.persistent.indices import gathered, parents, some_rows
from cavs._engines.persistent.launch import launch
from cavs._engines.persistent.lower import PARENT, PARENT_SLOT, Recurrence, recurrence_of
from cavs._engines.scan.task import eager_cotangents
from cavs._function.domains import EDGE
from cavs._function.plan import FunctionPlan
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Env
from cavs._schedule.schedule import Schedule
from cavs._stages.blocks import MANY_BYTES
from cavs._stages.cotangents import Floats, floats, merged, put_rows, take_rows
from cavs._stages.entrance import Copied, memory_of
from cavs._stages.lazy import apart, lazy_gradients
from cavs._stages.saved import Saved
from cavs._stages.tensors import Rows as KindRows, RowSpan
from cavs.kernels import PRECISIONS, Tensor, TensorRole, persistent

# Bytes of copies of states from which lazy gradients read them: below, that takes a little longer than reading the states.
COPY_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Persistent(StagesInXla):
    """Engine `persistent`: one kernel launch for all levels of a direction, or two if some levels are very wide.

    Attributes:
        interpret: Whether Pallas' interpreter runs the kernels: slow, on any machine; for tests.
        layouts: Overrides of the layouts on the chip, for tests and `bench tune`.
        apart: Whether gradients of weights are computed one after the other, see `_stages.lazy.apart`. That takes more time.
    """

    interpret: bool = False
    layouts: Layouts = MEASURED
    apart: bool = False

    launches = True
    pulls_in_levels = False

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
        sched = batch.sched
        g, static_cts = cotangents.states, list(cotangents.statics)
        ct_inputs, ct_edges = cotangents.inputs, cotangents.edges
        for k, (part, rows) in enumerate(zip(batch.parts, batch.rows, strict=True)):
            if not sched.shape.inner[k]:
                continue
            made, out, lost = backward_launch(self, batch, k, saved, cotangents)
            cuts = {v: out[Tensor(TensorRole.CUT, n)] for n, v in enumerate(part.reverse.cuts)}
            if cuts and self.apart:
                # XLA would gather the operands of the lazy gradients before the launch, and keep them while it runs.
                where, cts = barrier(((rows.kids, rows.edge_child), list(cuts.values())))
                rows, cuts = rows._replace(kids=where[0], edge_child=where[1]), dict(zip(cuts, cts, strict=True))
            if cuts:
                given = {v: out[Tensor(TensorRole.OPERAND, n)] for n, v in enumerate(made.operands)}
                span, memory = RowSpan(rows.pad, rows.size, rows.edge_pad, rows.edges), memory_of(part, rows, saved, k)
                memory = memory._replace(kept=memory.kept[: len(part.forward.keep)])
                copies, cuts = _copies(batch, k, saved, cuts)
                powers = powers_of_operands(part, state_bounds(batch.plan))
                now = lazy_gradients(part, rows, span, memory, cuts, given=given, powers=powers, copies=copies)
                static_cts[k] = merged(static_cts[k], now)
                if self.apart:
                    cuts = apart(cuts, now)
            ct_static, ct_pulled, ct_edge = saved.eager[k](eager_cotangents(part, cotangents.eager[k], cuts))
            ct_edges = put_rows(ct_edges, ct_edge, rows.edge_row, rows.real_edges.sum())
            # One kind has children, so its rows follow one another.
            ct_inputs = take_rows(ct_inputs, ct_pulled, jnp.asarray(sched.row), sched.task_row[0], rows.count)
            static_cts[k] = merged(static_cts[k], floats(ct_static))
            out, static_cts[k] = _in_turn(out, static_cts[k], sum(sched.shape.leaves))
            g = cotangents_at_leaves(self, batch, rows, made, saved, cotangents, out, lost)
        return BackwardLevels(g, static_cts, ct_inputs, ct_edges)


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
        given = statics[k]
        if engine.apart:  # weights are scaled after the eager part, which needs memory of its own
            given, crossing = barrier((given, crossing))
        tensors = {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(crossing)}
        out, lost = launch(made, rows, sched, given, tensors, states, interpret=engine.interpret, layouts=engine.layouts)
        states = [out[Tensor(TensorRole.STATE, i)] for i in range(len(states))]
        gave_up = gave_up + lost
        # First the kept values one by one, empty if they lie side by side in one of the tensors after them.
        nothing = jnp.zeros((0,))
        kept.append([out.get(Tensor(TensorRole.KEPT, n), nothing) for n in range(len(made.kept))])
        kept[-1] += [out[Tensor(TensorRole.REPLACED, m)] for m in made.replaced]
        if save:
            kept[-1] += [out[Tensor(TensorRole.STATE, i, half=True)] for i in _halved(plan, name, sched)]
        extras.append([out[Tensor(TensorRole.EXTRA, n)] for n in range(len(part.recurrent.extra))])
    return ForwardLevels(states, kept, extras, gave_up)


def backward_launch(
    engine: Persistent, batch: Batch, k: int, saved: Saved, cotangents: Cotangents
) -> tuple[Recurrence, dict[Tensor, jax.Array], jax.Array]:
    """Launches the backward's levels of kind `k`, which has vertices with children.

    The pushes' cotangents of states lie in the states' rows, or if `cotangents.row` is given, in the rows that it names.

    Returns:
        What ran, and what `launch` returned.
    """
    plan, sched, kinds, all_rows, _ = batch
    part, rows, extra_cts = batch.parts[k], all_rows[k], cotangents.extras
    made = recurrence_of(plan, kinds[k], False, sched.shape.forest)
    tensors = {Tensor(TensorRole.PUSHED, i): x for i, x in cotangents.states.items() if i in made.pushed}
    tensors |= {Tensor(TensorRole.STATE, i): x for i, x in enumerate(saved.states)}
    crossing = [x for v, x in zip(part.eager.outs, saved.eager_rows[k], strict=True) if v in part.recurrent.cross]
    tensors |= {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(crossing)}
    kept = [Tensor(TensorRole.KEPT, n) for n in range(len(part.forward.keep))]
    kept += [Tensor(TensorRole.REPLACED, m) for m in made.replaced]
    tensors |= dict(zip(kept, saved.kept[k], strict=False))
    tensors |= {Tensor(TensorRole.EXTRA, n): x for n, x in enumerate(saved.extras[k])}
    for i, v in part.reverse.extra_cts.items():
        edge = part.role.domain.get(part.recurrent.extra[i]) == EDGE
        zero = jnp.zeros((rows.edges if edge else rows.size, *v.aval.shape), v.aval.dtype)
        tensors[Tensor(TensorRole.EXTRA_COTANGENT, i)] = extra_cts[k][i] if extra_cts[k] else zero
    how = {"interpret": engine.interpret, "layouts": engine.layouts}
    return made, *launch(made, rows, sched, saved.statics[k], tensors, None, cotangents.row, **how)


def _halved(plan: FunctionPlan, name: str | None, sched: Schedule) -> list[int]:
    """Returns the states whose copies of 16 bits are the last of the kept values."""
    return halved_states(*(recurrence_of(plan, name, forward, sched.shape.forest) for forward in (True, False)))


def _copies(batch: Batch, k: int, saved: Saved, cuts: Env) -> tuple[dict[int, Copied], Env]:
    """Returns the copies of 16 bits of states that lazy gradients read, and `cuts`. XLA reads large ones after the launch."""
    name, forest = batch.kinds[k], batch.sched.shape.forest
    halved = _halved(batch.plan, name, batch.sched)
    copies = saved.kept[k][len(saved.kept[k]) - len(halved) :]
    size = sum(x.nbytes for x in copies)
    if size < COPY_BYTES:
        return {}, cuts
    if size >= MANY_BYTES:
        copies, cts = barrier((copies, list(cuts.values())))
        cuts = dict(zip(cuts, cts, strict=True))
    factor = PRECISIONS[recurrence_of(batch.plan, name, True, forest).precision].factor
    return {i: Copied(x, factor) for i, x in zip(halved, copies, strict=True)}, cuts


def _in_turn(out: dict[Tensor, jax.Array], gradients: Floats, leaves: int) -> tuple[dict[Tensor, jax.Array], Floats]:
    """Returns what a launch wrote for children, after `gradients` if F's derivative at the leaves takes much memory.

    It then has the memory of the cut cotangents, which only the gradients read.
    """
    up = {name: x for name, x in out.items() if name.role in (TensorRole.TO_SLOT, TensorRole.TO_EDGE)}
    if leaves * sum(x[0].nbytes for x in up.values()) < MANY_BYTES:
        return up, gradients
    return barrier((up, gradients))


def cotangents_at_leaves(
    engine: Persistent,
    batch: Batch,
    rows: KindRows,
    made: Recurrence,
    saved: Saved,
    cotangents: Cotangents,
    out: dict[Tensor, jax.Array],
    lost: jax.Array,
) -> dict[int, jax.Array]:
    """Returns the cotangents of the states at leaves: what pushes contribute, and what the launch wrote for them."""
    sched, above, g_row = batch.sched, cotangents.states, cotangents.row
    leaves = sched.shape.pad + sum(sched.shape.leaves)
    up = parents(sched, rows, made.arity, 0, leaves)
    g: dict[int, jax.Array] = {}
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
    return g
