"""Kept values in the memory of the host (moDNN, section 5.2): which ones, and when they are copied.

A value is copied out when it has been computed. The product that would run when the copy ends waits for it, so that the memory
on the device is free from there on. The copy back begins so early in the backward that it ends when the value is read.
"""

import functools
import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from cavs._jaxpr.costs import bytes_of_var, flops_of, is_heavy
from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.jaxprs import Eqn, Var, is_var
from cavs._remat.masks import Form
from cavs.kernels import Target

_LEAST = 1 << 20  # bytes of a value that is worth a copy
_FLOPS, _BYTES = 1e14, 1e12  # that a large GPU computes, and writes, in a second
_PER_SECOND = 5e10  # bytes to the host, where it is not measured


def on_host(v: Var, form: Form | None) -> Form:
    """Returns how a value is kept on the host, packed as in its form on the device."""
    kept, pack, unpack = (v, [], []) if form is None else form
    out = _put(kept, jax.memory.Space.Host)
    back = _put(out.outvars[0], jax.memory.Space.Device).replace(outvars=[kept])
    return Form(out.outvars[0], [*pack, out], [back, *unpack])


def _put(x: Var, space: Any) -> Eqn:
    traced: Any = jax.make_jaxpr(lambda x: jax.device_put(x, space))(type_of(x))
    return cast(Eqn, traced.eqns[0]).replace(invars=[x])


@functools.cache
def host_bandwidth() -> float:
    """Returns the bytes in a second between the first device and the host: measured on a GPU."""
    if not Target.here().is_gpu or jax.devices()[0].platform == "cpu":
        return _PER_SECOND
    there, here = (jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=k) for k in ("pinned_host", "device"))
    seconds = []
    with jax.ensure_compile_time_eval():  # the caller may be tracing
        x = jnp.zeros(1 << 26, jnp.float32, device=here)
        for _ in range(3):
            start = time.perf_counter()
            y = jax.block_until_ready(jax.device_put(x, there))
            x = jax.block_until_ready(jax.device_put(y, here))
            seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / min(seconds)


def seconds_of(eqns: Iterable[Eqn]) -> float:
    """Returns about how long equations run on a GPU, of which those without products are fused."""
    return sum(flops_of(e) / _FLOPS + sum(map(bytes_of_var, e.outvars)) / _BYTES for e in eqns if is_heavy(e))


def longest_kept(forward: Sequence[Eqn], keep: Collection[Var], share: float, times: int) -> frozenset[Var]:
    """Returns a share of the kept bytes: the values that are computed first, because the backward needs them last.

    Args:
        forward: the equations that compute them.
        keep: the kept values.
        share: of all bytes, at least.
        times: steps of a loop that keep them.
    """
    places = {v: i for i, e in enumerate(forward) for v in e.outvars}
    left, found = share * sum(map(bytes_of_var, keep)), list[Var]()
    for v in sorted((v for v in keep if times * bytes_of_var(v) >= _LEAST), key=lambda v: places.get(v, -1)):
        if left > 0:
            found.append(v)
            left -= bytes_of_var(v)
    return frozenset(found)


def waits(eqns: Sequence[Eqn], sizes: dict[Var, int]) -> dict[int, list[Var]]:
    """Returns when copies to the host end: for equations that wait for them, by their places, the variables on the host.

    Args:
        eqns: the forward, in order.
        sizes: the bytes of these variables.
    """
    found: dict[int, list[Var]] = {}
    if not sizes:  # nothing is measured then, which takes memory
        return found
    rate, now, free, ends = host_bandwidth(), 0.0, 0.0, dict[Var, float]()
    for i, e in enumerate(eqns):
        if is_heavy(e) and (done := [h for h, end in ends.items() if end <= now]):
            found[i] = done
            ends = {h: end for h, end in ends.items() if h not in done}
        now += seconds_of([e])
        for h in sizes.keys() & set(e.outvars):
            ends[h] = free = max(free, now) + sizes[h] / rate
    return found


def starts(durations: Sequence[float], needs: Sequence[Collection[Var]]) -> list[list[Var]]:
    """Returns for each stretch of the backward the values whose copies begin before it.

    Args:
        durations: the seconds of each stretch.
        needs: the values that each stretch is the first to read.
    """
    begins = [0.0, *itertools.accumulate(durations)]
    found: list[list[Var]] = [[] for _ in durations]
    rate, free = host_bandwidth(), float("inf")
    for i in reversed(range(len(needs))):
        for v in needs[i]:
            free = min(free, begins[i]) - bytes_of_var(v) / rate
            found[max((k for k in range(i + 1) if begins[k] <= free), default=0)].insert(0, v)
    return found


def operand_of(eqn: Eqn, without: Collection[Var]) -> Var | None:
    """Returns a value that a product reads, other than these."""
    return next((x for x in eqn.invars if is_var(x) and x not in without), None)
