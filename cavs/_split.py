"""The split of F and of its transpose into eager, recurrent and lazy parts (Cavs 3.5, definition 1 and proposition 2),
and what the backward keeps of the forward (a minimum cut, as Echo's footprint accounting asks).

- static: follows from parameters alone; once.
- eager: depends on no gather. One batch over all vertices before the levels.
- recurrent: on a path from gather to scatter. The only part that levels run.
- lazy: fed by a gather but not needed by scatter. One batch after the levels.

The transposed program is split the same way. Of the recurrent part's transpose the levels run what leads from the
cotangent of the scattered state to that of the gathered ones; a parameter's gradient is lazy: the levels store the
cotangent of each equation that reads a parameter (its *cut cotangent*), and one batched transpose of that equation
follows: one product (K, V) x (V, N) for a weight.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._rows import EDGE, ROW, STATIC, Program, bind, depends, is_float, is_var, levels, needed, tap_p, trace

# Not run a second time in the backward: what costs more than storing its result.
_COSTLY = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call", "sort", "reduce_children_max"}
_VIEWS = {"split", "squeeze", "reshape", "slice"}
# An edge value stands for this many of its kind per vertex when bytes are counted.
_EDGES_PER_ROW = 2


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """One recurrent equation that reads parameters: what its lazy parameter gradient needs."""

    eqn: Any
    level: int
    statics: tuple[int, ...]  # positions of the differentiable static operands
    operands: dict[int, Any]  # position -> joint variable, for row operands whose VALUE the gradient needs
    cuts: tuple[Any, ...]  # joint variables: cut cotangents of the float outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """F at vertices with children, split. Variables are those of `role.program` unless said to be of `joint`."""

    role: Any
    static_eqns: list[Any]
    eager_eqns: list[Any]
    eager_outs: list[Any]  # what later parts read of the eager part; inputs of F among them are pulled rows
    recurrent_eqns: list[Any]
    recurrent_statics: list[Any]
    cross: list[Any]  # the part of eager_outs that the recurrent part reads
    slots: list[tuple[int, int]]  # (k, state leaf) that recurrent or lazy part read
    child: list[int]  # state leaves read by gather_all
    extra: list[Any]  # recurrent values that the lazy part reads and that are no states
    lazy_eqns: list[Any]

    joint: Program  # recurrent part and its VJP in one program
    joint_level: dict[Any, int]
    j_statics: tuple[Any, ...]
    j_cross: tuple[Any, ...]
    j_slots: tuple[Any, ...]
    j_child: tuple[Any, ...]
    j_num_children: Any
    j_state_cts: dict[int, Any]  # state leaf -> cotangent input
    j_extra_cts: dict[int, Any]
    j_states: tuple[Any, ...]
    j_extra: tuple[Any, ...]
    keep: list[Any]  # joint variables stored by the forward for the backward
    ct_cross: dict[int, Any]  # index into cross -> joint variable
    ct_slots: dict[int, Any]
    ct_child: dict[int, Any]
    uses: list[ParamUse]
    launches: dict[Any, Any] = dataclasses.field(default_factory=dict)  # made by engine `persistent`, by kind of graph

    @property
    def cuts(self) -> list[Any]:
        """Joint variables that the levels store for the lazy and eager parts' gradients; each once."""
        return list(dict.fromkeys(v for v in [*self.ct_cross.values(), *(c for u in self.uses for c in u.cuts)] if is_var(v)))

    @property
    def available(self) -> set[Any]:
        """Joint variables that the backward can read without computing: kept, gathered again, or states."""
        free = {*self.j_statics, *self.j_cross, *self.j_slots, *self.j_child, self.j_num_children, *self.keep}
        return free | {v for v in (*self.j_states, *self.j_extra) if is_var(v)}


