"""One plan of F over schedules of one shape on an engine, with its VJP: compiled once, for all batches.

Under `jax.vmap` and second derivatives, engine `scan` replaces `persistent` and `native`. Their calls run one batch, and have
no derivatives of their own. When `run` is traced, it is not known whether the function will be batched or differentiated again:
`jax.vmap` and `jax.jvp` may be applied after `jax.jit` and `jax.grad`. Both passes of a sweep therefore have a batching rule
and a tangent rule. The backward pass then runs the forward pass again, because the forward pass of the other engine saved
nothing for it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax

from cavs._engines.choose import choose_engine
from cavs._engines.engine import Engine, Job
from cavs._function.keep_options import MemoryOptions
from cavs._function.plan import FunctionPlan
from cavs._function.raw_keys import zeros
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.empty import without_empty
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Arrays
from cavs._jaxpr.memo import memoized
from cavs._jaxpr.ruled import replaceable
from cavs._jaxpr.settings import always_compiled, promoting
from cavs._jaxpr.tunable import tunable
from cavs._run.adjoint import backward
from cavs._run.forward import Arguments, forward
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import Cotangent, differentiated, with_differentiated
from cavs._stages.saved import Saved

Select: TypeAlias = jax.Array | None
Fixed: TypeAlias = tuple[tuple[bool, ...], tuple[bool, ...]]


class Call(NamedTuple):
    """A call of `run`, with its arguments as these were checked and padded."""

    job: Job  # F, traced and split, the shape of the schedule, and the device
    sched: Schedule
    user_engine: Engine | None  # the engine that was asked for
    params: PyTree  # the parameters
    inputs: PyTree  # the inputs, (Vp, ...)
    edges: PyTree  # the edges, (Ep, ...)
    select: Select  # (M,) ints, the vertices whose pushes are returned; `None` for all


class Sweep(NamedTuple):
    """The passes of one plan over schedules of one shape, by one engine; all arguments and results are flat.

    `inputs` are the leaves of the inputs, then the leaves of the edges. `fixed` says for each leaf of `params`, and for each
    of `inputs`, whether nobody asks for its cotangent.
    """

    primal: Callable[..., PyTree]  # `primal(params, data, inputs, select) -> pushes`
    forward: Callable[..., PyTree]  # `forward(fixed, params, data, inputs, select) -> (pushes, saved)`
    # `backward(fixed, saved, data, select, cotangents of pushes) -> (cotangents of params, of inputs)`. Those of fixed
    # leaves, and of integers, may be anything.
    backward: Callable[..., PyTree]


def differentiable(sweep: Sweep) -> Callable[..., PyTree]:
    """Returns `sweep.primal`, with the derivative that the other two passes compute."""

    def forward(varied: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        fixed = tuple(tuple(not x for x in flags) for flags in varied[::2])
        outs, saved = sweep.forward(fixed, params, data, inputs, select)
        return outs, jax.tree_util.Partial(functools.partial(pull, fixed), saved, data, select)

    def pull(fixed: Any, saved: PyTree, data: jax.Array, select: Select, cts: list[Cotangent]) -> PyTree:
        ct_params, ct_inputs = sweep.backward(fixed, saved, data, select, cts)
        return ct_params, None, ct_inputs, None

    return reverse_differentiable(sweep.primal, forward, "run", once=True)


def transformed_by(sweep: Sweep, by: Sweep, local: bool) -> Sweep:
    """Returns `sweep`, whose passes the passes of `by` replace where they are batched or differentiated.

    `local`: whether `by` also replaces them in code that is exported.
    """
    primal = replaceable(sweep.primal, by.primal, local=local)
    return Sweep(primal, _forward(sweep, by, local), _backward(sweep, differentiable(by), local))


def _forward(sweep: Sweep, by: Sweep, local: bool) -> Callable[..., PyTree]:
    def forward(fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> PyTree:
        def saving(*args: PyTree) -> PyTree:
            outs, saved = sweep.forward(fixed, *args)
            place = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
            return outs, jax.tree.map(lambda x: _Argument(place[id(x)]) if id(x) in place else _as_bits(x), saved)

        def not_saving(*args: PyTree) -> PyTree:
            return by.primal(*args), jax.tree.map(zeros, jax.eval_shape(saving, *args)[1])

        outs, saved = replaceable(saving, not_saving, local=local)(params, data, inputs, select)
        return outs, (saved, params, inputs)

    return forward


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Argument:
    """Stands for an argument of a pass, by its place, among what the pass saved. XLA would copy an argument to return it."""

    place: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Bits:
    """The bits of floats that a launch saved.

    Rows that nothing has written may be NaN, for which `jax_debug_nans` would blame F if it saw floats.
    """

    bits: jax.Array
    dtype: np.dtype


def _as_bits(x: jax.Array) -> jax.Array | _Bits:
    if not is_float(x) or not x.size or x.dtype.kind == "c":  # no launch writes complex numbers
        return x
    return _Bits(lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), x.dtype)


def _value(x: jax.Array | _Bits | _Argument, args: Arrays) -> jax.Array:
    if isinstance(x, _Argument):
        return args[x.place]
    return lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, _Bits) else x


def _backward(sweep: Sweep, primal: Callable[..., PyTree], local: bool) -> Callable[..., PyTree]:
    def backward(fixed: Fixed, residuals: PyTree, data: jax.Array, select: Select, cts: list[Cotangent]) -> PyTree:
        saved, params, inputs = residuals
        all_cts = functools.partial(with_differentiated, [np.zeros(ct.shape, jax.dtypes.float0) for ct in cts])
        are_floats = jax.tree.map(is_float, (params, inputs))

        def direct(saved: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, float_cts: PyTree) -> PyTree:
            args = jax.tree.leaves((params, data, inputs, select))
            saved = jax.tree.map(lambda x: _value(x, args), saved, is_leaf=lambda x: isinstance(x, _Bits | _Argument))
            return differentiated(tuple(sweep.backward(fixed, saved, data, select, all_cts(float_cts))), are_floats)

        def again(saved: PyTree, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, float_cts: PyTree) -> PyTree:
            del saved  # zeros, if the forward ran on the other engine, too
            _, pull = jax.vjp(lambda p, x: primal(p, data, x, select), params, inputs)
            return differentiated(pull(all_cts(float_cts)), are_floats)

        float_cts = differentiated(cts, [ct.dtype != jax.dtypes.float0 for ct in cts])
        return replaceable(direct, again, local=local)(saved, params, data, inputs, select, float_cts)

    return backward


@contextlib.contextmanager
def _explained(plan: FunctionPlan) -> Iterator[None]:
    """Turns JAX's error for an equation without a reverse derivative into one that names the line of F."""
    try:
        yield
    except Exception as e:
        if not (refusal := plan.no_derivative):
            raise
        raise TypeError(refusal) from e


