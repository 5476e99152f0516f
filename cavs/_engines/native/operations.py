"""Engine `native`: which operation of its library computes an equation of elements, and where other equations move them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cavs._engines.native.values import View
from cavs._jaxpr.jaxprs import Atom, Eqn
from cavs.kernels import NATIVE_OPERATIONS, Unfit

CODE = {name: operation.code for name, operation in NATIVE_OPERATIONS.items()}
MOST_PIECES = 1024  # of one equation; each is a copy for every row
_SAME = {"add_any": "add"}
REDUCTIONS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or",
    "reduce_children_sum": "add", "reduce_children_max": "max",
}  # fmt: skip


def letter(x: Atom) -> str:
    """Returns "f", "i" or "b": float32, int32 or bool. Raises `Unfit` if the dtype is another one."""
    return letter_of(x.aval.dtype)


def letter_of(dtype: np.dtype) -> str:
    for name, supported in (("f", jnp.float32), ("i", jnp.int32), ("b", jnp.bool_)):
        if dtype == supported:
            return name
    raise Unfit(f"it computes with {dtype}, and the library has float32, int32 and bool")


def elementwise(eqn: Eqn) -> str | None:
    """Returns the operation of an elementwise equation, "view" if it changes nothing, `None` if it is not elementwise.

    Raises `Unfit` if the library lacks this operation for the equation's dtypes.
    """
    name = _SAME.get(eqn.primitive.name, eqn.primitive.name)
    if name == "convert_element_type":
        return _converted(letter(eqn.invars[0]), letter(eqn.outvars[0]))
    if name not in CODE:
        return None
    operation = _operation(name, eqn.invars)
    if len(eqn.invars) != NATIVE_OPERATIONS[operation].operands:
        raise Unfit(f"{name} of {len(eqn.invars)} operands")
    return operation


def reduction(eqn: Eqn) -> int:
    """Returns the code of the operation that a reduction repeats.

    Raises `Unfit` if the library lacks it for the equation's dtype.
    """
    return CODE[_operation(REDUCTIONS[eqn.primitive.name], eqn.invars)]


def _operation(name: str, operands: Sequence[Atom]) -> str:
    """Returns the operation of this name for the dtypes of `operands`."""
    types = {letter(x) for x in operands}
    for operation in (name, f"{name}_i"):
        if operation in NATIVE_OPERATIONS and types <= NATIVE_OPERATIONS[operation].types:
            return operation
    raise Unfit(f"{name} of {', '.join(str(x.aval.dtype) for x in operands)}")


def _converted(before: str, after: str) -> str:
    if before == after or before + after == "bi":
        return "view"
    if after == "f":
        return "to_float"
    if after == "i":
        return "to_int"
    return "to_bool" if before == "f" else "to_bool_i"


def _padded(x: np.ndarray, value: np.ndarray, config: Sequence[tuple[int, int, int]]) -> np.ndarray:
    if any(min(c) < 0 for c in config):
        raise Unfit("pad with negative padding")
    shape = [lo + hi + n + max(n - 1, 0) * step for (lo, hi, step), n in zip(config, x.shape, strict=True)]
    out = np.full(shape, value.reshape(()))
    out[tuple(slice(lo, lo + n + max(n - 1, 0) * s, s + 1) for (lo, _, s), n in zip(config, x.shape, strict=True))] = x
    return out


def _sliced(x: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(p["start_indices"], p["limit_indices"], strides, strict=True))]


def _broadcast(x: np.ndarray, p: dict[str, Any]) -> np.ndarray:
    shape = [1] * len(p["shape"])
    for axis, n in zip(p["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = n
    return np.broadcast_to(x.reshape(shape), p["shape"])


# Each takes the numbers of the operands' elements and the parameters, and returns the numbers of the results' elements.
MOVES: dict[str, Callable[..., Any]] = {
    "reshape": lambda x, p: x.reshape(p["new_sizes"]),
    "squeeze": lambda x, p: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda x, p: np.expand_dims(x, tuple(p["dimensions"])),
    "transpose": lambda x, p: x.transpose(p["permutation"]),
    "rev": lambda x, p: np.flip(x, tuple(p["dimensions"])),
    "slice": _sliced,
    "broadcast_in_dim": _broadcast,
    "split": lambda x, p: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "unstack": lambda x, p: list(np.moveaxis(x, p["axis"], 0)),
    "stack": lambda *x: np.stack(x[:-1], x[-1]["axis"]),
    "concatenate": lambda *x: np.concatenate(x[:-1], x[-1]["dimension"]),
    "pad": lambda x, value, p: _padded(x, value, p["padding_config"]),
}


def moved(eqn: Eqn) -> list[np.ndarray]:
    """Returns for each result the numbers of its elements, counted through all operands."""
    sizes = [int(np.prod(x.aval.shape, dtype=np.int64)) for x in eqn.invars]
    ends = np.cumsum([0, *sizes])
    numbers = [np.arange(a, b).reshape(x.aval.shape) for a, b, x in zip(ends[:-1], ends[1:], eqn.invars, strict=True)]
    if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) > 1:
        raise Unfit("broadcast_in_dim to a dynamic shape")
    out = MOVES[eqn.primitive.name](*numbers, eqn.params)
    return [np.asarray(x).reshape(-1) for x in (out if isinstance(out, list) else [out])]


def pieces(views: Sequence[View], sizes: Sequence[int], at: np.ndarray) -> list[tuple[View, int, int]]:
    """Returns the pieces of which a value consists: a view, where it begins in the value, and its number of elements.

    `at`: the numbers of the value's elements, counted through all operands. Raises `Unfit` if there are too many.
    """
    if not len(at):
        raise Unfit("a value without elements")
    ends = np.cumsum(sizes)
    operand = np.searchsorted(ends, at, side="right")
    first = ends - sizes
    step, offset = np.array([v.step for v in views]), np.array([v.offset for v in views])
    bases = {id(b): i for i, b in enumerate(dict.fromkeys(v.base for v in views))}
    base = np.array([bases[id(v.base)] for v in views])[operand]
    place = offset[operand] + step[operand] * (at - first[operand])
    out, begin, n = [], 0, len(at)
    while begin < n:
        end = begin + 1
        if end < n and base[end] == base[begin] and place[end] >= place[begin]:
            stride = place[end] - place[begin]
            same = (base[begin + 1 :] == base[begin]) & (np.diff(place[begin:]) == stride)
            end = begin + 1 + (len(same) if same.all() else int(same.argmin()))
        else:
            stride = 1
        view = views[int(operand[begin])]
        out.append((View(view.base, int(place[begin]), int(stride)), begin, end - begin))
        begin = end
        if len(out) > MOST_PIECES:
            raise Unfit("a rearrangement of single elements")
    return out
