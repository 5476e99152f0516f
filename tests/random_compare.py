"""Compares two results of a random case and classifies exceptions (`Outcome`)."""

import dataclasses
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cavs
from tests.random_cases import Case

FAILED = ("wrong", "crashed", "unclear")
# Why an engine that was asked for refuses F or a batch: the documentation says so of each.
_NATIVE = (
    r"the schedule runs vertex by vertex", r"F was created with Optimizations\((lazy|fusion)=False\)",
    r"the library has no \S+", r"it computes with \w+, and the library has float32, int32 and bool",
    r"select_n of \d+ operands", r"\w+ of (float32|int32|bool)\b", r"\w+ of operands of \[",
    r"a reduction of nothing", r"a product (of integers|without elements)", r"a value without elements",
    r"a rearrangement of single elements", r"pad with negative padding",
)  # fmt: skip
_PERSISTENT = (
    r"vertices of \d kinds have children", r"no vertex of the batch has children, or its schedule has no scripts",
    r"F was created with Optimizations\(lazy=False\)", r"F has a loop with a dynamic number of iterations",
    r"the primitive \S+ has no device code", r"float32 values are needed, with int32 and bool beside them",
    r"only float32 values can be summed", r"only whole blocks of \d+ numbers can be moved",
    r"only a sum or maximum over all numbers", r"only a vertex's value times a parameter matrix is possible",
    r"the weight must be float32 and its sizes multiples of", r"a width that is no multiple of \d+",
    r"the greatest common divisor of the widths", r"no layout of the recurrent part fits the chip",
    r"no order of phases runs", r"products of different sizes", r"products in \S+ need sizes", r"sums over \d+ parts",
    r"sums of other lengths", r"it computes with values of width 0",
)  # fmt: skip
REFUSALS: dict[str | None, tuple[str, ...]] = {
    "native": (rf"^run: engine: got 'native', but (the recurrent part of F does not fit it: )?.*({'|'.join(_NATIVE)})",),
    "persistent": (rf"^run: engine: got 'persistent', but .*({'|'.join(_PERSISTENT)})",),
    "persistent-interpret": (rf"^run: engine: got 'persistent', but .*({'|'.join(_PERSISTENT)})", "^the batch has no scripts"),
}


@dataclasses.dataclass
class Outcome:
    """How a case went: "ok", "refused" (for a documented reason), "wrong" (numbers), "crashed" (an error that nobody raised on
    purpose), "unclear" (one without a documented text) or "ill" (no number is to be had).

    `what` names it, the same for failures of the same cause as far as can be told; `text` has more.
    """

    status: str
    what: str = ""
    text: str = ""
    engine: str = ""  # that ran, as far as it came to that

    @property
    def failed(self) -> bool:
        return self.status in FAILED


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


ROUNDING = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-5}  # of leaves stored as less than F's floats


def differences(case: Case, got: Any, want: Any) -> list[str]:
    """Returns a line for each leaf that differs, starting with its kind.

    Results agree where they are not finite, too. Gradients are compared where the reference is finite. Signs of zeros are not
    compared, because sums of zeros in another order have other signs; `random_odd.LITERALS` turn signs into other values.
    """
    out = []
    for (name, a), (other, b) in zip(named(got), named(want), strict=True):
        kind = name.split("[")[0]
        alike = is_float(a) == is_float(b) and (is_float(a) or a.dtype.kind == b.dtype.kind)
        if name != other or a.shape != b.shape or not alike:
            out.append(f"{kind} of another type: {name} {a.shape} {a.dtype}, and the reference {other} {b.shape} {b.dtype}")
        elif not is_float(a):
            if (a != b).any():
                out.append(f"{kind} of integers differs: {name} {_first(a != b, a, b)}")
        else:
            limit = max(tolerance(case), ROUNDING.get(b.dtype.name, 0))
            found = _of_floats(a.astype(np.float64), b.astype(np.float64), kind == "push", limit)
            out += [f"{kind} {what}: {name} {_first(where, a, b)}" for what, where in found]
    return out


def _of_floats(a: np.ndarray, b: np.ndarray, forward: bool, tolerance: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what differs, and where, if anything does."""
    finite, same = np.isfinite(b), (a == b) | (np.isnan(a) & np.isnan(b))
    scale = np.abs(b[finite]).max(initial=1.0)
    error = np.abs(np.where(finite & np.isfinite(a), a, 0) - np.where(finite, b, 0))
    found = {
        "is not finite": finite & ~np.isfinite(a),
        "differs where it is not finite": ~finite & ~same & forward,
        "differs": (error == error.max(initial=0)) & (error > tolerance * scale) & np.isfinite(a),
    }
    return ((what, where) for what, where in found.items() if where.any())


def is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def _first(where: np.ndarray, a: np.ndarray, b: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(where)[0])
    return f"at {index}: {a[index]} and the reference {b[index]}"


def unsteady(want: Any, moved: Any, limit: float) -> bool:
    """Returns whether two results of the reference differ by more than a limit."""
    for (_, a), (_, b) in zip(named(want), named(moved), strict=True):
        if not is_float(a):
            if (a != b).any():
                return True
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(a)
        scale = np.abs(a[finite]).max(initial=1.0)
        if (finite != np.isfinite(b)).any() or (np.abs(a[finite] - b[finite]) > limit * scale).any():
            return True
    return False


def judged(error: Exception, engine: str | None) -> Outcome:
    """Whether an exception is one of `REFUSALS`, or one that the files of `cavs` at least raise on purpose."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno))
        tb = tb.tb_next
    ours = str(Path(cavs.__file__).parent.parent.resolve())
    own = [f for f in frames if str(Path(f[0]).resolve()).startswith((f"{ours}/cavs", f"{ours}/kernels"))]
    where = "; ".join(f"{Path(f).name}:{line}" for f, line in own[-3:])
    message = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    raised = frames and own and frames[-1] == own[-1] and linecache.getline(*frames[-1]).strip().startswith("raise")
    if any(re.search(text, message) for text in REFUSALS.get(engine, ())):
        return Outcome("refused", message)
    if raised and isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return Outcome("unclear", message, f"{type(error).__name__} at {where}")
    place = Path(own[-1][0]).name + " " + linecache.getline(*own[-1]).strip()[:60] if own else "outside cavs"
    return Outcome("crashed", f"{type(error).__name__} in {place}", f"{message}\n{where}")