def split(role: Any, optimizations: Any) -> Split:
    """Proposition 2 on the program of `role`, and the same on its transpose."""
    eqns, level, consts = role.program.eqns, role.level, role.program.consts
    gathered = {v for slot in role.slots for v in slot} | set(role.child)
    after_gather = depends(eqns, gathered)
    before_scatter = {id(e) for e in needed(eqns, role.states, set(consts))[0]}

    def lv(x: Any) -> int:
        return level.get(x, STATIC) if is_var(x) else STATIC

    static_eqns, eager_eqns, recurrent = [], [], []
    for e in eqns:
        top = max(lv(v) for v in e.outvars)
        hoisted = not any(v in after_gather for v in e.outvars) and top != EDGE
        if top == STATIC:
            static_eqns.append(e)
        elif hoisted and (optimizations.eager or id(e) not in before_scatter):
            eager_eqns.append(e)
        elif id(e) in before_scatter:
            recurrent.append(e)
    # Views of eager values cross over as what they are views of, so that one buffer crosses instead of several.
    moved = True
    while moved:
        read = {x for e in recurrent for x in e.invars if is_var(x)} | {x for x in role.states if is_var(x)}
        have = {id(e) for e in recurrent}
        views = [
            e
            for e in eager_eqns
            if e.primitive.name in _VIEWS and id(e) not in have and lv(e.invars[0]) == ROW and any(v in read for v in e.outvars)
        ]
        recurrent = views + recurrent
        moved = bool(views)
    recurrent = [e for e in eqns if id(e) in {id(r) for r in recurrent}]

    inside = {v for e in recurrent for v in e.outvars}
    reads = dict.fromkeys(
        x
        for x in [*(x for e in recurrent for x in e.invars), *role.states]
        if is_var(x) and x not in inside and x not in consts
    )
    statics = [x for x in reads if lv(x) == STATIC]
    cross = [x for x in reads if lv(x) == ROW and x not in gathered and x is not role.num_children]
    eager_made = {v for e in eager_eqns for v in e.outvars}
    ready = eager_made | inside | gathered | set(role.inputs) | {role.num_children} | {x for x in role.states if is_var(x)}
    static_made = {v for e in static_eqns for v in e.outvars} | set(role.params)
    lazy_eqns, lazy_reads = needed(eqns, role.pushes, ready | static_made | set(consts))
    lazy_reads = list(dict.fromkeys(lazy_reads))
    states = {x for x in role.states if is_var(x)}
    only_inside = inside - eager_made
    extra = [x for x in lazy_reads if x in only_inside and x not in states]
    eager_outs = list(
        dict.fromkeys([*cross, *(x for x in lazy_reads if x in eager_made or (x in role.inputs and lv(x) == ROW))])
    )
    used = {x for x in (*reads, *lazy_reads) if is_var(x)}
    slots = [(k, i) for k, slot in enumerate(role.slots) for i, v in enumerate(slot) if v in used]
    child = [i for i, v in enumerate(role.child) if v in used]

    from_params = depends(eqns, set(role.params))
    joint_parts = _trace_joint(role, recurrent, statics, cross, slots, child, extra, from_params, lv)
    return Split(
        role=role,
        static_eqns=static_eqns,
        eager_eqns=needed(eager_eqns, eager_outs, set())[0],
        eager_outs=eager_outs,
        recurrent_eqns=recurrent,
        recurrent_statics=statics,
        cross=cross,
        slots=slots,
        child=child,
        extra=extra,
        lazy_eqns=lazy_eqns,
        **joint_parts,
    )


def _trace_joint(
    role: Any,
    eqns: Sequence[Any],
    statics: list[Any],
    cross: list[Any],
    slots: list[tuple[int, int]],
    child: list[int],
    extra: list[Any],
    from_params: set[Any],
    lv: Any,
) -> dict[str, Any]:
    """The recurrent part and its VJP as one program, with the cut cotangents among its outputs."""
    uses = []  # (equation, positions of differentiable static operands)
    for e in eqns:
        positions = tuple(
            i for i, x in enumerate(e.invars) if is_var(x) and lv(x) == STATIC and x in from_params and is_float(x)
        )
        if positions and any(is_float(v) for v in e.outvars):
            uses.append((e, positions))
    of = {id(e): n for n, (e, _) in enumerate(uses)}
    state_cts = [i for i, x in enumerate(role.states) if is_float(x)]
    extra_cts = [i for i, x in enumerate(extra) if is_float(x)]
    slot_vars = [role.slots[k][i] for k, i in slots]
    child_vars = [role.child[i] for i in child]

    def joint(p: list[Any], x: list[Any], k: list[Any], c: list[Any], n: Any, gs: list[Any], gm: list[Any]) -> Any:
        fixed = dict(role.program.consts) | dict(zip(statics, p, strict=True)) | {role.num_children: n}

        def forward(x: list[Any], k: list[Any], c: list[Any], deltas: list[list[Any]]) -> Any:
            env = fixed | dict(zip(cross, x, strict=True))
            env |= dict(zip(slot_vars, k, strict=True)) | dict(zip(child_vars, c, strict=True))
            operands: list[Any] = [None] * len(uses)
            for e in eqns:
                args = [env[a] if is_var(a) else a.val for a in e.invars]
                outs = bind(e, args)
                if id(e) in of:
                    operands[of[id(e)]] = args
                    deltas_here = iter(deltas[of[id(e)]])
                    outs = [
                        tap_p.bind(o, next(deltas_here)) if is_float(v) else o for o, v in zip(outs, e.outvars, strict=True)
                    ]
                env.update(zip(e.outvars, outs, strict=True))

            def read(a: Any) -> Any:
                return env[a] if is_var(a) else jnp.asarray(a.val, a.aval.dtype)

            s, m = [read(a) for a in role.states], [read(a) for a in extra]
            return ([s[i] for i in state_cts], [m[i] for i in extra_cts]), (s, m, operands)

        deltas = [[jnp.zeros(v.aval.shape, v.aval.dtype) for v in e.outvars if is_float(v)] for e, _ in uses]
        _, vjp, (s, m, operands) = jax.vjp(forward, x, k, c, deltas, has_aux=True)
        ct_x, ct_k, ct_c, cuts = vjp((gs, gm))
        operands = [
            [a if is_var(b) and lv(b) != STATIC else None for a, b in zip(args, e.invars, strict=True)]
            for args, (e, _) in zip(operands, uses, strict=True)
        ]

        def floats(cts: list[Any], like: list[Any]) -> list[Any]:
            return [ct if is_float(v) else None for ct, v in zip(cts, like, strict=True)]

        return s, m, operands, floats(ct_x, cross), floats(ct_k, slot_vars), floats(ct_c, child_vars), cuts

    def shapes(variables: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]

    args = (
        shapes(statics),
        shapes(cross),
        shapes(slot_vars),
        shapes(child_vars),
        jax.ShapeDtypeStruct((), jnp.int32),
        [shapes(role.states)[i] for i in state_cts],
        [shapes(extra)[i] for i in extra_cts],
    )
    program, in_tree, out_tree = trace(joint, *args)
    p, x, k, c, n, gs, gm = jax.tree.unflatten(in_tree, program.invars)
    # Literals among the outputs are kept as leaves; None marks what has no cotangent.
    s, m, operands, ct_x, ct_k, ct_c, cuts = jax.tree.unflatten(out_tree, program.outs)
    known = {v: ROW for v in (*x, *k, n, *gs)} | {v: EDGE for v in c}
    known |= {v: lv(extra[i]) for v, i in zip(gm, extra_cts, strict=True)}
    level = levels(program.eqns, known)
    backward = depends(program.eqns, {*gs, *gm})

    param_uses = []
    for (e, positions), args_, cut in zip(uses, operands, cuts, strict=True):
        wanted = _operands_of_gradient(e, positions)
        top = max(lv(v) for v in e.outvars)
        values = {i: args_[i] for i in wanted if args_[i] is not None}
        param_uses.append(ParamUse(e, top, positions, values, tuple(cut)))

    free = {*p, *x, *k, *c, n, *program.consts} | {v for v in (*s, *m) if is_var(v)}
    results = [v for v in (*ct_x, *ct_k, *ct_c, *(v for cut in cuts for v in cut)) if v is not None and is_var(v)]
    sinks = {
        a
        for e in needed(program.eqns, results, set())[0]
        if any(v in backward for v in e.outvars)
        for a in e.invars
        if is_var(a) and a not in backward
    }
    sinks |= {v for v in results if v not in backward}
    sinks |= {v for u in param_uses for v in u.operands.values() if is_var(v)}
    keep = _minimum_cut([e for e in program.eqns if not any(v in backward for v in e.outvars)], sinks, free, level)

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
        "keep": keep,
        "ct_cross": present(ct_x),
        "ct_slots": present(ct_k),
        "ct_child": present(ct_c),
        "uses": param_uses,
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
    kept = needed(program.eqns, program.outs, set())[0]
    read = {x for e in kept for x in e.invars if is_var(x)} | {x for x in program.outs if is_var(x)}
    return {i for i, v in enumerate(program.invars[: len(eqn.invars)]) if v in read}


