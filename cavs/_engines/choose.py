"""The choice of an engine: the one that the user asked for, or else the one that fits and should be fastest."""

import functools
import warnings

import jax

from cavs._engines.engine import Engine
from cavs._engines.native import engine as native
from cavs._engines.native.eager import eager_split
from cavs._engines.native.engine import Native
from cavs._engines.persistent.chip import WIDE, Layouts, configure, too_wide
from cavs._engines.persistent.engine import Persistent
from cavs._engines.persistent.lower import recurrence_of
from cavs._engines.persistent.widest import possible
from cavs._engines.scan.engine import Scan
from cavs._function.plan import FunctionPlan
from cavs._graphs.counted import counted
from cavs._graphs.suggest import suggestion
from cavs._schedule.padding import Filled, in_total, padding_of
from cavs._schedule.schedule import Schedule, Shape
from cavs.kernels import PRECISIONS, Unfit, layout_of, persistent


class EngineError(ValueError):
    """The engine that was asked for cannot run F on schedules of some shape."""


ENGINES: dict[str, Engine] = {"scan": Scan(), "persistent": Persistent(), "native": Native()}  # by the names that users write


def engine_of(engine: str | Engine | None) -> Engine | None:
    """Returns the engine of a name. Returns engines, and `None` (for the choice of `choose_engine`), as they are.

    Raises:
        ValueError: If no engine has this name.
    """
    if engine is None or isinstance(engine, Scan | Persistent | Native):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        hint = suggestion(engine, ENGINES) if isinstance(engine, str) else ""
        raise ValueError(
            f"run: engine: got {engine!r}; expected None or one of {', '.join(map(repr, ENGINES))}. {hint}".rstrip()
        )
    return ENGINES[engine]


def name_of(engine: Engine) -> str:
    """Returns the name that users write for an engine."""
    return next(name for name, value in ENGINES.items() if type(value) is type(engine))


def choose_engine(
    engine: str | Engine | None, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...], exported: bool = False
) -> Engine:
    """Returns the engine to run: the one that was asked for or, for `None`, the one that fits and should be fastest.

    Args:
        engine: The engine that was asked for, or its name.
        plan: F.
        shape: The shape of the schedules.
        kinds: The kinds of vertices, in the schedule's order.
        exported: Whether the code is to run in other processes, which do not have the library of engine `native`.

    Raises:
        EngineError: If the engine that was asked for cannot run the plan on schedules of this shape.
    """
    asked = engine_of(engine)
    if isinstance(asked, Scan):
        return asked
    if isinstance(asked, Native):
        reason = native.unfit(plan, shape, kinds)
        if reason:
            raise EngineError(f"run: engine: got 'native', but {reason}. Write engine='scan', or engine=None to choose.")
        return asked
    fitting = asked if isinstance(asked, Persistent) else Persistent()
    reason = unfit(fitting, plan, shape, kinds)
    if asked is None:
        _warn_once_if_held_back()
        if reason:
            outside = exported or not _on_cpu() or native.unfit(plan, shape, kinds)
            return Scan() if outside else Native()
        return Scan() if _slower(plan, shape, kinds) else fitting
    if reason:
        raise EngineError(f"run: engine: got 'persistent', but {reason}. Write engine='scan', or engine=None to choose.")
    return fitting


def _on_cpu() -> bool:
    """Whether JAX runs on a CPU: engine `native` has a library for CPUs only, engine `scan` runs on every device."""
    return jax.default_backend() == "cpu"


@functools.cache
def _warn_once_if_held_back() -> None:
    if persistent.held_back():
        message = f"cavs: this GPU could run the fast engine, persistent, but it cannot run here: {persistent.supported()}."
        warnings.warn(message, stacklevel=2)


