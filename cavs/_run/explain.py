"""`explain`: the split of F, in words and numbers."""

import jax
import jax.numpy as jnp

from cavs._engines.choose import explain_engines
from cavs._engines.engine import Job
from cavs._engines.native.engine import Native
from cavs._function.domains import EDGE, STATIC
from cavs._function.keeping import front
from cavs._function.mixed import mixed
from cavs._function.split import Split
from cavs._function.vertex import VertexFunction, check_function
from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.costs import bytes_of_var, flops_of
from cavs._jaxpr.jaxprs import Eqn, is_var
from cavs._jaxpr.memo import results
from cavs._run.plans import latest_plan, plan_of
from cavs._run.run import for_schedule, kind_names
from cavs._schedule.schedule import Schedule, check_schedule
from cavs.kernels import Target


def explain(
    F: VertexFunction, params: PyTree = None, inputs: PyTree = None, edges: PyTree = None, sched: Schedule | None = None
) -> str:
    """Returns how F was split and what it costs.

    The text lists the eager, recurrent and lazy equations, the fused products, what is kept per vertex for the backward,
    FLOPs, and which engine runs F and why.

    Args:
        F: the vertex function.
        params: arrays or `jax.ShapeDtypeStruct`s. Without `params` and `inputs`, the text is for the shapes of the latest
            `run`.
        inputs: one vertex's row of the inputs: arrays or `jax.ShapeDtypeStruct`s.
        edges: one edge's row of the edges, if F reads them.
        sched: a schedule as in training. Its padding is listed, and engines are described for its shape.

    Raises:
        TypeError: `F` is no `VertexFunction`, or `sched` no `Schedule`.
        ValueError: only `F` is given, and it has not run yet.
    """
    check_function("explain", F)
    if sched is not None:
        check_schedule("explain", sched)
    function = F if sched is None else for_schedule(F, sched, None)[0]
    if params is None and inputs is None and edges is None:
        plan = latest_plan(function) or next(filter(None, map(latest_plan, reversed(results(mixed, F)))), None)
        if plan is None:
            raise ValueError(
                "explain: params: got nothing, and this F has not run yet, so its shapes are unknown; expected params and "
                "inputs. Write cavs.explain(F, params, inputs) with the inputs of ONE vertex (or shapes of them)."
            )
    else:
        shapes = jax.eval_shape(lambda *args: args, params, inputs, edges)
        pulled = {"inputs": shapes[1], "kind": jax.ShapeDtypeStruct((), jnp.int32)} if function.mixes else shapes[1]
        plan = plan_of(function, shapes[0], pulled, edges=shapes[2])
    lines, mixes = list[str](), ", ".join(map(repr, plan.function.mixes.values()))
    for kind, part in plan.inner.items():
        name = "" if kind is None else f" of kind {kind!r}"
        if not lines or not mixes:
            inner = f" of kinds {mixes}, which compute all and take the results of their own" if mixes else name
            lines += [f"Vertices with children{inner}:", *_inner(part)]
        role = plan.leaf[kind]
        flops = sum(_flops(e) for e in role.program.eqns if role.domain.get(e.outvars[0], STATIC) != STATIC)
        lines.append(
            f"Leaves{name}: {counted(len(role.program.eqns), 'equation')}, none waits for another vertex: one batch for all "
            "leaves."
        )
        lines.append(f"  FLOPs a leaf (products, forward): {_number(flops)}")
    lines.append("Pushes:")
    if plan.push_states is not None:
        lines.append("  scattered states: read from their dynamic tensors; nothing is computed for them.")
    else:
        lines.append("  computed in one batch after the levels.")
    o = F.optimizations
    off = [n for n in ("fusion", "eager", "lazy") if not getattr(o, n)]
    lines.append(f"Optimizations: {'all on' if not off else 'off: ' + ', '.join(off)}.")
    target = Target.here()
    lines += explain_engines(plan, target, None if sched is None else Job(plan, sched.shape, kind_names(F, sched), target))
    if sched is not None:
        lines += [
            "Rows of this schedule on engine scan, computed for vertices:",
            *(f"  {line}" for line in sched.explain().splitlines()),
            *Native().explain_rows(plan, sched),
        ]
    return "\n".join(lines)


def _inner(part: Split) -> list[str]:
    role, domain = part.role, part.role.domain
    fused = [f"  fused: {note}" for note in role.notes]
    keep = sum(bytes_of_var(v) for v in part.forward.keep if part.joint.domain.get(v) != EDGE)
    keep_edge = sum(bytes_of_var(v) for v in part.forward.keep if part.joint.domain.get(v) == EDGE)
    states = sum(map(bytes_of_var, filter(is_var, role.states)))
    cuts = sum(map(bytes_of_var, part.reverse.cuts))
    parts = [
        ("static", part.static_eqns, "from parameters alone, once"),
        ("eager", part.eager.eqns, "no gather before it: one batch before the levels"),
        ("recurrent", part.recurrent.eqns, "between gather and scatter: what the levels run"),
        ("lazy", part.lazy_eqns, "after a gather, before no scatter: one batch after the levels"),
    ]
    lines = []
    for name, eqns, why in parts:
        flops = sum(_flops(e) for e in eqns if domain.get(e.outvars[0], STATIC) != STATIC)
        count = counted(f"{len(eqns):>3}", "equation") + ","
        lines.append(f"  {name:<9} {count:<14} {_number(flops):>7} FLOPs in products a vertex ({why})")
    lines += fused
    slots = {k for k, _ in part.recurrent.slots}
    gathers = [f"{counted(len(slots), 'child')} by number"] if slots else []
    gathers += ["all children by gather_all"] if part.recurrent.child else []
    pulls = sum(v in role.inputs for v in part.eager.outs)
    unchanged = "as it is" if pulls == 1 else "as they are"
    lines.append(f"  gathers {' and '.join(gathers) or 'nothing'}; pulls {counted(pulls, 'value')} {unchanged}")
    if part.eager.reads_edges:
        num_edge_eqns = sum(domain.get(e.outvars[0]) == EDGE for e in part.eager.eqns)
        crossing = sum(d == EDGE for d in part.reverse.cross_domain)
        lines.append(
            f"  reads rows of edges: {counted(num_edge_eqns, 'eager equation')}, once for all edges; the levels read "
            f"{counted(crossing, 'value')} an edge"
        )
    lines.append(
        f"  kept a vertex: {states} B of state, {keep} B for the backward"
        + (f", {keep_edge} B an edge" if keep_edge else "")
        + f" (minimum cut, {counted(len(part.forward.keep), 'value')}); {cuts} B of cut cotangents while the backward runs"
    )
    points = front(part.joint)
    if len(points) > 1:
        steps = "; ".join(f"{int(p.bytes)} B for {_number(int(p.flops))} FLOPs" for p in points[1:])
        lines.append(f"  it can keep less, if products run again in the backward: {steps} a vertex (cavs.memory.recompute)")
    uses = counted(len(part.reverse.uses), "equation")
    lines.append(f"  lazy parameter gradients: {uses} with parameters, each transposed once for all vertices")
    return lines


def _flops(eqn: Eqn) -> int:
    return int(flops_of(eqn)) if eqn.primitive.name == "dot_general" else 0


def _number(n: int) -> str:
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)
