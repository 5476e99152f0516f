"""Builds the joint program: the recurrent part of F and its transpose, split like F itself (Cavs, proposition 2).

The levels run only the part of the transpose that leads from the cotangent of the scattered state to those of the gathered
states. The gradient of a parameter is lazy: the levels store the cotangent of each equation that reads a parameter (its *cut
cotangent*). One batched transpose of that equation follows; for a weight this is one product (K, V) x (V, N).
"""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from cavs._function.domains import EDGE, ROW, STATIC, Domains, domain_of, domains
from cavs._function.joint import Forward, Joint, ParamUse, Recurrent, Reverse, RoleProgram
from cavs._function.keeping import with_keeping
from cavs._function.unroll import trace, traced_vjp
from cavs._jaxpr.equations import Program, bind, depends, is_float, needed, reads, run_equations, shape_of, tap_p, value_of
from cavs._jaxpr.jaxprs import Atom, Env, Eqn, Var, is_var
from cavs._jaxpr.names import without_names
from cavs._jaxpr.source_lines import line_of

MSG_LOOP = (
    "run: F: got a loop whose number of iterations depends on values{where}; JAX has no reverse derivative of such loops. For "
    "gradients, write a fixed number of iterations: jax.lax.scan, or fori_loop with Python ints as bounds and "
    "jnp.where(i < n, new, old) inside."
)
MSG_NO_DERIVATIVE = (
    "run: F: got {name}{where}, of which JAX has no reverse derivative ({error}). For gradients, write a function with a rule "
    "of its own, jax.custom_vjp; or pass it jax.lax.stop_gradient(x) in place of x."
)


def joint_of(role: RoleProgram, part: Recurrent) -> Joint:
    """Returns the joint program of a role's recurrent part."""
    try:
        return _joint_of(role, part, differentiable=True)
    except Exception:
        if not no_derivative(part.eqns, [v for e in part.eqns for v in e.outvars]):
            raise
        return without_transpose(role, part)


def without_transpose(role: RoleProgram, part: Recurrent) -> Joint:
    """Returns the program of a role's recurrent part alone, whose calls of functions with derivative rules JAX still knows."""
    return _joint_of(role, part, differentiable=False)


def no_derivative(eqns: Sequence[Eqn], outs: Sequence[Atom], fixed: Set[Var] = frozenset()) -> str:
    """Returns what to say of the first equation that JAX cannot differentiate in reverse mode; empty if there is none.

    Only equations between what is not `fixed` and `outs` are differentiated, if no `stop_gradient` is in between.
    """
    varied = {x for e in eqns for x in e.invars if is_var(x)} - {v for e in eqns for v in e.outvars} - fixed
    eqns = [e for e in eqns if e.primitive.name != "stop_gradient"]
    for e in needed(eqns, outs)[0]:
        places = [i for i, x in enumerate(e.invars) if is_float(x) and is_var(x) and x in varied]
        if not places:
            continue
        varied.update(e.outvars)
        try:
            traced_vjp(e, places)
        except Exception as error:
            if "Reverse-mode differentiation does not work" in str(error):
                return MSG_LOOP.format(where=line_of(e))
            name, text = e.params.get("name", e.primitive.name), str(error).strip().partition("\n")[0].rstrip(".")
            return MSG_NO_DERIVATIVE.format(name=name, where=line_of(e), error=text or type(error).__name__)
    return ""


def _joint_of(role: RoleProgram, part: Recurrent, differentiable: bool) -> Joint:
    readers = _readers_of_params(role, part) if differentiable else []
    program, inputs, outputs, names = _traced(role, part, readers, differentiable)
    domain = domains(program.eqns, _known(role, part, inputs))
    uses = [
        _param_use(role, reader, args, cuts) for reader, args, cuts in zip(readers, outputs.operands, outputs.cuts, strict=True)
    ]
    statics, cross, slots, child = map(tuple, (inputs.statics, inputs.cross, inputs.slots, inputs.child))
    states, extra = tuple(outputs.states), tuple(outputs.extra)
    forward = Forward(statics, cross, slots, child, inputs.num_children, states, extra, keep=[])
    reverse = Reverse(
        state_cts=dict(zip(_floats(role.states), inputs.state_cts, strict=True)),
        extra_cts=dict(zip(_floats(part.extra), inputs.extra_cts, strict=True)),
        ct_cross=outputs.ct_cross,
        ct_slots=outputs.ct_slots,
        ct_child=outputs.ct_child,
        uses=uses,
        cross_domain=tuple(domain_of(v, role.domain) for v in part.cross),
    )
    return with_keeping(Joint(program, domain, forward, reverse, differentiable, names))


