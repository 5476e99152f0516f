"""The parts of F that run as one batch rather than level by level: leaves, static, eager and lazy (see `_function.split`)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from cavs._function.domains import EDGE, ROW, STATIC, domain_of
from cavs._function.evaluate import evaluate, value_at
from cavs._function.joint import RoleProgram
from cavs._function.products import large_product
from cavs._function.split import Split
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import needed, reads
from cavs._jaxpr.jaxprs import Arrays, Var, is_var
from cavs._stages.blocks import block_of
from cavs._stages.tensors import Pulled, Rows, Values, get_rows, repeated


def leaf_function(
    role: RoleProgram, size: int, count: jax.Array, stored: bool
) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Returns F at the leaves: (params, pulled rows) -> (states, pushes), for all `size` leaves of a kind.

    `role`: F at leaves of one kind. `count`: how many leaves of it there are. `stored`: as in `evaluate`.
    """

    def leaf(params: Arrays, pulled: Arrays) -> tuple[Arrays, Arrays]:
        if not size:  # a loop over the zeros that leaves gather might never end
            states, pushes = (
                [jnp.zeros((0, *x.aval.shape), x.aval.dtype) for x in outs] for outs in (role.states, role.pushes)
            )
            return states, pushes
        env = (
            dict(role.program.consts)
            | dict(zip(role.params, params, strict=True))
            | dict(zip(role.inputs, pulled, strict=True))
            | {role.num_children: jnp.zeros(size, jnp.int32)}
        )
        evaluate(role.program.eqns, env, role.domain, real=count, stored=stored, product=large_product)
        states, pushes = ([value_at(x, ROW, size, env, role.domain) for x in outs] for outs in (role.states, role.pushes))
        return states, pushes

    return leaf


def leaf_block(role: RoleProgram, size: int) -> int:
    """Returns how many of `size` leaves run at a time, 0 for all (`block_of`)."""
    read = reads(role.program.eqns, (*role.states, *role.pushes))
    pulled = sum(bytes_of_var(v) for v in role.inputs if v in read)
    return block_of(pulled, sum(map(bytes_of_var, (*role.states, *role.pushes))), size)


def static_variables(part: Split) -> list[Var]:
    """Returns the STATIC variables that the eager, recurrent and lazy parts read, `part.recurrent.statics` first."""
    role, defined = part.role, {v for e in part.static_eqns for v in e.outvars} | set(part.role.params)
    read = [*(x for e in (*part.eager.eqns, *part.lazy_eqns) for x in e.invars), *role.states, *role.pushes]
    read = [x for x in read if is_var(x) and x in defined and domain_of(x, role.domain) == STATIC]
    return list(dict.fromkeys([*part.recurrent.statics, *read]))


def static_values(part: Split, rows: Rows, params: Arrays) -> Arrays:
    """Evaluates the static part. Returns the values of `static_variables(part)`; zeros if there are no `rows` to read them."""
    if not rows.size:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in static_variables(part)]
    env = dict(part.role.program.consts) | dict(zip(part.role.params, params, strict=True))
    wanted = static_variables(part)
    evaluate(needed(part.static_eqns, wanted)[0], env, {})
    return [env[v] for v in wanted]


def pull(part: Split, variables: Sequence[Var], leaves: Arrays, index: jax.Array) -> Arrays:
    """Returns the rows `index` of each leaf of the inputs or edges; none of those that the eager part does not read or return.

    `variables`: of the leaves, `part.role.inputs` or `part.role.edges`.
    """
    used = reads(part.eager.eqns, part.eager.outs)
    return [get_rows(x, index) if v in used else x[:0] for v, x in zip(variables, leaves, strict=True)]


