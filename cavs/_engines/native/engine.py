"""Engine `native`: a library in C++ runs all levels of a direction in one call, on the cores of a CPU.

XLA on a CPU runs a task as some dozen kernels, each with a pass over its operands and a microsecond of overhead. The library
runs F's equations for a few rows at a time, which stay in the L1 cache, and its products read gathered rows where they are,
from weights that are packed once a call. Leaves are one more level, before all others, and the eager part is a level in a
call of its own. The lazy part is the same as on engine `scan`.

The library has no rules for `jax.vmap` and `jax.jvp`: engine `scan` then replaces it, as it does in code for other processes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from cavs._engines.engine import BackwardLevels, Batch, Cotangents, Engine, ForwardLevels, Job, batch_of
from cavs._engines.native.call import NativeCall
from cavs._engines.native.eager import eager_part, eager_split, in_library
from cavs._engines.native.gradients import gradients
from cavs._engines.native.kinds import NO_KIND, check_lowered
from cavs._engines.native.operations import letter_of
from cavs._engines.scan import engine as scan, reverse as scan_reverse
from cavs._engines.scan.task import StateCotangents, Totals
from cavs._function.keep_options import KeepOptions
from cavs._function.plan import FunctionPlan
from cavs._jaxpr.hold_back import hold_back
from cavs._jaxpr.jaxprs import Arrays, is_var
from cavs._schedule.schedule import Filled, Schedule, Shape, in_total, padding_of
from cavs._schedule.tasks import SMALLEST_TASK
from cavs._stages.saved import Saved, Transpose
from cavs._stages.tensors import Values
from cavs.kernels import Target, Unfit, native_unavailable

# From this mean width of tasks on, the levels run what is eager: products are fast there, and results stay in the cache.
WIDE_TASKS = 3


@dataclasses.dataclass(frozen=True)
class Native(Engine):
    """Engine `native`: C++ runs the levels on a CPU."""

    name = "native"
    stand_in = scan.Scan()
    local = True

    def unfit(self, job: Job) -> str | None:
        """Returns why the library cannot run a job, or `None` if it can."""
        if len(job.shape.classes) == 1 and job.shape.classes[0][0] == SMALLEST_TASK:
            return "the schedule runs vertex by vertex (policy='serial'), and it runs levels"
        return unfit_function(job.plan, job.inner_kinds)

    def is_best_for(self, job: Job) -> bool:
        """Returns whether the library fits, on a CPU, in a process that has it."""
        return job.target.is_cpu and not job.exported and not self.unfit(job)

    def plan_for(self, job: Job) -> FunctionPlan:
        """Returns the plan that overwrites what nobody reads again; its levels run what is eager if tasks are wide."""
        return self._split_for(job).keeping(
            KeepOptions(job.shape.forest and job.shape.rooted, job.options.least, names=job.options.names)
        )

    def _split_for(self, job: Job) -> FunctionPlan:
        """Returns the plan without an eager part if tasks are wide, and if the library has all that the levels then need."""
        plan, shape = job.plan, job.shape
        if sum(shape.inner) < WIDE_TASKS * shape.tasks or any(part.eager.reads_edges for part in plan.inner.values()):
            return plan
        without_eager = plan.without_eager_part()
        return plan if self.unfit(job._replace(plan=without_eager)) else without_eager

    def explain(self, plan: FunctionPlan, target: Target, shape: Shape | None = None) -> tuple[bool, list[str]]:
        """Returns whether the library can run F, and a line that says so, and whether it runs the leaves."""
        if reason := unfit_function(plan):
            return False, [f"Engine native: no: {reason}."]
        leaves = f"XLA runs the leaves: {reason}." if (reason := _leaves_outside(plan)) else "It runs the leaves, too."
        return True, [
            f"Engine native: fits. A library in C++ runs all levels of a pass in one call, on the cores of a CPU. {leaves}"
        ]

    def explain_rows(self, plan: FunctionPlan, sched: Schedule) -> list[str]:
        """Returns lines that say how many rows of a schedule the library computes; none if F does not fit it."""
        if unfit_function(plan):
            return []
        total = in_total(padding_of(sched.host()))
        leaves = total.leaves if _leaves_outside(plan) else Filled(total.leaves.vertices, total.leaves.vertices)
        levels = Filled(total.levels.vertices, total.levels.vertices)
        kinds = (None,) * len(sched.shape.kinds) if None in plan.inner else sched.shape.kinds
        chosen = self._split_for(Job(plan, sched.shape, kinds, Target.here()))
        parts = chosen.inner.values()
        eager = [part for part in parts if part.eager.eqns]
        outside = [part for part in eager if eager_split(part, len(plan.inner)) is None]
        lines = [f"leaves: {leaves}", f"vertices with children, in the levels and for the gradients of parameters: {levels}"]
        if chosen is not plan:
            lines.append("the levels run what is eager: they are wide, and its results stay in the cache")
        if eager:
            lines.append(f"vertices with children, in the eager part: {total.batches if outside else levels}")
        if any(part.lazy_eqns for part in parts):
            lines.append(f"vertices with children, in the lazy part: {total.batches}")
        return ["Rows of this schedule on engine native, computed for vertices:", *(f"  {line}" for line in lines)]

    def batch(self, job: Job, sched: Schedule) -> Batch:
        """Returns the batch of a schedule, with the leaves as a level if the library can compute F there."""
        kinds = {name: k for k, name in enumerate(job.kinds) if job.shape.leaves[k]}
        return batch_of(job, sched, leaves=not leaves_unfit(job.plan, kinds, len(job.kinds)))

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, edges: Arrays, save: bool
    ) -> tuple[list[Values], list[Transpose]]:
        """Computes the eager part in the library, if this has all that it needs."""
        result = eager_part(batch, k, statics, inputs, save)
        return result or super().eager_part(batch, k, statics, inputs, edges, save)

    def forward_levels(
        self, batch: Batch, states: Arrays, statics: list[Arrays], eager: list[Arrays], save: bool
    ) -> ForwardLevels:
        """Runs the forward's levels, and the leaves, in one call."""
        call = NativeCall(batch, backward=False)
        avals = batch.plan.state_avals
        for i, a in enumerate(avals):
            if batch.has_leaves:
                call.created("state", NO_KIND, i, jax.ShapeDtypeStruct((batch.sched.shape.rows, *a.shape), a.dtype))
            else:
                call.updated("state", i, states[i])
        for k, part in enumerate(batch.parts):
            call.forward_of(k, part, statics[k], eager[k], save)
        out = call.run()
        kept, extras = zip(*(call.saved_of(out, k, part, save) for k, part in enumerate(batch.parts)), strict=True)
        return ForwardLevels([out["state", NO_KIND, i] for i in range(len(avals))], [*kept], [*extras], None)

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels, leaves included, in one call."""
        rounds = functools.partial(_rounds_back, batch, saved)
        alone = batch.plan.push_states is not None  # only the levels give cotangents to the eager part
        return scan_reverse.backward_levels(batch, saved, cotangents, rounds, gradients, in_library(batch) if alone else [])


def unfit_function(plan: FunctionPlan, kinds: dict[str | None, int] | None = None) -> str | None:
    """Returns why engine `native` cannot run F at vertices of some kinds, or `None` if it can.

    `kinds`: the kinds of vertices with children, and their numbers; `None` for all.
    """
    if reason := native_unavailable():
        return reason
    off = [name for name in ("lazy", "fusion") if not getattr(plan.function.optimizations, name)]
    if off:
        return f"F was created with Optimizations({off[0]}=False)"
    try:
        for state in plan.state_avals:  # the library holds them, even if no vertex has children
            letter_of(state.dtype)
        for name, k in (dict.fromkeys(plan.inner, 0) if kinds is None else kinds).items():
            check_lowered(plan.inner[name], k)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def leaves_unfit(plan: FunctionPlan, kinds: dict[str | None, int], count: int) -> str | None:
    """Returns why XLA runs the leaves of some kinds, or `None` if the library does.

    `kinds`: the kinds that have leaves, and their numbers. `count`: how many kinds there are in all.
    """
    try:
        for name, k in kinds.items():
            part = plan.leaf_part(name)
            if part.gathers_all:
                raise Unfit("it calls gather_all")
            if any(is_var(x) and x in part.recurrent.statics for x in part.role.states):
                raise Unfit("it scatters what follows from parameters alone")
            check_lowered(part, count + k)
    except Unfit as e:
        return str(e)
    return None


def _leaves_outside(plan: FunctionPlan) -> str | None:
    """Returns why XLA runs the leaves; `None` if the library does."""
    return leaves_unfit(plan, {name: k for k, name in enumerate(plan.leaf)}, len(plan.leaf))


def _rounds_back(
    batch: Batch, saved: Saved, loop: scan_reverse.Loop, tasks: jax.Array, g: StateCotangents, totals: Totals
) -> tuple[jax.Array, StateCotangents, list[dict[Any, jax.Array]], Totals]:
    """Runs all rounds, and the leaves, in one call of the library; see `scan_reverse.rounds_back`."""
    del tasks
    call = NativeCall(batch, backward=True)
    for i, x in enumerate(saved.states):
        call.inputs[("state", NO_KIND, i)] = x
    for i, x in g.items():
        call.updated("cotangent", i, x)
    for kind in loop.kinds:
        k = kind.number
        call.backward_of(kind, saved.statics[k], saved.eager_rows[k], saved.kept[k], saved.extras[k])
    out = call.run()
    cuts = [dict(zip(kind.stored, call.cuts_of(out, kind), strict=True)) for kind in loop.kinds]
    left = jnp.zeros((), jnp.int32)
    # Not known before the levels have run.
    left = hold_back([left[None]], [x for arrays in cuts for x in arrays.values()], jnp.integer)[0][0]
    return left, {i: out["cotangent", NO_KIND, i] for i in g}, cuts, totals
