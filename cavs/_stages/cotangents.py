"""Zeros and sums of cotangents, and the transposes of gather, pull and push: in the backward, gather and scatter swap roles."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.children import wide
from cavs._function.evaluate import column
from cavs._function.raw_keys import Shaped
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._stages.tensors import Index, get_rows
from cavs.kernels import Target

Cotangent: TypeAlias = jax.Array | np.ndarray  # of an integer a NumPy array of JAX's float0
# Per leaf of the inputs: (Vp, ...); a shape as long as no vertex has added to it, and `None` for integers.
InputCotangents: TypeAlias = list[jax.Array | jax.ShapeDtypeStruct | None]
Floats: TypeAlias = dict[int, jax.Array]  # cotangents of floats, by their place in a list


def zero_cotangent(x: Shaped) -> Cotangent:
    """Returns the zero cotangent of `x`: of its dtype, or of JAX's float0 for integers."""
    return jnp.zeros(x.shape, x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def differentiated(tree: PyTree, varied: PyTree) -> PyTree:
    """Returns a tree with `None` in place of the leaves that are not differentiated; `varied` has bools as leaves."""
    return jax.tree.map(lambda is_varied, x: x if is_varied else None, varied, tree)


def with_differentiated(tree: PyTree, by: PyTree) -> PyTree:
    """Returns a tree with the leaves of `by` where it has any: `by` is like the result of `differentiated`."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if y is None else y for x, y in zip(leaves, treedef.flatten_up_to(by), strict=True)])


def floats(cts: list[Cotangent]) -> Floats:
    """Returns the floating-point cotangents, keyed by their position in the list."""
    return {i: jnp.asarray(ct) for i, ct in enumerate(cts) if ct.dtype != jax.dtypes.float0}


def merged(a: Floats, b: Floats) -> Floats:
    """Returns the sums of cotangents; one that is missing on one side is zero."""
    return {i: a[i] + b[i] if i in a and i in b else a[i] if i in a else b[i] for i in sorted({*a, *b})}


def filled(cts: Floats, like: list[jax.Array]) -> Floats:
    """Returns the cotangents of all floats of `like`, zeros where `cts` has none."""
    return {i: cts[i] if i in cts else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(like) if is_float(x)}


def mask_rows(x: jax.Array, real: jax.Array) -> jax.Array:
    """Returns `x` with zeros in the rows where `real` is false."""
    return jnp.where(column(real, x), x, jnp.zeros((), x.dtype))


def rows_of_push(ct: Cotangent, vertex: jax.Array, count: Index) -> Cotangent:
    """Transposes a push of some vertices.

    Returns (rows, ...), zero in padding. `ct`: (Vp, ...) the cotangent of the pushes of all vertices. `count`: the number of
    rows that are not padding.
    """
    if ct.dtype == jax.dtypes.float0:
        return np.zeros((vertex.shape[0], *ct.shape[1:]), jax.dtypes.float0)
    return mask_rows(get_rows(jnp.asarray(ct), vertex), jnp.arange(vertex.shape[0]) < count)


def add_rows(g: Floats, i: int, index: jax.Array, ct: Cotangent) -> None:
    """Transposes a gather: adds `ct` to the rows `index` of `g[i]`, the cotangent of state leaf i, unless it is an integer."""
    if i in g:
        rows = not_one(index)
        if rows is not index:
            ct = jnp.concatenate([ct, jnp.zeros_like(ct)])
        g[i] = g[i].at[rows].add(ct.astype(g[i].dtype), mode="promise_in_bounds")


def summed_rows(ct: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """Returns (rows, ...), sums of the rows of `ct` with the same `index`, in float32: bfloat16 cannot count to 257."""
    terms = wide(ct)
    return jnp.zeros((rows, *ct.shape[1:]), terms.dtype).at[index].add(terms, mode="drop").astype(ct.dtype)


def not_one(index: jax.Array) -> jax.Array:
    """Returns the rows of a scatter, a single one twice: XLA for CPUs would update a slice instead, and copy the tensor."""
    return jnp.concatenate([index, index]) if index.shape[0] == 1 and Target.here().is_cpu else index


def by_number(
    g: Floats, pushed: list[int], index: jax.Array, cts: list[Cotangent], rows: int, unique: bool
) -> tuple[Floats, jax.Array]:
    """Like `add_rows` for all pushes, but without tensors of zeros: the cotangents keep their rows, and states refer to them.

    Args:
        g: has the state leaves that are floats as keys.
        pushed: for each push, the state leaf that it is.
        index: (M,) the row of each pushed vertex in the dynamic tensors.
        cts: the cotangents of the pushes, (M, ...).
        rows: the number of rows of the dynamic tensors.
        unique: whether no row occurs twice in `index`. Otherwise the cotangents of one row are summed.

    Returns:
        The cotangents of state leaves, (M, ...), and (rows,) int32: for each row of the dynamic tensors its row in them, or -1.
    """
    number = _numbers(index, rows)
    ct_states: Floats = {}
    for i, ct in zip(pushed, cts, strict=True):
        if i in g:
            ct = ct if unique else summed_rows(jnp.asarray(ct), get_rows(number, index), ct.shape[0])
            ct_states[i] = ct_states[i] + ct if i in ct_states else jnp.asarray(ct)
    return ct_states, number


def once(ct: Cotangent, index: jax.Array, rows: int) -> Cotangent:
    """Returns 16-bit rows in which one of those that are added to the same row is their sum, and the others are zeros."""
    if ct.dtype == jax.dtypes.float0 or ct.dtype.itemsize >= 4:
        return ct
    return summed_rows(jnp.asarray(ct), get_rows(_numbers(index, rows), index), ct.shape[0])


def _numbers(index: jax.Array, rows: int) -> jax.Array:
    """Returns (rows,) int32, for each row its place in `index`, or -1."""
    return jnp.full(rows, -1, jnp.int32).at[index].set(jnp.arange(index.shape[0], dtype=jnp.int32))


def no_rows(inputs: list[jax.Array]) -> InputCotangents:
    """Returns the cotangents of the inputs before any vertex has added to them: shapes for zeros, `None` for integers."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_float(x) else None for x in inputs]


def made(ct_inputs: InputCotangents) -> list[jax.Array | None]:
    """Returns the cotangents of the inputs with arrays of zeros in place of shapes."""
    return [None if x is None else _array(x) for x in ct_inputs]


def _array(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


def put_rows(ct_inputs: InputCotangents, ct_rows: list[Cotangent], vertex: jax.Array, count: Index) -> InputCotangents:
    """Transposes a pull: writes the cotangents of some vertices to their rows of the inputs.

    `ct_inputs`: the cotangents of the inputs so far, (Vp, ...). `ct_rows`: the cotangents of the vertices' rows, (rows, ...).
    `count`: the number of rows that are not padding.
    """
    out = list(ct_inputs)
    for i, (total, ct) in enumerate(zip(ct_inputs, ct_rows, strict=True)):
        if total is not None and ct.shape[0]:
            index = jnp.where(jnp.arange(ct.shape[0]) < count, vertex, total.shape[0])
            out[i] = _array(total).at[index].set(ct, mode="drop", unique_indices=True)
    return out


def take_rows(
    ct_inputs: InputCotangents, ct_rows: list[Cotangent], row: jax.Array, begin: Index, count: Index
) -> InputCotangents:
    """Like `put_rows`, but gathers: vertex v reads the cotangent of row `row[v]` of the dynamic tensors, from row `begin` on.

    No tensor of zeros is written first, and XLA fuses the gather into the operation that reads its result, such as the update
    of an embedding.
    """
    out = list(ct_inputs)
    for i, (total, ct) in enumerate(zip(ct_inputs, ct_rows, strict=True)):
        if total is not None and ct.shape[0]:
            index = row - begin
            inside = column((index >= 0) & (index < count), ct)
            before = jnp.zeros((), ct.dtype) if isinstance(total, jax.ShapeDtypeStruct) else total
            out[i] = jnp.where(inside, get_rows(jnp.asarray(ct), jnp.clip(index, 0, ct.shape[0] - 1)), before)
    return out
