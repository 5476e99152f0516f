"""Engine `scan`, forward: the levels as loops over tasks, on any device; dynamic tensors are updated in place."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cavs._engines.engine import Arrays, BackwardLevels, Batch, Cotangents, Engine, ForwardLevels, Job
from cavs._engines.scan.reverse import backward_levels
from cavs._function.domains import EDGE, ROW, Domain
from cavs._function.evaluate import column, evaluate, turned_weights, value_at
from cavs._function.keep_options import KeepOptions
from cavs._function.keeping import overwritten_rows
from cavs._function.plan import FunctionPlan
from cavs._function.split import Split
from cavs._jaxpr.costs import may_repeat
from cavs._jaxpr.equations import needed, reads
from cavs._jaxpr.jaxprs import Env
from cavs._schedule.schedule import Shape
from cavs._stages.batched import in_place
from cavs._stages.entrance import barred, crossing, entrance, fixed, place_aval, together
from cavs._stages.saved import Saved, Transpose
from cavs._stages.tensors import Pulled, Rows, RowSpan, Values, Zeros, get_rows, repeated, window, write
from cavs.kernels import Target


class _ForwardKind(NamedTuple):
    """What the tasks of a kind read, besides states."""

    part: Split
    rows: Rows
    fixed: dict[Any, Any]
    crossing: list[Values]
    turned: dict[Any, Any]
    eqns: list[Any]
    wanted: set[Any]
    stored: list[tuple[Any, ...]]  # joint variables of each tensor: what is kept, then what the lazy part reads
    domains: list[Domain]  # of each
    over: dict[int, Any]  # of some of these, the eager rows that they overwrite
    overwritten: dict[Any, jax.Array]  # these rows


@dataclasses.dataclass(frozen=True)
class Scan(Engine):
    """Engine `scan`: XLA loops over tasks, on any device."""

    name = "scan"

    def unfit(self, job: Job) -> str | None:
        """Returns `None`: it runs every F on every schedule."""
        return None

    def is_best_for(self, job: Job) -> bool:
        """Returns `True`: it runs what no other engine is better for."""
        return True

    def plan_for(self, job: Job) -> FunctionPlan:
        """Returns the plan that overwrites what nobody reads again, and stores values together if XLA does not copy them."""
        together = jax.__version_info__ >= (0, 11)  # XLA before that copies tensors that are cut in parts
        overwrite = job.shape.forest and job.shape.rooted
        return job.plan.keeping(
            KeepOptions(overwrite, job.options.least, False, job.options.names, masks=True, together=together)
        )

    def explain(self, plan: FunctionPlan, target: Target, shape: Shape | None = None) -> tuple[bool, list[str]]:
        """Returns `True`, and a line about this engine."""
        return True, [
            "Engine scan: levels as loops over tasks, dynamic tensors updated in place; runs everywhere. On a GPU the loops "
            "are part of CUDA graphs in cavs.data.step and cavs.concurrent_jit; under plain jax.jit the host starts each "
            "iteration."
        ]

    def eager_part(
        self, batch: Batch, k: int, statics: Arrays, inputs: Arrays, edges: Arrays, save: bool
    ) -> tuple[list[Values], list[Transpose]]:
        """Computes the eager part. The levels read inputs that F pulls where they lie, without copies in their order."""
        outs, transpose = super().eager_part(batch, k, statics, inputs, edges, save)
        return in_place(batch.parts[k], batch.rows[k], inputs, edges, outs), transpose

    def forward_levels(
        self, batch: Batch, states: Arrays, statics: list[Arrays], eager: list[list[Values]], save: bool
    ) -> ForwardLevels:
        """Runs the forward's levels task by task."""
        sched, fusion = batch.sched, batch.plan.function.optimizations.fusion
        per_kind = zip(batch.parts, batch.rows, statics, eager, strict=True)
        kinds = [_kind(part, rows, static, eager_rows, save) for part, rows, static, eager_rows in per_kind]
        # XLA would fill the tensors first, and they would take memory beside the products of the eager part. It does not know
        # which row of the eager part's results is read here.
        eager_results = [x for kind in kinds for x in (*kind.crossing, *kind.overwritten.values()) if not isinstance(x, Pulled)]
        zeros = Zeros(sched, [window(x, sched.num_vertices, 1) for x in eager_results], start=500)
        tensors = [
            [
                together([k.overwritten[k.over[n]]], place_aval(place).shape)
                if n in k.over
                else k.rows.tensor(zeros, place_aval(place), domain)
                for n, (place, domain) in enumerate(zip(k.stored, k.domains, strict=True))
            ]
            for k in kinds
        ]

        def task(k: int, width: int, edges: int, t: Any, carry: Any) -> Any:
            states, tensors = carry
            kind, start = kinds[k], sched.task_start[t]
            rows = kind.rows
            span = RowSpan(rows.pad + start, width, rows.edge_pad + sched.task_edge[t], edges)
            segments = span.of_edges(rows.edge_owner) - start if kind.part.gathers_all else None
            before = _before(kind, span, tensors[k])
            count = {ROW: sched.task_size[t], EDGE: sched.task_edges[t]}
            new_states, values = _computed(kind, span, states, segments, fusion, before, count)
            states = [write(b, x, sched.task_row[t]) for b, x in zip(states, new_states, strict=True)]
            written = []
            for n, (b, x, domain) in enumerate(zip(tensors[k], values, kind.domains, strict=True)):
                if n in kind.over:  # rows after the task's are read by later tasks
                    in_task = column(jnp.arange(x.shape[0]) < count[domain], x)
                    x = jnp.where(in_task, x, together([before[kind.over[n]]], x.shape[1:]))
                written.append(write(b, x, span.start_in(domain)))
            return states, [written if j == k else x for j, x in enumerate(tensors)]

        ends, num_classes = sched.round_end, len(sched.shape.classes)

        def one_round(r: Any, carry: Any) -> Any:
            for k in range(len(kinds)):
                for c, (width, edges) in enumerate(sched.shape.classes if sched.shape.inner[k] else ()):
                    end = ends[r, k * num_classes + c]
                    carry = lax.while_loop(
                        lambda tc, end=end: tc[0] < end,
                        lambda tc, k=k, w=width, e=edges: (tc[0] + 1, task(k, w, e, tc[0], tc[1])),
                        carry,
                    )
            return carry

        _, (states, tensors) = lax.fori_loop(0, sched.num_rounds, one_round, (jnp.int32(0), (states, tensors)))
        kept, extras = [], []
        for k, x in zip(kinds, tensors, strict=True):
            split = len(k.stored) - len(k.part.recurrent.extra)
            kept.append(x[:split])
            inner = zip(k.domains[split:], x[split:], strict=True)
            extras.append([k.rows.inner_edges(b) if domain == EDGE else k.rows.inner(b) for domain, b in inner])
        return ForwardLevels(states, kept, extras, None)

    def backward_levels(self, batch: Batch, saved: Saved, cotangents: Cotangents) -> BackwardLevels:
        """Runs the backward's levels task by task, in reverse."""
        return backward_levels(batch, saved, cotangents)


