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
            return "scan" if reason else "persistent"
        if reason:
            raise ValueError(f"run: engine is 'persistent', but {reason}. Write engine='scan', or engine=None to choose.")
    return engine


def unfit(plan: Any, shape: Any, kinds: tuple[str | None, ...]) -> str | None:
    """Why engine `persistent` cannot run a plan on schedules of a shape; `None` where it can."""
    return persistent.supported() or _persistent.unfit(plan, shape, kinds)
