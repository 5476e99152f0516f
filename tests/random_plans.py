"""Losses over a batch in parts, with `cavs.memory.plan` or `sub_batched`: they are those of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from tests.per_vertex import with_edges
from tests.random_cases import WAYS, Case
from tests.random_values import (
    build,
    cast,
    count_of,
    engines_of,
    given,
    inputs,
    is_float,
    moved_by,
    parameters,
    per_vertex,
    precision_of,
    rounded,
    vertex_function,
)


def whole_batch(case: Case, fns: dict[Any, Any], moved: float, dtype: Any) -> Any:
    """((gradients of parameters, {}), {"loss": the loss}) of the loop over vertices."""
    params, x = (moved_by(moved, rounded(case, values)) for values in (parameters(case)["f"], inputs(case)))
    net, counts = per_vertex(case, fns, dtype), [len(graph) for graph in case.graphs]
    rows, edges = given(case.program, cast(x, dtype))
    rows = rows if edges is None else with_edges(rows, edges, case.graphs)
    graph = np.repeat(np.arange(len(counts)), counts)

    def loss(params: Any) -> Any:
        values = _rows(net(params, rows), sum(counts))
        match case.options.loss:
            case "sum" | "total":
                return values.sum()
            case "mean of graphs":
                return jax.ops.segment_sum(values, graph, len(counts)).mean()
            case "mean of vertices":
                return values.mean()
            case _:
                some = _some(case)
                return jnp.where(some, values, 0).sum() / max(some.sum(), 1)

    value, grads = jax.value_and_grad(loss)(cast(params, dtype))
    return (grads, {}), {"loss": value}


def in_parts(case: Case, fns: dict[Any, Any], used: list[str]) -> Any:
    """The same by `cavs`, in parts. Appends the engine to `used`."""
    how, graphs = case.options, build(case)
    dtype = jnp.float32 if how.float32 else jnp.float64
    params, F = cast(parameters(case)["f"], dtype), vertex_function(case, fns)
    x: dict[str, Any] = jax.tree.map(np.asarray, cast(inputs(case), dtype))
    starts = {False: graphs.vertex_offsets, True: graphs.child_offsets[graphs.vertex_offsets]}
    seen: list[cavs.Schedule] = []

    def collate(sample: Any) -> Any:
        seen.append(sample.sched)
        out = {}
        for name, y in (x | {"some": _some(case), "real": np.ones(count_of(case, "some"), bool)}).items():
            edge = name in case.program.edges
            at = [np.arange(int(starts[edge][g]), int(starts[edge][g + 1])) for g in sample.numbers]
            pad = sample.sched.pad_edges if edge else sample.sched.pad
            out[name] = pad(y[np.concatenate(at)])
        return sample.sched, out

    def loss(params: Any, batch: Any) -> Any:
        sched, x = batch
        rows, edges = given(case.program, {name: y for name, y in x.items() if name not in ("some", "real")})
        values = _rows(cavs.run(F, params, sched, rows, edges=edges, engine=how.engine), sched.shape.vertices)
        match how.loss:
            case "sum":
                return values.sum()
            case "total":
                return cavs.data.total(values)
            case "mean of graphs":
                return cavs.data.mean(cavs.readout(values, sched))
            case "mean of vertices":
                return cavs.data.mean(values, where=x["real"])
            case "mean of some":
                return cavs.data.mean(values, where=x["some"])
            case _:
                return cavs.data.total(jnp.where(x["some"], values, 0)) / jnp.maximum(cavs.data.total(x["some"]), 1)

    with jax.default_matmul_precision(precision_of(case)):
        plan = cavs.memory.plan(loss, params, graphs, collate=collate, parts=how.parts)
        batch = plan.batch(graphs)
        if how.sub_batched:
            value, grads = WAYS[how.way](jax.value_and_grad(cavs.memory.sub_batched(loss)))(params, [batch])
        else:
            value, grads = WAYS[how.way](jax.value_and_grad(plan.loss))(params, batch)
    used += engines_of(F, how.engine, seen[-1])
    return (grads, {}), {"loss": value}


def _rows(pushes: Any, rows: int) -> Any:
    """One number per vertex; zero in padding rows, as the pushes there are zeros."""
    total: Any = 0.0
    for i, x in enumerate(jax.tree.leaves(pushes)):
        if is_float(x):
            weights = np.random.default_rng(i).standard_normal(x.shape[1:])
            finite = jnp.where(jnp.isfinite(x), x, 0) * weights.astype(x.dtype)
            total = total + jnp.sin(finite).reshape(rows, -1).sum(1)
    return total if jnp.ndim(total) else jnp.zeros(rows)


def _some(case: Case) -> np.ndarray:
    return np.random.default_rng([case.seed, 4]).random(count_of(case, "some")) < 0.4
