"""Engine `native`: lazy gradients. The library gathers and packs the operands in one pass, and reads no padding."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.ruled import replaceable
from cavs._stages.cotangents import Floats
from cavs._stages.operands import LazyProduct, Operand
from cavs._stages.tensors import get_rows
from cavs.kernels import NATIVE_GRADIENTS, native_call


def gradients(products: Sequence[LazyProduct]) -> Floats:
    """Computes the sums of products, by their static value. See `Products`.

    A static value may be added in one equation and multiplied in another: its gradients are then of two shapes.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[LazyProduct]] = {}
    for p in products:
        groups.setdefault((p.static, _shape(p)), []).append(p)
    ordered = [p for group in groups.values() for p in group]
    bounds = [b for p in ordered for b in (0 if p.left is None else p.left.start, p.right.start, p.rows)]
    arrays = [jnp.stack([jnp.asarray(b, jnp.int32) for b in bounds])]
    places: dict[int, int] = {}

    def place(x: jax.Array | None) -> int:
        if x is None:
            return -1
        if id(x) not in places:
            places[id(x)] = len(arrays)
            arrays.append(x)
        return places[id(x)]

    def words(x: Operand | None) -> list[int]:
        return [-1, 0, 1, 0] if x is None else [place(x.index), x.parts, x.fold, len(x.sources), *map(place, x.sources)]

    terms = [[(words(p.left), words(p.right)) for p in group] for group in groups.values()]
    most = [[p.most for p in group] for group in groups.values()]
    program = [w for group in terms for w in (len(group), *(w for term in group for own in term for w in own))]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in groups]

    def on_library(arrays: list[jax.Array]) -> PyTree:
        return tuple(native_call(NATIVE_GRADIENTS, shapes, arrays, np.array(program, np.int32)))

    def on_xla(arrays: list[jax.Array]) -> PyTree:
        limits = iter(arrays[0].reshape(-1, 3))
        values = [
            [_product(arrays, term, next(limits), n) for term, n in zip(own, of_group, strict=True)]
            for own, of_group in zip(terms, most, strict=True)
        ]
        return tuple(functools.reduce(jnp.add, own) for own in values)

    sums: Floats = {}
    for (static, _), ct in zip(groups, replaceable(on_library, on_xla, local=True)(arrays), strict=True):
        sums[static] = sums[static] + ct.reshape(sums[static].shape) if static in sums else ct
    return sums


def _shape(p: LazyProduct) -> tuple[int, ...]:
    return (p.right.width,) if p.left is None else (p.left.width, p.right.width)


def _product(arrays: list[jax.Array], words: tuple[list[int], list[int]], bounds: jax.Array, most: int) -> jax.Array:
    """Returns what the library computes for one term."""
    left, right = (_rows(arrays, own, bounds[n], bounds[2], most) for n, own in enumerate(words))
    assert right is not None
    return right.sum(0) if left is None else left.T @ right


def _rows(arrays: list[jax.Array], words: list[int], start: jax.Array, count: jax.Array, most: int) -> jax.Array | None:
    """Returns the rows of an operand, zero from row `count` on."""
    index, _, fold, _, *sources = words
    if not sources:
        return None
    if fold == 1 and len(sources) == 1:
        source = arrays[sources[0]]
    else:
        source = jnp.concatenate([_matrix(arrays[n]) for n in sources], 1)
        source = source.reshape(source.shape[0] * fold, source.shape[1] // fold)
    n = jnp.arange(most)
    which = jnp.minimum(start + n, (source if index < 0 else arrays[index]).shape[0] - 1)
    x = get_rows(source, which if index < 0 else get_rows(arrays[index], which))
    x = x.reshape(most, math.prod(x.shape[1:]))  # there may be no row
    return jnp.where((n < count)[:, None], x, 0)


def _matrix(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
