"""The inputs of the joint program (`_function.transpose`) at some vertices: gathered, pulled, or kept by the forward.

Rows are copied here and where F scatters, and nowhere else (Cavs section 3.3).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.split import Split
from cavs._jaxpr.hold_back import barrier
from cavs._jaxpr.jaxprs import Env, Var, is_var
from cavs._stages.saved import Saved
from cavs._stages.tensors import Pulled, Rows, RowSpan, Values, get_rows


class Copied(NamedTuple):
    """A dynamic tensor as a copy of 16 bits."""

    rows: jax.Array  # the copy, (rows, ...)
    factor: float  # what the states were multiplied by


State: TypeAlias = jax.Array | Copied


class Memory(NamedTuple):
    """What the forward saved for the backward of one kind's vertices with children."""

    states: list[jax.Array]  # the dynamic tensors, one per leaf of the state
    statics: list[jax.Array]  # the static values
    crossing: list[Values]  # the eager rows that the recurrent part reads, of vertices or of edges, with slack
    kept: list[jax.Array]  # the values that the backward levels read, with slack
    extras: list[jax.Array]  # the values that the lazy part reads, with slack


def memory_of(part: Split, rows: Rows, saved: Saved, kind: int) -> Memory:
    return Memory(
        states=saved.states,
        statics=saved.statics[kind],
        crossing=crossing(part, rows, saved.eager_rows[kind]),
        kept=saved.kept[kind],
        extras=[rows.padded_in(domain, x) for domain, x in zip(part.extra_domain, saved.extras[kind], strict=True)],
    )


def crossing(part: Split, rows: Rows, eager: Sequence[Values]) -> list[Values]:
    """Returns the eager rows that the recurrent part reads, with slack."""
    crossed = ((part.role.domain[v], x) for v, x in zip(part.recurrent.cross, eager, strict=False))
    padded = rows.padded_in
    return [x._replace(index=padded(d, x.index)) if isinstance(x, Pulled) else padded(d, x) for d, x in crossed]


def fixed(part: Split, statics: list[jax.Array]) -> Env:
    """Returns the inputs of the joint program that are the same for all vertices."""
    return dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))


def entrance(
    part: Split, rows: Rows, span: RowSpan, states: Sequence[State], crossing: Sequence[Values], wanted: set[Var]
) -> Env:
    """Returns the `wanted` inputs of the joint program at the vertices of a span.

    `span`: some of them. `crossing`: as in `Memory`. `wanted`: variables of the joint program.
    """
    kids = span.rows(rows.kids)
    sources = zip(part.forward.cross, crossing, part.reverse.cross_domain, strict=True)
    env = {
        v: get_rows(x.source, span.rows_in(domain, x.index)) if isinstance(x, Pulled) else span.rows_in(domain, x)
        for v, x, domain in sources
        if v in wanted
    }
    env |= {
        v: _gathered(states[i], kids[:, k])
        for v, (k, i) in zip(part.forward.slots, part.recurrent.slots, strict=True)
        if v in wanted
    }
    if part.recurrent.child:
        children = span.of_edges(rows.edge_child)
        sources = zip(part.forward.child, part.recurrent.child, strict=True)
        env |= {v: _gathered(states[i], children) for v, i in sources if v in wanted}
    if part.forward.num_children in wanted:
        env[part.forward.num_children] = span.rows(rows.num_children)
    return env


def _gathered(state: State, index: jax.Array) -> jax.Array:
    """Returns rows of a state, in float32 if it is a copy of 16 bits."""
    if isinstance(state, Copied):
        return get_rows(state.rows, index).astype(jnp.float32) * jnp.float32(1 / state.factor)
    return get_rows(state, index)


def slots_together(part: Split, rows: Rows, span: RowSpan, states: Sequence[State], values: list[Var]) -> Env:
    """Gathers the `values` that concatenate or stack one state of several children, each by one gather without a copy."""
    env = {}
    for v, (i, slots) in slots_together_of(part, values).items():
        kids = span.rows(rows.kids)[:, np.array(slots)]
        env[v] = _gathered(states[i], kids).reshape(kids.shape[0], *v.aval.shape)
    return env


def slots_together_of(part: Split, values: Sequence[Var]) -> dict[Var, tuple[int, list[int]]]:
    """Returns the `values` that concatenate or stack one state of several children: the state leaf, and the children."""
    makers = {e.outvars[0]: e for e in part.joint.program.eqns if e.primitive.name in ("concatenate", "stack")}
    slot_of = dict(zip(part.forward.slots, part.recurrent.slots, strict=True))
    stacked = {}
    for v in values:
        if v not in makers or v in part.joint.available:
            continue
        e = makers[v]
        slots = [slot_of[x] for x in e.invars if is_var(x) and x in slot_of]
        first = e.params.get("dimension", e.params.get("axis")) == 0
        if first and len(slots) == len(e.invars) and len({i for _, i in slots}) == 1:
            stacked[v] = slots[0][1], [k for k, _ in slots]
    return stacked


def kept_values(part: Split, span: RowSpan, memory: Memory, wanted: set[Var], have: Env) -> Env:
    """Returns the `wanted` values that the forward kept, at the vertices of a span or their edges, except those in `have`."""
    env = {}
    places = [*part.forward.places, *((v,) for v in part.forward.extra)]
    for place, x in zip(places, (*memory.kept, *memory.extras), strict=True):
        missing = [v for v in place if is_var(v) and v in wanted and v not in have]
        if missing:
            rows = span.rows_in(part.joint.row_domain(place[0]), x)
            values = dict(zip(place, apart(rows, place), strict=True))
            env |= {v: values[v] for v in missing}
    return env


def apart(x: jax.Array, place: Sequence[Var]) -> list[jax.Array]:
    """Returns the values that are stored side by side in the rows of a tensor."""
    if len(place) == 1:
        return [x]
    ends = np.cumsum([v.aval.size for v in place])[:-1]
    return [part.reshape(x.shape[0], *v.aval.shape) for part, v in zip(jnp.split(x, ends, 1), place, strict=True)]


def together(values: Sequence[jax.Array], like: tuple[int, ...]) -> jax.Array:
    """Returns values side by side, as rows of shape `like`."""
    x = values[0]
    if len(values) > 1:
        x = jnp.concatenate([y.reshape(y.shape[0], math.prod(y.shape[1:])) for y in values], 1)
    return x if x.shape[1:] == like else x.reshape(x.shape[0], *like)


def place_aval(place: Sequence[Var]) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a vertex's row of a tensor of kept values."""
    shape = place[0].aval.shape if len(place) == 1 else (sum(v.aval.size for v in place),)
    return jax.ShapeDtypeStruct(shape, place[0].aval.dtype)


def barred(env: Env) -> Env:
    """Returns `env` behind a barrier, so that it is read before anything is computed.

    Otherwise XLA fuses these reads into later operations, and then copies whole tensors in every iteration of a loop that
    writes to them.
    """
    return dict(zip(env, barrier(list(env.values())), strict=True))
