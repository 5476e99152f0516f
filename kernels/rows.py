"""Sums of rows by number, in a fixed order: gather's transpose without atomics."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._layout.specs import Tile

_ROWS, COLUMNS, _CTAS = 8, 16, 264


def segment_rows(tensor: Any, index: Any, first: Any, count: Any) -> Any:
    """(n, width): row i is the sum of `tensor[index[e]]` over e from `first[i]`, `count[i]` of them; negative ones give 0.

    `tensor` (rows, width) float32, the width a multiple of `COLUMNS`; the others int32 vectors. For Hopper GPUs, and JAX 0.11.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from cavs.kernels._mosaic import mosaic

    n, width = first.shape[0], tensor.shape[1]
    blocks = width // COLUMNS
    tiles = -(-n // _ROWS) * blocks

    def body(tensor: Any, index: Any, first: Any, count: Any, out: Any) -> None:
        def one(i: Any, _: Any) -> Any:
            t = lax.axis_index("cta") + i * _CTAS
            tile = Tile((_ROWS, COLUMNS), lax.div(t, jnp.int32(blocks)) * _ROWS, jnp.int32(n - 1))
            column = lax.rem(t, jnp.int32(blocks)) * COLUMNS
            total = mosaic.segments(tile, jnp.float32, tensor, index, first, count, jnp.int32(0), column, False)
            mosaic.store(tile, out, total, jnp.int32(0), column)
            return _

        mine = lax.div(tiles - lax.axis_index("cta") + _CTAS - 1, jnp.int32(_CTAS))
        lax.fori_loop(jnp.int32(0), mine, one, jnp.int32(0))

    body.__name__ = "cavs_segment_rows"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, width), jnp.float32),
        grid=(_CTAS,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(tensor, index, first, count)
