"""The convolution: FILTER, INPUT, PRODUCT and OUTPUT tasks in one launch, or each kind in a launch of its own."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._tasks.mapping import FILTER, INPUT, OUTPUT, PRODUCT, Distances, TaskCounts
from cavs.kernels._tasks.roles import ROWS, ConvolutionLayout, Needs, Roles, end, in_order, launch, new_counters
from cavs.kernels._tasks.winograd import CHUNK, FILTER_ROWS, ConvolutionSizes, Padding

MOST_PRODUCTS = 1 << 21  # of a launch: their order is a constant of the program, 8 bytes each


def counts_of(s: ConvolutionSizes, layout: ConvolutionLayout) -> TaskCounts:
    """The numbers of tasks."""
    filters = s.blocks * (s.padded_inputs // FILTER_ROWS)
    inputs, outputs = s.rows // layout.input_tiles, s.rows // layout.output_tiles
    return TaskCounts(filters, s.groups, inputs, s.positions * s.blocks, outputs)


def too_large(s: ConvolutionSizes, parts: int = 3) -> str | None:
    """Returns why a convolution is too large for a launch, or `None` if it is not."""
    filters = s.positions * parts * s.padded_inputs * s.padded_outputs * 2
    if filters >= 1 << 31:  # the offsets in an instruction have 32 bits
        return f"the transformed filters would have {filters:,} bytes, and the launch takes less than {1 << 31:,}"
    products = s.groups * s.positions * s.blocks
    if products > MOST_PRODUCTS:
        return f"it has {products:,} products, and a launch at most {MOST_PRODUCTS:,}; fewer images at a time fit"
    return None


def convolve(x: jax.Array, w: jax.Array, padding: Padding, layout: ConvolutionLayout) -> jax.Array:
    """Convolves x, float32 of shape (N, H, W, C), with w of shape (3, 3, C, K), in one launch."""
    s = ConvolutionSizes.of(x.shape, w.shape[3], padding, layout.m, layout.columns)
    counts = counts_of(s, layout)
    counters = new_counters(counts, s.blocks)
    out = _launch(s, layout, x, w, in_order(counts, layout.distances), counters, {})
    return lax.optimization_barrier((out["y"], end(counters)))[0]


def convolve_in_stages(x: jax.Array, w: jax.Array, padding: Padding, layout: ConvolutionLayout) -> jax.Array:
    """Does the same in three launches: transformations of filters and inputs, products, and transformations of outputs.

    This is what the fused launch is compared with (MegaKernels, section 7.2).
    """
    s = ConvolutionSizes.of(x.shape, w.shape[3], padding, layout.m, layout.columns)
    share, counts = layout.distances.share, counts_of(s, layout)
    whole = dataclasses.replace(layout, distances=Distances(share, max(share, s.groups), -(-s.groups // share)))
    products, others = in_order(counts, layout.distances)
    first = others[:, 0] != OUTPUT
    types = {name: _types(s, whole)[name] for name in ("v", "u", "sums", "y")}
    held = {name: jax.new_ref(jnp.zeros(kind.shape, kind.dtype)) for name, kind in types.items()}
    for tasks in ((products[:0], others[first]), (products, others[:0]), (products[:0], others[~first])):
        counters = new_counters(counts, s.blocks)
        counters[1:] = jnp.full(counters.shape[0] - 1, 1 << 29, jnp.int32)  # everything is done: the launches follow each other
        _launch(s, whole, x, w, tasks, counters, held)
        end(counters)
    return jax.freeze(held["y"])


def _types(s: ConvolutionSizes, layout: ConvolutionLayout) -> dict[str, jax.ShapeDtypeStruct]:
    """What a launch writes: the output, and between its tasks transformed inputs, sums of products, and transformed filters."""
    slots = layout.distances
    shapes = {
        "y": (s.images, s.out_height, s.out_width, s.outputs),
        "v": (slots.input_slots * s.positions * s.rows, s.padded_inputs),
        "sums": (slots.output_slots * s.positions * s.rows, s.padded_outputs),
        "u": (s.positions * layout.parts * s.padded_inputs, s.padded_outputs),
    }
    return {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if k == "u" else jnp.float32) for k, shape in shapes.items()}


def _launch(
    s: ConvolutionSizes,
    layout: ConvolutionLayout,
    x: jax.Array,
    w: jax.Array,
    tasks: tuple[np.ndarray, np.ndarray],
    counters: Any,
    held: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs tasks. Returns what they write, but for what goes to the references in `held`."""
    counts, chunks = counts_of(s, layout), s.padded_inputs // CHUNK
    roles = functools.partial(_Convolution, sizes=s, layout=layout, counts=counts, chunks=chunks, filters=s.blocks)
    fresh = {name: kind for name, kind in _types(s, layout).items() if name not in held}
    name, inputs = f"cavs_convolution_{layout.m}", {"x": x, "w": w}
    return launch(name, roles, layout, (s.rows, CHUNK, CHUNK), tasks, counters, inputs, fresh, held)


