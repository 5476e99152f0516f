"""Which engine runs the levels: what the user asked for, else what fits and is fastest here."""

from cavs._engines.chip import WIDE, Layouts, configure, too_wide
from cavs._engines.engine import Engine
from cavs._engines.lower import program_of
from cavs._engines.persistent import Persistent
from cavs._engines.scan import Scan
from cavs._engines.widest import possible
from cavs._function.plan import Plan
from cavs._schedule.schedule import Shape
from cavs.kernels import Unfit, layout_of, persistent

ENGINES: dict[str, Engine] = {"scan": Scan(), "persistent": Persistent()}  # by the names that users write
PRODUCTS = {"f16": "float16 (what they read is bounded, and has as many bits as in tf32)"}


def engine_of(engine: str | Engine | None) -> Engine | None:
    """Returns the engine of a name; `None`, for the choice of `choose_engine`, and engines themselves are returned as given.

    Raises:
        ValueError: If no engine has this name.
    """
    if engine is None or isinstance(engine, Scan | Persistent):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ValueError(f"run: engine: got {engine!r}; expected None or one of {', '.join(map(repr, ENGINES))}.")
    return ENGINES[engine]


def name_of(engine: Engine) -> str:
    """Returns the name that users write for an engine."""
    return next(name for name, value in ENGINES.items() if type(value) is type(engine))


def choose_engine(engine: str | Engine | None, plan: Plan, shape: Shape, kinds: tuple[str | None, ...]) -> Engine:
    """Returns the engine to run: the one asked for, or with `None` the one that fits and should be fastest here.

    Raises:
        ValueError: If the engine asked for cannot run the plan on schedules of this shape.
    """
    asked = engine_of(engine)
    if isinstance(asked, Scan):
        return asked
    fitting = asked if isinstance(asked, Persistent) else Persistent()
    reason = unfit(fitting, plan, shape, kinds)
    if asked is None:
        return Scan() if reason or _slower(plan, shape, kinds) else fitting
    if reason:
        raise ValueError(f"run: engine: got 'persistent', but {reason}. Write engine='scan', or engine=None to choose.")
    return fitting


def unfit(engine: Persistent, plan: Plan, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """Returns why an engine `persistent` cannot run a plan on schedules of a shape, or `None` if it can."""
    if engine.interpret:
        return _without_program(plan, shape, kinds)
    return persistent.supported() or _unfit(plan, shape, kinds, engine.layouts)


def explain_engines(plan: Plan) -> list[str]:
    """Which engine runs here, and how F lies on the chip in engine `persistent`, or why it does not."""
    lines = ["Engine scan: levels as loops over tasks, dynamic tensors updated in place; runs everywhere."]
    fits = True
    for name in plan.inner:
        text = _explain(plan, name)
        fits = fits and not text.startswith("no")
        lines.append(f"Engine persistent{'' if name is None else f', kind {name!r}'}: {text}")
    here = persistent.supported()
    chosen = "scan" if here or not fits else "persistent"
    reason = f": the kernels of engine persistent cannot run here; {here}" if here else ""
    lines.append(f"Chosen here: {chosen}{reason}.")
    return lines


def _unfit(plan: Plan, shape: Shape, kinds: tuple[str | None, ...], layouts: Layouts) -> str | None:
    """Why the engine cannot run a plan on schedules of a shape, in words that follow "but"; `None` where it can."""
    if reason := _without_program(plan, shape, kinds):
        return reason
    try:
        for name, n in zip(kinds, shape.inner, strict=True):
            for forward in (True, False) if n else ():
                made = program_of(plan, name, forward, shape.forest)
                configure(made, made.precision, False, shape, layouts)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def _without_program(plan: Plan, shape: Shape, kinds: tuple[str | None, ...]) -> str | None:
    """The same, but for whether a layout fits the chip."""
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
                program_of(plan, name, forward, shape.forest)
    except Unfit as e:
        return f"the recurrent part of F does not fit it: {e}"
    return None


def _slower(plan: Plan, shape: Shape, kinds: tuple[str | None, ...]) -> bool:
    """Whether engine scan should be faster, where both can run."""
    made = [program_of(plan, name, True) for name, n in zip(kinds, shape.inner, strict=True) if n]
    return any(too_wide(configure(p, p.precision, False, shape), shape) for p in made)


def _explain(plan: Plan, name: str | None) -> str:
    """How a kind's levels run in one launch each way; or "no: ..." and why not."""
    if not plan.function.optimizations.lazy:
        return "no: F was made with Optimizations(lazy=False)."
    try:
        texts = []
        for way in ("forward", "backward"):
            made = program_of(plan, name, way == "forward")
            level, precision = made.level, made.precision
            config = configure(made, precision, False)
            layout = layout_of(level, config)
            size = layout.words * 4 * (level.unit // config.hb)
            where = f"stream from L2 in every tile, as they do not fit on chip (beyond {WIDE} vertices a level, scan runs)"
            if config.resident:
                where = "stay in shared memory" + ", three numbers in two words" * config.tight
            meetings = f"{sum(p.meet for p in level.phases)} meetings a level"
            if config.dataflow:
                meetings = "no meetings, as a product waits for its numbers alone"
            divided = f" ({config.split} of a cluster divide K of each product, and send each other sums)" * (config.split > 1)
            padded = "" if level.unit == level.valid else f"vectors of {level.valid} run as {level.unit}; "
            texts.append(
                f"{way}: {padded}{len(level.phases)} phases and {meetings}; {config.groups} groups of "
                f"{level.unit // config.hb} CTAs with {config.hb} units each{divided}; {size / 1e6:.1f} MB of weights a group, "
                f"which {where}; products in {PRODUCTS.get(precision, precision)}"
            )
        text = "fits. " + "; ".join(texts) + "."
        if (made.arity > 1 or made.part.gathers_all) and possible(made.level, precision):
            text += " Levels of thousands of vertices run as tiled products, in a launch of their own, where that is faster."
        return text
    except Unfit as e:
        return f"no: {e}."
