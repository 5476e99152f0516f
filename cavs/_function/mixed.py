"""F for levels that mix kinds: one program computes the functions of all kinds, and each vertex takes the results of its own.

So one launch runs all levels of a batch in which vertices of several kinds have children.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cavs._function.domains import STATIC, Domains, domain_of
from cavs._function.rewrite import KEEPS_ZERO, MOVES, retrace
from cavs._function.vertex import OneVertex, Vertex, VertexFunction
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import Program, bind, depends, run_equations, values
from cavs._jaxpr.jaxprs import Eqn, Var, is_var
from cavs._jaxpr.memo import memoized

_OF_ZEROS = KEEPS_ZERO | MOVES | {"add", "add_any", "sub", "mul", "max", "min"}  # their results are zero if all operands are


@memoized
def mixed(function: VertexFunction, kinds: tuple[str, ...], deep: tuple[int, ...]) -> VertexFunction:
    """Returns F for a schedule whose tasks mix kinds. It pulls `{"inputs": ..., "kind": ...}`, the number of its kind.

    Args:
        function: F.
        kinds: the names of the kinds.
        deep: the numbers of those whose vertices may have children.
    """
    copied = copy.copy(function)
    copied.fns = {name: _of_inputs(fn) for name, fn in function.fns.items()}
    copied.mixes = {k: kinds[k] for k in deep}
    return copied


def _of_inputs(fn: OneVertex) -> OneVertex:
    @functools.wraps(fn)
    def one(params: PyTree, v: Vertex) -> None:
        inner = v._with_inputs(v.pull("inputs"))
        fn(params, inner)
        v.scattered, v.pushed = inner.scattered, inner.pushed

    return one


def mixed_program(programs: Mapping[int, tuple[Program, Domains]], kind: Var, params: set[Var]) -> Program:
    """Returns one program for vertices of several kinds.

    What it computes for a vertex with the function of another kind is dropped, and takes no part in derivatives, even if it is
    infinite or NaN: all that such a function reads of a vertex is zero there, before and after each operation with parameters.

    Args:
        programs: for each kind, by its number, F and the domains of its values. All have the same inputs.
        kind: the input of the first one that holds the number of the kind.
        params: the inputs of the first one that are parameters.
    """
    first, _ = next(iter(programs.values()))
    are_params = [v in params for v in first.invars]

    def body(env: dict[Var, Any]) -> list[jax.Array]:
        args, outs = [env[v] for v in first.invars], list[jax.Array]()
        for number, (program, domain) in programs.items():
            of_kind = env[kind] == number
            static = {v for v, is_param in zip(program.invars, are_params, strict=True) if is_param}
            results = _of_own(program, domain, static, args, of_kind)
            outs = [jnp.where(of_kind, x, y) for x, y in zip(results, outs, strict=True)] if outs else results
        return outs

    return retrace(first, body)


def _of_own(program: Program, domain: Domains, params: set[Var], args: Sequence[jax.Array], mask: jax.Array) -> list[jax.Array]:
    """Evaluates a program, with zeros in place of what it reads of a vertex outside `mask`."""
    of_params = depends(program.eqns, params)
    zero: set[Var] = {v for v in program.invars if domain_of(v, domain) != STATIC}  # at other vertices
    env: dict[Var, Any] = dict(zip(program.invars, args, strict=True)) | program.consts
    env |= {v: _where(mask, env[v]) for v in zero}

    def results(eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        rows = [is_var(x) and domain_of(x, domain) != STATIC for x in eqn.invars]
        clean = all(is_var(x) and x in zero for x in eqn.invars)
        reads_params = any(is_var(x) and x in of_params and not row for x, row in zip(eqn.invars, rows, strict=True))
        # A sum of parameters over children is of rows, too, although it reads none.
        of_rows = any(rows) or any(domain_of(v, domain) != STATIC for v in eqn.outvars)
        if not (of_rows and reads_params):
            if clean and eqn.primitive.name in _OF_ZEROS:
                zero.update(eqn.outvars)
            return bind(eqn, operands)
        dirty = [row and x not in zero for x, row in zip(eqn.invars, rows, strict=True)]
        cleaned = [_where(mask, x) if masked else x for x, masked in zip(operands, dirty, strict=True)]
        zero.update(eqn.outvars)
        return [_where(mask, x) for x in bind(eqn, cleaned)]

    run_equations(program.eqns, env, results)
    return [jnp.asarray(x) for x in values(program.outs, env)]


def _where(mask: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(mask, x, jnp.zeros_like(x))
