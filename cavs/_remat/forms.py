"""How kept values are kept: masks, such as those of a ReLU or of dropout, as bits (as in Echo), others maybe on the host.

Values in the memory of the host are after moDNN (section 5.2).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.derivative import type_of
from cavs._jaxpr.inline import inlined
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, body_of, is_var, opened

_LEAST = 1 << 20  # bytes of a value that is worth a copy


class Form(NamedTuple):
    """How a value is kept: as a variable, the equations that compute it (`pack`), and those that return the value."""

    var: Var
    pack: list[Eqn]
    unpack: list[Eqn]


def bits_of(mask: Var) -> Form | None:
    """Returns how a value is kept with eight elements to a byte; `None` if it is not a mask, or too small to gain from it."""
    axis = _packed_axis(mask)
    if axis is None:
        return None
    pack = _equations(lambda x: _packed(x, axis), mask)
    (bits,) = pack[-1].outvars
    unpack = _equations(lambda x: jnp.unpackbits(x, axis, mask.aval.shape[axis]) > 0, bits)
    unpack[-1] = unpack[-1].replace(outvars=[mask])
    return Form(bits, pack, unpack)


def _equations(fn: Callable[[jax.Array], jax.Array], x: Var) -> list[Eqn]:
    """Returns the equations of a function of `x`. The last one computes its result."""
    jaxpr, _ = opened(jax.make_jaxpr(fn)(type_of(x)))
    return inlined(jaxpr, rename={jaxpr.invars[0]: x})[0]


def _packed(mask: jax.Array, axis: int) -> jax.Array:
    """Returns what `jnp.packbits` does, which would add up integers of four bytes."""
    padding, shape = -mask.shape[axis] % 8, mask.shape
    mask = jnp.pad(mask, [(0, padding * (i == axis)) for i in range(mask.ndim)])
    rows = mask.reshape(*shape[:axis], -1, 8, *shape[axis + 1 :]).astype(jnp.uint8)
    shift = jnp.arange(7, -1, -1, dtype=jnp.uint8).reshape(8, *[1] * (mask.ndim - axis - 1))
    return lax.reduce(rows << shift, np.uint8(0), lax.bitwise_or, [axis + 1])


def kept_bytes(v: Var) -> int:
    """Returns the bytes of a value that is kept."""
    axis = _packed_axis(v)
    return bytes_of_var(v) if axis is None else _packed_bytes(v, axis)


def _packed_axis(v: Var) -> int | None:
    """Returns the axis along which a mask has the fewest bytes, the last one of several; `None` if they are not fewer.

    An axis that is divided among devices stays as it is, so that no bits move between them.
    """
    shape = getattr(v.aval, "shape", ())
    if getattr(v.aval, "dtype", None) != jnp.bool_ or not shape:
        return None
    divided: Any = getattr(getattr(v.aval, "sharding", None), "spec", None) or [None] * len(shape)
    undivided = [i for i in reversed(range(len(shape))) if divided[i] is None]
    axis = min(undivided, key=lambda i: _packed_bytes(v, i), default=None)
    return axis if axis is not None and _packed_bytes(v, axis) < bytes_of_var(v) else None


def _packed_bytes(v: Var, axis: int) -> int:
    count = v.aval.shape[axis]
    return bytes_of_var(v) // max(count, 1) * -(-count // 8)


def compared_by_result(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Lets comparisons `x > 0` read `max(x, 0)` in place of `x`. Both have the same result, also for NaN.

    The product after a ReLU keeps what it reads, so its mask follows from that, and costs nothing.
    """
    rectified = {x: e for e in eqns if (x := _rectified(e)) is not None}
    ordered: dict[int, Eqn] = {}
    for e in eqns:
        compared = [x for x in e.invars[:1] if e.primitive.name == "gt" and is_var(x) and _is_zero(e.invars[1])]
        for relu in (rectified[x] for x in compared if x in rectified):
            ordered[id(relu)] = relu  # before the comparison
            e = e.replace(invars=[relu.outvars[0], e.invars[1]])
        ordered[id(e)] = e
    return list(ordered.values())


def _rectified(eqn: Eqn) -> Var | None:
    """Returns `x` if an equation computes `max(x, 0)`."""
    if eqn.primitive.name == "custom_jvp_call":
        body, _ = body_of(eqn)
        eqns, _ = inlined(body)
        x = _rectified(eqns[0]) if len(eqns) == 1 else None
        return cast(Var, eqn.invars[body.invars.index(x)]) if x in body.invars and is_var(eqn.invars[0]) else None
    is_limited = eqn.primitive.name == "max" and any(map(_is_zero, eqn.invars))
    return next(filter(is_var, eqn.invars), None) if is_limited else None


def _is_zero(x: Atom) -> bool:
    return not is_var(x) and not x.aval.shape and x.val == 0


def on_host(v: Var, form: Form | None) -> Form:
    """Returns how a value is kept on the host, packed as in its form on the device."""
    kept, pack, unpack = (v, [], []) if form is None else form
    (out,) = _equations(lambda x: jax.device_put(x, jax.memory.Space.Host), kept)
    (back,) = _equations(lambda x: jax.device_put(x, jax.memory.Space.Device), out.outvars[0])
    return Form(out.outvars[0], [*pack, out], [back.replace(outvars=[kept]), *unpack])


def longest_kept(forward: Sequence[Eqn], keep: Collection[Var], share: float, times: int) -> frozenset[Var]:
    """Returns at least a `share` of the bytes of the values `keep`: those that `forward` computes first.

    The backward needs these last. `times`: steps of a loop that keep them.
    """
    places = {v: i for i, e in enumerate(forward) for v in e.outvars}
    remaining, chosen = share * sum(map(bytes_of_var, keep)), list[Var]()
    for v in sorted((v for v in keep if times * bytes_of_var(v) >= _LEAST), key=lambda v: places.get(v, -1)):
        if remaining > 0:
            chosen.append(v)
            remaining -= bytes_of_var(v)
    return frozenset(chosen)
