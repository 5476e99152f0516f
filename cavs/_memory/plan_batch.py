"""`plan`: chooses how a batch is computed within a memory budget; `load` reads such a plan."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cavs._function.names import names_of
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._memory.batch_plan import BatchPlan
from cavs._memory.batch_search import BatchGradient, Collate
from cavs._memory.bytes import BudgetError, bytes_of, memory_of_gpu, text_of
from cavs._memory.compare_parts import check_parts
from cavs._memory.search import KEEPINGS, Candidate, Choice, Search, choices_for, in_segments, numbers_of_parts, with_segments


def plan(
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    graphs: Graphs,
    budget: int | float | str | None = None,
    *,
    collate: Collate = lambda sample: sample.sched,
    parts: int | None = None,
    keep: str | None = None,
    segments: int | None = None,
    names: Mapping[str, str] | None = None,
) -> "BatchPlan":
    """Plans how the gradient of a batch is computed within a memory budget. Nothing is compiled.

    The plan is the fastest that is predicted to fit. A batch may be computed in parts, one after another, whose gradients are
    added up (moDNN, section 5.1); the backward of F may keep less, and run products again (Echo); and the levels of deep graphs
    may run in segments, of which only the frontiers are kept.

    ```python
    plan = cavs.memory.plan(loss, params, graphs, "2GiB")             # loss(params, sched)
    print(plan)
    step = jax.jit(jax.value_and_grad(plan.loss), compiler_options=plan.compiler_options)
    value, grads = step(params, plan.batch(graphs))
    ```

    Args:
        loss: `loss(params, batch)`, a scalar: a sum over the graphs of the batch, or computed from [`cavs.data.total`][] and
            [`cavs.data.mean`][], which are over the whole batch.
        params: the parameters, or their `jax.ShapeDtypeStruct`s.
        graphs: a batch; pass the largest one. Batches of as many graphs and about as many vertices need as much memory.
        budget: the temporary memory of forward and backward, apart from parameters, gradients and inputs: bytes, `"2GiB"`, a
            fraction of the device's memory such as `0.5`, or `"min"` for the smallest plan. None: the fastest plan.
        collate: as in [`cavs.data.Loader`][]: `collate(sample)` returns the `batch` that `loss` gets, a pytree of NumPy arrays,
            for a part of the batch. By default `sample.sched`, which includes `input_id` and `label`.
        parts: the number of parts, if you choose it yourself. It divides the number of graphs.
        keep: what the backward of F keeps, if you choose it yourself: `"fast"`, `"least"` (no more than needed without running
            a product again; engine `scan` then shares buffers), or `"window"` (products run again, and parameter gradients
            are batched over 256 vertices at a time).
        segments: the number of segments of levels, as in [`cavs.schedule`][], if you choose it yourself. Otherwise large graphs
            of many levels run in segments if the budget requires it, on engine `scan`, or `native` on a CPU.
        names: how the backward gets values of the recurrent part of F that you named with `jax.ad_checkpoint.checkpoint_name`:
            `{"gates": "recompute"}` never keeps them, `"keep"` always does. If a product computes a value that is not kept, it
            runs again.

    Returns:
        The plan, which prints as a table. If there is no budget and the batch does not fit the GPU, a warning contains the plan
        that does.

    Raises:
        BudgetError: no plan fits the budget. The message names the smallest one that does.
        ValueError: `budget` is not an amount of memory; `parts`, `keep`, `segments` or `names` is invalid; or the loss would
            not be the same in parts. That is found by one comparison, on a few graphs of the batch.
        TypeError: `graphs` is not [`cavs.Graphs`][].
    """
    wanted = bytes_of(budget, "plan")
    if not isinstance(graphs, Graphs) or not len(graphs):
        got = "no graphs" if isinstance(graphs, Graphs) else f"a {type(graphs).__name__}"
        raise TypeError(f"plan: graphs: got {got}; expected a batch. Write graphs[:64] of cavs.read(...), for instance.")
    if keep is not None and keep not in KEEPINGS:
        raise ValueError(f"plan: keep: got {keep!r}; expected one of {', '.join(map(repr, KEEPINGS))}, or None.")
    counts = numbers_of_parts(len(graphs))
    if parts is not None and parts not in counts:
        raise ValueError(f"plan: parts: got {parts!r} for {counted(len(graphs), 'graph')}; expected one of {counts}.")
    if segments is not None and (not isinstance(segments, int) or segments < 1):
        raise ValueError(f"plan: segments: got {segments!r}; expected an int >= 1. Write segments=16.")
    known = choices_for(len(graphs), graphs.num_vertices) if keep is None else [Choice(n, keep) for n in counts]
    known = with_segments(known, graphs) if segments is None else [choice._replace(segments=segments) for choice in known]
    choices = [choice for choice in known if parts in (None, choice.parts)]
    batch = BatchGradient(loss, params, graphs, collate, names_of(names, "plan", ("keep", "recompute")))
    search = Search(batch, choices)
    chosen = search.chosen(wanted)
    if chosen is None:
        raise BudgetError(_too_small(batch, search.smallest(), int(wanted or 0)))
    if chosen.choice.parts > 1:
        check_parts(batch, chosen.choice.parts)
    found = BatchPlan(batch, search, chosen, wanted)
    if wanted is None and (limit := memory_of_gpu()) is not None and found.peak > limit:
        smaller = search.fastest(limit)
        what = f"this plan does:\n{BatchPlan(batch, search, smaller, limit)}" if smaller else "and no plan does."
        warnings.warn(
            f"plan: the batch needs {text_of(found.peak)}, which does not fit the GPU ({text_of(limit)}); {what}\n"
            f"Write budget={limit}.",
            stacklevel=2,
        )
    return found


def load(
    path: str | os.PathLike[str],
    loss: Callable[[Any, Any], jax.Array],
    params: PyTree,
    graphs: Graphs,
    *,
    collate: Collate = lambda sample: sample.sched,
) -> "BatchPlan":
    """Reads a plan that `BatchPlan.save` wrote, without planning again.

    Args:
        path: the file.
        loss: as in [`cavs.memory.plan`][].
        params: the parameters.
        graphs: a batch of as many graphs as that of the plan.
        collate: see [`cavs.memory.plan`][].

    Returns:
        The plan. Its peak is predicted for this batch.

    Raises:
        ValueError: the file is not such a plan, or it is for another number of graphs.
    """
    with open(path) as file:
        try:
            found = json.load(file)
            parts, keep, names, count, budget = (found[k] for k in ("parts", "keep", "names", "graphs", "budget"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"load: path: got {path}; expected a file that BatchPlan.save wrote. Write plan.save(path)."
            ) from error
    if len(graphs) != count:
        raise ValueError(
            f"load: graphs: got {counted(len(graphs), 'graph')}; expected {count}, as in the plan. Write graphs[:{count}]."
        )
    batch = BatchGradient(loss, params, graphs, collate, names_of(names, "load", ("keep", "recompute")))
    search = Search(batch, with_segments(choices_for(len(graphs), graphs.num_vertices), graphs))
    return BatchPlan(batch, search, search.candidate(Choice(parts, keep, found.get("segments", 1))), budget)


def _too_small(batch: BatchGradient, least: Candidate, budget: int) -> str:
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch.params))
    sizes = np.diff(batch.graphs.vertex_offsets)
    return (
        f"plan: budget: got {text_of(budget)}; expected at least {text_of(least.peak.bytes)}, for "
        f"{counted(least.choice.parts, 'part')}{in_segments(least.choice)}. The parameters take {text_of(weights)}, and so do "
        f"their gradients; the largest graph has {counted(sizes.max(), 'vertex')}. Write "
        f"budget={least.peak.bytes}, or a smaller width of the model."
    )
