"""Engine `scan`, backward: one task, which is the VJP of the recurrent part at its vertices."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from cavs._function.cut_parts import StoredCuts, stored_cuts
from cavs._function.domains import EDGE, ROW, Domains, domain_of
from cavs._function.evaluate import column, evaluate, turned_weights, value_at
from cavs._function.keeping import reused
from cavs._function.split import Split
from cavs._function.vertex import Optimizations
from cavs._jaxpr.costs import may_repeat
from cavs._jaxpr.equations import needed, reads
from cavs._jaxpr.jaxprs import Env, Eqn, Var, is_var
from cavs._schedule.schedule import Schedule
from cavs._stages.cotangents import Cotangent, merged
from cavs._stages.entrance import Memory, apart, barred, entrance, fixed, kept_values, together
from cavs._stages.lazy import OwnRows, lazy_gradients
from cavs._stages.tensors import Index, Rows, RowSpan, Zeros, get_rows, repeated, window, write

T = TypeVar("T")
StateCotangents: TypeAlias = dict[int, jax.Array]  # by the index of the state leaf, in the rows of the dynamic tensors
Totals: TypeAlias = list[dict[int, jax.Array]]  # for each kind the cotangents of the static values so far, by their index
Cuts: TypeAlias = list[list[jax.Array]]  # for each kind the cut cotangents, as in `Kind.stored`


class Kind(NamedTuple):
    """What the tasks of a kind read, besides cotangents of states."""

    number: int
    part: Split
    rows: Rows
    memory: Memory
    extra_cts: dict[int, jax.Array]  # of the values that the lazy part reads, with slack
    turned: Env
    eqns: list[Eqn]
    wanted: set[Var]
    cuts: StoredCuts
    stored: list[Var]  # what is stored of `cuts`: without lazy batching only that for which the eager part waits
    domains: Domains  # of cut cotangents, and of what is stored
    reused: dict[Var, int]  # what overwrites kept values: index into `memory.kept`
    own: dict[Var, int]  # what overwrites the cotangents of a vertex's own state: the state leaf


def with_whole(kind: Kind, stored: Env) -> Env:
    """Returns what is stored of the cut cotangents, and the cut cotangents that are not stored themselves."""
    env = dict(stored)
    for v, parts in kind.cuts.within.items():
        env |= dict(zip(parts, apart(together([stored[v]], (v.aval.size,)), parts), strict=True))
    evaluate(kind.cuts.eqns, env, kind.part.joint.domain)
    return env


def crossing_cts(part: Split, cuts: Mapping[Var, T]) -> dict[Var, T]:
    """Returns the cut cotangents, or where they lie, that belong to outputs of the eager part, by these outputs."""
    return {part.recurrent.cross[c]: cuts[v] for c, v in part.reverse.ct_cross.items() if is_var(v) and v in cuts}


def eager_cotangents(part: Split, eager_cts: list[Cotangent], cuts: Env) -> list[Cotangent]:
    """Adds up the cotangents of the eager part's outputs that come from the pushes and from the levels."""
    cross = crossing_cts(part, cuts)
    return [ct + cross[v] if v in cross else ct for v, ct in zip(part.eager.outs, eager_cts, strict=True)]


def kind_of(number: int, part: Split, rows: Rows, extra_cts: list[Cotangent], memory: Memory, in_parts: bool = True) -> Kind:
    """Collects what the tasks of a kind read. `in_parts`: whether cut cotangents may be stored in parts."""
    cuts = stored_cuts(part.joint, parts=in_parts)
    results = [*part.reverse.ct_slots.values(), *part.reverse.ct_child.values(), *cuts.values]
    eqns, available = needed(part.joint.program.eqns, results, part.joint.available)
    return Kind(
        number=number,
        part=part,
        rows=rows,
        memory=memory,
        extra_cts={
            i: rows.padded_in(part.extra_domain[i], jnp.asarray(extra_cts[i]))
            for i in (part.reverse.extra_cts if extra_cts else ())
        },
        turned=turned_weights(part.joint.program.eqns, part.joint.domain, fixed(part, memory.statics)),
        eqns=eqns,
        wanted=reads(eqns, available),
        cuts=cuts,
        stored=list(cuts.values),
        domains=part.reverse.cut_domain | cuts.domain,
        reused={},
        own={},
    )


