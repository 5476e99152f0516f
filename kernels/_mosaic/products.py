"""Products by `mma.sync`, of weights in shared memory and rows that are read straight from global memory."""

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax._src.lib.mlir.dialects import memref
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import ProductSpec, Tile
from cavs.kernels._mosaic.exchange import Exchange
from cavs.kernels._mosaic.held import HeldReader, HeldWeights
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, false, if_else, inline_mgpu
from cavs.kernels._mosaic.operands import WeightReader, multiply, right_operand, scaled
from cavs.kernels._mosaic.reads import POLLED, ChunkRead, Reader
from cavs.kernels._mosaic.types import F32, I32, Context, Fragments, MemRef, Predicate, Register, Scalar
from cavs.kernels._mosaic.value import as_index, compare, constant, int64, load_element, scalar
from cavs.kernels._program.arrays import Ref
from cavs.kernels.precision import PRECISIONS

# The sums of a product that a warp has in flight: an `mma.sync` waits for the one before if both add to the same sum.
CHAINS = 4


class Accumulator(NamedTuple):
    """Which 16 columns of a weight and which 8 rows of the tile a thread's four accumulators belong to."""

    spec: int
    weight: int
    tile: int
    operand: int
    group: int


Sums: TypeAlias = dict[Accumulator, list[F32]]
Chains: TypeAlias = dict[Accumulator, list[list[F32]]]  # sums, each of them in parts for some of the steps of K


def product(
    tile: Tile,
    specs: Sequence[ProductSpec],
    refs: Sequence[Ref],
    numbers: jax.Array,
    weights: Ref | HeldWeights,
    part: Ref,
    cta: jax.Array,
    counters: Ref,
    ring: Ref | None = None,
) -> None:
    """Computes all products of a phase for the rows of a tile, and writes partial sums to shared memory.

    Args:
        tile: The tile, of one warpgroup.
        specs: The products.
        refs: For each source of each spec, a tensor in global memory, of shape (rows, width).
        numbers: The rows that each thread reads; see `product_rows`.
        weights: The thread block's packed weights as one vector in shared memory; if they stream, those of all thread blocks in
            global memory; or those in registers.
        part: The partial sums in shared memory, float32 of shape (slots of all warpgroups, rows, columns).
        cta: An int32 scalar: the number of this thread block in its group.
        counters: int32 in global memory; the first is set if a thread gives up polling.
        ring: The barriers of `_mosaic.exchange`, if thread blocks divide K.
    """
    layout, kind, given, held = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=1), REF, weights, None
    if isinstance(weights, HeldWeights):
        given, held = weights
        kind = plgpu.Layout.WG_STRIDED(given.shape, vec_size=1)

    @inline_mgpu(arg_types=([REF] * len(refs), layout, kind, REF, SCALAR, SCALAR, SCALAR, REF, [REF] * (ring is not None)))
    def emit(ctx: Context, *arguments: Any) -> None:
        _Product(specs, held, *arguments).emit()

    emit(list(refs), numbers, given, part, tile.row, tile.last, cta, counters, [] if ring is None else [ring])


