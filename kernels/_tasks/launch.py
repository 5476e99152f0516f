"""The launch: thread blocks whose warpgroups have roles, and take tasks in the order of the mapping.

MegaKernels runs a compute-bound and a memory-bound thread block side by side on a multiprocessor. On Hopper both are roles of
one thread block: two warpgroups multiply, one copies their operands to shared memory, and two to four transform filters, inputs
and outputs. Each role takes every n-th task of its kinds, so a multiprocessor always has both to run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.arrays import Ref
from cavs.kernels._tasks.mapping import FILTER, INPUT, OUTPUT, PRODUCT, Distances, TaskCounts, task_mapping
from cavs.kernels._tasks.winograd import CHUNK, FILTER_ROWS, ConvolutionSizes, Padding
from cavs.kernels.turns import begin_p, end_p

MULTIPLIERS = 2  # warpgroups of a thread block
ROWS = 64  # the tiles of a multiplying warpgroup
MOST_PRODUCTS = 1 << 21  # of a launch: their order is a constant of the program, 8 bytes each
# A product of two sums of bfloat16 terms: the pairs of terms that matter, the small ones first.
TERMS = {1: [(0, 0)], 2: [(1, 0), (0, 1), (0, 0)], 3: [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]}


@dataclasses.dataclass(frozen=True)
class ConvolutionLayout:
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
        transformers: The warpgroups of a thread block that transform.
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
    transformers: int = 2
    blocks: int = 132

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers of a thread that copies, transforms, and multiplies."""
        warpgroups = MULTIPLIERS + self.transformers + 1
        all_ = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
        transform = {1: 96, 2: 80, 3: 64, 4: 56}[self.transformers]
        return 24, transform, (all_ - 24 - transform * self.transformers) // MULTIPLIERS // 8 * 8


@functools.lru_cache(maxsize=256)
def _mapping(counts: TaskCounts, distances: Distances) -> tuple[np.ndarray, np.ndarray]:
    """The products and the other tasks in their order."""
    tasks = task_mapping(counts, distances)
    is_product = tasks[:, 0] == PRODUCT
    return np.ascontiguousarray(tasks[is_product, 1:]), np.ascontiguousarray(tasks[~is_product])


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
    counted = jax.new_ref(begin_p.bind(jnp.zeros(_num_counters(s), jnp.int32)))
    out = _launch(s, layout, x, w, _mapping(counts, layout.distances), counted, {})
    return lax.optimization_barrier((out["y"], end_p.bind(jax.freeze(counted)[:1])))[0]


