"""What `cavs.explain` says about engine `persistent`: how F is laid out on the chip, or why it cannot be."""

from cavs._engines.persistent.chip import WIDE, LaunchOptions, can_stay, configure, source
from cavs._engines.persistent.lower import Recurrence, forward_of, recurrence_of
from cavs._engines.persistent.wide_levels import possible
from cavs._function.plan import FunctionPlan
from cavs._graphs.counted import counted
from cavs._schedule.schedule import Shape
from cavs.kernels import PRECISIONS, Target, Unfit, layout_of


def explain_launches(plan: FunctionPlan, target: Target, shape: Shape | None) -> tuple[bool, list[str]]:
    """Returns whether F fits, and for each kind a line that says how its launches are laid out, or why there are none."""
    fits, lines = True, []
    mixes = ", ".join(map(repr, plan.function.mixes.values()))
    for name in list(plan.inner)[: 1 if mixes else None]:
        try:
            text = f"fits. {_explain_kind(plan, name, target, shape)}"
        except Unfit as e:
            fits, text = False, f"no: {e}."
        of = f", kinds {mixes} in one launch" if mixes else "" if name is None else f", kind {name!r}"
        lines.append(f"Engine persistent{of}: {text}")
    if fits and len(lines) > 1:
        lines.append(
            "If vertices of several kinds have children, engine persistent runs schedules that mix kinds, as cavs.schedule "
            "creates them on a GPU: write cavs.explain(F, params, inputs, sched=sched) for their launch."
        )
    return fits, lines


def _explain_kind(plan: FunctionPlan, name: str | None, target: Target, shape: Shape | None) -> str:
    if not plan.function.optimizations.lazy:
        raise Unfit("F was created with Optimizations(lazy=False)")
    forest = shape is None or shape.forest
    forward, backward = (recurrence_of(plan, name, way, forest, target=target) for way in (True, False))
    forward = forward if shape is None else forward_of(plan, name, shape, True, target)
    text = f"forward: {_explain_launch(forward, target, shape)}; backward: {_explain_launch(backward, target, shape)}."
    if (backward.arity > 1 or backward.part.gathers_all) and possible(backward.program, backward.precision, target):
        text += " Levels of thousands of vertices run as tiled products in a launch of their own, if that is faster."
    text += " In a batch of few graphs with wide levels, all groups share the rows of every level, if that should be faster."
    text += (
        " Two launches of a step that do not depend on each other share the GPU, if that should be faster, in other layouts."
    )
    return text


def _explain_launch(made: Recurrence, target: Target, shape: Shape | None) -> str:
    program, config = made.program, configure(made, LaunchOptions(target), shape)
    layout = layout_of(program, config)
    size = layout.words * 4 * (program.unit // config.hb)
    where = "stay in shared memory" if config.resident else "stream from L2 for every tile"
    if not can_stay(made, target):
        where += f", as they do not fit the chip (beyond {WIDE} vertices per level, scan runs)"
    where += ", three weights in two words" * config.tight
    barriers = f"{counted(sum(p.barrier for p in program.phases), 'barrier')} per level"
    if config.dataflow:
        barriers = "no barriers, as products poll the rows that they read"
    divided = f" ({config.split} of a cluster divide K of each product and send each other sums)" * (config.split > 1)
    padded = "" if program.unit == program.valid else f"vectors of {program.valid} run as {program.unit}; "
    products = PRECISIONS[made.precision].text or made.precision
    if made.scaled:
        products = "float16, scaled by the largest number of the leaves (it has as many bits as tf32)"
    return (
        f"{padded}{counted(len(program.phases), 'phase')} and {barriers}; {counted(config.groups, 'group')} of "
        f"{counted(program.unit // config.hb, 'thread block')} with {counted(config.hb, 'unit')} each{divided}; "
        f"{size / 1e6:.1f} MB of weights per group, which {where}; products in {products}; "
        f"laid out {source(made, target, shape)}"
    )
