"""Engine `native`: lazy gradients. The library gathers and packs the operands in one pass, and reads no padding."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cavs._stages.cotangents import Floats
from cavs._stages.operands import LazyProduct, Operand
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
    program = [w for group in terms for w in (len(group), *(w for term in group for operand in term for w in operand))]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in groups]
    found = native_call(NATIVE_GRADIENTS, shapes, arrays, np.array(program, np.int32))
    sums: Floats = {}
    for (static, _), ct in zip(groups, found, strict=True):
        sums[static] = sums[static] + ct.reshape(sums[static].shape) if static in sums else ct
    return sums


def _shape(p: LazyProduct) -> tuple[int, ...]:
    return (p.right.width,) if p.left is None else (p.left.width, p.right.width)
