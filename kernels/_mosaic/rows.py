"""What surrounds a product: the rows that each thread reads before it, and the sum of the warps' partial sums after it."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import REF, SCALAR, elements, inline_mgpu, thread_index, tile_type
from cavs.kernels._mosaic.types import F32, I32, Context, Fragments, MemRef, Scalar
from cavs.kernels._mosaic.value import as_index, load_element, minimum, scalar
from cavs.kernels._program.arrays import Ref


def read_product(tile: Tile, part: Ref, slots: int, column: int | jax.Array) -> jax.Array:
    """Sums a warpgroup's partial sums of a product.

    Args:
        tile: The tile.
        part: Partial sums in shared memory, float32 of shape (slots of all warpgroups, rows, columns).
        slots: The slots of each warpgroup.
        column: The first column, an int32 scalar.

    Returns:
        float32 of the tile's shape.
    """

    @inline_mgpu(arg_types=(REF, SCALAR), return_type=tile_type(tile, jnp.float32))
    def emit(ctx: Context, part: MemRef, column: Scalar) -> Fragments:
        first = (thread_index() >> 7) * slots

        def value(i: I32, j: I32) -> F32:
            at = as_index(i), as_index(j + scalar(column))
            return functools.reduce(operator.add, (load_element(part, first + w, *at) for w in range(slots)))

        return elements(tile, np.dtype(np.float32), value)

    return emit(part, jnp.int32(column))


def product_rows(tile: Tile, indices: Sequence[Ref | None], bases: Sequence[jax.Array]) -> jax.Array:
    """Finds the rows that each thread reads for a product; see `product`.

    Args:
        tile: The tile.
        indices: For each source int32 of shape (rows,) in global memory: the source's row for row r of the tile is `index[r]`.
            `None` if it is r.
        bases: For each source an int32 scalar that is added to its rows.

    Returns:
        int32 of shape (128 * number of sources * rows of the tile / 8,): for each source and each 8 rows of the tile, one
        element per thread: the row that it reads.
    """
    present = [i for i, x in enumerate(indices) if x is not None]
    rows = tile.shape[0]
    count = len(indices) * (rows // 8)
    layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)

    @inline_mgpu(
        arg_types=([REF] * len(present), [SCALAR] * len(bases), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout),
    )
    def emit(ctx: Context, found: list[MemRef], bases: list[Scalar], row: Scalar, last: Scalar) -> Fragments:
        index = dict(zip(present, found, strict=True))
        group = thread_index() >> 2 & 7
        kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        out = np.empty(count, object)
        for s in range(len(indices)):
            for n in range(rows // 8):
                r = minimum(scalar(row) + group + 8 * n, scalar(last))
                if s in index:
                    r = load_element(index[s], r)
                out[s * (rows // 8) + n] = vector.broadcast(kind, r + scalar(bases[s]))
        form = mgpu.WGStridedFragLayout((128 * count,), 1)
        return mgpu.FragmentedArray(_registers=out, _layout=form, _is_signed=True)

    return emit([indices[i] for i in present], list(bases), tile.row, tile.last)