def unfit(engine: Persistent, plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """Returns why an engine `persistent` cannot run a plan on schedules of a shape, or `None` if it can."""
    if engine.interpret:
        return _without_program(plan, shape, kinds)
    return persistent.supported() or _unfit(plan, shape, kinds, engine.layouts)


def explain_engines(plan: FunctionPlan) -> list[str]:
    """Returns lines that say which engine runs here, and how engine `persistent` lays F out on the chip or why it cannot."""
    lines = [
        "Engine scan: levels as loops over tasks, dynamic tensors updated in place; runs everywhere. On a GPU the loops are "
        "part of CUDA graphs in cavs.data.step and cavs.concurrent_jit; under plain jax.jit the host starts each iteration."
    ]
    outside = native.unfit_function(plan)
    lines.append(
        f"Engine native: no: {outside}."
        if outside
        else "Engine native: fits. A library in C++ runs all levels of a pass in one call, on the cores of a CPU. "
        + _leaves_of_native(plan)
    )
    fits = True
    for name in plan.inner:
        fit, text = _explain(plan, name)
        fits = fits and fit
        lines.append(f"Engine persistent{'' if name is None else f', kind {name!r}'}: {text}")
    here = persistent.supported()
    chosen = "persistent"
    if here or not fits:
        chosen = "scan" if outside or not _on_cpu() else "native"
    reason = f" (persistent cannot run here: {here})" if here else ""
    lines.append(f"Selected engine: {chosen}{reason}.")
    return lines


def explain_native_rows(plan: FunctionPlan, sched: Schedule) -> list[str]:
    """Returns lines that say how many rows of a schedule engine `native` computes; none if it does not fit."""
    if native.unfit_function(plan):
        return []
    total = in_total(padding_of(sched.host()))
    leaves = total.leaves if _leaves_outside(plan) else Filled(total.leaves.vertices, total.leaves.vertices)
    levels = Filled(total.levels.vertices, total.levels.vertices)
    shape = sched.shape
    kinds = (None,) * len(shape.kinds) if None in plan.inner else shape.kinds
    chosen = Native().prefers(plan, shape, kinds)
    parts = chosen.inner.values()
    eager = [part for part in parts if part.eager.eqns]
    outside = [part for part in eager if eager_split(part, len(plan.inner)) is None]
    lines = [f"leaves: {leaves}", f"vertices with children, in the levels and for the gradients of parameters: {levels}"]
    if chosen is not plan:
        lines.append("the levels run what is eager: they are wide, and its results stay in the cache")
    if eager:
        lines.append(f"vertices with children, in the eager part: {total.batches if outside else levels}")
    if any(part.lazy_eqns for part in parts):
        lines.append(f"vertices with children, in the lazy part: {total.batches}")
    return ["Rows of this schedule on engine native, computed for vertices:", *(f"  {line}" for line in lines)]


def _leaves_of_native(plan: FunctionPlan) -> str:
    reason = _leaves_outside(plan)
    return f"XLA runs the leaves: {reason}." if reason else "It runs the leaves, too."


def _leaves_outside(plan: FunctionPlan) -> str | None:
    """Why XLA runs the leaves for engine `native`; `None` if the library does."""
    return native.leaves_unfit(plan, {name: k for k, name in enumerate(plan.leaf)}, len(plan.leaf))


def _unfit(plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...], layouts: Layouts) -> str | None:
    """Why the engine cannot run a plan on schedules of a shape, as words that follow "but"; `None` if it can."""
    if reason := _without_program(plan, shape, kinds):
        return reason
    try:
        for name, n in zip(kinds, shape.inner, strict=True):
            for forward in (True, False) if n else ():
                made = recurrence_of(plan, name, forward, shape.forest)
                configure(made, made.precision, False, shape, layouts)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def _without_program(plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """As `_unfit`, without asking whether a layout fits the chip."""
    deep = [name for name, n in zip(kinds, shape.inner, strict=True) if n]
    if not shape.levels and deep:
        if len(deep) > 1:
            return f"vertices of {len(deep)} kinds have children ({', '.join(map(repr, deep))}), and it runs one such kind"
        return (
            "no vertex of the batch has children, or its schedule has no scripts (cavs.schedule creates them if JAX runs on "
            "a GPU, or with scripts=True)"
        )
    if not plan.function.optimizations.lazy:
        return "F was created with Optimizations(lazy=False)"
    if not all(plan.inner[name].joint.differentiable for name in deep):
        return "F has a loop with a dynamic number of iterations"
    try:
        for name in deep:
            for forward in (True, False):
                recurrence_of(plan, name, forward, shape.forest)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def _slower(plan: FunctionPlan, shape: Shape, kinds: tuple[str | None, ...]) -> bool:
    """Whether engine scan should be faster, if both can run."""
    made = [recurrence_of(plan, name, True) for name, n in zip(kinds, shape.inner, strict=True) if n]
    return any(too_wide(configure(p, p.precision, False, shape), shape) for p in made)


def _explain(plan: FunctionPlan, name: str | None) -> tuple[bool, str]:
    """Whether one launch can run the levels of a kind in each direction; and how, or why not."""
    if not plan.function.optimizations.lazy:
        return False, "no: F was created with Optimizations(lazy=False)."
    try:
        texts = []
        for way in ("forward", "backward"):
            made = recurrence_of(plan, name, way == "forward")
            program, precision = made.program, made.precision
            config = configure(made, precision, False)
            layout = layout_of(program, config)
            size = layout.words * 4 * (program.unit // config.hb)
            where = f"stream from L2 for every tile, as they do not fit the chip (beyond {WIDE} vertices per level, scan runs)"
            if config.resident:
                where = "stay in shared memory" + ", three weights in two words" * config.tight
            barriers = f"{counted(sum(p.barrier for p in program.phases), 'barrier')} per level"
            if config.dataflow:
                barriers = "no barriers, as products poll the rows that they read"
            divided = f" ({config.split} of a cluster divide K of each product and send each other sums)" * (config.split > 1)
            padded = "" if program.unit == program.valid else f"vectors of {program.valid} run as {program.unit}; "
            products = PRECISIONS[precision].text or precision
            texts.append(
                f"{way}: {padded}{counted(len(program.phases), 'phase')} and {barriers}; {counted(config.groups, 'group')} of "
                f"{counted(program.unit // config.hb, 'thread block')} with {counted(config.hb, 'unit')} each{divided}; "
                f"{size / 1e6:.1f} MB of weights per group, which {where}; products in {products}"
            )
        text = "fits. " + "; ".join(texts) + "."
        if (made.arity > 1 or made.part.gathers_all) and possible(made.program, precision):
            text += " Levels of thousands of vertices run as tiled products in a launch of their own, if that is faster."
        return True, text
    except Unfit as e:
        return False, f"no: {e}."
