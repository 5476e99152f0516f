"""Which engine runs the levels: what the user asked for, else what fits and is fastest here."""

from typing import Any

from cavs import _persistent
from cavs._persistent import INTERPRET as INTERPRET
from cavs.kernels import persistent

ENGINES = ("scan", "persistent")


def choose_engine(engine: str | None, plan: Any, shape: Any, kinds: tuple[str | None, ...]) -> str:
    """The engine to run. Raises `ValueError` where the one asked for cannot."""
    if engine == "persistent" or engine is None:
        reason = unfit(plan, shape, kinds)
        if engine is None:
            return "scan" if reason or _persistent.slower(plan, shape, kinds) else "persistent"
        if reason:
            raise ValueError(f"run: engine is 'persistent', but {reason}. Write engine='scan', or engine=None to choose.")
    return engine


def unfit(plan: Any, shape: Any, kinds: tuple[str | None, ...]) -> str | None:
    """Why engine `persistent` cannot run a plan on schedules of a shape; `None` where it can."""
    return persistent.supported() or _persistent.unfit(plan, shape, kinds)


def explain_engines(plan: Any) -> list[str]:
    """Which engine runs here, and how F lies on the chip in engine `persistent`, or why it does not."""
    lines = ["Engine scan: levels as loops over tasks, dynamic tensors updated in place; runs everywhere."]
    fits = True
    for name in plan.inner:
        text = _persistent.explain(plan, name)
        fits = fits and not text.startswith("no")
        lines.append(f"Engine persistent{'' if name is None else f', kind {name!r}'}: {text}")
    here = persistent.supported()
    chosen = "scan" if here or not fits else "persistent"
    reason = f": the kernels of engine persistent cannot run here; {here}" if here else ""
    lines.append(f"Chosen here: {chosen}{reason}.")
    return lines
