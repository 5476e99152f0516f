"""F traced once per kind and role (leaf or inner vertex), rewritten, and split: the `Plan` that engines run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from cavs._function.children import MSG_ESCAPED, checked_calls, enter_p
from cavs._function.domains import EDGE, ROW, Domains, domains
from cavs._function.equations import Program, trace
from cavs._function.jaxprs import is_var
from cavs._function.lines import line_of, line_of_error
from cavs._function.rewrite import fold_zeros, fuse_products, make_domains_explicit
from cavs._function.role import Role
from cavs._function.split import Split, split
from cavs._function.stored import from_stored, key_impl, stored_aval, to_stored
from cavs._function.transpose import has_loop
from cavs._function.vertex import Vertex, VertexFunction

# What F does with a traced value that JAX refuses, by JAX's error, most special first. `{where}` is the line of F.
_REFUSED = [
    (
        jax.errors.TracerIntegerConversionError,
        "F uses a traced value as a Python integer{where}. F is traced once for all vertices, so v.num_children() has no value "
        "yet. For all children write v.gather_all(fn, reduce=...); for the first few, for k in range(arity): v.gather(k) with "
        "jnp.where(v.has_child(k), ...); to index an array, jnp.take(x, i, axis=0).",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "F hands a traced value to NumPy{where}. F is traced once for all vertices, so write the same with jax.numpy, such as "
        "jnp.tanh for np.tanh.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "F selects with booleans{where}, so the shape of the result depends on values. Write jnp.where(condition, x, 0).",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "F branches in Python on a traced value (or turns one into a Python number){where}. F is traced once for all vertices, "
        "so write jnp.where(condition, a, b) or jax.lax.cond for values of a vertex; v.is_leaf() and plain settings may be "
        "branched on.",
    ),
    (jax.errors.UnexpectedTracerError, MSG_ESCAPED),
]

MSG_SIDE_EFFECTS = (
    "F has side effects ({}){}. F is traced once and its equations are moved and batched, so they would happen in no order, or "
    "never. To print, use cavs.interpret(F, params, graphs, inputs), where print and breakpoint() work; else push the value."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All that engines need to know of F for given shapes of params and inputs. One `leaf` and `inner` role per kind."""

    function: VertexFunction
    state_avals: list[jax.ShapeDtypeStruct]
    push_avals: list[jax.ShapeDtypeStruct]
    push_tree: Any
    push_impls: list[str | None]  # of pushes that are keys of `jax.random`
    leaf: dict[str | None, Role]
    inner: dict[str | None, Split]
    sweeps: dict[Any, Any] = dataclasses.field(default_factory=dict)  # compiled, by schedule shape

    @property
    def loop(self) -> str:
        """The line of F's first loop with a dynamic number of turns, as the end of a sentence."""
        return next((role.loop for role in self.roles if role.loop), "")

    @property
    def roles(self) -> list[Role]:
        """F at leaves, and at vertices with children, of every kind."""
        return [*self.leaf.values(), *(part.role for part in self.inner.values())]

    @property
    def push_states(self) -> list[int] | None:
        """For each push the state leaf that it is, where ALL pushes are scattered states; else `None`."""
        found: list[int] = []
        for j in range(len(self.push_avals)):
            hits = set(range(len(self.state_avals)))
            for role in self.roles:
                hits &= {i for i, s in enumerate(role.states) if s is role.pushes[j] and is_var(s)}
            if not hits:
                return None
            found.append(min(hits))
        return found


def make_plan(function: VertexFunction, params: Any, inputs: Any, most: int | None) -> Plan:
    """Traces every kind of F for leaves and for inner vertices. `inputs` are shapes of ONE vertex's row; `most` is the largest
    number of children, where F asks for it."""
    leaf, inner, pushes = {}, {}, {}
    for kind in function.fns:
        for role in (True, False):
            program, pushed = _trace_role(function, kind, params, inputs, most, role)
            pushes[kind, role] = pushed
            if role:
                leaf[kind] = program
            else:
                inner[kind] = split(program, function.optimizations.eager)
    (first, (tree, avals)), *rest = pushes.items()
    for which, (other, other_avals) in rest:
        if other != tree or [(a.shape, a.dtype) for a in other_avals] != [(a.shape, a.dtype) for a in avals]:
            raise ValueError(
                f"push: {_role_name(*which)} pushes {other} of {_short(other_avals)}, but "
                f"{_role_name(*first)} pushes {tree} of {_short(avals)}. All vertices must push the same "
                "structure, shapes and dtypes."
            )
    state_avals = [stored_aval(a) for a in function.state_avals(params, inputs)]
    push_avals = [stored_aval(a) for a in avals]
    return Plan(function, state_avals, push_avals, tree, [key_impl(a) for a in avals], leaf, inner)


def _short(avals: list[Any]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals)


def _role_name(kind: str | None, leaf: bool) -> str:
    return f"a {'leaf' if leaf else 'vertex with children'}" + (f" of kind {kind!r}" if kind is not None else "")


