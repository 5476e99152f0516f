"""F traced once per kind and role (leaf or inner vertex), rewritten, and split: the `Plan` that engines run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from cavs._rewrite import fold_zeros, fuse_products, make_levels_explicit
from cavs._rows import EDGE, ROW, Program, is_var, levels, trace
from cavs._split import Split, split
from cavs._vertex import Vertex, VertexFunction

MSG_TRACED_VALUE = (
    "F branches in Python on a traced value (or turns one into a Python number). F is traced once for all vertices, so "
    "write jnp.where(condition, a, b) or jax.lax.cond for values of a vertex; v.is_leaf() and plain settings may be "
    "branched on."
)

MSG_SIDE_EFFECTS = (
    "F has side effects ({}). F is traced once and its equations are moved and batched, so they would happen in no order, or "
    "never. To print, use cavs.interpret(F, params, graphs, inputs), where print and breakpoint() work; else push the value."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Role:
    """F for one kind of vertex and one role, as a flat program. `level` knows all its variables."""

    program: Program
    level: dict[Any, int]
    params: tuple[Any, ...]  # invars, flat
    inputs: tuple[Any, ...]
    slots: tuple[tuple[Any, ...], ...]  # [k][state leaf]
    child: tuple[Any, ...]  # [state leaf]
    num_children: Any
    states: tuple[Any, ...]  # outs
    pushes: tuple[Any, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All that engines need to know of F for given shapes of params and inputs. One `leaf` and `inner` role per kind."""

    function: VertexFunction
    state_avals: list[jax.ShapeDtypeStruct]
    push_avals: list[jax.ShapeDtypeStruct]
    push_tree: Any
    leaf: dict[str | None, Role]
    inner: dict[str | None, Split]
    sweeps: dict[Any, Any] = dataclasses.field(default_factory=dict)  # compiled, by schedule shape

    @property
    def push_states(self) -> list[int] | None:
        """For each push the state leaf that it is, where ALL pushes are scattered states; else `None`."""
        found: list[int] = []
        for j in range(len(self.push_avals)):
            hits = set(range(len(self.state_avals)))
            for role in [*self.leaf.values(), *[s.role for s in self.inner.values()]]:
                hits &= {i for i, s in enumerate(role.states) if s is role.pushes[j] and is_var(s)}
            if not hits:
                return None
            found.append(min(hits))
        return found


def make_plan(function: VertexFunction, params: Any, inputs: Any) -> Plan:
    """Traces every kind of F for leaves and for inner vertices. `inputs` are shapes of ONE vertex's row."""
    state_avals = function.state_avals(params, inputs)
    leaf, inner, pushes = {}, {}, {}
    for kind in function.fns:
        for role in (True, False):
            program, pushed = _trace_role(function, kind, params, inputs, state_avals, role)
            pushes[kind, role] = pushed
            if role:
                leaf[kind] = program
            else:
                inner[kind] = split(program, function.optimizations)
    (first, (tree, avals)), *rest = pushes.items()
    for which, (other, other_avals) in rest:
        if other != tree or [(a.shape, a.dtype) for a in other_avals] != [(a.shape, a.dtype) for a in avals]:
            raise ValueError(
                f"push: {_role_name(*which)} pushes {other} of {[a.str_short() for a in other_avals]}, but "
                f"{_role_name(*first)} pushes {tree} of {[a.str_short() for a in avals]}. All vertices must push the same "
                "structure, shapes and dtypes."
            )
    push_avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return Plan(function, state_avals, push_avals, tree, leaf, inner)


def _role_name(kind: str | None, leaf: bool) -> str:
    return f"a {'leaf' if leaf else 'vertex with children'}" + (f" of kind {kind!r}" if kind is not None else "")


def _trace_role(
    function: VertexFunction, kind: str | None, params: Any, inputs: Any, state_avals: list[Any], leaf: bool
) -> tuple[Role, tuple[Any, list[Any]]]:
    fn, tree = function.fns[kind], function.state_tree
    trees: dict[str, Any] = {}

    def one_vertex(params: Any, inputs: Any, slots: list[list[Any]], child: list[Any], num_children: Any) -> Any:
        v = Vertex(
            function,
            state_avals,
            inputs,
            [tree.unflatten(s) for s in slots],
            jnp.int32(0) if leaf else num_children,
            tree.unflatten(child),
            leaf,
        )
        fn(params, v)
        who = _role_name(kind, leaf)
        if v.scattered is None:
            raise ValueError(
                f"F scatters nothing at {who}; write v.scatter(state) exactly once, also where no parent reads it."
            )
        if not v.pushed:
            raise ValueError(f"F pushes nothing at {who}, so run would return nothing; write v.push(value).")
        pushed = v.pushed[None] if None in v.pushed else v.pushed
        leaves, trees["push"] = jax.tree.flatten(pushed)
        return v.scattered, leaves

    slots = [list(state_avals) for _ in range(function.arity)]
    args = (params, inputs, slots, list(state_avals), jax.ShapeDtypeStruct((), jnp.int32))
    try:
        program, _, _ = trace(one_vertex, *args)
    except jax.errors.ConcretizationTypeError as e:
        raise TypeError(MSG_TRACED_VALUE) from e
    effects = dict.fromkeys(e.primitive.name for e in program.eqns if e.effects or not e.outvars)
    if effects:
        raise TypeError(MSG_SIDE_EFFECTS.format(", ".join(effects)))
    for value in program.consts.values():
        if isinstance(value, Tracer):
            raise ValueError(
                f"F closes over a traced value of shape {value.shape}; F is traced once and kept, so it may only close over "
                "constants. Pass the value through params or inputs."
            )

    counts = [len(jax.tree.leaves(params)), len(jax.tree.leaves(inputs)), len(state_avals) * function.arity, len(state_avals)]

    def groups(p: Program) -> list[tuple[Any, ...]]:
        out, at = [], 0
        for c in counts:
            out.append(p.invars[at : at + c])
            at += c
        return [*out, p.invars[at:]]

    def known(p: Program) -> dict[Any, int]:
        _, x, s, c, n = groups(p)
        return {v: ROW for v in (*x, *s, *n)} | {v: EDGE for v in c}

    notes: list[str] = []
    if leaf:
        _, _, s, c, _ = groups(program)
        program = fold_zeros(program, {*s, *c})
    else:
        program = make_levels_explicit(program, known(program), len(state_avals), program.invars[-1])
    if function.optimizations.fusion:
        program, notes = fuse_products(program, known(program))
    p, x, s, c, n = groups(program)
    size = len(state_avals)
    role = Role(
        program,
        levels(program.eqns, known(program)),
        params=p,
        inputs=x,
        slots=tuple(s[k * size : (k + 1) * size] for k in range(function.arity)),
        child=c,
        num_children=n[0],
        states=program.outs[:size],
        pushes=program.outs[size:],
        notes=tuple(notes),
    )
    avals = [out.aval for out in role.pushes]
    return role, (trees["push"], avals)
