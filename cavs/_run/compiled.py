"""One plan of F over schedules of one shape on an engine, with its VJP: compiled once, for all batches."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax

from cavs._engines.choose import choose_engine
from cavs._engines.engine import Engine, Job
from cavs._function.keep_options import MemoryOptions
from cavs._function.plan import FunctionPlan
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.always_compiled import always_compiled
from cavs._jaxpr.empty import without_empty
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.promotion import promoting
from cavs._jaxpr.tunable import tunable
from cavs._run.adjoint import backward
from cavs._run.forward import Given, forward
from cavs._run.other_engine import Fixed, Sweep, differentiable, transformed_by
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import Cotangent
from cavs._stages.saved import Saved

Arrays: TypeAlias = list[jax.Array]


class Call(NamedTuple):
    """A call of `run`, with its arguments as these were checked and padded."""

    job: Job  # F, traced and split, the shape of the schedule, and the device
    sched: Schedule
    user_engine: Engine | None  # the engine that was asked for
    params: PyTree  # the parameters
    inputs: PyTree  # the inputs, (Vp, ...)
    edges: PyTree  # the edges, (Ep, ...)
    select: jax.Array | None  # (M,) ints, the vertices whose pushes are returned; `None` for all


@contextlib.contextmanager
def _explained(plan: FunctionPlan) -> Iterator[None]:
    """Turns JAX's error for an equation without a reverse derivative into one that names the line of F."""
    try:
        yield
    except Exception as e:
        if not (refusal := plan.no_derivative):
            raise
        raise TypeError(refusal) from e


def compiled(job: Job, user_engine: Engine | None) -> Callable[..., list[jax.Array]]:
    """Returns the jitted function of a job, with its VJP. A memory plan can change its options."""
    return _compiled(job.plan, job, user_engine, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]


@memoized
def _compiled(
    plan: FunctionPlan, job: Job, user_engine: Engine | None, precision: str | None
) -> Callable[..., list[jax.Array]]:
    def call_of(options: MemoryOptions) -> tuple[Callable[..., list[jax.Array]], str]:
        return _call(plan, job._replace(options=options), user_engine, precision)

    return jax.jit(tunable(call_of, job.options, plan.names))


@memoized
def _call(
    plan: FunctionPlan, job: Job, user_engine: Engine | None, precision: str | None
) -> tuple[Callable[..., list[jax.Array]], str]:
    """Returns the function of a job, and the name of the engine that runs it."""
    del plan, precision  # which owns the memo; which engines read from JAX's configuration
    engine = choose_engine(user_engine, job)
    sweep = _sweep(job, engine)
    if engine.stand_in is not None:
        sweep = transformed_by(sweep, _sweep(job, engine.stand_in))
    return differentiable(sweep), engine.name


def _sweep(job: Job, engine: Engine) -> Sweep:
    """Returns the passes of a job on an engine."""

    @functools.cache
    def without(fixed: Fixed) -> Job:
        """Returns the job as the engine runs it, without the cotangents of what is fixed."""
        return job._replace(plan=engine.plan_for(job._replace(plan=job.plan.fixing(*fixed))))

    def run(own: Job, params: Arrays, data: jax.Array, inputs: Arrays, select: jax.Array | None, save: bool) -> Any:
        given = Given(params, *own.plan.rows_and_edges(inputs), select)
        return forward(own, Schedule(data, job.shape), engine, given, save)

    def primal(params: Arrays, data: jax.Array, inputs: Arrays, select: jax.Array | None) -> Arrays:
        return run(without(((), ())), params, data, inputs, select, save=False)[0]

    def forward_saving(
        fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: jax.Array | None
    ) -> tuple[Arrays, Saved | None]:
        own = without(fixed)
        if any(not part.joint.differentiable for part in own.plan.inner.values()):
            raise TypeError(own.plan.no_derivative)
        with _explained(own.plan):
            return run(own, params, data, inputs, select, save=True)

    def reverse(
        fixed: Fixed, saved: Saved, data: jax.Array, select: jax.Array | None, cts: list[Cotangent]
    ) -> tuple[list[Cotangent], list[jax.Array | None]]:
        own = without(fixed)
        with _explained(own.plan):
            return backward(own, Schedule(data, job.shape), engine, saved, select, cts)

    # JAX transposes outside of `run`.
    run_back = always_compiled(promoting(reverse))
    passes = always_compiled(promoting(primal)), always_compiled(promoting(forward_saving)), run_back
    return Sweep(*map(without_empty, passes)) if engine.one_launch else Sweep(*passes)
