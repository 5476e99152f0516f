"""The launch: thread blocks whose warpgroups have roles, and take tasks in the order of the mapping.

MegaKernels runs a compute-bound and a memory-bound thread block side by side on a multiprocessor. On Hopper both are roles of one
thread block: two warpgroups multiply, one copies their operands to shared memory, and two transform filters, inputs and outputs.
Each role takes every n-th task of its kinds, so the hardware always has both to run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.arrays import Ref
from cavs.kernels._tasks.mapping import FILTER, INPUT, OUTPUT, PRODUCT, Counts, Distances, task_mapping
from cavs.kernels._tasks.transforms import FILTER_ROWS
from cavs.kernels._tasks.winograd import CHUNK, Sizes
from cavs.kernels.turns import begin_p, end_p

MULTIPLIERS, TRANSFORMERS = 2, 2  # warpgroups of a thread block
ROWS = 64  # the tiles of a multiplying warpgroup
# A product of two sums of bfloat16 terms: the pairs of terms that matter, the small ones first.
TERMS = {1: [(0, 0)], 2: [(1, 0), (0, 1), (0, 0)], 3: [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a convolution is laid out on the chip.

    Attributes:
        m: The side of an output tile: 2 or 4.
        parts: In how many bfloat16 terms products split each element: 3 are as exact as float32.
        columns: The output channels of a product, a multiple of 32 up to 128.
        distances: The parameters of the task mapping.
        input_tiles: The tiles of an INPUT task.
        output_tiles: The tiles of an OUTPUT task.
        stages: The chunks of operands in shared memory.
        apart: Whether small terms have accumulators of their own. Tensor cores truncate sums; this truncates fewer.
        blocks: The thread blocks, all resident at once.
    """

    m: int
    parts: int
    columns: int
    distances: Distances
    input_tiles: int
    output_tiles: int
    stages: int
    apart: bool
    blocks: int = 132


@functools.lru_cache(maxsize=256)
def _mapping(counts: Counts, distances: Distances) -> tuple[np.ndarray, np.ndarray]:
    """The products and the other tasks in their order."""
    tasks = task_mapping(counts, distances)
    is_product = tasks[:, 0] == PRODUCT
    return np.ascontiguousarray(tasks[is_product, 1:]), np.ascontiguousarray(tasks[~is_product])