def with_reuse(kind: Kind, own: bool) -> Kind:
    """Returns `kind` with the cut cotangents that overwrite kept values, and with `own` cotangents of states.

    A task reads its rows of these before it writes them, and nothing else reads them.
    """
    number = {place: n for n, place in enumerate(kind.part.forward.places)}
    over = reused(kind.part.joint, kind.stored, kind.domains)
    kept_of = {cut: number[place] for cut, place in over.items() if kind.wanted.issuperset(place)}
    unused = {i: (x.aval.shape, x.aval.dtype) for i, x in kind.part.reverse.state_cts.items() if own}
    state_of: dict[Var, int] = {}
    for v in kind.stored:
        fits = [i for i, like in unused.items() if like == (v.aval.shape, v.aval.dtype)]
        if v not in kept_of and kind.domains[v] == ROW and fits:
            state_of[v] = fits[0]
            del unused[fits[0]]
    return kind._replace(reused=kept_of, own=state_of, stored=[v for v in kind.stored if v not in state_of])


def empty_cuts(kind: Kind, zeros: Zeros) -> list[jax.Array]:
    """Returns dynamic tensors for cut cotangents: zeros, unless they overwrite kept values."""
    return [
        kind.memory.kept[kind.reused[v]] if v in kind.reused else kind.rows.tensor(zeros, v.aval, kind.domains[v])
        for v in kind.stored
    ]


def run_task(
    kind: Kind,
    sched: Schedule,
    size: tuple[int, int],
    t: jax.Array,
    carry: tuple[StateCotangents, Cuts, Totals],
    options: Optimizations,
) -> tuple[StateCotangents, Cuts, Totals]:
    """Runs task t: the VJP of the recurrent part at as many vertices, with as many edges to children, as `size` says.

    It adds to the cotangents of the children's states and writes cut cotangents. Without lazy batching it also adds to the
    cotangents of static values.
    """
    (width, edges), (g, cuts, totals) = size, carry
    part, rows, memory, domain = kind.part, kind.rows, _now(kind, g, cuts[kind.number]), kind.part.joint.domain
    shift = sched.task_size[t] - width  # backward windows END at the task's last row
    row, start = sched.task_row[t] + shift, rows.pad + sched.task_start[t] + shift
    edge_start = rows.edge_pad + sched.task_edge[t] + sched.task_edges[t] - edges
    span = RowSpan(start, width, edge_start, edges)
    known = _known(kind, memory, g, span, row)
    places = part.forward.places
    before = {cut: together([known[v] for v in places[n]], cut.aval.shape) for cut, n in kind.reused.items()}
    segments = span.segments(rows) if part.gathers_all else None
    in_task, edges_in_task = jnp.arange(width) >= -shift, jnp.arange(edges) >= edges - sched.task_edges[t]
    env = dict(known)
    if not all(map(may_repeat, kind.eqns)):  # loops may never end for rows that are not the task's
        own = {ROW: in_task, EDGE: edges_in_task}
        env |= {v: repeated(x, own[domain[v]], x[-1:]) for v, x in known.items() if domain_of(v, domain) in own}
    evaluate(kind.eqns, env, domain, segments, width, kind.turned, fusion=options.fusion)
    values = {v: value_at(v, want, span.size_in(want), env, domain) for v, want in kind.cuts.domain.items()}
    for v, i in kind.own.items():  # rows that are not the task's may belong to its children, or others
        g = g | {i: write(g[i], jnp.where(column(in_task, values[v]), values[v], known[part.reverse.state_cts[i]]), row)}
    g = _with_children(kind, g, span, in_task, edges_in_task, env)
    new_cuts = []
    for v, b in zip(kind.stored, cuts[kind.number], strict=True):
        value = values[v]
        if v in kind.reused:  # rows of the span that are not the task's still hold what the forward kept
            value = jnp.where(column(edges_in_task if kind.domains[v] == EDGE else in_task, value), value, before[v])
        value = together([value], b.shape[1:])  # it may lie where several kept values were
        new_cuts.append(write(b, value, span.start_in(kind.domains[v])))
    cuts, totals = list(cuts), list(totals)
    cuts[kind.number] = new_cuts
    if not options.lazy:
        grads = lazy_gradients(part, rows, span, memory, values, OwnRows(in_task, edges_in_task))  # the last row is the task's
        totals[kind.number] = merged(totals[kind.number], grads)
    return g, cuts, totals