def in_place(part: Split, rows: Rows, inputs: Arrays, edges: Arrays, eager: Arrays) -> list[Values]:
    """Returns the rows of `part.eager.outs` without copies of those that are inputs: these are read where they lie."""
    sources = {v: Pulled(x, rows.vertex) for v, x in zip(part.role.inputs, inputs, strict=True)}
    sources |= {v: Pulled(x, rows.edge_row) for v, x in zip(part.role.edges, edges, strict=True)}
    return [sources.get(v, x) for v, x in zip(part.eager.outs, eager, strict=True)]


def without_cotangents(part: Split) -> set[int]:
    """Returns the places of the static values that have no cotangent. Loops without a derivative may read them."""
    differentiated = part.role.from_params()
    return {i for i, v in enumerate(static_variables(part)) if v not in differentiated}


def eager_function(
    part: Split, num_children: jax.Array, rows: Rows | None = None
) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """Returns the eager part: (static values, pulled rows, rows of edges) -> the rows of `part.eager.outs`.

    `num_children`: of the vertices. `rows`: the vertices; they may be `None`, or a part of those of the kind, if the eager part
    does not read edges.
    """

    def eager(statics: Arrays, pulled: Arrays, edges: Arrays) -> Arrays:
        env = dict(part.role.program.consts) | dict(zip(static_variables(part), statics, strict=True))
        env |= dict(zip(part.role.inputs, pulled, strict=True))
        env[part.role.num_children] = num_children
        if rows is not None and part.eager.reads_edges:
            env |= dict(zip(part.role.edges, edges, strict=True))
            owner = rows.inner_edges(rows.edge_owner)
            evaluate(part.eager.eqns, env, part.role.domain, owner, rows.size, real=rows.count, product=large_product)
        else:
            count = None if rows is None else rows.count
            evaluate(part.eager.eqns, env, part.role.domain, real=count, product=large_product)
        return [env[v] for v in part.eager.outs]

    return eager


def lazy_arguments(part: Split, rows: Rows, states: Arrays, eager: Sequence[Values], extras: Arrays) -> tuple[Arrays, ...]:
    """Returns what the lazy part reads.

    Returns:
        The vertices' own states, the states of numbered children, the states of all children by edge, `eager`, and `extras`.

    `eager`: the outputs of the eager part. `extras`: the values of `part.recurrent.extra`.
    """
    kids = rows.inner(rows.kids)
    own_states = [get_rows(b, rows.row) for b in states]
    slots = [get_rows(states[i], kids[:, k]) for k, i in part.recurrent.slots]
    child = [get_rows(states[i], rows.inner_edges(rows.edge_child)) for i in part.recurrent.child]
    return own_states, slots, child, [x.copied() if isinstance(x, Pulled) else x for x in eager], extras


def lazy_function(part: Split, rows: Rows) -> Callable[..., Arrays]:
    """Returns the lazy part: (static values, *lazy_arguments) -> the pushes of all vertices with children of a kind."""
    role = part.role

    def lazy(statics: Arrays, own_states: Arrays, slots: Arrays, child: Arrays, eager: Arrays, extras: Arrays) -> Arrays:
        env = dict(role.program.consts) | dict(zip(static_variables(part), statics, strict=True))
        env[role.num_children] = rows.inner(rows.num_children)
        env |= {role.slots[k][i]: x for (k, i), x in zip(part.recurrent.slots, slots, strict=True)}
        env |= {role.child[i]: x for i, x in zip(part.recurrent.child, child, strict=True)}
        env |= dict(zip(part.eager.outs, eager, strict=True))
        env |= {v: x for v, x in zip(role.states, own_states, strict=True) if is_var(v) and v not in env}
        real = {EDGE: rows.real_edges, ROW: rows.real}
        env |= {v: repeated(x, real[of]) for v, of, x in zip(part.recurrent.extra, part.extra_domain, extras, strict=True)}
        owner = rows.inner_edges(rows.edge_owner)
        evaluate(part.lazy_eqns, env, role.domain, owner, rows.size, real=rows.count, product=large_product)
        return [value_at(x, ROW, rows.size, env, role.domain) for x in role.pushes]

    return lazy
