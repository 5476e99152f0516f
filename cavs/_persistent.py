"""Engine `persistent`: the recurrent part of F, forward and backward, each as one launch (`cavs.kernels.persistent`).

What is around it is the same as in engine `scan`: leaves, eager and lazy parts as large products in XLA. The levels of
the forward are F's recurrent equations; those of the backward the rest of the joint program (`_split`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs._chip import configure
from cavs._rows import EDGE, ROW, STATIC, depends, evaluate, is_var, needed, open_custom_calls, reduce_max_p, reduce_sum_p
from cavs._schedule import Schedule, Shape
from cavs._split import Split
from cavs._tensors import Rows as KindRows, get_rows
from cavs.kernels import persistent
from cavs.kernels._phases import cut
from cavs.kernels._specs import Constant, Level, Place, Rows, Sum, Unfit, num_blocks, stored_dtype
from cavs.kernels.rows import segment_rows

INTERPRET = "persistent-interpret"  # the engine's kernels in Pallas' interpreter: slow, any machine; for tests

# Of the scalars that a launch reads; the first three are `persistent.NUM_LEVELS`, `NUM_ROWS`, `NUM_EDGES`.
_STATE_ROW, _PAD, _EDGE_PAD, _SLOTS = 3, 4, 5, 6


class Program:
    """One direction of the recurrent part of an inner role as a `Level`, and what its launch is given and gives."""

    def __init__(self, part: Split, forward: bool, forest: bool = True, pushed: frozenset[int] = frozenset()):
        self.part, self.forward, self.pushed = part, forward, pushed
        self.made: dict[str, tuple[Any, int, int | None, int]] = {}  # name -> (variable, level, base, copies of its rows)
        joint, level = part.joint, part.joint_level
        if forward:
            outputs = [*part.j_states, *part.j_extra, *part.keep]
            eqns, _ = needed(joint.eqns, outputs, set())
        else:
            self.operands = _summed_operands(part)
            outputs = [*part.ct_slots.values(), *part.ct_child.values(), *part.cuts, *self.operands]
            eqns, _ = needed(joint.eqns, outputs, part.available)
        eqns, level = open_custom_calls(eqns, level)
        moving = [e for e in eqns if level.get(e.outvars[0], STATIC) != STATIC]
        self.static_eqns = [e for e in eqns if level.get(e.outvars[0], STATIC) == STATIC]
        weights = {e.invars[1] for e in moving if e.primitive.name == "dot_general"}
        read = dict.fromkeys(x for e in moving for x in e.invars if is_var(x))
        read |= dict.fromkeys(x for x in outputs if is_var(x))
        self.statics = [x for x in read if level.get(x, STATIC) == STATIC]
        self.weights = [x for x in self.statics if x in weights]
        sources = self._sources(forest)
        places = self._places()
        self.level: Level = cut(moving, level, sources, places, self._written())

    def _written(self) -> frozenset[str]:
        if self.forward:
            return frozenset(f"state{i}" for i in range(len(self.part.j_states)))
        return frozenset()

    def _sources(self, forest: bool) -> dict[Any, Any]:
        part = self.part
        out: dict[Any, Any] = {v: Constant(f"static{n}") for n, v in enumerate(self.statics)}
        out |= {v: Rows(f"cross{n}") for n, v in enumerate(part.j_cross)}
        out |= {v: Rows(f"state{i}", index=f"kid{k}") for v, (k, i) in zip(part.j_slots, part.slots, strict=True)}
        out |= {v: Rows(f"state{i}", index="edge_child") for v, i in zip(part.j_child, part.child, strict=True)}
        out[part.j_num_children] = Rows("num_children")
        if self.forward:
            return out
        for n, v in enumerate(part.j_extra):
            if is_var(v):
                out.setdefault(v, Rows(f"extra{n}"))
        for i, v in enumerate(part.j_states):
            if is_var(v):
                out.setdefault(v, Rows(f"state{i}", base=_STATE_ROW))
        for n, v in enumerate(part.keep):
            out[v] = Rows(f"kept{n}", base=_EDGE_PAD if part.joint_level.get(v) == EDGE else _PAD)
        for i, v in part.j_state_cts.items():
            parts = [(f"up{i}", "parent_slot")] if any(part.slots[j][1] == i for j in part.ct_slots) else []
            parts += [(f"edge_up{i}", "parent")] if any(part.child[j] == i for j in part.ct_child) else []
            ends = (None, None) if forest else ("parent_first", "parent_count")
            out[v] = Sum(f"g{i}" if i in self.pushed else None, _STATE_ROW, tuple(parts), *ends)
        for i, v in part.j_extra_cts.items():
            out[v] = Rows(f"extra_ct{i}")
        return out

    def _places(self) -> dict[Any, list[Place]]:
        part, level = self.part, self.part.joint_level
        places: dict[Any, list[Place]] = {}

        def put(v: Any, name: str, base: int | None, copies: int = 1, want: int = ROW) -> None:
            if not is_var(v) or level.get(v, STATIC) != want:
                raise Unfit(f"the recurrent part's {name} is a constant, or the same for all child edges; use engine='scan'")
            places.setdefault(v, []).append(Place(name, base))
            if not name.startswith("state"):
                self.made[name] = (v, level[v], base, copies)

        if self.forward:
            for i, v in enumerate(part.j_states):
                put(v, f"state{i}", _STATE_ROW)
            for n, v in enumerate(part.j_extra):
                edge = part.role.level.get(part.extra[n]) == EDGE
                put(v, f"extra{n}", None, want=EDGE if edge else ROW)
            for n, v in enumerate(part.keep):
                edge = level.get(v) == EDGE
                put(v, f"kept{n}", _EDGE_PAD if edge else _PAD, want=level.get(v, STATIC))
            return places
        for j, v in part.ct_slots.items():
            slot, i = part.slots[j]
            put(v, f"up{i}", _SLOTS + slot, self.arity)
        for j, v in part.ct_child.items():
            put(v, f"edge_up{part.child[j]}", None, want=EDGE)
        for n, v in enumerate(part.cuts):
            put(v, f"cut{n}", None, want=level.get(v, STATIC))
        for n, v in enumerate(self.operands):
            put(v, f"operand{n}", None, want=level.get(v, STATIC))
        return places

    @property
    def arity(self) -> int:
        """Slots that children fill."""
        return max((k for k, _ in self.part.slots), default=-1) + 1


def _summed_operands(part: Split) -> list[Any]:
    """What parameter gradients read of the forward that is a sum over children: made in the kernel, in a fixed order."""
    sums = [v for e in part.joint.eqns if e.primitive in (reduce_sum_p, reduce_max_p) for v in e.outvars]
    wanted = [v for u in part.uses for v in u.operands.values() if is_var(v) and v not in part.available]
    return [v for v in dict.fromkeys(wanted) if v in depends(part.joint.eqns, set(sums))]


def launch(
    program: Program,
    rows: KindRows,
    sched: Schedule,
    statics: list[Any],
    tensors: dict[str, Any],
    states: list[Any] | None,
    precision: str,
    interpret: bool,
) -> tuple[dict[str, Any], Any]:
    """Runs all levels in one direction.

    `tensors` are what the sources name, by vertex or edge, (N, ...). Returns the tensors made, (N, ...), by name, the
    states under `state0` ... where they are given (updated), and the flag of `persistent.launch`.
    """
    part, level, unit = program.part, program.level, program.level.unit
    config = configure(program, precision, interpret, sched.shape)
    layout = persistent.layout_of(level, config)
    env = dict(part.joint.consts) | dict(zip(part.j_statics, statics[: len(part.j_statics)], strict=True))
    evaluate(program.static_eqns, env, {})
    tensors = {name: x.reshape(x.shape[0], -1) for name, x in tensors.items()}
    constants = {f"static{n}": env[v] for n, v in enumerate(program.statics) if v not in program.weights}
    weights = {v: env[v] for v in program.weights}

    num_children, first = rows.inner(rows.num_children), sched.first_edge[_inner_slice(sched, rows)]
    owner, size = rows.inner_edges(rows.edge_owner), rows.size
    state_row = sched.task_row[0]
    last = jnp.maximum(rows.count - 1, 0)
    num_edges = first[last] + num_children[last]
    slots = [k * size for k in range(max(program.arity, 1))]
    scalars = [sched.num_levels, rows.count, num_edges, state_row, rows.pad, rows.edge_pad, *slots]
    integers = {
        "scalars": jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        "starts": sched.part_start,
        "first": first,
        "count": num_children,
        "edge_owner": owner,
        "edge_child": rows.inner_edges(rows.edge_child),
        **{f"kid{k}": rows.inner(rows.kids)[:, k] for k in range(program.arity)},
    }
    tensors["num_children"] = num_children.reshape(-1, 1)
    if not program.forward:
        integers |= parents(sched, rows, program.arity, state_row, size)
    made = {}
    for name, (v, lv, base, copies) in program.made.items():
        width = max(1, num_blocks(v.aval, unit)) * unit
        n = rows.edges + (2 * rows.edge_pad if base == _EDGE_PAD else 0) if lv == EDGE else copies * size
        if base == _PAD:
            n = size + 2 * rows.pad
        sparse = name.startswith(("up", "edge_up"))
        made[name] = persistent.Made(n, width, stored_dtype(v.aval), lv, None if sparse else base, sparse)
    updated = {} if states is None else {f"state{i}": s.reshape(s.shape[0], -1) for i, s in enumerate(states)}
    used = {k: jnp.asarray(x, jnp.int32) for k, x in integers.items()}
    tensors = {name: x for name, x in tensors.items() if name in program.level.tensors()}
    tensors = {name: x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for name, x in tensors.items()}
    arrays = persistent.Arrays(tensors, constants, used, updated, made)
    out, lost = persistent.launch(level, config, layout, weights, arrays, not program.forward)
    for name, (v, _, _, _) in program.made.items():
        x = out[name] if num_blocks(v.aval, unit) else out[name][:, :1]
        out[name] = x.reshape(-1, *v.aval.shape).astype(v.aval.dtype)
    for i, s in enumerate(states or []):
        out[f"state{i}"] = out[f"state{i}"].reshape(s.shape)
    return out, lost


def _inner_slice(sched: Schedule, rows: KindRows) -> slice:
    start = sum(sched.shape.inner[: rows.kind])
    return slice(start, start + rows.size)


def parents(sched: Schedule, rows: KindRows, arity: int, at: Any, size: int) -> dict[str, Any]:
    """Where vertices from row `at` of the dynamic tensors find what their parents left: by edge and by slot."""
    edge = jnp.asarray(sched.parent_edge)
    out = {}
    if sched.shape.forest:
        edge = lax.dynamic_slice_in_dim(edge, at, size)
    else:
        out["parent_first"] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_first), at, size)
        out["parent_count"] = lax.dynamic_slice_in_dim(jnp.asarray(sched.parent_count), at, size)
    out["parent"] = edge
    known = jnp.maximum(edge, 0)
    owner = get_rows(rows.inner_edges(rows.edge_owner), known)
    slot = known - get_rows(jnp.asarray(sched.first_edge[_inner_slice(sched, rows)]), jnp.minimum(owner, rows.size - 1))
    out["parent_slot"] = jnp.where((edge < 0) | (slot >= arity), -1, slot * rows.size + owner)
    return out


def pushed_states(plan: Any) -> frozenset[int]:
    """States whose cotangents the pushes begin; those of the others come from parents alone."""
    found = plan.push_states
    return frozenset(range(len(plan.state_avals)) if found is None else found)


def programs(plan: Any, name: str | None, forest: bool) -> tuple[Program, Program]:
    """Both directions of the inner role of a kind, kept with it. Raises [`Unfit`][]."""
    part = plan.inner[name]
    if forest not in part.launches:
        try:
            part.launches[forest] = Program(part, True), Program(part, False, forest, pushed_states(plan))
        except Unfit as e:
            part.launches[forest] = e
    found = part.launches[forest]
    if isinstance(found, Unfit):
        raise found
    return found


def unfit(plan: Any, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """Why the engine cannot run a plan on schedules of a shape, in words that follow "but"; `None` where it can."""
    deep = [name for name, n in zip(kinds, shape.inner, strict=True) if n]
    if not shape.levels and deep:
        if len(deep) > 1:
            return f"vertices of {len(deep)} kinds have children ({', '.join(map(repr, deep))}), and it runs one such kind"
        return "the schedule has no scripts for it (cavs.schedule makes them where JAX runs on a GPU)"
    if not plan.function.optimizations.lazy:
        return "F was made with Optimizations(lazy=False)"
    try:
        for name in deep:
            for program in programs(plan, name, shape.forest):
                configure(program, precision_of(program), False, shape)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def explain(plan: Any, name: str | None) -> str:
    """How a kind's levels run in one launch each way; or "no: ..." and why not."""
    if not plan.function.optimizations.lazy:
        return "no: F was made with Optimizations(lazy=False)."
    try:
        texts = []
        for program, way in zip(programs(plan, name, True), ("forward", "backward"), strict=True):
            level, precision = program.level, precision_of(program)
            config = configure(program, precision, False)
            layout = persistent.layout_of(level, config)
            size = layout.words * 4 * (level.unit // config.hb)
            where = "stay in shared memory" if config.resident else "stream from L2 in every tile, as they do not fit on chip"
            meetings = sum(p.meet for p in level.phases)
            texts.append(
                f"{way}: {len(level.phases)} phases and {meetings} meetings a level; {config.groups} groups of "
                f"{level.unit // config.hb} CTAs with {config.hb} units each; {size / 1e6:.1f} MB of weights a group, which "
                f"{where}; products in {precision}"
            )
        return "fits. " + "; ".join(texts) + "."
    except Unfit as e:
        return f"no: {e}."


def precision_of(program: Program) -> str:
    """How products are computed: as JAX computes float32 products on this GPU at the precision that F asks for."""
    asked = {str(e.params["precision"]) for p in program.level.phases for q in p.products for e in [q.eqn]}
    if any("HIGHEST" in a or "F32_F32_F32" in a for a in asked if "TF32" not in a and "BF16" not in a):
        return "fp32"
    if any("BF16_BF16" in a for a in asked):
        return "bf16"
    return "tf32"


def levels(
    plan: Any,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    all_rows: list[KindRows],
    zeros: Any,
    states: list[Any],
    statics: list[list[Any]],
    eager: list[list[Any]],
    save: bool,
    interpret: bool = False,
) -> tuple[list[Any], list[list[Any]], list[list[Any]], Any]:
    """The forward's levels: states; per kind what the backward keeps and the lazy part reads; and a flag for `checked`."""
    kept, extras, gave_up = [], [], jnp.zeros(1, jnp.int32)
    for k, (name, rows) in enumerate(zip(kinds, all_rows, strict=True)):
        part = plan.inner[name]
        if not sched.shape.inner[k]:
            kept.append([rows.tensor(zeros, v.aval, part.joint_level.get(v) == EDGE) for v in (part.keep if save else ())])
            edge = [part.role.level.get(v) == EDGE for v in part.extra]
            tensors = [rows.tensor(zeros, v.aval, e) for v, e in zip(part.extra, edge, strict=True)]
            extras.append([rows.inner_edges(x) if e else rows.inner(x) for x, e in zip(tensors, edge, strict=True)])
            continue
        program = programs(plan, name, sched.shape.forest)[0]
        crossing = [x for v, x in zip(part.eager_outs, eager[k], strict=True) if v in part.cross]
        tensors = {f"cross{n}": x for n, x in enumerate(crossing)}
        out, lost = launch(program, rows, sched, statics[k], tensors, states, precision_of(program), interpret)
        states = [out[f"state{i}"] for i in range(len(states))]
        gave_up = gave_up + lost
        kept.append([out[f"kept{n}"] for n in range(len(part.keep))] if save else [])
        extras.append([out[f"extra{n}"] for n in range(len(part.extra))])
    return states, kept, extras, gave_up


def reverse(
    plan: Any,
    sched: Schedule,
    kinds: tuple[str | None, ...],
    parts: list[Split],
    all_rows: list[KindRows],
    saved: dict[str, Any],
    g: dict[int, Any],
    extra_cts: list[list[Any]],
    interpret: bool = False,
) -> tuple[dict[int, Any], list[dict[Any, Any]], list[dict[Any, Any]]]:
    """The backward's levels: the states' cotangents at leaves; of each kind the cut cotangents, and operands made again."""
    cuts: list[dict[Any, Any]] = []
    operands: list[dict[Any, Any]] = []
    for k, (name, part, rows) in enumerate(zip(kinds, parts, all_rows, strict=True)):
        cuts.append({})
        operands.append({})
        if not sched.shape.inner[k]:
            continue
        program = programs(plan, name, sched.shape.forest)[1]
        tensors = {f"g{i}": x for i, x in g.items() if i in program.pushed} | {
            f"state{i}": x for i, x in enumerate(saved["states"])
        }
        crossing = [x for v, x in zip(part.eager_outs, saved["eager_rows"][k], strict=True) if v in part.cross]
        tensors |= {f"cross{n}": x for n, x in enumerate(crossing)}
        tensors |= {f"kept{n}": x for n, x in enumerate(saved["kept"][k])}
        tensors |= {f"extra{n}": x for n, x in enumerate(saved["extras"][k])}
        for i, v in part.j_extra_cts.items():
            edge = part.role.level.get(part.extra[i]) == EDGE
            zero = jnp.zeros((rows.edges if edge else rows.size, *v.aval.shape), v.aval.dtype)
            tensors[f"extra_ct{i}"] = extra_cts[k][i] if extra_cts[k] else zero
        out, lost = launch(program, rows, sched, saved["statics"][k], tensors, None, precision_of(program), interpret)
        cuts[k] = {v: out[f"cut{n}"] for n, v in enumerate(part.cuts)}
        operands[k] = {v: out[f"operand{n}"] for n, v in enumerate(program.operands)}
        leaves = sched.shape.pad + sum(sched.shape.leaves)
        up = parents(sched, rows, program.arity, 0, leaves)
        g = dict(g)
        for i in g:
            total = g[i][:leaves]
            for tensor, index in ((f"up{i}", "parent_slot"), (f"edge_up{i}", "parent")):
                if tensor in out:
                    total = total + gathered(out[tensor], up, index, leaves, interpret)
            g[i] = checked(total, lost)
    return g, cuts, operands


def gathered(tensor: Any, up: dict[str, Any], index: str, n: int, interpret: bool) -> Any:
    """The sum of what parents left in `tensor`, for n vertices; in a fixed order."""
    edge = up[index]
    if "parent_first" not in up:
        picked = get_rows(tensor, jnp.maximum(edge, 0))
        return jnp.where((edge >= 0).reshape(-1, *(1,) * (tensor.ndim - 1)), picked, 0)
    flat = tensor.reshape(tensor.shape[0], -1)
    first, count = up["parent_first"], up["parent_count"]
    if not interpret:
        # What follows from slices of the schedule is made anew: a kernel's operands must be aligned.
        operands = (jnp.concatenate([x, jnp.zeros(4, jnp.int32)]) for x in (edge, first, count))
        edge, first, count = lax.optimization_barrier(tuple(operands))
        return segment_rows(flat, edge, first[:n], count[:n]).reshape(n, *tensor.shape[1:])
    # `parent_edge` lists edges child after child: a sorted segment sum.
    at, ends = jnp.arange(edge.shape[0]), first + count
    child = jnp.clip(jnp.searchsorted(ends, at, side="right"), 0, n)
    rows = jnp.where((edge >= 0)[:, None], get_rows(flat, jnp.maximum(edge, 0)), 0)
    total = jax.ops.segment_sum(rows, jnp.where(at < ends[-1], child, n), n, indices_are_sorted=True)
    return total.reshape(n, *tensor.shape[1:])


def checked(x: Any, lost: Any) -> Any:
    """NaN everywhere where a wait was given up: a wrong result never looks like a right one."""
    return jnp.where(lost[0] == 0, x, jnp.asarray(jnp.nan, x.dtype))