def _minimum_cut(eqns: Sequence[Any], sinks: set[Any], free: set[Any], level: dict[Any, int]) -> list[Any]:
    """The cheapest variables to store so that all `sinks` follow from them and from `free` without running a product twice.

    A maximum flow from the results of costly equations to the sinks; a variable's capacity is its bytes per vertex. Of
    the minimum cuts, the one nearest the sinks: the same bytes, the least to run again.
    """
    made = {v: e for e in eqns for v in e.outvars if level.get(v, STATIC) != STATIC and v not in free}
    source, sink = "source", "sink"
    capacity: dict[Any, dict[Any, float]] = {}

    def edge(a: Any, b: Any, c: float) -> None:
        capacity.setdefault(a, {})[b] = capacity.get(a, {}).get(b, 0.0) + c
        capacity.setdefault(b, {}).setdefault(a, 0.0)

    for v, e in made.items():
        scale = _EDGES_PER_ROW if level.get(v) == EDGE else 1
        size = float(np.prod(v.aval.shape, dtype=float) * getattr(v.aval.dtype, "itemsize", 4) * scale)
        edge(("in", v), ("out", v), size)
        if e.primitive.name in _COSTLY:
            edge(source, ("in", v), float("inf"))
        for x in e.invars:
            if is_var(x) and x in made:
                edge(("out", x), ("in", v), float("inf"))
    for v in sinks:
        if v in made:
            edge(("out", v), sink, float("inf"))

    def search(start: Any, forward: bool) -> dict[Any, Any]:
        seen = {start: None}
        queue = deque([start])
        while queue:
            a = queue.popleft()
            for b in capacity.get(a, {}):
                room = capacity[a][b] if forward else capacity[b][a]
                if room > 0 and b not in seen:
                    seen[b] = a
                    queue.append(b)
        return seen

    while sink in (seen := search(source, True)):
        path, b = [], sink
        while seen[b] is not None:
            path.append((seen[b], b))
            b = seen[b]
        amount = min(capacity[a][b] for a, b in path)
        assert amount < float("inf"), "a product's result is not storable"
        for a, b in path:
            capacity[a][b] -= amount
            capacity[b][a] += amount
    reaches_sink = search(sink, False)
    return [v for v in made if ("out", v) in reaches_sink and ("in", v) not in reaches_sink]
