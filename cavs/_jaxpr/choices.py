"""`lax.cond` and `lax.switch`, one primitive of JAX: a number chooses among branches.

In F, each vertex chooses. For many vertices at once every branch runs, and results are selected; but not before F is
differentiated, as the derivative of a select would have the infinities of branches that are not taken.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from cavs._jaxpr.equations import Program, bind, reads, run_jaxpr, shape_of, value_of
from cavs._jaxpr.jaxprs import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, is_var, opened

EMPTY = "empty", "empty2"  # what JAX returns from a branch where only the derivatives of others read it


def is_choice(eqn: Eqn) -> bool:
    """Returns whether an equation is a `lax.cond` or `lax.switch`, and no `lax.platform_dependent`."""
    return eqn.primitive.name == "cond" and eqn.params.get("branches_platforms") is None


def run_every_branch(
    eqn: Eqn, operands: Sequence[Any], results: Callable[[Eqn, list[Any]], Sequence[jax.Array]] = bind
) -> list[jax.Array]:
    """Runs every branch of a choice, and selects the results of one. `results` runs one equation, as in `run_jaxpr`."""

    def run(inner: Eqn, args: list[Any]) -> Sequence[jax.Array]:
        if inner.primitive.name in EMPTY:
            return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in inner.outvars]
        return results(inner, args)

    cases = [run_jaxpr(*opened(branch), operands[1:], run) for branch in eqn.params["branches"]]
    return [_pick(operands[0], parts) for parts in zip(*cases, strict=True)]


def _pick(index: jax.Array, cases: Iterable[jax.Array]) -> jax.Array:
    *others, out = cases  # `lax.switch` has already clamped `index`
    for i, case in enumerate(others):
        out = jnp.where(index == i, case, out)
    return out


def every_branch(eqn: Eqn) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr, and its constants, that does what `run_every_branch` does."""
    return opened(jax.make_jaxpr(lambda *args: run_every_branch(eqn, args))(*map(shape_of, eqn.invars)))


def with_shared_operands(program: Program) -> Program:
    """Lets the derivative of a choice read the operands of the choice where these are.

    JAX returns from a choice what its derivative reads, also an operand such as a weight: each vertex would have its own.
    """
    if sum(map(is_choice, program.eqns)) < 2:
        return program
    eqns: list[Eqn] = []
    makers: dict[Var, tuple[Eqn, int]] = {}
    for eqn in program.eqns:
        if is_choice(eqn):
            eqn = _reading_operands(eqn, makers)
            makers |= {v: (eqn, n) for n, v in enumerate(eqn.outvars)}
        eqns.append(eqn)
    read = reads(eqns, program.outs)
    eqns = [_with_results(e, read) if is_choice(e) else e for e in eqns]
    return program._replace(eqns=tuple(e for e in eqns if e.outvars or e.effects))


def _reading_operands(eqn: Eqn, makers: Mapping[Var, tuple[Eqn, int]]) -> Eqn:
    """Returns a choice that reads operands of earlier ones, with the same number, rather than results that are these operands.

    `makers`: for each result of an earlier choice, the equation and the place of the result.
    """
    index, *operands = eqn.invars
    earlier = {n: makers[x] for n, x in enumerate(operands) if is_var(x) and x in makers}
    candidates = {n: _passed(*maker) for n, maker in earlier.items() if maker[0].invars[0] is index}
    passed = {n: atoms for n, atoms in candidates.items() if atoms is not None}
    if not passed:
        return eqn
    kept = [x for n, x in enumerate(operands) if n not in passed]
    extra = list(dict.fromkeys(x for atoms in passed.values() for x in atoms if is_var(x)))

    def of(number: int, branch: ClosedJaxpr) -> ClosedJaxpr:
        def run(*args: jax.Array) -> list[jax.Array]:
            remaining, env = iter(args), dict(zip(extra, args[len(kept) :], strict=True))
            values = [value_of(passed[n][number], env) if n in passed else next(remaining) for n in range(len(operands))]
            return run_jaxpr(*opened(branch), values)

        return cast(ClosedJaxpr, jax.make_jaxpr(run)(*map(shape_of, (*kept, *extra))))

    branches = tuple(of(number, branch) for number, branch in enumerate(eqn.params["branches"]))
    return eqn.replace(invars=[index, *kept, *extra], params=eqn.params | {"branches": branches})


def _passed(eqn: Eqn, n: int) -> list[Atom] | None:
    """Returns which operand result `n` of a choice is in each branch, zeros where nobody reads it; `None` if it is computed."""
    atoms: list[Atom] = []
    for branch in eqn.params["branches"]:
        jaxpr = opened(branch)[0]
        x, empty = jaxpr.outvars[n], set[Var]()
        for e in jaxpr.eqns:
            if e.primitive.name in EMPTY or (e.primitive.name == "broadcast_in_dim" and reads([e]) & empty):
                empty.update(e.outvars)
        if is_var(x) and x in jaxpr.invars:
            atoms.append(eqn.invars[1 + jaxpr.invars.index(x)])
        elif is_var(x) and x in empty:
            atoms.append(Literal(np.zeros(x.aval.shape, x.aval.dtype), x.aval))
        else:
            return None
    return atoms


def _with_results(eqn: Eqn, read: set[Var]) -> Eqn:
    """Returns a choice without the results that nobody reads."""
    places = [n for n, v in enumerate(eqn.outvars) if v in read]
    if len(places) == len(eqn.outvars):
        return eqn

    def some(branch: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr, consts = opened(branch)
        shapes = map(shape_of, jaxpr.invars)
        return cast(ClosedJaxpr, jax.make_jaxpr(lambda *args: [run_jaxpr(jaxpr, consts, args)[n] for n in places])(*shapes))

    branches = tuple(map(some, eqn.params["branches"]))
    return eqn.replace(outvars=[eqn.outvars[n] for n in places], params=eqn.params | {"branches": branches})