class _Reader(NamedTuple):
    """A recurrent equation that reads parameters, and the positions of its differentiable STATIC operands."""

    eqn: Eqn
    statics: tuple[int, ...]


def _readers_of_params(role: RoleProgram, part: Recurrent) -> list[_Reader]:
    from_params = role.from_params()
    readers = []
    for e in part.eqns:
        static = [i for i, x in enumerate(e.invars) if is_var(x) and domain_of(x, role.domain) == STATIC]
        positions = tuple(i for i in static if e.invars[i] in from_params and is_float(e.invars[i]))
        if positions and any(is_float(v) for v in e.outvars):
            readers.append(_Reader(e, positions))
    return readers


class _Inputs(NamedTuple):
    """Inputs of the joint program: arrays while it is traced, then variables."""

    statics: list[Any]
    cross: list[Any]
    slots: list[Any]
    child: list[Any]
    num_children: Any
    state_cts: list[Any]  # of the states that are floats
    extra_cts: list[Any]  # of the extra values that are floats


class _Outputs(NamedTuple):
    """Outputs of the joint program: arrays while it is traced, then variables or literals."""

    states: list[Any]
    extra: list[Any]
    operands: list[list[Any]]  # of each reader of parameters; `None` for STATIC ones
    ct_cross: dict[int, Any]  # as in `Reverse`
    ct_slots: dict[int, Any]
    ct_child: dict[int, Any]
    cuts: list[list[Any]]  # of each reader of parameters, the cut cotangents of its float outputs


def _traced(
    role: RoleProgram, part: Recurrent, readers: Sequence[_Reader], differentiable: bool
) -> tuple[Program, _Inputs, _Outputs, dict[str, set[Var]]]:
    """Traces the recurrent part and its VJP. Returns also the variables that the user has named."""
    slots, child = [role.slots[k][i] for k, i in part.slots], [role.child[i] for i in part.child]
    float_states, float_extra = _floats(role.states), _floats(part.extra)
    varied = depends(role.program.eqns, role.varied)

    def joint(inputs: _Inputs) -> _Outputs:
        fixed = dict(role.program.consts) | dict(zip(part.statics, inputs.statics, strict=True))
        fixed |= {role.num_children: inputs.num_children}

        def forward(
            cross: list[jax.Array], slot_values: list[jax.Array], child_values: list[jax.Array], deltas: list[list[jax.Array]]
        ) -> Any:
            env = fixed | dict(zip([*part.cross, *slots, *child], [*cross, *slot_values, *child_values], strict=True))
            operands = _run(part.eqns, env, readers, deltas)
            states, extra = [value_of(a, env) for a in role.states], [value_of(a, env) for a in part.extra]
            return ([states[i] for i in float_states], [extra[i] for i in float_extra]), (states, extra, operands)

        deltas = [[jnp.zeros(v.aval.shape, v.aval.dtype) for v in r.eqn.outvars if is_float(v)] for r in readers]
        args = inputs.cross, inputs.slots, inputs.child, deltas
        if differentiable:
            _, vjp, (states, extra, operands) = jax.vjp(forward, *args, has_aux=True)
            (*cts, cuts), primals = vjp((inputs.state_cts, inputs.extra_cts)), (part.cross, slots, child)
            ct_cross, ct_slots, ct_child = ({i: ct[i] for i in _floats(xs)} for ct, xs in zip(cts, primals, strict=True))
        else:
            _, (states, extra, operands) = forward(*args)
            ct_cross, ct_slots, ct_child, cuts = {}, {}, {}, []
        operands = [
            [None if domain_of(x, role.domain) == STATIC else a for a, x in zip(values, r.eqn.invars, strict=True)]
            for values, r in zip(operands, readers, strict=True)
        ]
        return _Outputs(
            states,
            extra,
            operands,
            ct_cross={i: ct for i, ct in ct_cross.items() if part.cross[i] in varied},
            ct_slots=ct_slots,
            ct_child=ct_child,
            cuts=cast(list[list[Any]], cuts),
        )

    program, in_tree, out_tree = trace(
        joint,
        _Inputs(
            statics=_shapes(part.statics),
            cross=_shapes(part.cross),
            slots=_shapes(slots),
            child=_shapes(child),
            num_children=jax.ShapeDtypeStruct((), jnp.int32),
            state_cts=_shapes([role.states[i] for i in float_states]),
            extra_cts=_shapes([part.extra[i] for i in float_extra]),
        ),
    )
    eqns, outs, names = without_names(program.eqns, program.outs)
    # Literals among the outputs are kept as leaves.
    inputs, outputs = jax.tree.unflatten(in_tree, program.invars)[0], jax.tree.unflatten(out_tree, outs)
    return program._replace(eqns=tuple(eqns), outs=tuple(outs)), inputs, outputs, names


