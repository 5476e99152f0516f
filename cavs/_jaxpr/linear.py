"""Whether values depend on others linearly, as far as this follows from the primitives of a jaxpr."""

import enum
from collections.abc import Iterable, Sequence

import numpy as np

from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import CALLS, Atom, Eqn, Jaxpr, Var, body_of, is_var, opened, scan_parts

# A sum of operands gives the sum of the results.
_TOGETHER = frozenset(
    "add add_any sub neg concatenate broadcast_in_dim reshape transpose squeeze expand_dims rev slice split reduce_sum cumsum "
    "convert_element_type reduce_precision copy copy_p real imag conj complex pad optimization_barrier reduce_window_sum fft "
    "scatter scatter-add scatter_add dynamic_update_slice pvary stack unstack".split()
)
_PRODUCTS = frozenset("mul dot_general conv_general_dilated cavs_conv cavs_conv_filters".split())
_IN_FIRST = frozenset("div gather dynamic_slice".split())
_IN_OTHERS = frozenset("select_n triangular_solve".split())  # in all operands but the first one
CALLED = (*CALLS, "checkpoint", "remat2", "core_call")
_SCATTERS = ("scatter", "scatter-add", "scatter_add")


class _Way(enum.IntEnum):
    """How a value depends on the given ones."""

    ZERO = 0  # not at all: it is zero
    LINEAR = 1
    FREE = 2  # not at all
    OTHER = 3


def is_linear(eqns: Sequence[Eqn], inputs: Iterable[Var], outs: Iterable[Atom]) -> bool:
    """Returns whether `outs` are linear in the values `inputs` together, for certain."""
    ways = dict.fromkeys(inputs, _Way.LINEAR)
    _follow(eqns, ways)
    return all(_way(x, ways) in (_Way.ZERO, _Way.LINEAR) for x in outs if is_float(x))


def _way(x: Atom, ways: dict[Var, _Way]) -> _Way:
    if is_var(x):
        return ways.get(x, _Way.FREE)
    return _Way.FREE if np.any(x.val) else _Way.ZERO


def _follow(eqns: Sequence[Eqn], ways: dict[Var, _Way]) -> None:
    """Adds the results of equations to `ways`."""
    for e in eqns:
        ways.update(zip(e.outvars, _results(e, [_way(x, ways) for x in e.invars]), strict=True))


def _results(eqn: Eqn, in_ways: list[_Way]) -> list[_Way]:
    """Returns the ways of the results of an equation, given the ways of its operands."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "optimization_barrier":
        return in_ways
    if name in CALLED:
        body, _ = body_of(eqn)
        return _of_body(body, in_ways[len(in_ways) - len(body.invars) :])
    if name == "scan":
        return _of_scan(eqn, in_ways)
    if name == "cond" and in_ways[0] in (_Way.ZERO, _Way.FREE):
        branches = [_of_body(opened(branch)[0], in_ways[1:]) for branch in eqn.params["branches"]]
        return [_sum(ways) for ways in zip(*branches, strict=True)]
    return [_of_operands(eqn, in_ways)] * count


def _of_operands(eqn: Eqn, in_ways: list[_Way]) -> _Way:
    name = eqn.primitive.name
    if name in _TOGETHER and all(map(is_float, eqn.outvars)):
        indices = (1,) if name in _SCATTERS else range(2, len(in_ways)) if name == "dynamic_update_slice" else ()
        return _apart(in_ways, indices)
    if all(way in (_Way.ZERO, _Way.FREE) for way in in_ways):
        return _Way.FREE
    if name in _PRODUCTS:
        return _Way.LINEAR if sorted(in_ways) in ([_Way.LINEAR, _Way.FREE], [_Way.ZERO, _Way.LINEAR]) else _Way.OTHER
    if name in _IN_FIRST:
        return _apart(in_ways, range(1, len(in_ways)))
    return _apart(in_ways, (0,)) if name in _IN_OTHERS else _Way.OTHER


def _apart(in_ways: list[_Way], excluded: Iterable[int]) -> _Way:
    """Returns the way of a result that is linear in its operands together, without those at the places `excluded`."""
    fixed = {*excluded}
    if any(in_ways[i] not in (_Way.ZERO, _Way.FREE) for i in fixed):
        return _Way.OTHER
    return _sum(way for i, way in enumerate(in_ways) if i not in fixed)


def _sum(ways: Iterable[_Way]) -> _Way:
    nonzero = {*ways} - {_Way.ZERO}
    return next(iter(nonzero), _Way.ZERO) if len(nonzero) < 2 else _Way.OTHER


def _of_body(body: Jaxpr, in_ways: Sequence[_Way]) -> list[_Way]:
    ways = dict(zip(body.invars, in_ways, strict=True))
    _follow(body.eqns, ways)
    return [_way(x, ways) for x in body.outvars]


def _of_scan(eqn: Eqn, in_ways: list[_Way]) -> list[_Way]:
    body, _ = opened(eqn.params["jaxpr"])
    consts, carry, xs = scan_parts(eqn.params, in_ways)
    while True:
        outs = _of_body(body, [*consts, *carry, *xs])
        after = [_sum(pair) for pair in zip(carry, outs, strict=False)]
        if after == carry:
            return [*carry, *outs[len(carry) :]]
        carry = after
