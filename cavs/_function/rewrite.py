"""Rewriting of a traced vertex function: zeros of leaves are folded away, and changes of domain become explicit."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from cavs._function.children import TO_EDGES, TO_ROWS, enter_p, reduce_sum_p, spread, spread_p
from cavs._function.domains import EDGE, ROW, STATIC, Domains, domain_of, domains
from cavs._function.equations import Program, bind, is_float, shape_of, trace
from cavs._function.jaxprs import Atom, Env, Eqn, Var, is_var

# f(0) = 0, whatever the parameters of the equation.
_ZERO_UNARY = {
    "neg", "reshape", "broadcast_in_dim", "transpose", "reduce_sum", "slice", "squeeze", "convert_element_type", "copy",
    "tanh", "sin", "abs", "sign", "rev", "stop_gradient", "cumsum", "real", "reduce_precision", "split",
    spread_p.name, reduce_sum_p.name, enter_p.name,
}  # fmt: skip


class _Zero:
    """A value known to be zero: what a leaf gathers. A sum over no children is a constant."""

    def __init__(self, aval: ShapedArray, constant: bool = False):
        self.aval, self.constant = aval, constant

    def array(self) -> jax.Array:
        return jnp.zeros(self.aval.shape, self.aval.dtype)


def retrace(program: Program, body: Callable[[Env], Sequence[jax.Array]]) -> Program:
    """Returns a new program with the same inputs.

    Args:
        program: the program.
        body: takes an environment of the program's inputs and constants; returns the outputs of the new program.
    """

    def fn(*args: jax.Array) -> list[jax.Array]:
        return list(body(dict(zip(program.invars, args, strict=True)) | program.consts))

    return trace(fn, *map(shape_of, program.invars))[0]


def fold_zeros(program: Program, zeros: set[Var]) -> Program:
    """Returns the program with the inputs `zeros` taken as zero, without their products and sums (leaves, Cavs 3.2)."""

    def body(env: Env) -> list[jax.Array]:
        values: dict[Var, Any] = env | {v: _Zero(v.aval) for v in zeros}

        def read(x: Atom) -> Any:
            return values[x] if is_var(x) else x.val

        for eqn in program.eqns:
            args = [read(x) for x in eqn.invars]
            outs = _folded(eqn, args)
            if outs is None and _is_constant_zero(eqn):
                outs = [_Zero(eqn.outvars[0].aval, constant=True)]
            if outs is None:
                outs = bind(eqn, [_solid(a) for a in args])
            values.update(zip(eqn.outvars, outs, strict=True))
        return [_solid(read(x)) for x in program.outs]

    return retrace(program, body)


def _is_constant_zero(eqn: Eqn) -> bool:
    x = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return x is not None and not is_var(x) and is_float(x) and not np.any(x.val)


def _solid(x: Any) -> jax.Array:
    return x.array() if isinstance(x, _Zero) else x


def _folded(eqn: Eqn, args: Sequence[Any]) -> list[Any] | None:
    """The results of an equation that zeros among its operands make trivial; else `None`."""
    zero, name, out = [isinstance(a, _Zero) for a in args], eqn.primitive.name, eqn.outvars[0] if eqn.outvars else None
    if not any(zero) or out is None:
        return None
    # The product with a constant of the user's is not folded: it may be infinity times 0. XLA folds matrix products, too.
    constant = all(a.constant for a in args if isinstance(a, _Zero))
    if name == "dot_general" or (name == "mul" and not constant) or (name in _ZERO_UNARY and zero[0]):
        return [_Zero(v.aval, constant) for v in eqn.outvars]
    if name in ("add", "add_any", "sub", "concatenate") and all(zero):
        return [_Zero(out.aval, constant)]
    if name == "select_n" and all(zero[1:]):
        return [_Zero(out.aval, constant)]
    if name in ("add", "add_any", "sub") and (name != "sub" or zero[1]):
        other = args[0] if zero[1] else args[1]
        if jnp.shape(other) == out.aval.shape:
            return [other]
    return None


def make_domains_explicit(program: Program, known: Domains, num_states: int, some_row: Var) -> Program:
    """Returns the program with an equation of its own for each change of domain.

    Every ROW value that an EDGE equation reads is spread to the edges. A parameter that F scatters, or reduces over the
    children, becomes a ROW value by an addition of zero, so that its gradient is summed over the vertices like any other.

    Args:
        program: F at vertices with children.
        known: the domains of its inputs.
        num_states: how many of its outputs, the first ones, are scattered.
        some_row: an integer ROW input, of which the zero is computed.
    """
    program = _without_static_spreads(program, known)
    domain = domains(program.eqns, known)

    def body(env: Env) -> list[jax.Array]:
        on_edge: dict[int, jax.Array] = {}

        def read(x: Atom) -> Any:
            return env[x] if is_var(x) else x.val

        def row(x: Atom) -> jax.Array:
            """A STATIC value as a ROW value."""
            zero = env[some_row] * 0
            return read(x) | (zero != 0) if x.aval.dtype == bool else read(x) + zero.astype(x.aval.dtype)

        def on_edges(x: Atom, reduced: bool) -> jax.Array:
            here = domain_of(x, domain)
            if here == EDGE or (here == STATIC and not reduced):
                return read(x)
            if id(x) not in on_edge:
                on_edge[id(x)] = spread(read(x) if here == ROW else row(x))
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
    """The program without the spreads of parameters, so that a product with a parameter stays a product."""
    domain: Domains = dict(known)
    same: dict[Var, Atom] = {}
    eqns = []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=[same.get(x, x) if is_var(x) else x for x in eqn.invars])
        if eqn.primitive is spread_p and domain_of(eqn.invars[0], domain) == STATIC:
            same[eqn.outvars[0]] = eqn.invars[0]
        else:
            eqns.append(eqn)
            domain = domains([eqn], domain)
    return program._replace(eqns=tuple(eqns), outs=tuple(same.get(x, x) if is_var(x) else x for x in program.outs))
