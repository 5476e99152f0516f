"""Traces F for one kind of vertex and one role, and rewrites it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cavs._function.children import MSG_ESCAPED, checked_calls, enter_p
from cavs._function.common_subexpressions import merge_common_subexpressions
from cavs._function.domains import EDGE, ROW, Domains, domains
from cavs._function.fuse import fuse_products
from cavs._function.joint import RoleProgram
from cavs._function.misuse import call_pure, check_outputs, check_program, defined, explained, role_name, short
from cavs._function.mixed import mixed_program
from cavs._function.raw_keys import from_stored, stored_aval, to_stored
from cavs._function.rewrite import fold_zeros, make_domains_explicit
from cavs._function.unroll import trace
from cavs._function.user_rules import with_rules_per_vertex
from cavs._function.vertex import Vertex, VertexFunction
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import Program, needed
from cavs._jaxpr.jaxprs import PyTreeDef, Var


class PushTypes(NamedTuple):
    """What F pushes: a pytree, and the shapes and dtypes of its leaves (keys of `jax.random` are keys)."""

    tree: PyTreeDef
    avals: list[jax.ShapeDtypeStruct]


class ArgumentShapes(NamedTuple):
    """Shapes of what F is given."""

    params: PyTree  # of the parameters
    inputs: PyTree  # of ONE vertex's row of the inputs
    edges: PyTree  # of ONE edge's row of the edges


def trace_role(
    function: VertexFunction, kind: str | None, shapes: ArgumentShapes, most: int | None, leaf: bool
) -> tuple[RoleProgram, PushTypes]:
    """Traces and rewrites F for one kind and role.

    `most`: the largest number of children; `None` if F does not call `gather_all` within `gather_all`. `leaf`: whether the role
    is that of leaves.
    """
    traced = _mixed(function, shapes, most) if function.mixes and not leaf else _traced(function, kind, shapes, most, leaf)
    program, arguments_of, pushed, gathering, reads_edges = traced
    written = program
    program = program.without(lambda e: e.invars if e.primitive is enter_p else None)  # calls are checked by now
    num_states = len(function.key_impls)
    if leaf:
        arguments = arguments_of(program)
        program = fold_zeros(program, {*arguments.child, *(v for slot in arguments.slots for v in slot)})
    arguments = arguments_of(program)
    program = with_rules_per_vertex(program, arguments.domains, arguments.num_children)
    if not leaf:
        arguments = arguments_of(program)
        program = make_domains_explicit(program, arguments.domains, num_states, arguments.num_children)
    # Leaves need no forget gates, for instance, whose product is not to become part of another.
    program = merge_common_subexpressions(program._replace(eqns=tuple(needed(program.eqns, program.outs)[0])))
    notes: list[str] = []
    if function.optimizations.fusion:
        program, notes = fuse_products(program, arguments_of(program).domains)
    arguments = arguments_of(program)
    role = RoleProgram(
        program,
        domains(program.eqns, arguments.domains),
        **arguments._asdict(),
        states=program.outs[:num_states],
        pushes=program.outs[num_states:],
        notes=tuple(notes),
        gathering=gathering,
        reads_edges=reads_edges,
        written=written,
    )
    return role, pushed


class _Arguments(NamedTuple):
    """The inputs of a program that F was traced to; see `RoleProgram`."""

    params: tuple[Var, ...]
    inputs: tuple[Var, ...]
    edges: tuple[Var, ...]
    slots: tuple[tuple[Var, ...], ...]
    child: tuple[Var, ...]
    num_children: Var

    @property
    def domains(self) -> Domains:
        """The domains of the inputs; parameters are STATIC."""
        known: Domains = {v: ROW for v in (*self.inputs, *(v for slot in self.slots for v in slot), self.num_children)}
        return known | {v: EDGE for v in (*self.child, *self.edges)}


class _Traced(NamedTuple):
    """F as a program."""

    program: Program
    arguments_of: Callable[[Program], _Arguments]  # finds its inputs in this program or a rewritten one
    pushed: PushTypes
    gathering: frozenset[str | None]  # the kinds whose function calls `gather_all`
    reads_edges: bool  # whether that reads edges


def _traced(function: VertexFunction, kind: str | None, shapes: ArgumentShapes, most: int | None, leaf: bool) -> _Traced:
    """F of one kind as a program."""
    fn, tree, who = function.fns[kind], function.state_tree, role_name(kind, leaf)
    avals = function.state_avals(shapes.params, shapes.inputs)
    stored = [stored_aval(a) for a in avals]
    found: list[tuple[PushTypes, frozenset[str | None], bool]] = []  # the last three fields of `_Traced`

    def one_vertex(
        arguments: ArgumentShapes, slots: list[list[jax.Array]], child: list[jax.Array], num_children: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        params, inputs, edges = arguments
        states = [tree.unflatten(map(from_stored, s, function.key_impls)) for s in slots]
        v = Vertex(function, avals, inputs, edges, states, jnp.int32(0) if leaf else num_children, child, leaf, most)
        try:
            call_pure(fn, params, v)
        except Exception as e:
            if (better := explained(e, who, inputs, avals)) is not None:
                raise better from e
            raise
        check_outputs(v, who, fn)
        assert v.scattered is not None
        leaves, structure = jax.tree.flatten(v._value)
        pushed = PushTypes(structure, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        found.append((pushed, frozenset({kind} if v._gathers.calls else ()), v._gathers.reads_edges))
        return list(map(to_stored, v.scattered)), list(map(to_stored, leaves))

    slots = [list(stored) for _ in range(function.arity)]
    try:
        program, in_tree, _ = trace(one_vertex, shapes, slots, list(stored), jax.ShapeDtypeStruct((), jnp.int32))
    except jax.errors.UnexpectedTracerError as e:
        raise TypeError(MSG_ESCAPED.format(where=defined(fn))) from e

    def arguments_of(program: Program) -> _Arguments:
        arguments, slots, child, num_children = jax.tree.unflatten(in_tree, program.invars)
        params, inputs, edges = (tuple(jax.tree.leaves(x)) for x in arguments)
        return _Arguments(params, inputs, edges, tuple(map(tuple, slots)), tuple(child), num_children)

    check_program(program, arguments_of(program).domains, fn)
    checked_calls(program.eqns, program.outs)
    return _Traced(program, arguments_of, *found[-1])


def _mixed(function: VertexFunction, shapes: ArgumentShapes, most: int | None) -> _Traced:
    """F at vertices with children, of all kinds that `function.mixes`."""
    traced = {k: _traced(function, kind, shapes, most, leaf=False) for k, kind in function.mixes.items()}
    pushed = agreed({(kind, False): traced[k].pushed for k, kind in function.mixes.items()})
    first = next(iter(traced.values()))
    arguments = first.arguments_of(first.program)
    programs = {k: (f.program, domains(f.program.eqns, f.arguments_of(f.program).domains)) for k, f in traced.items()}
    program = mixed_program(programs, arguments.inputs[-1], {*arguments.params})
    gathering = frozenset[str | None]().union(*(f.gathering for f in traced.values()))
    return _Traced(program, first.arguments_of, pushed, gathering, any(f.reads_edges for f in traced.values()))


def agreed(pushes: dict[tuple[str | None, bool], PushTypes]) -> PushTypes:
    """Checks that all kinds and roles push the same, and returns what they push."""
    (first_role, pushed), *rest = pushes.items()
    for role, other in rest:
        if other.tree != pushed.tree or [(a.shape, a.dtype) for a in other.avals] != [(a.shape, a.dtype) for a in pushed.avals]:
            raise ValueError(
                f"push: {role_name(*role)} pushes {other.tree} of {short(other.avals)}, but "
                f"{role_name(*first_role)} pushes {pushed.tree} of {short(pushed.avals)}. All vertices must push the same "
                "structure, shapes and dtypes."
            )
    return pushed
