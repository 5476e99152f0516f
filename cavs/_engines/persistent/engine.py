"""Engine `persistent`: one launch runs all levels of a direction, or two if levels are very wide (`cavs.kernels.persistent`).

XLA runs the rest, as for engine `scan`: the leaves and the eager and lazy parts are large products.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cavs._engines.engine import Arrays, BackwardLevels, Batch, Cotangents, Engine, ForwardLevels, Gradients, Job
from cavs._engines.persistent.bounds import gathered_operands, powers_of_operands, state_bounds
from cavs._engines.persistent.chip import MEASURED, WIDE, LaunchOptions, Layouts, can_stay, configure, source, too_wide
from cavs._engines.persistent.launch import LaunchArrays, gathered, inner_row, launch, leaf_exponent, parents, some_rows
from cavs._engines.persistent.launch_calls import marked
from cavs._engines.persistent.lower import OF_PARENTS, PARENT, PARENT_SLOT, Recurrence, forward_of, recurrence_of
from cavs._engines.persistent.wide_levels import possible
from cavs._engines.scan.engine import Scan
from cavs._engines.scan.task import eager_cotangents
from cavs._function.domains import EDGE
from cavs._function.keep_options import KeepOptions
from cavs._function.plan import FunctionPlan
from cavs._function.products import exponent_of_power
from cavs._function.split import Split
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.hold_back import barrier, late_zero
from cavs._jaxpr.jaxprs import Env, Var
from cavs._schedule.schedule import Shape
from cavs._stages.blocks import MANY_BYTES
from cavs._stages.cotangents import Floats, floats, merged, put_rows, take_rows
from cavs._stages.entrance import Copied, memory_of
from cavs._stages.lazy import lazy_gradients, not_joined
from cavs._stages.saved import Saved
from cavs._stages.tensors import RowSpan
from cavs.kernels import PRECISIONS, Target, Tensor, TensorRole, Unfit, layout_of, persistent

# Bytes of copies of states from which lazy gradients read them: below, that takes a little longer than reading the states.
COPY_BYTES = 8 << 20
# Rows from which on the lazy batch waits for the gradients of leaves: smaller products are not in their way. On an H200
# (2026-11-29), steps of a Tree-LSTM (hidden 512) take 2 % less by waiting at batch 64 (1,248 rows), and 2 % more at 16 (304).
LATE_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Persistent(Engine):
    """Engine `persistent`: one kernel launch for all levels of a direction, or two if some levels are very wide.

    A launch has no rule for `jax.vmap` and no derivative of its own: engine `scan` then replaces it.
    """

    interpret: str | None = None  # see `LaunchConfig`: slow, on any machine; for tests
    layouts: Layouts = MEASURED  # overrides of the layouts on the chip, for tests and `bench tune`

    name = "persistent"
    one_launch = True
    stand_in = Scan()

    def unfit(self, job: Job) -> str | None:
        """Returns why the kernels cannot run a job, or `None` if they can."""
        if not self.interpret and (reason := persistent.unsupported(job.target)):
            return reason
        job = job._replace(plan=self.plan_for(job))
        return _without_program(job) or (None if self.interpret else _without_layout(job, self.options(job.target)))

    def is_best_for(self, job: Job) -> bool:
        """Returns whether a launch fits and should be faster than the loops of engine `scan`."""
        if self.unfit(job):
            return False
        plan = self.plan_for(job)
        programs = [recurrence_of(plan, name, True, job.shape.forest, target=job.target) for name in job.inner_kinds]
        return not any(too_wide(recurrence, job.target, job.shape) for recurrence in programs)

    def plan_for(self, job: Job) -> FunctionPlan:
        """Returns the plan that keeps what products need, and comparisons that could be rounded differently later."""
        return job.plan.keeping(KeepOptions(again=job.options.least, names=job.options.names, masks=True))

    def explain(self, plan: FunctionPlan, target: Target, shape: Shape | None = None) -> tuple[bool, list[str]]:
        """Returns whether F fits, and for each kind a line that says how launches are laid out on the chip, or why not."""
        fits, lines = True, []
        mixes = ", ".join(map(repr, plan.function.mixes.values()))
        for name in list(plan.inner)[: 1 if mixes else None]:
            try:
                text = f"fits. {_explain_kind(plan, name, target, shape)}"
            except Unfit as e:
                fits, text = False, f"no: {e}."
            kind_text = f", kinds {mixes} in one launch" if mixes else "" if name is None else f", kind {name!r}"
            lines.append(f"Engine persistent{kind_text}: {text}")
        if fits and len(lines) > 1:
            lines.append(
                "If vertices of several kinds have children, engine persistent runs schedules that mix kinds, as cavs.schedule "
                "creates them on a GPU: write cavs.explain(F, params, inputs, sched=sched) for their launch."
            )
        return fits, lines

    def options(self, target: Target) -> LaunchOptions:
        """Returns how launches run on a GPU."""
        return LaunchOptions(target, self.interpret, self.layouts)

    def launched(self, batch: Batch, k: int, recurrence: Recurrence, arrays: LaunchArrays) -> "Launched":
        """Launches the levels of kind `k`. The flag is marked in the jaxpr if records and the cost model choose the layout."""
        out, lost = launch(recurrence, batch.rows[k], batch.sched, self.options(batch.job.target), arrays)
        return Launched(recurrence, out, marked(lost, batch.job, recurrence) if self == Persistent() else lost)

    def forward_levels(
        self, batch: Batch, states: Arrays, statics: list[Arrays], eager: list[Arrays], save: bool
    ) -> ForwardLevels:
        """Runs the forward's levels in one launch, or in two."""
        sched = batch.sched
        pairs = [([], []) if size else _of_no_rows(batch, k, save) for k, size in enumerate(sched.shape.inner)]
        kept, extras = ([pair[n] for pair in pairs] for n in range(2))
        if not (inner := [k for k, size in enumerate(sched.shape.inner) if size]):
            return ForwardLevels(states, kept, extras, jnp.zeros(1, jnp.int32))
        (k,) = inner
        part, static = batch.parts[k], statics[k]
        recurrence = forward_of(batch.plan, batch.kinds[k], sched.shape, save, batch.job.target)
        crossing = eager[k][: len(part.recurrent.cross)]
        if batch.job.options.in_parts:  # weights are scaled after the eager part, which needs memory of its own
            static, crossing = barrier((static, crossing))
        tensors = {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(crossing)}
        _, out, lost = self.launched(batch, k, recurrence, LaunchArrays(static, tensors, states))
        # First the kept values one by one, empty if they lie side by side in one of the tensors after them.
        kept[k] = [out.get(Tensor(TensorRole.KEPT, n), jnp.zeros((0,))) for n in range(len(recurrence.kept))]
        kept[k] += [out[Tensor(TensorRole.REPLACED, m)] for m in recurrence.replaced]
        kept[k] += [out[Tensor(TensorRole.STATE, i, half=True)] for i in recurrence.halved]
        extras[k] = [out[Tensor(TensorRole.EXTRA, n)] for n in range(len(part.recurrent.extra))]
        return ForwardLevels([out[Tensor(TensorRole.STATE, i)] for i in range(len(states))], kept, extras, lost)

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels in one launch, or in two; the rest is one lazy batch of all rows.

        The lazy batch follows the leaves, whose cotangents the next step needs first. If much memory is at stake, the leaves
        follow the lazy batch, which alone reads the cut cotangents.
        """
        sched = batch.sched
        if not (inner := [k for k, size in enumerate(sched.shape.inner) if size]):
            unchanged = Gradients(cotangents.statics, cotangents.inputs, cotangents.edges)
            return BackwardLevels(cotangents.states, lambda _: unchanged)
        (k,) = inner
        launched = backward_launch(self, batch, k, saved, cotangents)

        def at_leaves(launched: Launched) -> Floats:
            return cotangents_at_leaves(self, batch, k, launched, saved, cotangents)

        def rest(before: Arrays) -> Gradients:
            return _gradients(batch, k, saved, cotangents, launched, before)

        up = {name: x for name, x in launched.out.items() if name.role in OF_PARENTS}
        large = sum(sched.shape.leaves) * sum(x[0].nbytes for x in up.values()) >= MANY_BYTES
        if not large and not batch.job.options.in_parts:
            return BackwardLevels(at_leaves(launched), rest)
        gradients = rest([])
        if large:
            up, gradients.statics[k] = barrier((up, gradients.statics[k]))
        return BackwardLevels(at_leaves(launched._replace(out=up)), lambda _: gradients)


def _of_no_rows(batch: Batch, k: int, save: bool) -> tuple[Arrays, Arrays]:
    """Returns what the backward and the lazy part read of kind `k` if it has no vertices with children."""
    part, rows, zeros = batch.parts[k], batch.rows[k], batch.zeros
    kept = [rows.tensor(zeros, v.aval, part.joint.row_domain(v)) for v in (part.forward.keep if save else ())]
    tensors = [rows.tensor(zeros, v.aval, domain) for v, domain in zip(part.recurrent.extra, part.extra_domain, strict=True)]
    inner = zip(part.extra_domain, tensors, strict=True)
    return kept, [rows.inner_edges(x) if domain == EDGE else rows.inner(x) for domain, x in inner]


class Launched(NamedTuple):
    """A launch that has run: what it computed, the tensors that it wrote, and the flag of `kernels.persistent.launches`."""

    recurrence: Recurrence
    out: dict[Tensor, jax.Array]
    lost: jax.Array


def _without_program(job: Job) -> str | None:
    """Returns why F has no program for the kernels on schedules of a shape, as words that follow "but"; `None` if it has."""
    plan, inner = job.plan, [name for name, n in zip(job.kinds, job.shape.inner, strict=True) if n]
    if not job.shape.levels and inner:
        if len(inner) > 1:
            names = ", ".join(map(repr, inner))
            return f"vertices of {len(inner)} kinds have children ({names}): write cavs.schedule(..., kinds='mixed')"
        return (
            "no vertex of the batch has children, or its schedule has no scripts (cavs.schedule creates them if JAX runs on "
            "a GPU, or with scripts=True)"
        )
    if not plan.function.optimizations.lazy:
        return "F was created with Optimizations(lazy=False)"
    if not all(plan.inner[name].joint.differentiable for name in inner):
        return "F has a loop with a dynamic number of iterations"
    return _without_layout(job, None)


def _without_layout(job: Job, options: LaunchOptions | None) -> str | None:
    """Returns why the kernels cannot compute F; with options, also if no layout of a launch fits the chip."""
    try:
        for name in job.inner_kinds:
            for forward in (True, False):
                recurrence = recurrence_of(job.plan, name, forward, job.shape.forest, target=job.target)
                if options is not None:
                    configure(recurrence, options, job.shape)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def backward_launch(engine: Persistent, batch: Batch, k: int, saved: Saved, cotangents: Cotangents) -> Launched:
    """Launches the backward's levels of kind `k`, which has vertices with children.

    The pushes' cotangents of states lie in the states' rows, or if `cotangents.row` is given, in the rows that it names.
    """
    sched, part, rows, extra_cts = batch.sched, batch.parts[k], batch.rows[k], cotangents.extras
    recurrence = recurrence_of(batch.plan, batch.kinds[k], False, sched.shape.forest, target=batch.job.target)
    tensors = {Tensor(TensorRole.PUSHED, i): x for i, x in cotangents.states.items() if i in recurrence.pushed}
    tensors |= {Tensor(TensorRole.STATE, i): x for i, x in enumerate(saved.states)}
    tensors |= {Tensor(TensorRole.CROSSING, n): x for n, x in enumerate(saved.eager_rows[k][: len(part.recurrent.cross)])}
    kept = [Tensor(TensorRole.KEPT, n) for n in range(len(part.forward.keep))]
    kept += [Tensor(TensorRole.REPLACED, m) for m in recurrence.replaced]
    tensors |= dict(zip(kept, saved.kept[k], strict=False))
    tensors |= {Tensor(TensorRole.EXTRA, n): x for n, x in enumerate(saved.extras[k])}
    for i, v in part.reverse.extra_cts.items():
        zero = jnp.zeros((rows.edges if part.extra_domain[i] == EDGE else rows.size, *v.aval.shape), v.aval.dtype)
        tensors[Tensor(TensorRole.EXTRA_COTANGENT, i)] = extra_cts[k][i] if extra_cts[k] else zero
    return engine.launched(batch, k, recurrence, LaunchArrays(saved.statics[k], tensors, [], cotangents.row))


def _gradients(batch: Batch, k: int, saved: Saved, cotangents: Cotangents, launched: Launched, before: Arrays) -> Gradients:
    """Adds what the levels of kind `k` contribute: one lazy batch of all rows, and the eager part's transpose.

    `before`: gradients that the lazy batch waits for, unless memory is at stake. It waits for those of the eager part, too, as
    the next step begins with both.
    """
    sched, part, rows, (recurrence, out, _) = batch.sched, batch.parts[k], batch.rows[k], launched
    cuts = {v: out[Tensor(TensorRole.CUT, n)] for n, v in enumerate(part.reverse.cuts)}

    def lazy(kids: jax.Array, edge_child: jax.Array, cuts: Env) -> Floats:
        lazy_rows = rows._replace(kids=kids, edge_child=edge_child)
        operands = {v: out[Tensor(TensorRole.OPERAND, n)] for n, v in enumerate(recurrence.operands)}
        span, memory = RowSpan(rows.pad, rows.size, rows.edge_pad, rows.edges), memory_of(part, lazy_rows, saved, k)
        memory = memory._replace(kept=memory.kept[: len(part.forward.keep)])
        copies, cuts = _copies(batch, k, saved, cuts)
        exponents = _exponents(batch, part, saved)
        return lazy_gradients(part, lazy_rows, span, memory, cuts, known=operands, exponents=exponents, copies=copies)

    def eager(cuts: Env) -> tuple[PyTree, ...]:
        return saved.eager[k](eager_cotangents(part, cotangents.eager[k], cuts))

    if cuts and batch.job.options.in_parts:
        # XLA would gather the operands of the lazy gradients before the launch, and keep them while it runs.
        children, tied = barrier(((rows.kids, rows.edge_child), list(cuts.values())))
        cuts = dict(zip(cuts, tied, strict=True))
        of_lazy = lazy(*children, cuts)
        of_eager, ct_pulled, ct_edge = eager(not_joined(cuts, of_lazy))
    else:
        of_eager, ct_pulled, ct_edge = eager(cuts)
        awaited = (*before, *floats(of_eager).values()) if rows.size >= LATE_ROWS else ()
        zero = late_zero([x[(0,) * x.ndim] for x in awaited if x.size])
        of_lazy = lazy(*barrier((rows.kids + zero, rows.edge_child + zero)), cuts) if cuts else {}
    statics = list(cotangents.statics)
    statics[k] = merged(merged(statics[k], of_lazy), floats(of_eager))
    # One kind has children, so its rows follow one another.
    ct_inputs = take_rows(cotangents.inputs, ct_pulled, jnp.asarray(sched.row), inner_row(sched), rows.count)
    ct_edges = put_rows(cotangents.edges, ct_edge, rows.edge_row, rows.real_edges.sum())
    return Gradients(statics, ct_inputs, ct_edges)


def _exponents(batch: Batch, part: Split, saved: Saved) -> dict[Var, jax.Array]:
    """Returns exponents of operands of lazy gradients, from bounds of F.

    If F bounds only what vertices with children scatter, it searches the leaves for larger numbers.
    """
    plan, gathered = batch.plan, gathered_operands(part)
    everywhere, inner = state_bounds(plan), state_bounds(plan, leaves=False)
    leaves = {
        i: leaf_exponent(saved.states[i], batch.sched, inner[i])
        for i in {*gathered.values()} - plan.overwritten
        if everywhere[i] == math.inf > inner[i] and saved.states[i].dtype == jnp.float32
    }
    exponents = {x: leaves[i] for x, i in gathered.items() if i in leaves}
    return exponents | {x: exponent_of_power(n) for x, n in powers_of_operands(part, everywhere).items()}


def _copies(batch: Batch, k: int, saved: Saved, cuts: Env) -> tuple[dict[int, Copied], Env]:
    """Returns the copies of 16 bits of states that lazy gradients read, and `cuts`. XLA reads large ones after the launch."""
    recurrence = forward_of(batch.plan, batch.kinds[k], batch.sched.shape, True, batch.job.target)
    copies = saved.kept[k][len(saved.kept[k]) - len(recurrence.halved) :]
    size = sum(x.nbytes for x in copies)
    if size < COPY_BYTES:
        return {}, cuts
    if size >= MANY_BYTES:
        copies, cts = barrier((copies, list(cuts.values())))
        cuts = dict(zip(cuts, cts, strict=True))
    factor = PRECISIONS[recurrence.precision].factor
    return {i: Copied(x, factor) for i, x in zip(recurrence.halved, copies, strict=True)}, cuts


def cotangents_at_leaves(
    engine: Persistent, batch: Batch, k: int, launched: Launched, saved: Saved, cotangents: Cotangents
) -> dict[int, jax.Array]:
    """Returns the cotangents of the states at leaves: what pushes contribute, and what the launch wrote for them."""
    sched, pushed, g_row = batch.sched, cotangents.states, cotangents.row
    leaves, out = sched.shape.pad + sum(sched.shape.leaves), launched.out
    up = parents(sched, batch.rows[k], launched.recurrence.arity, 0, leaves)
    g: dict[int, jax.Array] = {}
    for i, state in enumerate(saved.states):
        if not is_float(state):
            continue
        if g_row is None:
            total = pushed[i][:leaves]
        elif i in pushed:
            total = some_rows(pushed[i], g_row[:leaves])
        else:
            total = jnp.zeros((leaves, *state.shape[1:]), state.dtype)
        for tensor, index in ((Tensor(TensorRole.TO_SLOT, i), PARENT_SLOT), (Tensor(TensorRole.TO_EDGE, i), PARENT)):
            if tensor in out:
                total = total + gathered(out[tensor], up, index, leaves, bool(engine.interpret))
        g[i] = persistent.checked(total, launched.lost)
    return g


def _explain_kind(plan: FunctionPlan, name: str | None, target: Target, shape: Shape | None) -> str:
    if not plan.function.optimizations.lazy:
        raise Unfit("F was created with Optimizations(lazy=False)")
    forest = shape is None or shape.forest
    forward, backward = (recurrence_of(plan, name, is_forward, forest, target=target) for is_forward in (True, False))
    forward = forward if shape is None else forward_of(plan, name, shape, True, target)
    text = f"forward: {_explain_launch(forward, target, shape)}; backward: {_explain_launch(backward, target, shape)}."
    if (backward.arity > 1 or backward.part.gathers_all) and possible(backward.program, backward.precision, target):
        text += " Levels of thousands of vertices run as tiled products in a launch of their own, if that is faster."
    return (
        f"{text} In a batch of few graphs with wide levels, all groups share the rows of every level, if that should be faster."
        " Two launches of a step that do not depend on each other share the GPU, if that should be faster, in other layouts."
    )


def _explain_launch(recurrence: Recurrence, target: Target, shape: Shape | None) -> str:
    program, config = recurrence.program, configure(recurrence, LaunchOptions(target), shape)
    layout = layout_of(program, config)
    size = layout.words * 4 * (program.unit // config.hb)
    place = "registers" if config.registers else "shared memory"
    location = f"stay in {place}" if config.resident else "stream from L2 for every tile"
    if not can_stay(recurrence, target):
        location += f", as they do not fit the chip (beyond {WIDE} vertices per level, scan runs)"
    location += ", three weights in two words" * config.tight
    barriers = f"{counted(sum(p.barrier for p in program.phases), 'barrier')} per level"
    if config.dataflow:
        barriers = "no barriers, as products poll the rows that they read"
    divided = f" ({config.split} of a cluster divide K of each product and send each other sums)" * (config.split > 1)
    padded = "" if program.unit == program.valid else f"vectors of {program.valid} run as {program.unit}; "
    products = PRECISIONS[recurrence.precision].text or recurrence.precision
    if recurrence.scaled:
        products = "float16, scaled by the largest number of the leaves (it has as many bits as tf32)"
    return (
        f"{padded}{counted(len(program.phases), 'phase')} and {barriers}; {counted(config.groups, 'group')} of "
        f"{counted(program.unit // config.hb, 'thread block')} with {counted(config.hb, 'unit')} each{divided}; "
        f"{size / 1e6:.1f} MB of weights per group, which {location}; products in {products}; "
        f"laid out {source(recurrence, target, shape)}"
    )
