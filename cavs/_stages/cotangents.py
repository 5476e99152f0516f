"""Cotangents: zero ones, sums of them, and the transposes of gather, pull and push, as gather and scatter swap roles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.equations import is_float
from cavs._stages.tensors import get_rows


def zero_cotangent(x: Any) -> Any:
    """The zero cotangent of an array or shape: of its dtype, or JAX's float0 for integers."""
    return jnp.zeros(x.shape, x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def floats(cts: list[Any]) -> dict[int, Any]:
    """Cotangents by their place in a list, without those of integers."""
    return {i: ct for i, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0}


def merged(a: dict[int, Any], b: dict[int, Any]) -> dict[int, Any]:
    """The sum of two, either of which may lack some."""
    return {i: a[i] + b[i] if i in a and i in b else a.get(i, b.get(i)) for i in sorted({*a, *b})}


def filled(cts: dict[int, Any], like: list[Any]) -> dict[int, Any]:
    """The cotangents with zeros for those that are missing, of the floats of `like`."""
    return {i: cts.get(i, zero_cotangent(x)) for i, x in enumerate(like) if is_float(x)}


def mask_rows(x: Any, real: Any) -> Any:
    """`x` with zeros in the rows where `real` is false."""
    return jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def rows_of_push(ct: Any, vertex: Any, count: Any) -> Any:
    """push's transpose: rows of its cotangent in schedule order, zero in padding."""
    if ct.dtype == jax.dtypes.float0:
        return np.zeros((vertex.shape[0], *ct.shape[1:]), jax.dtypes.float0)
    return mask_rows(get_rows(ct, vertex), jnp.arange(vertex.shape[0]) < count)


def add_rows(g: dict[int, Any], i: int, index: Any, ct: Any) -> None:
    """gather's transpose: `ct` added to rows of the cotangent of state leaf i, where that is a float."""
    if i in g:
        g[i] = g[i].at[index].add(ct, mode="promise_in_bounds")


def by_number(
    g: dict[int, Any], pushed: list[int], index: Any, cts: list[Any], rows: int, unique: bool
) -> tuple[dict[int, Any], Any]:
    """`add_rows` of all pushes without tensors of zeros: the cotangents as they are, and for each of the states' `rows` the
    number of its own, or -1. Unless `index` is `unique`, what goes to one row is summed under one number."""
    number = jnp.full(rows, -1, jnp.int32).at[index].set(jnp.arange(index.shape[0], dtype=jnp.int32))
    found: dict[int, Any] = {}
    for i, ct in zip(pushed, cts, strict=True):
        if i in g:
            ct = ct if unique else jnp.zeros_like(ct).at[get_rows(number, index)].add(ct)
            found[i] = found[i] + ct if i in found else ct
    return found, number


def no_rows(inputs: list[Any]) -> list[Any]:
    """Cotangents of the inputs before any vertex has added to them: shapes for zeros, `None` for integers."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_float(x) else None for x in inputs]


def made(ct_inputs: list[Any]) -> list[Any]:
    """The cotangents as arrays."""
    return [jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in ct_inputs]


def put_rows(ct_inputs: list[Any], ct_rows: list[Any], vertex: Any, count: Any, add: bool = False) -> list[Any]:
    """pull's transpose: each vertex's cotangent to its row of the inputs; `count` of the rows are no padding."""
    out = list(ct_inputs)
    for i, (total, ct) in enumerate(zip(ct_inputs, ct_rows, strict=True)):
        if total is not None and ct.shape[0]:
            index = jnp.where(jnp.arange(ct.shape[0]) < count, vertex, total.shape[0])
            place = made([total])[0].at[index]
            out[i] = (place.add if add else place.set)(ct, mode="drop", unique_indices=True)
    return out


def take_rows(ct_inputs: list[Any], ct_rows: list[Any], row: Any, begin: Any, count: Any) -> list[Any]:
    """`put_rows` from the other side, for vertices in the rows `begin` ... of the states: vertex v reads what is in `row[v]`.

    Nothing is filled with zeros first, and XLA fuses the reading into what reads the sum, such as an embedding's update.
    """
    out = list(ct_inputs)
    for i, (total, ct) in enumerate(zip(ct_inputs, ct_rows, strict=True)):
        if total is not None and ct.shape[0]:
            at = row - begin
            mine = ((at >= 0) & (at < count)).reshape(-1, *(1,) * (ct.ndim - 1))
            before = jnp.zeros((), ct.dtype) if isinstance(total, jax.ShapeDtypeStruct) else total
            out[i] = jnp.where(mine, get_rows(ct, jnp.clip(at, 0, ct.shape[0] - 1)), before)
    return out