def compiled(job: Job, user_engine: Engine | None) -> Callable[..., Arrays]:
    """Returns the jitted function of a job, with its VJP. A memory plan can change its options."""
    # JAX keeps the rules of a call as long as the jitted function lives, which F keeps: the rules must not refer to F.
    plan = job.plan.traced()
    return _compiled(job.plan, job._replace(plan=plan), user_engine, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]


@memoized
def _compiled(plan: FunctionPlan, job: Job, user_engine: Engine | None, precision: str | None) -> Callable[..., Arrays]:
    def call_of(options: MemoryOptions) -> tuple[Callable[..., Arrays], str]:
        return _call(job.plan, job._replace(options=options), user_engine, precision)

    return jax.jit(tunable(call_of, job.options, plan.names))


@memoized
def _call(plan: FunctionPlan, job: Job, user_engine: Engine | None, precision: str | None) -> tuple[Callable[..., Arrays], str]:
    """Returns the function of a job, and the name of the engine that runs it."""
    del plan, precision  # which owns the memo; which engines read from JAX's configuration
    engine = choose_engine(user_engine, job)
    sweep = _sweep(job, engine)
    if engine.stand_in is not None:
        sweep = transformed_by(sweep, _sweep(job, engine.stand_in), engine.local)
    return differentiable(sweep), engine.name


def _sweep(job: Job, engine: Engine) -> Sweep:
    """Returns the passes of a job on an engine."""

    @functools.cache
    def without(fixed: Fixed) -> Job:
        """Returns the job as the engine runs it, without the cotangents of what is fixed."""
        return job._replace(plan=engine.plan_for(job._replace(plan=job.plan.fixing(*fixed))))

    def run(engine_job: Job, params: Arrays, data: jax.Array, inputs: Arrays, select: Select, save: bool) -> Any:
        arrays = Arguments(params, *engine_job.plan.rows_and_edges(inputs), select)
        return forward(engine_job, Schedule(data, job.shape), engine, arrays, save)

    def primal(params: Arrays, data: jax.Array, inputs: Arrays, select: Select) -> Arrays:
        engine_job = without(((), ()))
        if engine.stand_in is None:  # JAX differentiates it in forward mode
            engine_job = engine_job._replace(plan=engine_job.plan.for_forward_mode())
        return run(engine_job, params, data, inputs, select, save=False)[0]

    def forward_saving(
        fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: Select
    ) -> tuple[Arrays, Saved | None]:
        engine_job = without(fixed)
        if any(not part.joint.differentiable for part in engine_job.plan.inner.values()):
            raise TypeError(engine_job.plan.no_derivative)
        with _explained(engine_job.plan):
            return run(engine_job, params, data, inputs, select, save=True)

    def reverse(
        fixed: Fixed, saved: Saved, data: jax.Array, select: Select, cts: list[Cotangent]
    ) -> tuple[list[Cotangent], list[jax.Array | None]]:
        engine_job = without(fixed)
        with _explained(engine_job.plan):
            return backward(engine_job, Schedule(data, job.shape), engine, saved, select, cts)

    # Settings of JAX may have changed since `run` was called: JAX transposes later.
    passes = [always_compiled(promoting(fn)) for fn in (primal, forward_saving, reverse)]
    return Sweep(*(map(without_empty, passes) if engine.one_launch else passes))
