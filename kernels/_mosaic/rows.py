"""Before and after a product: the rows that each thread reads, and the sum of what the warps left; see `_mosaic.products`."""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.mlir import REF, SCALAR, as_index, elements, int32, scalar, tile_layout


def read_product(tile: Tile, part: Any, slots: int, column: Any) -> Any:
    """The sum of the partial products that were left for a warpgroup in `part` (slots of all warpgroups, rows, columns)."""

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR), return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, tile_layout(tile)))
    def go(ctx: Any, part: Any, column: Any) -> Any:
        first = arith.muli(arith.shrui(mu.thread_idx(), int32(7)), int32(slots))

        def value(i: Any, j: Any) -> Any:
            at = [as_index(i), as_index(arith.addi(j, scalar(column)))]
            total = None
            for w in range(slots):
                got = memref.load(part, [as_index(arith.addi(first, int32(w))), *at])
                total = got if total is None else arith.addf(total, got)
            return total

        return elements(tile, jnp.float32, value)

    return go(part, jnp.int32(column))


def product_rows(tile: Tile, indices: Sequence[Any], bases: Sequence[Any]) -> Any:
    """For each source and each 8 rows of a tile the row that this thread reads, one a register; see `product`."""
    present = [i for i, x in enumerate(indices) if x is not None]
    rows = tile.shape[0]
    count = len(indices) * (rows // 8)
    layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=([REF] * len(present), [SCALAR] * len(bases), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout),
    )
    def go(ctx: Any, found: Any, bases: Any, row: Any, last: Any) -> Any:
        index = dict(zip(present, found, strict=True))
        group = arith.andi(arith.shrui(mu.thread_idx(), int32(2)), int32(7))
        kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        out = np.empty(count, object)
        for s in range(len(indices)):
            for n in range(rows // 8):
                r = arith.minsi(arith.addi(arith.addi(scalar(row), group), int32(8 * n)), scalar(last))
                if s in index:
                    r = memref.load(index[s], [as_index(r)])
                out[s * (rows // 8) + n] = vector.broadcast(kind, arith.addi(r, scalar(bases[s])))
        form = mgpu.WGStridedFragLayout((128 * count,), 1)
        return mgpu.FragmentedArray(_registers=out, _layout=form, _is_signed=True)

    return go([indices[i] for i in present], list(bases), tile.row, tile.last)