class _Product(Reader):
    """Emits the products of a phase; see `product` for the arguments."""

    def __init__(
        self,
        specs: Sequence[ProductSpec],
        held: Sequence[ProductSpec] | None,
        refs: Sequence[MemRef],
        numbers: Fragments,
        weights: Any,
        part: MemRef,
        row: Scalar,
        last: Scalar,
        cta: Scalar,
        counters: MemRef,
        ring: Sequence[MemRef],
    ):
        peer = scalar(cta) % specs[0].split
        self.exchange = Exchange(ring[0], part, peer, specs[0]) if ring else None
        super().__init__(specs, refs, numbers, row, last, peer, counters)
        self.spec, self.part = specs[0], part
        if held:
            self.weights = HeldReader(weights, held)
        elif self.spec.resident:
            self.weights = address(weights, 3)
        else:
            offset = int64(scalar(cta)) * (self.spec.words * 4)
            self.weights = address(weights, 1) + offset

    def emit(self) -> None:
        """Emits the products."""
        count = self.last - self.row + 1
        groups = self.spec.rows // 8
        mu.warpgroup_barrier()  # until the partial sums of the previous tile have been read
        if self.exchange:
            self.exchange.release()
        self._choose([n for n in (1, 2, 4, 8) if n < groups] + [groups], count)
        mu.warpgroup_barrier()
        if self.exchange:
            self.exchange.swap(count)

    def _choose(self, sizes: list[int], count: I32) -> None:
        """Branches to the code for the smallest of these numbers of 8-row groups that holds `count` rows."""
        if len(sizes) == 1:
            self._rows(sizes[0])
            return
        if_else(count <= 8 * sizes[0], [], lambda: self._rows(sizes[0]), lambda: self._choose(sizes[1:], count))

    def _rows(self, groups: int) -> None:
        """All products, of `groups` groups of 8 rows."""
        self.begin(groups)
        for splits in dict.fromkeys(spec.splits for spec in self.specs):
            together = [n for n, spec in enumerate(self.specs) if spec.splits == splits]
            active = self.warp < splits
            with contextlib.nullcontext() if splits == 4 else mu.when(active):
                self._stream(together, groups)

    def _stream(self, which: list[int], groups: int) -> None:
        """The products of some specs, chunk after chunk; the rows of several chunks are in flight."""
        specs, spec = {n: self.specs[n] for n in which}, self.specs[which[0]]
        weights = self.weights
        if not isinstance(weights, HeldReader):
            weights = WeightReader(weights, self.warp, self.lane)  # what it reads is used in this branch only
        pointers = {n: self.pointers(n, groups) for n in which}
        steps = [ChunkRead(pointers[n], c, n) for n in which for c in range(specs[n].chunks // spec.splits)]
        # Enough reads in flight to hide the latency of L2.
        ends = np.cumsum([step.reads for step in steps])
        depth = max(1, int((ends <= (min(POLLED, spec.in_flight) if self.awaits else spec.in_flight)).sum()))
        keys = [
            Accumulator(s, w, m, o, n)
            for s in which
            for w, weight in enumerate(specs[s].weights)
            for m in range(weight.tiles)
            for o in weight.operands
            for n in range(groups)
        ]
        chains = {s: max(1, CHAINS // sum(key.spec == s for key in keys)) for s in which}

        def attempt() -> tuple[list[F32], Predicate]:
            """The sums, and whether they read an element that was not written yet."""
            queue, sent = self.first(steps[:depth]), depth
            totals: Chains = {key: [[constant(self.f32, 0)] * 4] * chains[key.spec] for key in keys}
            late = false()
            for i, step in enumerate(steps):
                done = ends[i] - step.reads
                while sent < len(steps) and (not queue or ends[sent] - done <= spec.in_flight):
                    queue.append(self.read(steps[sent]))
                    sent += 1
                values = queue.pop(0)
                if i >= depth:
                    late = late | self.any_unwritten(step.pointers, values)
                self._multiply_chunk(step, weights, values, totals, groups)
            return [functools.reduce(operator.add, parts) for key in keys for parts in zip(*totals[key], strict=True)], late

        if self.awaits and depth < len(steps):
            sums = self.poll([self.f32] * 4 * len(keys), attempt)
        else:
            sums, _ = attempt()
        totals = {key: sums[4 * i : 4 * i + 4] for i, key in enumerate(keys)}
        if spec.slots == spec.splits:
            self._store(totals, spec, False)
            return
        with mu.when(compare("uge", self.warp, spec.slots)):
            self._store(totals, spec, False)
        mu.warpgroup_barrier()
        with mu.when(compare("ult", self.warp, spec.slots)):
            self._store(totals, spec, True)

    def _multiply_chunk(
        self, step: ChunkRead, weights: WeightReader | HeldReader, values: list[list[Register]], totals: Chains, groups: int
    ) -> None:
        """Adds the products of one chunk to `totals`; `values` are the registers of each pointer."""
        spec = self.specs[step.spec]
        for half in range(2):
            rights = {
                (o, n): right_operand([values[s * groups + n] for s in operand], half, spec.precision)
                for o, operand in enumerate(spec.operands)
                for n in range(groups)
            }
            for w, weight in enumerate(spec.weights):
                for m in range(weight.tiles):
                    left = weights.read(spec, weight, m, step.chunk, half)
                    for o in weight.operands:
                        for n in range(groups):
                            parts = totals[Accumulator(step.spec, w, m, o, n)]
                            c = (2 * step.chunk + half) % len(parts)
                            parts[c] = multiply(parts[c], left, rights[o, n], spec.precision)

    def _store(self, totals: Sums, spec: ProductSpec, add: bool) -> None:
        """Writes the warp's sums to its slot of `part`, or adds them to it."""
        slot = self.warp if spec.slots == spec.splits else self.warp & (spec.slots - 1)
        place = (self.thread >> 7) * spec.all_slots + slot
        for (s, w, m, o, n), four in totals.items():
            weight = self.specs[s].weights[w]
            column = weight.columns[weight.operands.index(o)] + 16 * m
            present = four[:2] if weight.half and m == weight.tiles - 1 else four
            for q, x in enumerate(scaled(present, 1 / PRECISIONS[spec.precision].factor)):
                r, col = self.quad * 2 + (8 * n + q % 2), self.group + (column + 8 * (q // 2))
                at = [as_index(place), as_index(r), as_index(col)]
                memref.store(load_element(self.part, *at) + x if add else x, self.part, at)