def convolve_in_stages(x: jax.Array, w: jax.Array, padding: Padding, layout: ConvolutionLayout) -> jax.Array:
    """Does the same in three launches: transformations of filters and inputs, products, and transformations of outputs.

    This is what the fused launch is compared with (MegaKernels, section 7.2).
    """
    s = ConvolutionSizes.of(x.shape, w.shape[3], padding, layout.m, layout.columns)
    share = layout.distances.share
    whole = dataclasses.replace(layout, distances=Distances(share, max(share, s.groups), -(-s.groups // share)))
    products, others = _mapping(counts_of(s, layout), layout.distances)
    first = others[:, 0] != OUTPUT
    types = {name: _types(s, whole)[name] for name in ("v", "u", "sums", "y")}
    held = {name: jax.new_ref(jnp.zeros(kind.shape, kind.dtype)) for name, kind in types.items()}
    for tasks in ((products[:0], others[first]), (products, others[:0]), (products[:0], others[~first])):
        # All counters say that everything is done: the launches follow each other.
        done = jax.new_ref(begin_p.bind(jnp.full(_num_counters(s), 1 << 29, jnp.int32).at[0].set(0)))
        _launch(s, whole, x, w, tasks, done, held)
        end_p.bind(jax.freeze(done)[:1])
    return jax.freeze(held["y"])


def _num_counters(s: ConvolutionSizes) -> int:
    """A flag, a counter for each block of columns of the filters, and three for each group."""
    return 1 + s.blocks + 3 * s.groups


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
    counted: Any,
    held: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs products and other tasks in one launch. Returns what it writes, but for what goes to the references in `held`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    fresh = {name: kind for name, kind in _types(s, layout).items() if name not in held}
    parts, given = layout.parts, [jnp.asarray(t if len(t) else np.zeros((1, t.shape[1]), np.int32)) for t in tasks]
    tiled, swizzle = cast(Any, plgpu.TilingTransform), cast(Any, plgpu.SwizzleTransform)
    scratch = {
        "rows": plgpu.SMEM((layout.stages, s.rows, CHUNK), jnp.float32, transforms=(tiled((8, 32)), swizzle(128))),
        "filters": plgpu.SMEM((layout.stages, parts, CHUNK, s.columns), jnp.bfloat16, transforms=(tiled((8, 32)), swizzle(64))),
        "full": plgpu.Barrier(num_arrivals=1 + parts, num_barriers=layout.stages),
        "empty": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=layout.stages),
    }

    def body(x: Ref, w: Ref, products: Ref, others: Ref, counted: Ref, *buffers: Ref, **shared: Ref) -> None:
        named = dict(zip([*held, *fresh], buffers, strict=True))
        numbers = len(tasks[0]), len(tasks[1])
        run = _Roles(s, layout, counts_of(s, layout), numbers, counted, products, others, x, w, **named, **shared)
        lax.switch(run.role(), [run.multiply, run.transform, run.copy])

    body.__name__ = f"cavs_convolution_{layout.m}"
    kernel = plgpu.kernel(
        body,
        out_type=list(fresh.values()),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        grid=(layout.blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + layout.transformers + 1,
        thread_name="wg",
    )
    return dict(zip(fresh, kernel(x, w, *given, counted, *held.values()), strict=True))


def _loop(count: Any, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """A loop whose counter is int32, also if 64-bit numbers are enabled."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)


@dataclasses.dataclass(frozen=True)
class _Roles:
    """The roles of warpgroups, and the buffers that they share."""

    s: ConvolutionSizes
    layout: ConvolutionLayout
    counts: TaskCounts
    numbers: tuple[int, int]  # of products, and of other tasks
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
        return (wg >= MULTIPLIERS).astype(jnp.int32) + (wg >= MULTIPLIERS + self.layout.transformers).astype(jnp.int32)

    # The counters: of FILTER tasks by block of columns, and of the others by group.
    def _filters(self, block: jax.Array) -> jax.Array:
        return 1 + block

    def _group(self, kind: int, group: jax.Array) -> jax.Array:
        return 1 + self.s.blocks + (kind - INPUT) * self.s.groups + group

    def _earlier(self, kind: int, group: jax.Array, each: int, slots: int) -> tuple[jax.Array, jax.Array]:
        """The counter of the group whose slot is reused, and its target: 0 if the slot is new."""
        before = group - slots
        return self._group(kind, jnp.maximum(before, 0)), jnp.where(before >= 0, jnp.int32(each), jnp.int32(0))

    def _chunks(self) -> int:
        return self.s.padded_inputs // CHUNK

    def _own_products(self) -> jax.Array:
        """How many products this thread block takes."""
        block = lax.axis_index("block")
        return lax.div(self.numbers[0] - block + self.layout.blocks - 1, jnp.int32(self.layout.blocks))

    def _product(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group, the position and the block of the i-th product."""
        n = jnp.clip(lax.axis_index("block") + i * self.layout.blocks, 0, max(self.numbers[0] - 1, 0))
        group, number = self.products[n, 0], self.products[n, 1]
        return group, lax.div(number, jnp.int32(self.s.blocks)), lax.rem(number, jnp.int32(self.s.blocks))

    def copy(self) -> None:
        """Copies the operands of all products to shared memory, as soon as they exist and there is room."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import wait

        plgpu.set_max_registers(self.layout.registers[0], action="decrease")
        s, slots = self.s, self.layout.distances
        chunks, stages, parts = self._chunks(), self.layout.stages, self.layout.parts

        def task(i: jax.Array, carry: tuple) -> tuple:
            group, position, block = carry
            following = self._product(i + 1)
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

            _loop(chunks, chunk, None)
            return following

        _loop(self._own_products(), task, self._product(jnp.int32(0)))

    def multiply(self) -> None:
        """Runs PRODUCT tasks: the transformed inputs of a group at one position times a block of the filters there."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import finish

        plgpu.set_max_registers(self.layout.registers[2], action="increase")
        s, chunks, stages = self.s, self._chunks(), self.layout.stages
        wg, terms = lax.axis_index("wg"), TERMS[self.layout.parts]

        # A task is counted when the next one is computed: its results have arrived by then, and no time is lost in waiting for
        # them. If a step of the mapping has a task for each thread block, the next task is at most one step later, and needs
        # nothing that waits for this one.
        late = self.layout.distances.share * self.counts.products >= self.layout.blocks

        def task(i: jax.Array, carry: tuple) -> tuple:
            before, (group, position, block) = carry
            following = self._product(i + 1)

            def compute(*sums: Any) -> jax.Array:
                def chunk(k: jax.Array, _: None) -> None:
                    stage = lax.rem(i * chunks + k, jnp.int32(stages))
                    plgpu.barrier_wait(self.full.at[stage])
                    here = self.rows.at[stage, pl.ds(wg * ROWS, ROWS)]
                    rest = cast(Any, plgpu.load)(here, layout=plgpu.Layout.WGMMA)
                    split = []
                    for _part in range(self.layout.parts):
                        split.append(rest.astype(jnp.bfloat16))
                        rest = rest - split[-1].astype(jnp.float32)
                    for a, b in terms:
                        plgpu.wgmma(sums[-1 if a + b else 0], split[a], self.filters.at[stage, b])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(self.empty.at[stage])

                _loop(chunks, chunk, None)
                total = sums[0][...]
                return total + sums[1][...] if len(sums) > 1 else total

            accumulators = [plgpu.ACC((ROWS, s.columns), jnp.float32)] * (1 + self.layout.apart)
            total = pl.run_scoped(compute, *accumulators)
            if late:
                pl.when(i > 0)(lambda: finish(self.counters, self._group(PRODUCT, before)))
            slot = lax.rem(group, jnp.int32(self.layout.distances.output_slots))
            row = (slot * s.positions + position) * s.rows + wg * ROWS
            self.sums[pl.ds(row, ROWS), pl.ds(block * s.columns, s.columns)] = total
            if not late:
                finish(self.counters, self._group(PRODUCT, group))
            return group, following

        own = self._own_products()
        last, _ = _loop(own, task, (jnp.int32(0), self._product(jnp.int32(0))))
        if late:
            pl.when(own > 0)(lambda: finish(self.counters, self._group(PRODUCT, last)))

    def transform(self) -> None:
        """Runs FILTER, INPUT and OUTPUT tasks."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import finish, wait
        from cavs.kernels._tasks.transforms import transform_filter, transform_input, transform_output

        plgpu.set_max_registers(self.layout.registers[1], action="decrease")
        s, layout, counts = self.s, self.layout, self.counts
        products = counts.products * MULTIPLIERS  # each multiplying warpgroup counts
        workers = layout.blocks * layout.transformers
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
            slot = lax.rem(group, jnp.int32(slots))
            transform_output(s, layout.output_tiles, self.sums, self.y, self.counters, group, number, slot)
            finish(self.counters, self._group(OUTPUT, group))

        def other(i: jax.Array) -> tuple[jax.Array, ...]:
            n = jnp.clip(worker + i * workers, 0, max(self.numbers[1] - 1, 0))
            return tuple(self.others[n, column] for column in range(3))

        def task(i: jax.Array, carry: tuple) -> tuple:
            kind, group, number = carry
            following = other(i + 1)
            which = (kind == INPUT).astype(jnp.int32) + (kind == OUTPUT).astype(jnp.int32) * 2
            assert FILTER == 0
            lax.switch(which, [run_filter, run_input, run_output], group, number)
            return following

        own = lax.div(self.numbers[1] - worker + workers - 1, jnp.int32(workers))
        _loop(own, task, other(jnp.int32(0)))
