"""Rewriting a traced vertex function: zeros of leaves folded away, products fused, edge values spread explicitly."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.children import TO_EDGES, TO_ROWS, enter_p, reduce_sum_p, spread, spread_p
from cavs._function.domains import EDGE, ROW, STATIC, Domains, domain_of, domains
from cavs._function.equations import Program, bind, is_float, trace
from cavs._function.jaxprs import is_var

# f(0) = 0, whatever the parameters of the equation.
_ZERO_UNARY = {
    "neg", "reshape", "broadcast_in_dim", "transpose", "reduce_sum", "slice", "squeeze", "convert_element_type", "copy",
    "tanh", "sin", "abs", "sign", "rev", "stop_gradient", "cumsum", "real", "reduce_precision", "split",
    spread_p.name, reduce_sum_p.name, enter_p.name,
}  # fmt: skip


class _Zero:
    """A value known to be zero: what a leaf gathers."""

    def __init__(self, aval: Any):
        self.aval = aval

    def array(self) -> Any:
        return jnp.zeros(self.aval.shape, self.aval.dtype)


def retrace(program: Program, body: Callable[[dict[Any, Any]], Sequence[Any]]) -> Program:
    """A new program with the same inputs: `body` gets an environment of inputs and constants, returns the outputs."""

    def fn(*args: Any) -> list[Any]:
        return list(body(dict(zip(program.invars, args, strict=True)) | program.consts))

    return trace(fn, *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.invars])[0]


def fold_zeros(program: Program, zeros: set[Any]) -> Program:
    """The program with the inputs `zeros` taken as zero: their products and sums disappear (leaves, Cavs section 3.2)."""

    def body(env: dict[Any, Any]) -> list[Any]:
        env |= {v: _Zero(v.aval) for v in zeros}

        def read(x: Any) -> Any:
            return env[x] if is_var(x) else x.val

        def solid(x: Any) -> Any:
            return x.array() if isinstance(x, _Zero) else x

        for eqn in program.eqns:
            args = [read(x) for x in eqn.invars]
            zero = [isinstance(a, _Zero) for a in args]
            name = eqn.primitive.name
            outs: list[Any] | None = None
            if any(zero):
                if name in ("mul", "dot_general") or (name in _ZERO_UNARY and zero[0]):
                    outs = [_Zero(v.aval) for v in eqn.outvars]
                elif name in ("add", "add_any", "sub", "concatenate") and all(zero):
                    outs = [_Zero(eqn.outvars[0].aval)]
                elif name == "select_n" and all(zero[1:]):
                    outs = [_Zero(eqn.outvars[0].aval)]
                elif name in ("add", "add_any", "sub") and (name != "sub" or zero[1]):
                    other = args[0] if zero[1] else args[1]
                    if jnp.shape(other) == eqn.outvars[0].aval.shape:
                        outs = [other]
            if outs is None:
                outs = bind(eqn, [solid(a) for a in args])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [solid(read(x)) for x in program.outs]

    return retrace(program, body)


def make_domains_explicit(program: Program, known: Domains, num_states: int, some_row: Any) -> Program:
    """The program with an equation of its own wherever a value changes its level.

    Every ROW value that an EDGE equation reads is spread to the edges. A parameter that is scattered or reduced over the
    children as it is becomes a ROW value by an addition of zero (made of the integer `some_row`), so that its gradient is
    summed over the vertices like any other's.
    """
    program = _without_static_spreads(program, known)
    level = domains(program.eqns, known)

    def body(env: dict[Any, Any]) -> list[Any]:
        on_edge: dict[int, Any] = {}

        def read(x: Any) -> Any:
            return env[x] if is_var(x) else x.val

        def row(x: Any) -> Any:
            """A STATIC value as a ROW value."""
            zero = env[some_row] * 0
            return read(x) | (zero != 0) if x.aval.dtype == bool else read(x) + zero.astype(x.aval.dtype)

        def on_edges(x: Any, reduced: bool) -> Any:
            here = domain_of(x, level)
            if here == EDGE or (here == STATIC and not reduced):
                return read(x)
            if id(x) not in on_edge:
                on_edge[id(x)] = spread(read(x) if here == ROW else row(x))
            return on_edge[id(x)]

        for eqn in program.eqns:
            reduced = eqn.primitive in TO_ROWS
            edge = eqn.primitive not in TO_EDGES and (reduced or any(level.get(v) == EDGE for v in eqn.outvars))
            args = [on_edges(x, reduced) if edge else read(x) for x in eqn.invars]
            env.update(zip(eqn.outvars, bind(eqn, args), strict=True))
        outs = [read(x) for x in program.outs]
        for i, x in enumerate(program.outs[:num_states]):
            if is_var(x) and level.get(x, STATIC) == STATIC and is_float(x):
                outs[i] = row(x)
        return outs

    return retrace(program, body)


def _without_static_spreads(program: Program, known: Domains) -> Program:
    """The program in which parameters are read as they are where F spread them, so that a product with one stays a product."""
    level, same, eqns = dict(known), {}, []
    for eqn in program.eqns:
        eqn = eqn.replace(invars=[same.get(x, x) if is_var(x) else x for x in eqn.invars])
        if eqn.primitive is spread_p and domain_of(eqn.invars[0], level) == STATIC:
            same[eqn.outvars[0]] = eqn.invars[0]
        else:
            eqns.append(eqn)
            level = domains([eqn], level)
    return program._replace(eqns=tuple(eqns), outs=tuple(same.get(x, x) if is_var(x) else x for x in program.outs))


def _product(eqn: Any, level: Domains) -> tuple[Any, Any, int, int] | None:
    """(row operand, weight, weight's contracted axis, its other axis) of a vector-matrix product with a static matrix."""
    if eqn.primitive.name != "dot_general":
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    if lb or rb or len(lc) != 1 or not all(is_var(x) for x in eqn.invars):
        return None
    a, b = eqn.invars
    if level.get(a, STATIC) == STATIC:  # W @ x is x @ W^T
        (a, b), (lc, rc) = (b, a), (rc, lc)
    if level.get(a, STATIC) == STATIC or level.get(b, STATIC) != STATIC:
        return None
    if len(a.aval.shape) != 1 or len(b.aval.shape) != 2:
        return None
    return a, b, rc[0], 1 - rc[0]


def fuse_products(program: Program, known: Domains) -> tuple[Program, list[str]]:
    """Horizontal fusion: products that share their row operand become one, with the weights side by side (the gates of
    an LSTM); then products that share their weight become one, with the row operands stacked (the forget gates of a
    Tree-LSTM). Returns the program and a description of each fused group.
    """
    notes: list[str] = []
    for side in ("operand", "weight"):
        program = _fuse(program, known, side, notes)
    return program, notes


def _fuse(program: Program, known: Domains, side: str, notes: list[str]) -> Program:
    level = domains(program.eqns, known)
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    weight_id, depth = _weight_ids(program), _product_depths(program, level)
    for eqn in program.eqns:
        p = _product(eqn, level)
        if p is not None:
            a, b, axis, _ = p
            rest = (axis, level.get(a), str(eqn.params["precision"]), str(eqn.params["preferred_element_type"]))
            dtypes = (a.aval.dtype, b.aval.dtype)
            # Only products of equal depth: of these none waits for another, however many groups there are.
            same = ("x", a) if side == "operand" else ("w", weight_id.get(b, b), depth[eqn.outvars[0]])
            key = (same, rest, dtypes, a.aval.shape)
            groups.setdefault(key, []).append((eqn, p))
    member: dict[int, list[tuple[Any, Any]]] = {}
    for group in groups.values():
        if len(group) > 1:
            for eqn, _ in group:
                member[id(eqn)] = group
            a, b = group[0][1][:2]
            sizes = [p[1].aval.shape[p[3]] for _, p in group]
            if side == "operand":
                notes.append(f"{len(group)} products share their operand {a.aval.str_short()}: one of width {sum(sizes)}")
            else:
                notes.append(
                    f"{len(group)} products share their weight {b.aval.str_short()}: one of {len(group)} rows a vertex"
                )
    if not member:
        return program
    biases = _common_biases(program, groups.values(), member, level) if side == "weight" else {}

    def body(env: dict[Any, Any]) -> list[Any]:
        pending = list(program.eqns)
        while pending:
            later = []
            for eqn in pending:
                if eqn.outvars and eqn.outvars[0] in env:
                    continue  # done with its group
                group = member.get(id(eqn))
                adds = biases.get(id(group), ())
                operands = [x for e, _ in group for x in e.invars] if group else list(eqn.invars)
                operands += [x for e in adds for x in e.invars if level.get(x, STATIC) == STATIC]
                if any(is_var(x) and x not in env for x in operands):
                    later.append(eqn)
                    continue
                if group is None:
                    values = [env[x] if is_var(x) else x.val for x in eqn.invars]
                    env.update(zip(eqn.outvars, bind(eqn, values), strict=True))
                else:
                    _run_group(group, side, adds, env)
            assert len(later) < len(pending), "fused products wait for each other"
            pending = later
        return [env[x] if is_var(x) else x.val for x in program.outs]

    return retrace(program, body)


def _common_biases(program: Program, groups: Any, member: dict[int, Any], level: Domains) -> dict[int, list[Any]]:
    """For each group of stacked products: the additions of one and the same static vector to each of their results.

    They are stacked too, so that product and addition leave ONE cut cotangent for both parameters.
    """
    readers: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for x in eqn.invars:
            if is_var(x):
                readers.setdefault(x, []).append(eqn)
    outs = {x for x in program.outs if is_var(x)}
    found = {}
    for group in groups:
        if id(group[0][0]) not in member:
            continue
        adds, vectors = [], set()
        for eqn, _ in group:
            (z,) = eqn.outvars
            uses = readers.get(z, [])
            if z in outs or len(uses) != 1 or uses[0].primitive.name != "add" or not all(is_var(x) for x in uses[0].invars):
                break
            (b,) = [x for x in uses[0].invars if x is not z] or [z]
            if level.get(b, STATIC) != STATIC or b.aval.shape != z.aval.shape:
                break
            adds.append(uses[0])
            vectors.add(b)
        if len(adds) == len(group) and len(vectors) == 1:
            found[id(group)] = adds
    return found


def _weight_ids(program: Program) -> dict[Any, Any]:
    """Equal keys for static concatenations of the same weights, so that stacking sees what side-by-side fusion made."""
    ids: dict[Any, Any] = {}
    for eqn in program.eqns:
        if eqn.primitive.name == "concatenate":
            parts = tuple(ids.get(x, x) if is_var(x) else id(x) for x in eqn.invars)
            ids[eqn.outvars[0]] = ("concatenate", eqn.params["dimension"], parts)
    return ids


def _product_depths(program: Program, level: Domains) -> dict[Any, int]:
    """How many products lead to each variable, one after another."""
    depth: dict[Any, int] = {}
    for eqn in program.eqns:
        before = max((depth.get(x, 0) for x in eqn.invars if is_var(x)), default=0)
        depth |= dict.fromkeys(eqn.outvars, before + (_product(eqn, level) is not None))
    return depth


def _run_group(group: list[tuple[Any, Any]], side: str, adds: Sequence[Any], env: dict[Any, Any]) -> None:
    eqn, (a, b, axis, free) = group[0]
    kwargs = {"precision": eqn.params["precision"], "preferred_element_type": eqn.params["preferred_element_type"]}
    if side == "operand":
        weights = [env[p[1]] for _, p in group]
        wide = lax.concatenate(weights, free)
        z = lax.dot_general(env[a], wide, (((0,), (axis,)), ((), ())), **kwargs)
        parts = lax.split(z, [w.shape[free] for w in weights])
    else:
        rows = jnp.stack([env[p[0]] for _, p in group])
        z = lax.dot_general(rows, env[b], (((1,), (axis,)), ((), ())), **kwargs)
        if adds:
            (bias,) = {x for x in adds[0].invars if x is not group[0][0].outvars[0]}
            z = z + jnp.broadcast_to(env[bias], z.shape)
        parts = [lax.squeeze(part, (0,)) for part in lax.split(z, [1] * len(group))]
    for (e, _), part in zip(group, parts, strict=True):
        env[e.outvars[0]] = part
    for add, part in zip(adds, parts, strict=False):
        env[add.outvars[0]] = part
