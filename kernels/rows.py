"""Sums of rows by index, in a fixed order: gather's transpose without atomics."""

import jax
import jax.numpy as jnp
from jax import lax

from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.arrays import Ref

_ROWS, COLUMNS, _CTAS = 8, 16, 264


def segment_rows(tensor: jax.Array, index: jax.Array, first: jax.Array, count: jax.Array) -> jax.Array:
    """Returns in row i the sum of `tensor[index[e]]` for `count[i]` values of e from `first[i]` on.

    It needs a Hopper GPU and JAX 0.11.

    Args:
        tensor: float32 of shape (rows, width), the width a multiple of `COLUMNS`.
        index: int32; negative indices contribute nothing.
        first: int32 of shape (n,).
        count: int32 of shape (n,).

    Returns:
        float32 of shape (n, width).
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from cavs.kernels._mosaic import mosaic

    n, width = first.shape[0], tensor.shape[1]
    blocks = width // COLUMNS
    tiles = -(-n // _ROWS) * blocks

    def body(tensor: Ref, index: Ref, first: Ref, count: Ref, out: Ref) -> None:
        def one(i: jax.Array, _: jax.Array) -> jax.Array:
            t = lax.axis_index("cta") + i * _CTAS
            tile = Tile((_ROWS, COLUMNS), lax.div(t, jnp.int32(blocks)) * _ROWS, jnp.int32(n - 1))
            column = lax.rem(t, jnp.int32(blocks)) * COLUMNS
            total = mosaic.segments(tile, jnp.float32, tensor, index, first, count, jnp.int32(0), column, False)
            mosaic.store(tile, out, total, jnp.int32(0), column)
            return _

        turns = lax.div(tiles - lax.axis_index("cta") + _CTAS - 1, jnp.int32(_CTAS))
        lax.fori_loop(jnp.int32(0), turns, one, jnp.int32(0))

    body.__name__ = "cavs_segment_rows"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, width), jnp.float32),
        grid=(_CTAS,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(tensor, index, first, count)
