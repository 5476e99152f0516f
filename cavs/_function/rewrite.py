"""Rewriting of a traced vertex function: zeros of leaves are folded away, and changes of domain become explicit."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from cavs._function.children import TO_EDGES, TO_ROWS, enter_p, reduce_sum_p, spread, spread_p
from cavs._function.domains import EDGE, ROW, STATIC, Domains, domain_of, domains
from cavs._function.raw_keys import is_key
from cavs._function.unroll import trace
from cavs._jaxpr.equations import Program, bind, is_float, run_equations, shape_of, values
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Var, is_var

# f(+0) = +0, whatever the parameters of the equation.
KEEPS_ZERO = {
    "reshape", "broadcast_in_dim", "transpose", "reduce_sum", "slice", "squeeze", "convert_element_type", "copy",
    "tanh", "sin", "abs", "sign", "rev", "stop_gradient", "cumsum", "real", "reduce_precision", "split",
    spread_p.name, reduce_sum_p.name, enter_p.name,
}  # fmt: skip


# The result consists of elements of the operands.
MOVES = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims slice transpose rev split concatenate copy stop_gradient".split()
)

Range: TypeAlias = tuple[float, float]  # of a value that is finite, and neither below zero nor -0


@dataclasses.dataclass(frozen=True, eq=False)
class _Zero:
    """A value known to be +0: what a leaf gathers. A sum over no children is a constant."""

    aval: ShapedArray
    constant: bool = False


def retrace(program: Program, body: Callable[[Env], Sequence[jax.Array]]) -> Program:
    """Returns a new program with the same inputs.

    `body`: takes an environment of the program's inputs and constants; returns the outputs of the new program.
    """

    def fn(*args: jax.Array) -> list[jax.Array]:
        return list(body(dict(zip(program.invars, args, strict=True)) | program.consts))

    return trace(fn, *map(shape_of, program.invars))[0]


def fold_zeros(program: Program, zeros: set[Var]) -> Program:
    """Returns the program with the inputs `zeros` taken as +0, without their products and sums (leaves, Cavs 3.2).

    Values stay as they are, but for one case: 0 times a gate is zero, and the gate is not computed, where it may be NaN.
    """
    ranges: dict[Var, Range] = {}

    def body(env: Env) -> list[jax.Array]:
        folded: dict[Var, Any] = env | {v: _Zero(v.aval) for v in zeros}

        def results(eqn: Eqn, args: list[Any]) -> Sequence[Any]:
            in_ranges = [_range(x, ranges) for x in eqn.invars]
            outs = _folded(eqn, args, in_ranges)
            if (result_range := _range_of_results(eqn, in_ranges)) is not None:
                ranges.update(dict.fromkeys(eqn.outvars, result_range))
            if outs is None and _is_constant_zero(eqn):
                outs = [_Zero(eqn.outvars[0].aval, constant=True)]
            return bind(eqn, list(map(_solid, args))) if outs is None else outs

        run_equations(program.eqns, folded, results)
        return list(map(_solid, values(program.outs, folded)))

    return retrace(program, body)


def _is_constant_zero(eqn: Eqn) -> bool:
    x = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return x is not None and not is_var(x) and is_float(x) and not any(np.asarray(x.val).tobytes())  # -0 is another constant


def _solid(x: Any) -> jax.Array:
    return jnp.zeros(x.aval.shape, x.aval.dtype) if isinstance(x, _Zero) else x


def _folded(eqn: Eqn, args: Sequence[Any], ranges: Sequence[Range | None]) -> list[Any] | None:
    """Returns the results of an equation that zeros among its operands make trivial; else `None`."""
    zero, name, out = [isinstance(a, _Zero) for a in args], eqn.primitive.name, eqn.outvars[0] if eqn.outvars else None
    if not any(zero) or out is None:
        return None
    # The product with a constant of the user's is not folded: it may be infinity or NaN times 0.
    constant = all(a.constant for a in args if isinstance(a, _Zero))
    other_ranges = [r for r, is_zero in zip(ranges, zero, strict=True) if not is_zero]
    product = name == "mul" and not constant and (not is_float(out) or None not in other_ranges)
    if name == "dot_general" or product or (name in KEEPS_ZERO and zero[0]):
        return [_Zero(v.aval, constant) for v in eqn.outvars]
    if name in ("add", "add_any", "sub", "concatenate") and all(zero):
        return [_Zero(out.aval, constant)]
    if name == "select_n" and all(zero[1:]):
        return [_Zero(out.aval, constant)]
    if name in ("add", "add_any", "sub") and (name != "sub" or zero[1]):  # XLA folds x + 0, too, although -0 + 0 is +0
        other = args[0] if zero[1] else args[1]
        if jnp.shape(other) == out.aval.shape:
            return [other]
    return None


def _range(x: Atom, ranges: dict[Var, Range]) -> Range | None:
    if is_var(x):
        return ranges.get(x)
    if is_key(x.aval):
        return None
    value = np.asarray(x.val)
    if (
        np.iscomplexobj(value)
        or not np.issubdtype(value.dtype, np.number)
        or not np.all(np.isfinite(value))
        or np.any(np.signbit(value))
        or not value.size
    ):
        return None
    return float(value.min()), float(value.max())


def _range_of_results(eqn: Eqn, in_ranges: Sequence[Range | None]) -> Range | None:
    """Returns the range of gates and the like: sigmoids, masks, and sums and products of these."""
    name, x = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
    if name == "logistic" or (name == "convert_element_type" and x is not None and x.aval.dtype == bool):
        return 0.0, 1.0
    known = [r for r in (in_ranges[1:] if name == "select_n" else in_ranges) if r is not None]
    if not known or len(known) < len(in_ranges) - (name == "select_n"):
        return None
    if name in MOVES or name in ("select_n", "max", "min") or (name == "convert_element_type" and is_float(eqn.outvars[0])):
        return min(low for low, _ in known), max(high for _, high in known)
    if name in ("add", "add_any"):
        return sum(low for low, _ in known), sum(high for _, high in known)
    if name == "mul":
        return math.prod(low for low, _ in known), math.prod(high for _, high in known)
    if name == "sub" and known[0][0] >= known[1][1]:
        return known[0][0] - known[1][1], known[0][1] - known[1][0]
    return None


def make_domains_explicit(program: Program, known: Domains, num_states: int, some_row: Var) -> Program:
    """Returns the program with an equation of its own for each change of domain.

    Every ROW value that an EDGE equation reads is spread to the edges. A parameter that F scatters, or reduces over the
    children, becomes a ROW value by a subtraction of zero, so that its gradient is summed over the vertices like any other.

    `num_states`: how many of its outputs, the first ones, are scattered. `some_row`: an integer ROW input, of which the zero is
    computed.
    """
    program = _without_static_spreads(program, known)
    domain = domains(program.eqns, known)

    def body(env: Env) -> list[jax.Array]:
        on_edge: dict[int, jax.Array] = {}

        def read(x: Atom) -> Any:
            return env[x] if is_var(x) else x.val

        def row(x: Atom) -> jax.Array:
            """Returns a STATIC value as a ROW value."""
            zero = env[some_row] * 0
            return read(x) | (zero != 0) if x.aval.dtype == bool else read(x) - zero.astype(x.aval.dtype)  # -0 - 0 is -0

        def on_edges(x: Atom, reduced: bool) -> jax.Array:
            x_domain = domain_of(x, domain)
            if x_domain == EDGE or (x_domain == STATIC and not reduced):
                return read(x)
            if id(x) not in on_edge:
                on_edge[id(x)] = spread(read(x) if x_domain == ROW else row(x))
            return on_edge[id(x)]

        for eqn in program.eqns:
            reduced = eqn.primitive in TO_ROWS
            edge = eqn.primitive not in TO_EDGES and (reduced or any(domain.get(v) == EDGE for v in eqn.outvars))
            args = [on_edges(x, reduced) if edge else read(x) for x in eqn.invars]
            env.update(zip(eqn.outvars, bind(eqn, args), strict=True))
        outs = [read(x) for x in program.outs]
        for i, x in enumerate(program.outs[:num_states]):
            if is_var(x) and domain_of(x, domain) == STATIC and is_float(x):
                outs[i] = row(x)
        return outs

    return retrace(program, body)


def _without_static_spreads(program: Program, known: Domains) -> Program:
    """Removes the spreads of parameters, so that a product with a parameter stays a product."""
    domain = dict(known)

    def same(e: Eqn) -> Sequence[Atom] | None:
        if e.primitive is spread_p and domain_of(e.invars[0], domain) == STATIC:
            return e.invars
        domain.update(domains([e], domain))
        return None

    return program.without(same)