def counts_of(s: Sizes, layout: Layout) -> Counts:
    """The numbers of tasks."""
    filters = s.blocks * (s.padded_inputs // FILTER_ROWS)
    inputs, outputs = s.rows // layout.input_tiles, s.rows // layout.output_tiles
    return Counts(filters, s.groups, inputs, s.positions * s.blocks, outputs)


def convolve(x: jax.Array, w: jax.Array, padding: tuple[tuple[int, int], tuple[int, int]], layout: Layout) -> jax.Array:
    """Convolves x, float32 of shape (N, H, W, C), with w of shape (3, 3, C, K), in one launch."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s = Sizes(*x.shape, w.shape[3], padding, layout.m, columns=layout.columns)
    counts, parts = counts_of(s, layout), layout.parts
    products, others = _mapping(counts, layout.distances)
    counters = begin_p.bind(jnp.zeros(1 + s.blocks + 3 * s.groups, jnp.int32))
    counted = jax.new_ref(counters)
    slots = layout.distances.input_slots, layout.distances.output_slots
    out_type = [
        jax.ShapeDtypeStruct((s.images, s.out_height, s.out_width, s.outputs), jnp.float32),
        jax.ShapeDtypeStruct((slots[0] * s.positions * s.rows, s.padded_inputs), jnp.float32),
        jax.ShapeDtypeStruct((slots[1] * s.positions * s.rows, s.padded_outputs), jnp.float32),
        jax.ShapeDtypeStruct((s.positions * parts * s.padded_inputs, s.padded_outputs), jnp.bfloat16),
    ]
    swizzled = lambda columns, swizzle: (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))  # noqa: E731
    scratch = {
        "rows": plgpu.SMEM((layout.stages, s.rows, CHUNK), jnp.float32, transforms=swizzled(32, 128)),
        "filters": plgpu.SMEM((layout.stages, parts, CHUNK, s.columns), jnp.bfloat16, transforms=swizzled(32, 64)),
        "full": plgpu.Barrier(num_arrivals=1 + parts, num_barriers=layout.stages),
        "empty": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=layout.stages),
    }

    def body(x: Ref, w: Ref, products: Ref, others: Ref, counted: Ref, y: Ref, v: Ref, sums: Ref, u: Ref, **shared: Ref) -> None:
        run = _Roles(s, layout, counts, counted, products, others, x, w, y, v, sums, u, **shared)
        lax.switch(run.role(), [run.multiply, run.transform, run.copy])

    body.__name__ = f"cavs_convolution_{layout.m}"
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        grid=(layout.blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + TRANSFORMERS + 1,
        thread_name="wg",
    )
    y = kernel(x, w, jnp.asarray(products), jnp.asarray(others), counted)[0]
    lost = end_p.bind(jax.freeze(counted)[:1])
    return jnp.where(lost[0] == 0, y, jnp.nan)


@dataclasses.dataclass(frozen=True)
class _Roles:
    """The roles of warpgroups, and the buffers that they share."""

    s: Sizes
    layout: Layout
    counts: Counts
    counters: Ref
    products: Ref
    others: Ref
    x: Ref
    w: Ref
    y: Ref
    v: Ref
    sums: Ref
    u: Ref
    rows: Ref
    filters: Ref
    full: Ref
    empty: Ref

    def role(self) -> jax.Array:
        """0 to multiply, 1 to transform, 2 to copy."""
        wg = lax.axis_index("wg")
        return (wg >= MULTIPLIERS).astype(jnp.int32) + (wg >= MULTIPLIERS + TRANSFORMERS).astype(jnp.int32)

    # The counters: of FILTER tasks by block of columns, and of the others by group.
    def _filters(self, block: jax.Array) -> jax.Array:
        return 1 + block

    def _group(self, kind: int, group: jax.Array) -> jax.Array:
        return 1 + self.s.blocks + (kind - INPUT) * self.s.groups + group

    def _earlier(self, kind: int, group: jax.Array, each: int, slots: int) -> tuple[jax.Array, jax.Array]:
        """The counter of the group whose slot is reused, and its target: 0 if the slot is new."""
        before = group - slots
        return self._group(kind, jnp.maximum(before, 0)), jnp.where(before >= 0, each, 0)

    def _chunks(self) -> int:
        return self.s.padded_inputs // CHUNK

    def _own_products(self) -> jax.Array:
        """How many products this thread block takes."""
        block = lax.axis_index("block")
        return lax.div(self.products.shape[0] - block + self.layout.blocks - 1, jnp.int32(self.layout.blocks))

    def _product(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group, the position and the block of the i-th product."""
        n = lax.axis_index("block") + i * self.layout.blocks
        group, number = self.products[n, 0], self.products[n, 1]
        return group, lax.div(number, jnp.int32(self.s.blocks)), lax.rem(number, jnp.int32(self.s.blocks))

    def copy(self) -> None:
        """Copies the operands of all products to shared memory, as soon as they exist and there is room."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import wait

        plgpu.set_max_registers(24, action="decrease")
        s, slots = self.s, self.layout.distances
        chunks, stages, parts = self._chunks(), self.layout.stages, self.layout.parts

        def task(i: jax.Array, _: None) -> None:
            group, position, block = self._product(i)
            ready = [
                (self._filters(block), jnp.int32(s.padded_inputs // FILTER_ROWS)),
                (self._group(INPUT, group), jnp.int32(self.counts.inputs)),
                self._earlier(OUTPUT, group, self.counts.outputs, slots.output_slots),
            ]
            wait(self.counters, ready)
            row = (lax.rem(group, jnp.int32(slots.input_slots)) * s.positions + position) * s.rows

            def chunk(k: jax.Array, _: None) -> None:
                q = i * chunks + k
                stage = lax.rem(q, jnp.int32(stages))

                @pl.when(q >= stages)
                def _() -> None:
                    plgpu.barrier_wait(self.empty.at[stage])

                full = self.full.at[stage]
                here = self.v.at[pl.ds(row, s.rows), pl.ds(k * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(here, self.rows.at[stage], full)
                for part in range(parts):
                    first = (position * parts + part) * s.padded_inputs + k * CHUNK
                    here = self.u.at[pl.ds(first, CHUNK), pl.ds(block * s.columns, s.columns)]
                    plgpu.copy_gmem_to_smem(here, self.filters.at[stage, part], full)

            lax.fori_loop(0, chunks, chunk, None)

        lax.fori_loop(0, self._own_products(), task, None)

    def multiply(self) -> None:
        """Runs PRODUCT tasks: the transformed inputs of a group at one position times a block of the filters there."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import finish

        plgpu.set_max_registers(152, action="increase")
        s, chunks, stages = self.s, self._chunks(), self.layout.stages
        wg, terms = lax.axis_index("wg"), TERMS[self.layout.parts]

        def task(i: jax.Array, _: None) -> None:
            group, position, block = self._product(i)

            def compute(*sums: Ref) -> jax.Array:
                def chunk(k: jax.Array, _: None) -> None:
                    stage = lax.rem(i * chunks + k, jnp.int32(stages))
                    plgpu.barrier_wait(self.full.at[stage])
                    here = self.rows.at[stage, pl.ds(wg * ROWS, ROWS)]
                    rest = plgpu.load(here, layout=plgpu.Layout.WGMMA)
                    split = []
                    for _ in range(self.layout.parts):
                        split.append(rest.astype(jnp.bfloat16))
                        rest = rest - split[-1].astype(jnp.float32)
                    for a, b in terms:
                        plgpu.wgmma(sums[-1 if a + b else 0], split[a], self.filters.at[stage, b])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(self.empty.at[stage])

                lax.fori_loop(0, chunks, chunk, None)
                total = sums[0][...]
                return total + sums[1][...] if len(sums) > 1 else total

            accumulators = [plgpu.ACC((ROWS, s.columns), jnp.float32)] * (1 + self.layout.apart)
            total = pl.run_scoped(compute, *accumulators)
            slot = lax.rem(group, jnp.int32(self.layout.distances.output_slots))
            row = (slot * s.positions + position) * s.rows + wg * ROWS
            self.sums[pl.ds(row, ROWS), pl.ds(block * s.columns, s.columns)] = total
            finish(self.counters, self._group(PRODUCT, group))

        lax.fori_loop(0, self._own_products(), task, None)

    def transform(self) -> None:
        """Runs FILTER, INPUT and OUTPUT tasks."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import finish, wait
        from cavs.kernels._tasks.transforms import transform_filter, transform_input, transform_output

        plgpu.set_max_registers(88, action="decrease")
        s, layout, counts = self.s, self.layout, self.counts
        products = counts.products * MULTIPLIERS  # each multiplying warpgroup counts
        workers = layout.blocks * TRANSFORMERS
        # Thread blocks take neighbouring tasks, and only then their second warpgroups: each multiprocessor has some.
        worker = lax.axis_index("block") + (lax.axis_index("wg") - MULTIPLIERS) * layout.blocks

        def run_filter(group: jax.Array, number: jax.Array) -> None:
            transform_filter(s, layout.parts, self.w, self.u, number)
            finish(self.counters, self._filters(lax.div(number, jnp.int32(s.padded_inputs // FILTER_ROWS))))

        def run_input(group: jax.Array, number: jax.Array) -> None:
            slots = layout.distances.input_slots
            wait(self.counters, [self._earlier(PRODUCT, group, products, slots)])
            transform_input(s, layout.input_tiles, self.x, self.v, group, number, lax.rem(group, jnp.int32(slots)))
            finish(self.counters, self._group(INPUT, group))

        def run_output(group: jax.Array, number: jax.Array) -> None:
            slots = layout.distances.output_slots
            wait(self.counters, [(self._group(PRODUCT, group), jnp.int32(products))])
            transform_output(s, layout.output_tiles, self.sums, self.y, group, number, lax.rem(group, jnp.int32(slots)))
            finish(self.counters, self._group(OUTPUT, group))

        def task(i: jax.Array, _: None) -> None:
            n = worker + i * workers
            kind, group, number = (self.others[n, column] for column in range(3))
            which = (kind == INPUT).astype(jnp.int32) + (kind == OUTPUT).astype(jnp.int32) * 2
            assert FILTER == 0
            lax.switch(which, [run_filter, run_input, run_output], group, number)

        own = lax.div(self.others.shape[0] - worker + workers - 1, jnp.int32(workers))
        lax.fori_loop(0, own, task, None)
