"""Arrays from values as JSON and networkx have them, and back: ids and their names, numbers to predict, rows of features."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cavs._graphs.checks import INT32_MAX
from cavs._graphs.flat import number_names

Names = tuple[str, ...] | None

_NONE: Any = None  # NumPy takes it; its types do not


def ids_of(values: Sequence[Any], optional: bool) -> tuple[np.ndarray, Names]:
    """Converts integers or names to ids.

    Integers are ids themselves, without names. Strings are numbered by first appearance. `None` becomes -1, if `optional`.

    Returns (N,) int32 ids, and the names. Raises `ValueError`, whose text says what was got, if the values are neither all
    integers from 0 to 2**31 - 1 nor all strings.
    """
    types = set(map(type, values)) - ({type(None)} if optional else set())
    if types - {int, str} or len(types) > 1:
        raise ValueError(" and ".join(sorted("null" if t is type(None) else t.__name__ for t in types)))
    if types == {str}:
        ids, names = number_names(values)
        return ids, tuple(names)
    if wrong := [value for value in values if value is not None and not 0 <= value <= INT32_MAX]:
        # Python refuses to print integers of thousands of digits.
        raise ValueError(f"the integer {wrong[0]}" if abs(wrong[0]) < 10**30 else "an integer of over 30 digits")
    return np.array([-1 if value is None else value for value in values], np.int32), None


def are_targets(values: Iterable[object]) -> bool:
    """Returns whether labels are numbers to predict rather than ids: one of them has decimals, or is a list."""
    return not {float, list}.isdisjoint(map(type, values))


def targets_of(values: Sequence[Any]) -> np.ndarray:
    """(N, ...) float64, NaN for `None`, also within lists.

    Raises `ValueError` if the values are not numbers, or nested lists, of one shape, or one of them is infinite, or an integer
    that float64 would round.
    """
    present = [i for i, value in enumerate(values) if value is not None]
    array = _numbers([values[i] for i in present], floats=True, missing=np.nan)
    if np.isinf(array).any():
        raise ValueError("an infinite number")
    out = np.full((len(values), *array.shape[1:]), np.nan)
    out[present] = array
    return out


def rows_of(values: Sequence[Any]) -> np.ndarray:
    """(N, ...) int64 if all are integers, else float64.

    Raises `ValueError` if they are not finite numbers of one shape, or float64 would round one of the integers.
    """
    array = _numbers(values)
    if not np.isfinite(array).all():
        raise ValueError("a number that is not finite")
    return array


def _numbers(values: Sequence[Any], floats: bool = False, missing: float | None = None) -> np.ndarray:
    """Returns numbers as int64 if all are integers, unless they must be `floats`, else as float64."""
    array, objects = None, np.zeros(0, object)
    with contextlib.suppress(ValueError, OverflowError):  # lists of different lengths, or integers of more than 64 bits
        objects = np.array(values, object)
        objects[np.equal(objects, _NONE)] = missing
        types = set(map(type, objects.ravel().tolist()))
        if types <= {int, float}:
            array = objects.astype(np.int64 if types == {int} and not floats else np.float64)
    if array is None:
        raise ValueError("values that are not numbers of one shape")
    if array.dtype == np.float64 and (rounded := (array != objects) & ~np.isnan(array)).any():
        raise ValueError(f"the integer {objects[rounded][0]}, which float64 rounds")
    return array


def id_values(ids: np.ndarray, names: Names) -> list[Any]:
    """The values for JSON of ids, or of targets: names or integers, and `None` for -1; numbers, and `None` for NaN."""
    if ids.dtype != np.int32 or ids.ndim != 1:
        return as_values(ids)
    return [None if i < 0 else i if names is None else names[i] for i in ids.tolist()]


def as_values(array: np.ndarray) -> list[Any]:
    """The rows of an array for JSON, `None` for NaN and for a row of NaN."""
    array = _in_64_bits(array)
    if array.dtype.kind != "f":
        return array.tolist()
    missing, axes = np.isnan(array), tuple(range(1, array.ndim))
    none_rows: Any = (missing.all(axes) & missing.any(axes)).tolist()  # not a row without numbers
    return [None if is_none else row for is_none, row in zip(none_rows, np.where(missing, _NONE, array).tolist(), strict=True)]


def check_finite(rows: np.ndarray, name: str, or_nan: bool = False) -> None:
    """Raises `ValueError` if a value of the field `name` is not a finite real number, and not NaN if that is allowed.

    Or if it is an integer that `read_edges` refuses, of more than 64 bits with its sign, or a label that float64 rounds; or
    there are no values to show the shape of a row.
    """
    if not rows.size and np.shape(rows.tolist()) != rows.shape:
        raise ValueError(
            f"write_edges: {name}: got shape {rows.shape}; expected values, as JSON lines show the shape of rows by values. "
            f"Write graphs.replace({name.split('/')[0]}=None), or cavs.io.save_npz, which stores any."
        )
    if rows.dtype == np.uint64 and (rows > np.iinfo(np.int64).max).any():
        raise ValueError(
            f"write_edges: {name}: got the integer {rows.max()}; expected integers < 2**63, which read_edges reads. Write "
            "cavs.io.save_npz, which stores any."
        )
    if or_nan and rows.ndim > 1 and rows.dtype.kind in "iu":
        if (rounded := rows.astype(np.float64).astype(object) != rows).any():
            raise ValueError(
                f"write_edges: {name}: got the integer {rows[rounded][0]}; expected integers that float64 holds exactly, as "
                "which read_edges reads lists of labels. Write cavs.io.save_npz, which stores any."
            )
    values = _in_64_bits(rows)
    if values.dtype.kind == "c" or (np.isinf(values).any() if or_nan else not np.isfinite(values).all()):
        raise ValueError(
            f"write_edges: {name}: got {rows.dtype} with values that are not finite real numbers; expected such "
            f"numbers{', or NaN' * or_nan}. Write cavs.io.save_npz, which stores any."
        )


def rows_for_json(rows: np.ndarray, name: str) -> list[Any]:
    """The rows of `Graphs.edge_attr` or of `Graphs.x` for JSON. Raises `ValueError` if a value is not a finite real number."""
    check_finite(rows, name)
    return _in_64_bits(rows).tolist()


def _in_64_bits(array: np.ndarray) -> np.ndarray:
    """Returns booleans, bfloat16 and its like as int64 or float64, of which JSON has numbers. Others stay as they are."""
    if array.dtype.kind in "iuc":
        return array
    return array.astype(np.int64 if array.dtype == bool or jnp.issubdtype(array.dtype, np.integer) else np.float64)
