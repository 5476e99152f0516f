"""One plan of F over schedules of one shape on an engine, with its VJP: compiled once, for all batches."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax

from cavs._engines.choose import choose_engine, name_of
from cavs._engines.engine import Engine
from cavs._engines.persistent.engine import Persistent
from cavs._engines.scan.engine import Scan
from cavs._function.asked import ToKeep, keeping_now
from cavs._function.plan import FunctionPlan
from cavs._jaxpr.always_compiled import always_compiled
from cavs._jaxpr.empty import without_empty
from cavs._run.adjoint import backward
from cavs._run.forward import forward
from cavs._run.other_engine import Fixed, Sweep, differentiable, transformed_by
from cavs._schedule.schedule import Schedule, Shape
from cavs._stages.cotangents import Cotangent
from cavs._stages.saved import Saved

Arrays: TypeAlias = list[jax.Array]

MSG_LOOP = (
    "run: F: got a loop whose number of iterations depends on values{where}; JAX has no reverse derivative of such loops. For "
    "gradients, write a fixed number of iterations: jax.lax.scan, or fori_loop with Python ints as bounds and "
    "jnp.where(i < n, new, old) inside."
)


@contextlib.contextmanager
def _loops_are_refused(plan: FunctionPlan) -> Iterator[None]:
    """Turns JAX's error for a loop without a reverse derivative into one that names the line of F."""
    try:
        yield
    except ValueError as e:
        if "Reverse-mode differentiation does not work" not in str(e):
            raise
        raise TypeError(MSG_LOOP.format(where=plan.loop)) from e


def compiled(
    plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...], asked: Engine | None, exported: bool
) -> Callable[..., list[jax.Array]]:
    """Returns the jitted function of a plan for schedules of one shape, with its VJP; cached on the plan.

    Args:
        plan: F, traced and split.
        shape: of the schedules.
        kinds: for each kind of the schedules, the name of the function that evaluates it.
        asked: the engine that was asked for.
        exported: whether the code is exported, so that it cannot use engine `native`.
    """
    least, names, seen, engines, in_parts = keeping_now()
    seen.update(plan.names)
    key = (shape, kinds, asked, exported, least, names, in_parts, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    if key not in plan.sweeps:
        launched = ToKeep(again=least, names=names, masks=True)
        engine = choose_engine(asked, plan.keeping(launched), shape, kinds, exported)
        if isinstance(engine, Persistent):
            engine = dataclasses.replace(engine, apart=in_parts)

            def of(fixed: Fixed) -> FunctionPlan:
                return plan.fixing(*fixed).keeping(launched)

            sweep = transformed_by(_sweep(of, shape, kinds, engine), _sweep(of, shape, kinds, Scan()))
        else:
            # Cut cotangents of all vertices are stored: where they overwrite kept values, these cost nothing.
            on_scan = isinstance(engine, Scan)
            together = on_scan and jax.__version_info__ >= (0, 11)  # XLA before that copies tensors that are cut in parts

            wanted = ToKeep(shape.forest and shape.rooted, least, False, names, on_scan, together)

            @functools.cache
            def kept(fixed: Fixed) -> FunctionPlan:
                return engine.prefers(plan.fixing(*fixed), shape, kinds).keeping(wanted)

            sweep = _sweep(kept, shape, kinds, engine)
        plan.sweeps[key] = jax.jit(differentiable(sweep)), name_of(engine)
    found, name = plan.sweeps[key]
    engines.add(name)
    return found


def _sweep(of: Callable[[Fixed], FunctionPlan], shape: Shape, kinds: tuple[str | None, ...], engine: Engine) -> Sweep:
    """Returns the passes of a plan on an engine. `of` returns the plan that computes no cotangents of what is fixed."""

    def primal(params: Arrays, data: jax.Array, inputs: Arrays, select: jax.Array | None) -> Arrays:
        plan = of(((), ()))
        return forward(plan, Schedule(data, shape), kinds, engine, params, *plan.rows_and_edges(inputs), select, save=False)[0]

    def forward_saving(
        fixed: Fixed, params: Arrays, data: jax.Array, inputs: Arrays, select: jax.Array | None
    ) -> tuple[Arrays, Saved | None]:
        plan = of(fixed)
        if any(not part.joint.differentiable for part in plan.inner.values()):
            raise TypeError(MSG_LOOP.format(where=plan.loop))
        with _loops_are_refused(plan):
            return forward(plan, Schedule(data, shape), kinds, engine, params, *plan.rows_and_edges(inputs), select, save=True)

    def reverse(
        fixed: Fixed, saved: Saved, data: jax.Array, select: jax.Array | None, cts: list[Cotangent]
    ) -> tuple[list[Cotangent], list[jax.Array | None]]:
        plan = of(fixed)
        with _loops_are_refused(plan):
            return backward(plan, Schedule(data, shape), kinds, engine, saved, select, cts)

    # JAX transposes outside of `run`.
    passes = always_compiled(primal), always_compiled(forward_saving), always_compiled(reverse)
    return Sweep(*map(without_empty, passes)) if engine.launches else Sweep(*passes)