@dataclasses.dataclass(frozen=True)
class _Convolution(Roles):
    """The tasks of a convolution.

    A product multiplies the transformed inputs of a group at one position with a block of the filters there.
    """

    sizes: ConvolutionSizes

    def _place(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The position and the block of columns of a product."""
        return lax.div(number, jnp.int32(self.sizes.blocks)), lax.rem(number, jnp.int32(self.sizes.blocks))

    def _row(self, group: jax.Array, position: jax.Array, slots: int) -> jax.Array:
        """The first row of a group at a position, in a buffer of some slots."""
        return (lax.rem(group, jnp.int32(slots)) * self.sizes.positions + position) * self.sizes.rows

    def needs(self, group: jax.Array, number: jax.Array) -> Needs:
        filters, slots = self.sizes.padded_inputs // FILTER_ROWS, self.layout.distances.output_slots
        return [
            (1 + self._place(number)[1], jnp.int32(filters)),
            (self.counter(INPUT, group), jnp.int32(self.counts.inputs)),
            self.earlier(OUTPUT, group, self.counts.outputs, slots),
        ]

    def copy_chunk(self, group: jax.Array, number: jax.Array, k: jax.Array, stage: jax.Array) -> None:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        s, (position, block) = self.sizes, self._place(number)
        row = self._row(group, position, self.layout.distances.input_slots)
        rows = self.arrays["v"].at[pl.ds(row, s.rows), pl.ds(k * CHUNK, CHUNK)]
        plgpu.copy_gmem_to_smem(rows, self.left.at[stage], self.full.at[stage])
        first = lambda term: (position * self.layout.parts + term) * s.padded_inputs + k * CHUNK  # noqa: E731
        self.copy_terms(self.arrays["u"], first, block, stage)

    def load_left(self, stage: jax.Array) -> jax.Array:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        rows = self.left.at[stage, pl.ds(lax.axis_index("wg") * ROWS, ROWS)]
        return cast(Any, plgpu.load)(rows, layout=plgpu.Layout.WGMMA)

    def keep(self, group: jax.Array, number: jax.Array, total: jax.Array) -> None:
        from jax.experimental import pallas as pl

        position, block = self._place(number)
        row = self._row(group, position, self.layout.distances.output_slots) + lax.axis_index("wg") * ROWS
        self.arrays["sums"][pl.ds(row, ROWS), pl.ds(block * self.sizes.columns, self.sizes.columns)] = total

    def run_other(self, kind: int, group: jax.Array, number: jax.Array) -> None:
        from cavs.kernels._tasks.counters import finish, wait
        from cavs.kernels._tasks.transforms import transform_filter, transform_input, transform_output

        s, layout, slots, a = self.sizes, self.layout, self.layout.distances, self.arrays
        if kind == FILTER:
            transform_filter(s, layout.parts, a["w"], a["u"], number)
            finish(self.counters, 1 + lax.div(number, jnp.int32(s.padded_inputs // FILTER_ROWS)))
        elif kind == INPUT:
            wait(self.counters, [self.earlier(PRODUCT, group, self.all_products(), slots.input_slots)])
            slot = lax.rem(group, jnp.int32(slots.input_slots))
            transform_input(s, layout.input_tiles, a["x"], a["v"], group, number, slot)
            finish(self.counters, self.counter(INPUT, group))
        else:
            wait(self.counters, [(self.counter(PRODUCT, group), jnp.int32(self.all_products()))])
            slot = lax.rem(group, jnp.int32(slots.output_slots))
            transform_output(s, layout.output_tiles, a["sums"], a["y"], self.counters, group, number, slot)
            finish(self.counters, self.counter(OUTPUT, group))
