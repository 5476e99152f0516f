"""The roles of warpgroups: a thread block multiplies, copies and transforms at the same time.

MegaKernels runs a compute-bound and a memory-bound thread block side by side on a multiprocessor. On Hopper both are roles of
one thread block: two warpgroups multiply, one copies their operands to shared memory, and two to four transform. Each role
takes every n-th task of its kinds, so a multiprocessor always has both to run.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.arrays import Ref
from cavs.kernels._tasks.mapping import FILTER, INPUT, OUTPUT, PRODUCT, Distances, TaskCounts, task_mapping
from cavs.kernels.turns import begin_p, end_p

MULTIPLIERS = 2  # warpgroups of a thread block
ROWS = 64  # the rows of a product that a warpgroup computes
# A product of two sums of bfloat16 terms: the pairs of terms that matter, the small ones first.
TERMS = {1: [(0, 0)], 2: [(1, 0), (0, 1), (0, 0)], 3: [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]}

Needs = list[tuple[jax.Array, jax.Array]]  # counters and their targets


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
        rows: The tiles of a group.
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
    rows: int = MULTIPLIERS * ROWS

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers of a thread that copies, transforms, and multiplies."""
        warpgroups = MULTIPLIERS + self.transformers + 1
        all_ = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
        transform = {1: 96, 2: 80, 3: 64, 4: 56}[self.transformers]
        return 24, transform, (all_ - 24 - transform * self.transformers) // MULTIPLIERS // 8 * 8


@functools.lru_cache(maxsize=256)
def in_order(counts: TaskCounts, distances: Distances) -> tuple[np.ndarray, np.ndarray]:
    """Returns the products (group, number) and the other tasks (kind, group, number), each in the order of the mapping."""
    tasks = task_mapping(counts, distances)
    is_product = tasks[:, 0] == PRODUCT
    return np.ascontiguousarray(tasks[is_product, 1:]), np.ascontiguousarray(tasks[~is_product])