def _run(
    eqns: Sequence[Eqn], env: Env, readers: Sequence[_Reader], deltas: Sequence[Sequence[jax.Array]]
) -> list[list[jax.Array]]:
    """Runs the recurrent equations; a `tap` adds a delta to each float output of a reader of parameters.

    Returns the operands of each reader.
    """
    number = {id(r.eqn): n for n, r in enumerate(readers)}
    operands: list[list[jax.Array]] = [[] for _ in readers]

    def results(e: Eqn, args: list[Any]) -> Sequence[jax.Array]:
        outs = bind(e, args)
        if (n := number.get(id(e))) is not None:
            operands[n], left = args, iter(deltas[n])
            outs = [tap_p.bind(o, next(left)) if is_float(v) else o for o, v in zip(outs, e.outvars, strict=True)]
        return outs

    run_equations(eqns, env, results)
    return operands


def _known(role: RoleProgram, part: Recurrent, inputs: _Inputs) -> Domains:
    """Returns the domains of the inputs of the joint program, except STATIC ones."""
    known: Domains = {v: ROW for v in (*inputs.slots, inputs.num_children, *inputs.state_cts)}
    known |= {v: EDGE for v in inputs.child}
    known |= {v: domain_of(x, role.domain) for v, x in zip(inputs.cross, part.cross, strict=True)}
    extra = [part.extra[i] for i in _floats(part.extra)]
    return known | {ct: domain_of(v, role.domain) for ct, v in zip(inputs.extra_cts, extra, strict=True)}


def _param_use(role: RoleProgram, reader: _Reader, args: Sequence[Atom | None], cuts: Sequence[Atom]) -> ParamUse:
    read = {i: args[i] for i in _operands_of_gradient(reader)}
    operands = {i: x for i, x in read.items() if x is not None}
    domain = max(domain_of(v, role.domain) for v in reader.eqn.outvars)
    return ParamUse(reader.eqn, domain, reader.statics, operands, tuple(cuts))


def _operands_of_gradient(reader: _Reader) -> set[int]:
    """Positions of the operands whose values the parameter gradient of an equation reads.

    A bias needs none: d(x + b)/db is 1. Echo calls products of which this holds "dead".
    """
    program = traced_vjp(reader.eqn, reader.statics)
    read = reads(needed(program.eqns, program.outs)[0], program.outs)
    return {i for i, v in enumerate(program.invars[: len(reader.eqn.invars)]) if v in read}


def _floats(values: Sequence[Atom]) -> list[int]:
    """Returns the places of the floats among `values`."""
    return [i for i, x in enumerate(values) if is_float(x)]


def _shapes(values: Sequence[Atom]) -> list[jax.ShapeDtypeStruct]:
    return [shape_of(x) for x in values]
