"""The choice of an engine: the one that the user asked for, or else the one that fits and should be fastest."""

import functools
import os
import re
import warnings

from cavs._engines.engine import Engine, Job
from cavs._engines.native.engine import Native
from cavs._engines.persistent.engine import Persistent
from cavs._engines.scan.engine import Scan
from cavs._function.plan import FunctionPlan
from cavs._graphs.counted import suggestion
from cavs.kernels import Target, persistent


class EngineError(ValueError):
    """The engine that was asked for cannot run F on schedules of some shape."""


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Scan(), Persistent(), Native())}
_PREFERRED = ("persistent", "native", "scan")  # the first that is the best for a job runs if the user chose none


def engine_of(engine: str | Engine | None) -> Engine | None:
    """Returns the engine of a name. Returns engines, and `None` (for the choice of `choose_engine`), as they are.

    Raises `ValueError` if no engine has this name.
    """
    if engine is None or isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        hint = suggestion(engine, ENGINES) if isinstance(engine, str) else ""
        raise ValueError(
            f"run: engine: got {engine!r}; expected None or one of {', '.join(map(repr, ENGINES))}. {hint}".rstrip()
        )
    return ENGINES[engine]


def choose_engine(engine: str | Engine | None, job: Job) -> Engine:
    """Returns the engine to run: the one that was asked for or, for `None`, the one that fits and should be fastest.

    `job`: what it is to run. Raises `EngineError` if the engine that was asked for cannot run the job.
    """
    user_engine = engine_of(engine)
    _warn_once_of_wrong_scatters(job.target)
    if user_engine is None:
        _warn_once_if_held_back(job.target)
        return _best_for(job)
    if reason := user_engine.unfit(job):
        raise EngineError(
            f"run: engine: got {user_engine.name!r}, but {reason}. Write engine='scan', or engine=None to choose."
        )
    return user_engine


def _best_for(job: Job) -> Engine:
    return next(ENGINES[name] for name in _PREFERRED if ENGINES[name].is_best_for(job))


@functools.cache
def _warn_once_if_held_back(target: Target) -> None:
    if persistent.held_back(target):
        reason = persistent.unsupported(target)
        warnings.warn(f"cavs: this GPU could run the fast engine, persistent, but it cannot run here: {reason}.", stacklevel=2)


@functools.cache
def _warn_once_of_wrong_scatters(target: Target) -> None:
    """Warns of XLA's deterministic scatters, which are wrong where a whole axis precedes an indexed one (JAX 0.11.2)."""
    flags = os.environ.get("XLA_FLAGS", "")
    deterministic = re.search(r"--xla_gpu_(deterministic|exclude_nondeterministic)_ops(?!=(false|0))", flags)
    if target.is_gpu and deterministic and not re.search(r"--xla_disable_hlo_passes=\S*scatter_determinism_expander", flags):
        warnings.warn(
            f"cavs: XLA_FLAGS has {deterministic[0]}, with which XLA computes wrong numbers under jax.vmap, "
            "and for gradients of h[indices] in F. Add --xla_disable_hlo_passes=scatter_determinism_expander, which is slower.",
            stacklevel=2,
        )


def explain_engines(plan: FunctionPlan, target: Target, job: Job | None) -> list[str]:
    """Returns lines that say which engine runs F on a device, and how each engine would, or why it cannot.

    `job`: what is to run, if the schedule is known.
    """
    shape = None if job is None else job.shape
    explanations = {name: ENGINES[name].explain(plan, target, shape) for name in ("scan", "native", "persistent")}
    unsupported = persistent.unsupported(target)
    usual = "native" if explanations["native"][0] and target.is_cpu else "scan"
    if explanations["persistent"][0] and not unsupported:
        usual = "persistent"
    reasons = [f"persistent cannot run here: {unsupported}"] if unsupported else []
    chosen = usual if job is None else _best_for(job).name
    if job is not None and chosen != usual:
        why = ENGINES[usual].unfit(job) or "its levels have so many vertices that another engine should be faster"
        reasons.append(f"{usual} is not for this schedule: {why}")
    text = f" ({'; '.join(reasons)})" if reasons else ""
    return [*(line for _, lines in explanations.values() for line in lines), f"Selected engine: {chosen}{text}."]
