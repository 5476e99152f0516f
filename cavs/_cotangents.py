"""Cotangents: zero ones, sums of them, and the transposes of gather, pull and push, as gather and scatter swap roles."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._rows import is_float
from cavs._tensors import get_rows


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


def put_rows(ct_inputs: list[Any], ct_rows: list[Any], vertex: Any, count: Any, add: bool = False) -> list[Any]:
    """pull's transpose: each vertex's cotangent to its row of the inputs; `count` of the rows are no padding."""
    out = []
    for total, ct in zip(ct_inputs, ct_rows, strict=True):
        if total is not None and ct.shape[0]:
            index = jnp.where(jnp.arange(ct.shape[0]) < count, vertex, total.shape[0])
            place = total.at[index]
            total = (place.add if add else place.set)(ct, mode="drop", unique_indices=True)
        out.append(total)
    return out