def _computed(
    kind: _ForwardKind,
    span: RowSpan,
    states: Arrays,
    segments: jax.Array | None,
    fusion: bool,
    before: Env,
    count: dict[Domain, jax.Array],
) -> tuple[Arrays, Arrays]:
    """Returns the states of the vertices of a span, and the values that are stored.

    `before`: eager rows of the span. `count`: how many of its rows, and of its edges, are the task's; others are arbitrary.
    """
    part, domain = kind.part, kind.part.joint.domain
    read = barred(entrance(part, kind.rows, span, states, kind.crossing, kind.wanted) | before)
    real = None
    if not all(map(may_repeat, kind.eqns)):  # loops may never end for arbitrary rows
        real = count[ROW]
        read = {v: repeated(x, jnp.arange(x.shape[0]) < count[domain[v]]) for v, x in read.items()}
    env = kind.fixed | read
    evaluate(kind.eqns, env, domain, segments, span.size, kind.turned, real, fusion=fusion)
    new_states = [value_at(x, ROW, span.size, env, domain) for x in part.forward.states]
    stored = zip(kind.stored, kind.domains, strict=True)
    values = [(place, [value_at(v, want, span.size_in(want), env, domain) for v in place]) for place, want in stored]
    return new_states, [together(x, place_aval(place).shape) for place, x in values]


def _kind(part: Split, rows: Rows, statics: list[Any], eager: Sequence[Values], save: bool) -> _ForwardKind:
    """Collects what the tasks of a kind read. Kept values overwrite eager rows: a task reads its rows before it writes them."""
    env, domain = fixed(part, statics), part.joint.domain
    keep, crossed = part.forward.places if save else [], crossing(part, rows, eager)
    stored = [*keep, *((v,) for v in part.forward.extra)]
    eager_rows: Env = {v: x for v, x in zip(part.forward.cross, crossed, strict=True) if not isinstance(x, Pulled)}
    places = overwritten_rows(part.joint, eager_rows) if part.forward.together is not None else {}
    over = {n: places[place] for n, place in enumerate(stored) if place in places}
    evaluate(needed(part.joint.program.eqns, list(over.values()), set(eager_rows))[0], eager_rows, domain)
    overwritten = {v: eager_rows[v] for v in over.values()}
    targets = [*part.forward.states, *(v for place in stored for v in place)]
    eqns, _ = needed(part.joint.program.eqns, targets, set(overwritten))
    return _ForwardKind(
        part=part,
        rows=rows,
        fixed=env,
        crossing=crossed,
        turned=turned_weights(part.joint.program.eqns, domain, env),
        eqns=eqns,
        wanted=reads(eqns, targets) - overwritten.keys(),
        stored=stored,
        domains=[*(part.joint.row_domain(v) for v, *_ in keep), *part.extra_domain],
        over=over,
        overwritten=overwritten,
    )


def _before(kind: _ForwardKind, span: RowSpan, tensors: Arrays) -> Env:
    """Returns the eager rows of a span that kept values overwrite, read by number: see `task._known`."""
    row, edge = span.start + jnp.arange(span.size), span.edge_start + jnp.arange(span.edges)
    eager_rows = {v: get_rows(tensors[n], edge if kind.domains[n] == EDGE else row) for n, v in kind.over.items()}
    return {v: together([x], v.aval.shape) for v, x in eager_rows.items()}
