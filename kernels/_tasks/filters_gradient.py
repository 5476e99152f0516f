"""The gradient of a convolution with respect to its filters: tasks of two kinds in one launch.

The transpose of Winograd's algorithm (see `winograd`): the gradient of a filter is G^T [sum of (B^T d B) * (A dY A^T)] G, where
the sum is over tiles. INPUT tasks transform tiles of the input and of the gradient of the output. PRODUCT tasks sum over the
tiles of a group.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.arrays import Ref
from cavs.kernels._tasks.convolution import MOST_PRODUCTS
from cavs.kernels._tasks.mapping import INPUT, PRODUCT, TaskCounts
from cavs.kernels._tasks.roles import MULTIPLIERS, ROWS, ConvolutionLayout, Needs, Roles, end, in_order, launch, new_counters
from cavs.kernels._tasks.winograd import CHUNK, ConvolutionSizes, Padding, matrices


def filters_gradient(x: jax.Array, dy: jax.Array, padding: Padding, layout: ConvolutionLayout) -> jax.Array:
    """Returns the gradient with respect to the filters, float32 of shape (3, 3, C, K), of a convolution.

    Args:
        x: float32 of shape (N, H, W, C): its input.
        dy: float32 of shape (N, H', W', K): the gradient with respect to its output.
        padding: Zeros around the input.
        layout: The layout. `output_tiles` are the tiles of `dy` in an INPUT task.
    """
    s = gradient_sizes(ConvolutionSizes.of(x.shape, dy.shape[3], padding, layout.m), layout)
    counts, slots, halves = gradient_counts(s, layout), layout.distances.input_slots, halves_of(s)
    chunks = s.rows // (halves * CHUNK)
    roles = functools.partial(_FiltersGradient, sizes=s, layout=layout, counts=counts, chunks=chunks, filters=0)
    fresh = {
        "v": jax.ShapeDtypeStruct((slots * s.positions * s.rows, s.padded_inputs), jnp.float32),
        "d": jax.ShapeDtypeStruct((slots * s.positions * layout.parts * s.rows, s.padded_outputs), jnp.bfloat16),
        "sums": jax.ShapeDtypeStruct((s.groups * halves * s.positions * s.padded_inputs, s.padded_outputs), jnp.float32),
    }
    tasks, counters = in_order(counts, layout.distances), new_counters(counts, 0)
    name, chunk = f"cavs_convolution_gradient_{layout.m}", (halves * CHUNK, s.multiple, halves * CHUNK)
    out = launch(name, roles, layout, chunk, tasks, counters, {"x": x, "dy": dy}, fresh, {})
    sums, lost = lax.optimization_barrier((out["sums"], end(counters)))
    total = sums.reshape(s.groups * halves, s.positions, -1).sum(0)
    g = matrices(layout.m)[1].T
    dw = jnp.matmul(jnp.asarray(np.kron(g, g), jnp.float32), total, precision=lax.Precision.HIGHEST)
    dw = dw.reshape(3, 3, s.padded_inputs, s.padded_outputs)[..., : s.inputs, : s.outputs]
    return jnp.where(lost == 0, dw, jnp.nan)


def gradient_sizes(sizes: ConvolutionSizes, layout: ConvolutionLayout) -> ConvolutionSizes:
    """The sizes of a convolution, in groups and blocks of this launch."""
    multiple = ROWS if sizes.inputs <= ROWS else MULTIPLIERS * ROWS
    return dataclasses.replace(sizes, m=layout.m, columns=layout.columns, rows=layout.rows, multiple=multiple)


def halves_of(s: ConvolutionSizes) -> int:
    """In how many sums a product is split: with few input channels, each warpgroup sums over a half of the tiles."""
    return MULTIPLIERS * ROWS // s.multiple


def gradient_counts(s: ConvolutionSizes, layout: ConvolutionLayout) -> TaskCounts:
    """The numbers of tasks, for `gradient_sizes`."""
    inputs = s.rows // layout.input_tiles + s.rows // layout.output_tiles
    return TaskCounts(0, s.groups, inputs, s.positions * (s.padded_inputs // s.multiple) * s.blocks, 0)


def gradient_fits(sizes: ConvolutionSizes, layout: ConvolutionLayout) -> bool:
    """Whether the launch takes the gradient: its offsets and its tasks are not too many."""
    s = gradient_sizes(sizes, layout)
    bytes_ = max(4 * s.padded_inputs, 2 * layout.parts * s.padded_outputs) * s.positions * s.rows
    return bytes_ < 1 << 31 and s.groups * gradient_counts(s, layout).products <= MOST_PRODUCTS


@dataclasses.dataclass(frozen=True)
class _FiltersGradient(Roles):
    """The tasks: a product multiplies a block of input channels with a block of output channels, at one position."""

    sizes: ConvolutionSizes

    def _place(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The position, the block of input channels, and that of output channels of a product."""
        s = self.sizes
        blocks, channels = jnp.int32(s.blocks), jnp.int32(s.padded_inputs // s.multiple)
        rest = lax.div(number, blocks)
        return lax.div(rest, channels), lax.rem(rest, channels), lax.rem(number, blocks)

    def needs(self, group: jax.Array, number: jax.Array) -> Needs:
        return [(self.counter(INPUT, group), jnp.int32(self.counts.inputs))]

    def copy_chunk(self, group: jax.Array, number: jax.Array, k: jax.Array, stage: jax.Array) -> None:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        s, count = self.sizes, halves_of(self.sizes) * CHUNK
        position, channels, block = self._place(number)
        row = lax.rem(group, jnp.int32(self.layout.distances.input_slots)) * s.positions + position
        tiles = self.arrays["v"].at[pl.ds(row * s.rows + k * count, count), pl.ds(channels * s.multiple, s.multiple)]
        plgpu.copy_gmem_to_smem(tiles, self.left.at[stage], self.full.at[stage])
        first = lambda term: (row * self.layout.parts + term) * s.rows + k * count  # noqa: E731
        self.copy_terms(self.arrays["d"], first, block, stage)

    def load_left(self, stage: jax.Array) -> jax.Array:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        wg = lax.axis_index("wg")
        of_wg = (wg * CHUNK, 0) if halves_of(self.sizes) > 1 else (0, wg * ROWS)
        tiles = self.left.at[stage, pl.ds(of_wg[0], CHUNK), pl.ds(of_wg[1], ROWS)]
        turned = cast(Any, plgpu.load)(tiles.T, layout=plgpu.Layout.WGMMA_TRANSPOSED)
        return plgpu.layout_cast(turned, plgpu.Layout.WGMMA)

    def right_of(self, stage: jax.Array, part: int) -> Ref:
        from jax.experimental import pallas as pl

        first = lax.axis_index("wg") * CHUNK if halves_of(self.sizes) > 1 else 0
        return self.right.at[stage, part, pl.ds(first, CHUNK)]

    def keep(self, group: jax.Array, number: jax.Array, total: jax.Array) -> None:
        from jax.experimental import pallas as pl

        s, (position, channels, block) = self.sizes, self._place(number)
        wg, halves = lax.axis_index("wg"), halves_of(s)
        half, below = (wg, 0) if halves > 1 else (0, wg * ROWS)
        row = ((group * halves + half) * s.positions + position) * s.padded_inputs + channels * s.multiple + below
        self.arrays["sums"][pl.ds(row, ROWS), pl.ds(block * s.columns, s.columns)] = total

    def run_other(self, kind: int, group: jax.Array, number: jax.Array) -> None:
        if kind != INPUT:
            return
        from cavs.kernels._tasks.counters import finish, wait
        from cavs.kernels._tasks.transforms import transform_gradient, transform_input

        s, layout, slots, a = self.sizes, self.layout, self.layout.distances.input_slots, self.arrays
        wait(self.counters, [self.earlier(PRODUCT, group, self.all_products(), slots)])
        slot, of_x = lax.rem(group, jnp.int32(slots)), s.rows // layout.input_tiles

        def of_input() -> None:
            transform_input(s, layout.input_tiles, a["x"], a["v"], group, number, slot)

        def of_gradient() -> None:
            transform_gradient(s, layout.output_tiles, layout.parts, a["dy"], a["d"], group, number - of_x, slot)

        lax.cond(number < of_x, of_input, of_gradient)
        finish(self.counters, self.counter(INPUT, group))