@dataclasses.dataclass(frozen=True)
class Roles(abc.ABC):
    """What warpgroups do in each role, and the buffers that they share. Subclasses say what their tasks read and write.

    Attributes:
        layout: The layout.
        counts: The numbers of tasks.
        numbers: The numbers of products, and of other tasks, that this launch runs.
        chunks: The steps of a product, which sums over `CHUNK` elements at a time.
        filters: The number of counters of FILTER tasks.
        counters: int32: a flag, the counters of FILTER tasks, and one for each other kind and group.
        products: int32 (group, number) of each product, in their order.
        others: int32 (kind, group, number) of each other task, in their order.
        left: Chunks of left operands in shared memory, float32.
        right: Chunks of the terms of right operands, bfloat16.
        full: Barriers: a chunk has arrived.
        empty: Barriers: a chunk was multiplied.
        arrays: The buffers in global memory, by name.
    """

    layout: ConvolutionLayout
    counts: TaskCounts
    numbers: tuple[int, int]
    chunks: int
    filters: int
    counters: Ref
    products: Ref
    others: Ref
    left: Ref
    right: Ref
    full: Ref
    empty: Ref
    arrays: Mapping[str, Ref]

    @abc.abstractmethod
    def needs(self, group: jax.Array, number: jax.Array) -> Needs:
        """The counters that a product waits for, with their targets."""

    @abc.abstractmethod
    def copy_chunk(self, group: jax.Array, number: jax.Array, k: jax.Array, stage: jax.Array) -> None:
        """Copies chunk `k` of the operands of a product to shared memory."""

    @abc.abstractmethod
    def load_left(self, stage: jax.Array) -> jax.Array:
        """Loads this warpgroup's rows of a chunk of left operands, float32 of shape (`ROWS`, `CHUNK`)."""

    def right_of(self, stage: jax.Array, part: int) -> Ref:
        """This warpgroup's chunk of a term of right operands, bfloat16 of shape (`CHUNK`, columns)."""
        return self.right.at[stage, part]

    @abc.abstractmethod
    def keep(self, group: jax.Array, number: jax.Array, total: jax.Array) -> None:
        """Stores this warpgroup's rows of a product."""

    @abc.abstractmethod
    def run_other(self, kind: int, group: jax.Array, number: jax.Array) -> None:
        """Runs a task that is no product."""

    def copy_terms(self, of: Ref, first: Callable[[int], jax.Array], block: jax.Array, stage: jax.Array) -> None:
        """Copies a chunk of all terms of right operands: of a block of columns, from row `first(term)` on."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        rows, columns = self.right.shape[2:]
        for term in range(self.layout.parts):
            chunk = of.at[pl.ds(first(term), rows), pl.ds(block * columns, columns)]
            plgpu.copy_gmem_to_smem(chunk, self.right.at[stage, term], self.full.at[stage])

    # --- Counters.
    def counter(self, kind: int, group: jax.Array) -> jax.Array:
        """The counter of the finished tasks of a kind in a group."""
        return 1 + self.filters + (kind - INPUT) * self.counts.groups + group

    def earlier(self, kind: int, group: jax.Array, each: int, slots: int) -> tuple[jax.Array, jax.Array]:
        """The counter of the group whose slot is reused, and its target: 0 if the slot is new."""
        before = group - slots
        return self.counter(kind, jnp.maximum(before, 0)), jnp.where(before >= 0, jnp.int32(each), jnp.int32(0))

    def all_products(self) -> int:
        """The target of a group's counter of products: each multiplying warpgroup counts."""
        return self.counts.products * MULTIPLIERS

    # --- Products, and who takes them.
    def own_products(self) -> jax.Array:
        """How many products this thread block takes."""
        block = lax.axis_index("block")
        return lax.div(self.numbers[0] - block + self.layout.blocks - 1, jnp.int32(self.layout.blocks))

    def product(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The group and the number of this thread block's i-th product."""
        n = jnp.clip(lax.axis_index("block") + i * self.layout.blocks, 0, max(self.numbers[0] - 1, 0))
        return self.products[n, 0], self.products[n, 1]

    # --- Roles.
    def role(self) -> jax.Array:
        """0 to multiply, 1 to transform, 2 to copy."""
        wg = lax.axis_index("wg")
        return (wg >= MULTIPLIERS).astype(jnp.int32) + (wg >= MULTIPLIERS + self.layout.transformers).astype(jnp.int32)

    def copy(self) -> None:
        """Copies the operands of all products to shared memory, as soon as they exist and there is room."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import wait

        plgpu.set_max_registers(self.layout.registers[0], action="decrease")
        stages = self.layout.stages

        def task(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            following = self.product(i + 1)
            wait(self.counters, self.needs(*carry))

            def chunk(k: jax.Array, _: None) -> None:
                q = i * self.chunks + k
                stage = lax.rem(q, jnp.int32(stages))

                @pl.when(q >= stages)
                def _() -> None:
                    plgpu.barrier_wait(self.empty.at[stage])

                self.copy_chunk(*carry, k, stage)

            loop(self.chunks, chunk, None)
            return following

        loop(self.own_products(), task, self.product(jnp.int32(0)))

    def multiply(self) -> None:
        """Runs PRODUCT tasks."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from cavs.kernels._tasks.counters import finish

        layout = self.layout
        plgpu.set_max_registers(layout.registers[2], action="increase")

        # A task is counted when the next one is computed: its results have arrived by then, and no time is lost in waiting for
        # them. If a step of the mapping has a task for each thread block, the next task is at most one step later, and needs
        # nothing that waits for this one.
        late = layout.distances.share * self.counts.products >= layout.blocks

        def task(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            before, group, number = carry
            following = self.product(i + 1)
            accumulators = [plgpu.ACC((ROWS, layout.columns), jnp.float32)] * (1 + layout.apart)
            total = pl.run_scoped(functools.partial(self._sum_chunks, i), *accumulators)
            if late:
                pl.when(i > 0)(lambda: finish(self.counters, self.counter(PRODUCT, before)))
            self.keep(group, number, total)
            if not late:
                finish(self.counters, self.counter(PRODUCT, group))
            return group, *following

        own = self.own_products()
        last, *_ = loop(own, task, (jnp.int32(0), *self.product(jnp.int32(0))))
        if late:
            pl.when(own > 0)(lambda: finish(self.counters, self.counter(PRODUCT, last)))

    def _sum_chunks(self, i: jax.Array, *sums: Any) -> jax.Array:
        """Multiplies all chunks of this thread block's i-th product."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def chunk(k: jax.Array, _: None) -> None:
            stage = lax.rem(i * self.chunks + k, jnp.int32(self.layout.stages))
            plgpu.barrier_wait(self.full.at[stage])
            rest, split = self.load_left(stage), []
            for _part in range(self.layout.parts):
                split.append(rest.astype(jnp.bfloat16))
                rest = rest - split[-1].astype(jnp.float32)
            for a, b in TERMS[self.layout.parts]:
                plgpu.wgmma(sums[-1 if a + b else 0], split[a], self.right_of(stage, b))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.empty.at[stage])

        loop(self.chunks, chunk, None)
        total = sums[0][...]
        return total + sums[1][...] if len(sums) > 1 else total

    def transform(self) -> None:
        """Runs FILTER, INPUT and OUTPUT tasks."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        layout = self.layout
        plgpu.set_max_registers(layout.registers[1], action="decrease")
        workers = layout.blocks * layout.transformers
        # Thread blocks take neighbouring tasks, and only then their second warpgroups: each multiprocessor has some.
        worker = lax.axis_index("block") + (lax.axis_index("wg") - MULTIPLIERS) * layout.blocks

        def other(i: jax.Array) -> tuple[jax.Array, ...]:
            n = jnp.clip(worker + i * workers, 0, max(self.numbers[1] - 1, 0))
            return tuple(self.others[n, column] for column in range(3))

        def task(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            kind, group, number = carry
            following = other(i + 1)
            which = (kind == INPUT).astype(jnp.int32) + (kind == OUTPUT).astype(jnp.int32) * 2
            run = [functools.partial(self.run_other, of) for of in (FILTER, INPUT, OUTPUT)]
            lax.switch(which, run, group, number)
            return following

        own = lax.div(self.numbers[1] - worker + workers - 1, jnp.int32(workers))
        loop(own, task, other(jnp.int32(0)))


def new_counters(counts: TaskCounts, filters: int) -> Any:
    """Returns a reference to counters for a launch, all zero (see `Roles.counters`)."""
    return jax.new_ref(begin_p.bind(jnp.zeros(1 + filters + 3 * counts.groups, jnp.int32)))


def end(counters: Any) -> jax.Array:
    """Ends a launch, and returns its flag: int32[1], not 0 if a task waited in vain."""
    return end_p.bind(jax.freeze(counters)[:1])


def launch(
    name: str,
    roles: Callable[..., Roles],
    layout: ConvolutionLayout,
    chunk: tuple[int, int, int],
    tasks: Sequence[np.ndarray],
    counters: Any,
    inputs: Mapping[str, jax.Array],
    fresh: Mapping[str, jax.ShapeDtypeStruct],
    held: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Runs products and other tasks in one launch.

    Args:
        name: The name of the kernel.
        roles: `Roles` but for the arguments that this function gives by name.
        layout: The layout.
        chunk: The shape of a chunk of left operands, and the rows of a chunk of right operands.
        tasks: The products and the other tasks (see `in_order`).
        counters: A reference to the counters.
        inputs: What the tasks read, by name.
        fresh: What they write, and the launch returns.
        held: References to what they write, and other launches read.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    given = [jnp.asarray(t if len(t) else np.zeros((1, t.shape[1]), np.int32)) for t in tasks]
    tiled, swizzle = cast(Any, plgpu.TilingTransform)((8, 32)), cast(Any, plgpu.SwizzleTransform)
    right_shape = (layout.stages, layout.parts, chunk[2], layout.columns)
    scratch = {
        "left": plgpu.SMEM((layout.stages, *chunk[:2]), jnp.float32, transforms=(tiled, swizzle(128))),
        "right": plgpu.SMEM(right_shape, jnp.bfloat16, transforms=(tiled, swizzle(64))),
        "full": plgpu.Barrier(num_arrivals=1 + layout.parts, num_barriers=layout.stages),
        "empty": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=layout.stages),
    }

    def body(products: Ref, others: Ref, counters: Ref, *buffers: Ref, **shared: Ref) -> None:
        named = dict(zip([*inputs, *held, *fresh], buffers, strict=True))
        numbers = len(tasks[0]), len(tasks[1])
        run = roles(numbers=numbers, counters=counters, products=products, others=others, arrays=named, **shared)
        lax.switch(run.role(), [run.multiply, run.transform, run.copy])

    body.__name__ = name
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
    return dict(zip(fresh, kernel(*given, counters, *inputs.values(), *held.values()), strict=True))


def loop(count: Any, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """A loop whose counter is int32, also if 64-bit numbers are enabled."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