def is_leaf(kind: Kind, sched: Schedule) -> bool:
    return kind.number >= len(sched.shape.kinds)


def _known(kind: Kind, memory: Memory, g: StateCotangents, span: RowSpan, row: Index) -> Env:
    """Returns what the VJP reads at the vertices of a span, of which the first has this row in the dynamic tensors."""
    part, env = kind.part, fixed(kind.part, memory.statics)
    env |= barred(entrance(part, kind.rows, span, memory.states, memory.crossing, kind.wanted))
    kept = kept_values(part, span, memory, kind.wanted, env)
    for i, (v, x) in enumerate(zip(part.forward.states, memory.states, strict=True)):
        # Two leaves of the state may be one variable, of which only one is overwritten.
        if is_var(v) and v in kind.wanted and v not in env and v not in kept and i not in part.forward.overwritten:
            kept[v] = window(x, row, span.size)
    # What is overwritten later is read by number, not as a slice: XLA would fuse a slice past the write, and copy the tensor.
    state_rows = row + jnp.arange(span.size)
    kept |= {v: get_rows(g[i], state_rows).astype(v.aval.dtype) for i, v in part.reverse.state_cts.items()}
    for cut, n in kind.reused.items():
        index = span.start_in(kind.domains[cut]) + jnp.arange(span.size_in(kind.domains[cut]))
        place = part.forward.places[n]
        kept |= dict(zip(place, apart(get_rows(memory.kept[n], index), place), strict=True))
    for i, v in part.reverse.extra_cts.items():
        if i in kind.extra_cts:
            kept[v] = span.rows_in(part.extra_domain[i], kind.extra_cts[i])
        else:
            kept[v] = jnp.zeros((span.size_in(part.extra_domain[i]), *v.aval.shape), v.aval.dtype)
    return env | barred(kept)


def _now(kind: Kind, g: StateCotangents, cuts: list[jax.Array]) -> Memory:
    """Returns the memory of a kind while tensors of cotangents overwrite some of it."""
    memory, kept = kind.memory, list(kind.memory.kept)
    for v, b in zip(kind.stored, cuts, strict=True):
        if v in kind.reused:
            kept[kind.reused[v]] = b
    states = [g[i] if i in kind.part.forward.overwritten else x for i, x in enumerate(memory.states)]
    return memory._replace(states=states, kept=kept)


def _with_children(
    kind: Kind, g: StateCotangents, span: RowSpan, in_task: jax.Array, edges_in_task: jax.Array, env: Env
) -> StateCotangents:
    """Adds the cotangents of the children of a task's vertices to the cotangents of states.

    They are added to what other parents contributed, or they overwrite the states of the children, which nobody reads again.
    """
    part, rows, domain = kind.part, kind.rows, kind.part.joint.domain
    kids, children = span.rows(rows.kids), span.of_edges(rows.edge_child)
    by_state: dict[int, list[tuple[jax.Array, jax.Array]]] = {}
    for j, v in part.reverse.ct_slots.items():
        slot, i = part.recurrent.slots[j]
        by_state.setdefault(i, []).append((jnp.where(in_task, kids[:, slot], 0), value_at(v, ROW, span.size, env, domain)))
    for j, v in part.reverse.ct_child.items():
        index = jnp.where(edges_in_task, children, 0)
        by_state.setdefault(part.recurrent.child[j], []).append((index, value_at(v, EDGE, span.edges, env, domain)))
    g = dict(g)
    for i, pairs in by_state.items():
        index, cts = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
        # Row 0 belongs to no vertex: rows of the span that are not the task's go there, and absent children are there. Nothing
        # reads row 0 of the cotangents. But row 0 of the states is the state of absent children, which must stay zeros: there
        # the last row is the one that belongs to no vertex.
        if i in part.forward.overwritten:
            index = jnp.where(index > 0, index, g[i].shape[0] - 1)
            g[i] = g[i].at[index].set(cts, mode="promise_in_bounds")
        else:
            g[i] = g[i].at[index].add(cts.astype(g[i].dtype), mode="promise_in_bounds")
    return g
