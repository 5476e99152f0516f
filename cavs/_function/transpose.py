"""The recurrent part and its transpose in one program, split like F itself (Cavs proposition 2).

Of the transpose the levels run what leads from the cotangent of the scattered state to that of the gathered ones; a
parameter's gradient is lazy: the levels store the cotangent of each equation that reads a parameter (its *cut cotangent*),
and one batched transpose of that equation follows: one product (K, V) x (V, N) for a weight.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from cavs._function.equations import (
    EDGE,
    ROW,
    STATIC,
    bind,
    depends,
    is_float,
    is_var,
    level_of,
    levels,
    needed,
    reads,
    tap_p,
    trace,
    value_of,
)
from cavs._function.minimum_cut import minimum_cut


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """One recurrent equation that reads parameters: what its lazy parameter gradient needs."""

    eqn: Any
    level: int
    statics: tuple[int, ...]  # positions of the differentiable static operands
    operands: dict[int, Any]  # position -> joint variable, for row operands whose VALUE the gradient needs
    cuts: tuple[Any, ...]  # joint variables: cut cotangents of the float outputs


def joint_of(
    role: Any,
    eqns: Sequence[Any],
    statics: list[Any],
    cross: list[Any],
    slots: list[tuple[int, int]],
    child: list[int],
    extra: list[Any],
) -> dict[str, Any]:
    """The fields of `_function.split.Split` from `joint` on; `eqns` are the recurrent ones, the others as there."""
    try:
        return _joint_of(role, eqns, statics, cross, slots, child, extra, differentiable=True)
    except ValueError:
        if not any(map(has_loop, eqns)):
            raise
        return _joint_of(role, eqns, statics, cross, slots, child, extra, differentiable=False)


def has_loop(eqn: Any) -> bool:
    """Whether an equation is, or holds, a loop with a dynamic number of turns, which JAX does not differentiate in reverse."""
    return eqn.primitive.name == "while" or any(has_loop(e) for body in jex.jaxprs_in_params(eqn.params) for e in body.eqns)


def _joint_of(
    role: Any,
    eqns: Sequence[Any],
    statics: list[Any],
    cross: list[Any],
    slots: list[tuple[int, int]],
    child: list[int],
    extra: list[Any],
    differentiable: bool,
) -> dict[str, Any]:
    from_params = depends(role.program.eqns, set(role.params))
    uses = []  # (equation, positions of differentiable static operands)
    for e in eqns:
        static = [i for i, x in enumerate(e.invars) if is_var(x) and level_of(x, role.level) == STATIC]
        positions = tuple(i for i in static if e.invars[i] in from_params and is_float(e.invars[i]))
        if differentiable and positions and any(is_float(v) for v in e.outvars):
            uses.append((e, positions))
    number = {id(e): n for n, (e, _) in enumerate(uses)}
    state_cts = [i for i, x in enumerate(role.states) if is_float(x)]
    extra_cts = [i for i, x in enumerate(extra) if is_float(x)]
    slot_vars = [role.slots[k][i] for k, i in slots]
    child_vars = [role.child[i] for i in child]

    def joint(p: list[Any], x: list[Any], k: list[Any], c: list[Any], n: Any, gs: list[Any], gm: list[Any]) -> Any:
        fixed = dict(role.program.consts) | dict(zip(statics, p, strict=True)) | {role.num_children: n}

        def forward(x: list[Any], k: list[Any], c: list[Any], deltas: list[list[Any]]) -> Any:
            env = fixed | dict(zip([*cross, *slot_vars, *child_vars], [*x, *k, *c], strict=True))
            operands: list[Any] = [None] * len(uses)
            for e in eqns:
                args = [env[a] if is_var(a) else a.val for a in e.invars]
                outs = bind(e, args)
                if (use := number.get(id(e))) is not None:
                    operands[use], own = args, iter(deltas[use])
                    outs = [tap_p.bind(o, next(own)) if is_float(v) else o for o, v in zip(outs, e.outvars, strict=True)]
                env.update(zip(e.outvars, outs, strict=True))
            s, m = [value_of(a, env) for a in role.states], [value_of(a, env) for a in extra]
            return ([s[i] for i in state_cts], [m[i] for i in extra_cts]), (s, m, operands)

        deltas = [[jnp.zeros(v.aval.shape, v.aval.dtype) for v in e.outvars if is_float(v)] for e, _ in uses]
        if differentiable:
            _, vjp, (s, m, operands) = jax.vjp(forward, x, k, c, deltas, has_aux=True)
            ct_x, ct_k, ct_c, cuts = vjp((gs, gm))
        else:
            _, (s, m, operands) = forward(x, k, c, deltas)
            ct_x, ct_k, ct_c, cuts = ([None] * n for n in (len(cross), len(slot_vars), len(child_vars), 0))
        operands = [
            [None if level_of(b, role.level) == STATIC else a for a, b in zip(args, e.invars, strict=True)]
            for args, (e, _) in zip(operands, uses, strict=True)
        ]
        cts = [
            [ct if is_float(v) else None for ct, v in zip(cts, like, strict=True)]
            for cts, like in ((ct_x, cross), (ct_k, slot_vars), (ct_c, child_vars))
        ]
        return s, m, operands, *cts, cuts

    def shapes(variables: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]

    ct_shapes = [shapes(role.states)[i] for i in state_cts], [shapes(extra)[i] for i in extra_cts]
    rows = shapes(statics), shapes(cross), shapes(slot_vars), shapes(child_vars)
    program, in_tree, out_tree = trace(joint, *rows, jax.ShapeDtypeStruct((), jnp.int32), *ct_shapes)
    p, x, k, c, n, gs, gm = jax.tree.unflatten(in_tree, program.invars)
    # Literals among the outputs are kept as leaves; None marks what has no cotangent.
    s, m, operands, ct_x, ct_k, ct_c, cuts = jax.tree.unflatten(out_tree, program.outs)
    known = {v: ROW for v in (*x, *k, n, *gs)} | {v: EDGE for v in c}
    known |= {v: level_of(extra[i], role.level) for v, i in zip(gm, extra_cts, strict=True)}
    level = levels(program.eqns, known)

    param_uses = []
    for (e, positions), args, cut in zip(uses, operands, cuts, strict=True):
        values = {i: args[i] for i in _operands_of_gradient(e, positions) if args[i] is not None}
        param_uses.append(ParamUse(e, max(level_of(v, role.level) for v in e.outvars), positions, values, tuple(cut)))

    # What the backward reads of the forward: the operands of its equations, what is itself a cotangent, and of lazy gradients.
    backward = depends(program.eqns, {*gs, *gm})
    results = [v for v in (*ct_x, *ct_k, *ct_c, *(v for cut in cuts for v in cut)) if v is not None and is_var(v)]
    backward_eqns = [e for e in needed(program.eqns, results, set())[0] if e.outvars[0] in backward]
    sinks = reads(backward_eqns, [*results, *(v for u in param_uses for v in u.operands.values())]) - backward
    free = {*p, *x, *k, *c, n, *program.consts} | {v for v in (*s, *m) if is_var(v)}
    forward_eqns = [e for e in program.eqns if e.outvars[0] not in backward]

    def present(cts: list[Any]) -> dict[int, Any]:
        return {i: v for i, v in enumerate(cts) if v is not None}

    return {
        "joint": program,
        "joint_level": level,
        "j_statics": tuple(p),
        "j_cross": tuple(x),
        "j_slots": tuple(k),
        "j_child": tuple(c),
        "j_num_children": n,
        "j_state_cts": dict(zip(state_cts, gs, strict=True)),
        "j_extra_cts": dict(zip(extra_cts, gm, strict=True)),
        "j_states": tuple(s),
        "j_extra": tuple(m),
        "keep": minimum_cut(forward_eqns, sinks, free, level),
        "ct_cross": present(ct_x),
        "ct_slots": present(ct_k),
        "ct_child": present(ct_c),
        "uses": param_uses,
        "differentiable": differentiable,
    }


def _operands_of_gradient(eqn: Any, positions: tuple[int, ...]) -> set[int]:
    """Positions of the operands whose values the gradient with respect to those at `positions` reads.

    A bias needs none: d(x + b)/db is 1. Echo calls products of which this holds "dead".
    """
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]

    def gradient(args: list[Any], cts: list[Any]) -> Any:
        def f(statics: list[Any]) -> list[Any]:
            full = list(args)
            for i, x in zip(positions, statics, strict=True):
                full[i] = x
            return [o for o, v in zip(bind(eqn, full), eqn.outvars, strict=True) if is_float(v)]

        return jax.vjp(f, [args[i] for i in positions])[1](cts)

    cts = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars if is_float(v)]
    program, _, _ = trace(gradient, shapes, cts)
    read = reads(needed(program.eqns, program.outs, set())[0], program.outs)
    return {i for i, v in enumerate(program.invars[: len(eqn.invars)]) if v in read}
