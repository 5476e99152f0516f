"""Kept values in the memory of the host (moDNN, section 5.2): which ones, and the equations that copy them."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import jax

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.jaxprs import Eqn, Var
from cavs._remat.masks import Form

_LEAST = 1 << 20  # bytes of a value that is worth a copy


def on_host(v: Var, form: Form | None) -> Form:
    """Returns how a value is kept on the host, packed as in its form on the device."""
    kept, pack, unpack = (v, [], []) if form is None else form
    out = _put(kept, jax.memory.Space.Host)
    back = _put(out.outvars[0], jax.memory.Space.Device).replace(outvars=[kept])
    return Form(out.outvars[0], [*pack, out], [back, *unpack])


def _put(x: Var, space: Any) -> Eqn:
    traced: Any = jax.make_jaxpr(lambda x: jax.device_put(x, space))(type_of(x))
    return cast(Eqn, traced.eqns[0]).replace(invars=[x])


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