def _trace_role(
    function: VertexFunction, kind: str | None, params: Any, inputs: Any, most: int | None, leaf: bool
) -> tuple[Role, tuple[Any, list[Any]]]:
    """F for one role, and the tree and the shapes of what it pushes."""
    fn, tree, who = function.fns[kind], function.state_tree, _role_name(kind, leaf)
    avals = function.state_avals(params, inputs)
    state_avals = [stored_aval(a) for a in avals]
    pushed: dict[str, Any] = {}

    def one_vertex(params: Any, inputs: Any, slots: list[list[Any]], child: list[Any], num_children: Any) -> Any:
        states = [tree.unflatten(map(from_stored, s, function.key_impls)) for s in slots]
        v = Vertex(function, avals, inputs, states, jnp.int32(0) if leaf else num_children, child, leaf, most)
        try:
            fn(params, v)
        except Exception as e:
            for kind_of_error, text in _REFUSED:
                if isinstance(e, kind_of_error):
                    raise TypeError(text.format(where=line_of_error(e))) from e
            e.add_note(f"while F was traced for {who}{line_of_error(e)}")
            raise
        if v.scattered is None:
            raise ValueError(
                f"F scatters nothing at {who}; write v.scatter(state) exactly once, also if no parent reads it{_defined(fn)}."
            )
        if not v.pushed:
            raise ValueError(f"F pushes nothing at {who}, so run would return nothing; write v.push(value){_defined(fn)}.")
        leaves, pushed["tree"] = jax.tree.flatten(v.pushed[None] if None in v.pushed else v.pushed)
        pushed["avals"] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        return list(map(to_stored, v.scattered)), list(map(to_stored, leaves))

    slots = [list(state_avals) for _ in range(function.arity)]
    args = (params, inputs, slots, list(state_avals), jax.ShapeDtypeStruct((), jnp.int32))
    try:
        program, _, _ = trace(one_vertex, *args)
    except jax.errors.UnexpectedTracerError as e:
        raise TypeError(MSG_ESCAPED.format(where=_defined(fn))) from e
    effects = {e.primitive.name: e for e in reversed(program.eqns) if e.effects}
    if effects:
        raise TypeError(MSG_SIDE_EFFECTS.format(", ".join(reversed(effects)), line_of([*effects.values()][-1])))
    for value in program.consts.values():
        if isinstance(value, Tracer):
            raise ValueError(
                f"F closes over a traced value of shape {value.shape}{_defined(fn)}; F is traced once and kept, so it may only "
                "close over constants. Pass the value through params or inputs."
            )
    checked_calls(program.eqns, program.outs)
    loop = next((line_of(e) for e in program.eqns if has_loop(e)), "")  # rewritten equations do not know their line
    program = _without_marks(program)

    counts = [len(jax.tree.leaves(params)), len(jax.tree.leaves(inputs)), len(state_avals) * function.arity, len(state_avals)]

    def groups(p: Program) -> list[tuple[Any, ...]]:
        out, at = [], 0
        for c in counts:
            out.append(p.invars[at : at + c])
            at += c
        return [*out, p.invars[at:]]

    def known(p: Program) -> Domains:
        _, x, s, c, n = groups(p)
        return {v: ROW for v in (*x, *s, *n)} | {v: EDGE for v in c}

    notes: list[str] = []
    if leaf:
        _, _, s, c, _ = groups(program)
        program = fold_zeros(program, {*s, *c})
    else:
        program = make_domains_explicit(program, known(program), len(state_avals), program.invars[-1])
    if function.optimizations.fusion:
        program, notes = fuse_products(program, known(program))
    p, x, s, c, n = groups(program)
    size = len(state_avals)
    role = Role(
        program,
        domains(program.eqns, known(program)),
        params=p,
        inputs=x,
        slots=tuple(s[k * size : (k + 1) * size] for k in range(function.arity)),
        child=c,
        num_children=n[0],
        states=program.outs[:size],
        pushes=program.outs[size:],
        notes=tuple(notes),
        loop=loop,
    )
    return role, (pushed["tree"], pushed["avals"])


def _without_marks(program: Program) -> Program:
    """The program without `enter`, which is of no use once calls are checked."""
    same: dict[Any, Any] = {}
    eqns = []
    for e in program.eqns:
        if e.primitive is enter_p:
            same[e.outvars[0]] = same.get(e.invars[0], e.invars[0])
        else:
            eqns.append(e.replace(invars=[same.get(x, x) if is_var(x) else x for x in e.invars]))
    outs = tuple(same.get(x, x) if is_var(x) else x for x in program.outs)
    return program._replace(eqns=tuple(eqns), outs=outs)


def _defined(fn: Any) -> str:
    code = getattr(fn if hasattr(fn, "__code__") else type(fn).__call__, "__code__", None)
    return f" (F is defined in {code.co_filename}, line {code.co_firstlineno})" if code else ""
