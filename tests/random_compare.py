"""Compares two results of a random case and classifies exceptions (`Outcome`)."""

import dataclasses
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cavs
from tests.random_cases import Case


@dataclasses.dataclass
class Outcome:
    """How a case went: "ok", "refused" (a documented error), "wrong" (numbers), "error" or "ill" (no number is to be had).

    `what` names it, the same for failures of the same cause as far as can be told; `text` has more.
    """

    status: str
    what: str = ""
    text: str = ""
    engine: str = ""  # that ran, as far as it came to that

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "error")


def named(result: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of ((gradients of parameters, of inputs), pushes); keys as their integers."""
    (gp, gx), pushes = result
    for prefix, tree in (("push", pushes), ("gradient of p", gp), ("gradient of input", gx)):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                x = jax.random.key_data(x)
            yield prefix + jax.tree_util.keystr(path), np.asarray(x)


def tolerance(case: Case) -> float:
    """Returns the difference relative to the largest value of a leaf, and to 1."""
    if case.options.float32:
        return 1e-4 if case.options.precision == "highest" else 2e-2
    return max(1e-10, 100 * case.program.coarse)


def differences(case: Case, got: Any, want: Any) -> list[str]:
    """Returns a line for each leaf that differs, starting with its kind."""
    out = []
    pairs = list(zip(named(got), named(want), strict=True))
    for (name, a), (other, b) in pairs:
        kind = name.split("[")[0]
        if name != other or a.shape != b.shape or a.dtype.kind != b.dtype.kind:
            out.append(f"{kind} of another type: {name} {a.shape} {a.dtype}, and the reference {other} {b.shape} {b.dtype}")
        elif a.size and a.dtype.kind != "f" and a.dtype.name != "bfloat16":
            if (a != b).any():
                out.append(f"{kind} of integers differs: {name} {_first(a != b, a, b)}")
        elif a.size and not np.isfinite(a).all():
            out.append(f"{kind} is not finite: {name} {_first(~np.isfinite(a), a, b)}")
        elif a.size:
            error, scale = np.abs(a.astype(np.float64) - b), max(1.0, np.abs(b).max())
            if error.max() > tolerance(case) * scale:
                out.append(f"{kind} differs: {name} by {error.max():.3g} of {scale:.3g}, {_first(error == error.max(), a, b)}")
    return out


def _first(where: np.ndarray, a: np.ndarray, b: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(where)[0])
    return f"at {index}: {a[index]} and the reference {b[index]}"


def unsteady(want: Any, moved: Any, limit: float) -> bool:
    """Returns whether two results of the reference differ by more than a limit."""
    for (_, a), (_, b) in zip(named(want), named(moved), strict=True):
        if a.size and (
            a.dtype.kind != "f"
            and (a != b).any()
            or a.dtype.kind == "f"
            and np.abs(a - b).max() > limit * max(1, np.abs(a).max())
        ):
            return True
    return False


def judged(error: Exception) -> Outcome:
    """Whether `cavs` documents an exception: its own files raise it on purpose, with a type for users."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
        tb = tb.tb_next
    ours = str(Path(cavs.__file__).parent.parent.resolve())
    own = [f for f in frames if str(Path(f[0]).resolve()).startswith((f"{ours}/cavs", f"{ours}/kernels"))]
    where = "; ".join(f"{Path(f).name}:{line}" for f, line in own[-3:])
    message = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    raised = frames and own and frames[-1] == own[-1] and linecache.getline(*frames[-1]).strip().startswith("raise")
    if raised and isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return Outcome("refused", message, f"{type(error).__name__} at {where}")
    place = Path(own[-1][0]).name + " " + linecache.getline(*own[-1]).strip()[:60] if own else "outside cavs"
    return Outcome("error", f"{type(error).__name__} in {place}", f"{message}\n{where}")
