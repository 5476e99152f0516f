"""F's entrance: what the joint program (`_function.transpose`) reads at some vertices, gathered, pulled, or kept by the
forward.

Memory moves here and where F scatters, nowhere between (Cavs section 3.3).
"""

from typing import Any, NamedTuple

import numpy as np
from jax import lax

from cavs._function.domains import EDGE
from cavs._function.jaxprs import is_var
from cavs._function.split import Split
from cavs._stages.tensors import Rows, View, get_rows


class Memory(NamedTuple):
    """What the forward leaves for the backward of the inner vertices of one kind; `crossing`, `kept`, `extras` with slack."""

    states: list[Any]
    statics: list[Any]
    crossing: list[Any]
    kept: list[Any]
    extras: list[Any]


def memory_of(part: Split, rows: Rows, saved: dict[str, Any], kind: int) -> Memory:
    """The memory of a kind, of what `_run.forward.forward` saved."""
    return Memory(
        states=saved["states"],
        statics=saved["statics"][kind],
        crossing=crossing(part, rows, saved["eager_rows"][kind]),
        kept=saved["kept"][kind],
        extras=[
            rows.padded_edges(x) if level == EDGE else rows.padded(x)
            for level, x in zip(part.extra_domain, saved["extras"][kind], strict=True)
        ],
    )


def crossing(part: Split, rows: Rows, eager: list[Any]) -> list[Any]:
    """The eager rows that the recurrent part reads, with slack."""
    return [rows.padded(x) for v, x in zip(part.eager.outs, eager, strict=True) if v in part.recurrent.cross]


def fixed(part: Split, statics: list[Any]) -> dict[Any, Any]:
    """What the joint program reads that is the same for all vertices."""
    return dict(part.joint.program.consts) | dict(zip(part.forward.statics, statics[: len(part.forward.statics)], strict=True))


def entrance(part: Split, rows: Rows, view: View, states: list[Any], crossing: list[Any], wanted: set[Any]) -> dict[Any, Any]:
    """The `wanted` inputs of the joint program at the vertices of a view."""
    kids = view.rows(rows.kids)
    env = {v: view.rows(x) for v, x in zip(part.forward.cross, crossing, strict=True) if v in wanted}
    env |= {
        v: get_rows(states[i], kids[:, k])
        for v, (k, i) in zip(part.forward.slots, part.recurrent.slots, strict=True)
        if v in wanted
    }
    children = view.of_edges(rows.edge_child) if part.recurrent.child else None
    env |= {
        v: get_rows(states[i], children) for v, i in zip(part.forward.child, part.recurrent.child, strict=True) if v in wanted
    }
    if part.forward.num_children in wanted:
        env[part.forward.num_children] = view.rows(rows.num_children)
    return env


def slots_together(part: Split, rows: Rows, view: View, states: list[Any], values: list[Any]) -> dict[Any, Any]:
    """Those of `values` that are one state of several children, side by side or stacked: one gather, and no copy after it."""
    makers = {e.outvars[0]: e for e in part.joint.program.eqns if e.primitive.name in ("concatenate", "stack")}
    slot_of = dict(zip(part.forward.slots, part.recurrent.slots, strict=True))
    env = {}
    for v in values:
        if v not in makers or v in part.joint.available:
            continue
        e = makers[v]
        slots = [slot_of[x] for x in e.invars if is_var(x) and x in slot_of]
        first = e.params.get("dimension", e.params.get("axis")) == 0
        if first and len(slots) == len(e.invars) and len({i for _, i in slots}) == 1:
            kids = view.rows(rows.kids)[:, np.array([k for k, _ in slots])]
            env[v] = get_rows(states[slots[0][1]], kids).reshape(kids.shape[0], *v.aval.shape)
    return env


def kept_values(part: Split, view: View, memory: Memory, wanted: set[Any], have: dict[Any, Any]) -> dict[Any, Any]:
    """The `wanted` values that the forward kept, at the vertices of a view or their edges; without those in `have`."""
    env = {}
    for v, x in zip((*part.forward.keep, *part.forward.extra), (*memory.kept, *memory.extras), strict=True):
        if is_var(v) and v in wanted and v not in have:
            env[v] = view.of_edges(x) if part.joint.domain.get(v) == EDGE else view.rows(x)
    return env


def barred(env: dict[Any, Any]) -> dict[Any, Any]:
    """`env`, read before anything is computed: else XLA fuses reads into late consumers, and then copies whole tensors in
    every iteration of a loop that writes them."""
    return dict(zip(env, lax.optimization_barrier(list(env.values())), strict=True))
