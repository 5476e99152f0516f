"""Layouts for the launches of a traced training step, settled before it is compiled (VPPS, section III-A: tuning in situ).

Each launch whose layout is not on record for this GPU gets a record, once and for all: the fastest of a few layouts, or today's
layout if the time is up. Only records decide then, so a run that is resumed has the layouts with which it began.
"""

import concurrent.futures
import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.persistent import chip
from cavs._engines.persistent.launch_calls import LaunchMark
from cavs._function.raw_keys import Shaped, from_stored, key_impl, stored_aval
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Jaxpr
from cavs._jaxpr.ruled import rules_in
from cavs._run.tune import Task, Timed, Tuned, by_the_clock, compiled, keep, lower, promising
from cavs._schedule.schedule import Schedule
from cavs._schedule.shape import Shape
from cavs.kernels import LaunchConfig, Target, Unfit, persistent, tuned

FEW = 8  # layouts of a launch that are tried
COMPILING = 0.8  # after this part of the time, what is compiled by then is timed


def unable(target: Target) -> str | None:
    """Returns why no launch can be tuned here, as words that follow "but"; `None` if launches can."""
    if (count := jax.process_count()) > 1:
        return f"{count} processes train together, which must compile the same program"
    return persistent.unsupported(target)


def launches_in(jaxpr: Jaxpr) -> dict[str, LaunchMark]:
    """Returns the launches in a jaxpr by the keys of their records."""
    return {chip.key_of(mark.made, mark.job.shape): mark for mark in rules_in(jaxpr, LaunchMark)}


def settle(jaxpr: Jaxpr, batches: PyTree, target: Target, seconds: float) -> list[Tuned]:
    """Puts the layouts of all launches in a jaxpr on record that are not, after timing a few layouts of each.

    Returns these launches. If the user's cache cannot be written, there are none.

    Args:
        jaxpr: the training step.
        batches: the batches that it reads, with the schedules of its launches. If they are stacked, the first one is taken.
        target: the GPU.
        seconds: the time for all launches together; one compilation more may pass. With 0, nothing is timed.
    """
    new = {key: mark for key, mark in launches_in(jaxpr).items() if not chip.is_settled(mark.made, target, mark.job.shape)}
    if not new:
        return []
    today = {key: chip.chosen(mark.made, target, mark.job.shape)[0] for key, mark in new.items()}  # with which it was traced
    try:
        tuned.save(tuned.own_file(target.device_kind), {})
    except OSError:  # later processes would not know the layouts
        return []
    timed = dict[str, list[Timed]]()
    try:
        timed = few_timed(tasks_of(new, batches), target, seconds) if seconds > 0 else timed
    except jax.errors.JaxRuntimeError as error:  # the step itself may still fit
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    found = [Tuned(key, mark.made.forward, today[key], timed.get(key, [])) for key, mark in new.items()]
    keep(found, target, replace=False)  # of processes that tune at the same time, the first one decides for all
    return found


def tasks_of(marks: Mapping[str, LaunchMark], batches: PyTree) -> dict[str, Task]:
    """Returns the launches whose schedules are among the batches, with random parameters and inputs.

    Under a mesh that is set for all of JAX, arrays are divided, and a launch would not be the one of the step: there are none.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return {}
    scheds = _schedules(batches)
    return {key: _task(mark, scheds[mark.job.shape]) for key, mark in marks.items() if mark.job.shape in scheds}


def _schedules(batches: PyTree) -> dict[Shape, Schedule]:
    """Returns the first schedule of each shape."""
    leaves = jax.tree.leaves(batches, is_leaf=lambda x: isinstance(x, Schedule))
    whole = {x.shape: np.asarray(x.data) for x in leaves if type(x) is Schedule}
    return {shape: jax.device_put(Schedule(data.reshape(-1, data.shape[-1])[0], shape)) for shape, data in whole.items()}


def _task(mark: LaunchMark, sched: Schedule) -> Task:
    some = 0.1 * np.random.default_rng(0).standard_normal(1 << 12, np.float32)

    def drawn(x: Shaped, *rows: int) -> jax.Array:
        like = stored_aval(x)
        values = np.resize(some if jnp.issubdtype(like.dtype, jnp.floating) else np.zeros(1), (*rows, *like.shape))
        return from_stored(jnp.asarray(values, like.dtype), key_impl(x))

    plan, shape = mark.job.plan, sched.shape
    params = jax.tree.map(drawn, plan.shapes.params)
    inputs = jax.tree.map(lambda x: drawn(x, shape.vertices), plan.shapes.inputs)
    edges = jax.tree.map(lambda x: drawn(x, shape.all_edges), plan.shapes.edges)
    return Task(plan.function, params, sched, inputs, edges, mark.made)


def few_timed(tasks: Mapping[str, Task], target: Target, seconds: float) -> dict[str, list[Timed]]:
    """Times a few layouts of each task, today's first, until the time is up. A task is missing if today's was not timed.

    The layouts of all tasks compile side by side. Those that are not compiled in time go on in the background, unused.
    """
    begin, found = time.monotonic(), dict[str, list[Timed]]()
    left = lambda part: part * seconds - (time.monotonic() - begin)  # noqa: E731
    layouts = [[(key, config) for config in promising(task, target)[:FEW]] for key, task in tasks.items()]
    firsts = [some[0] for some in layouts]
    pool = concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1))
    running: list[tuple[str, LaunchConfig, concurrent.futures.Future[Any]]] = []
    try:
        for key, config in (one for some in itertools.zip_longest(*layouts) for one in some if one):
            if left(COMPILING) <= 0:
                break
            with contextlib.suppress(Unfit):  # F alone, without the step around it, may keep more for its backward
                running.append((key, config, pool.submit(compiled, lower(tasks[key], config))))
        concurrent.futures.wait([future for *_, future in running], max(0.0, left(COMPILING)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    for key, config, future in running:
        if future.done() and not future.cancelled() and left(1) > 0 and (key in found or (key, config) in firsts):
            found.setdefault(key, []).append(Timed(config, by_the_clock(future.result(), tasks[key].given)))
    return found
