"""Packs weights in the order in which `mma.sync` reads them, and copies them into shared memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.pack import PackedWeight
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, for_each, inline_mgpu, ptx, store_words, thread_index
from cavs.kernels._mosaic.types import F32, I32, Context, GlobalAddress, MemRef, Register, Scalar
from cavs.kernels._mosaic.value import as_index, binary, bitcast, int32, int64, load_element, scalar, select
from cavs.kernels._program.arrays import Ref
from cavs.kernels.precision import PRECISIONS

Fragment: TypeAlias = list[list[F32]]  # what a lane holds of a fragment: for each register one element, or two that share it
_Values = TypeVar("_Values")
_BLOCKS = 16 * 132  # of 128 threads, for a kernel that packs


def pack_weights(
    parts: Sequence[PackedWeight],
    weights: Sequence[jax.Array],
    inverses: Sequence[jax.Array | None],
    unit: int,
    config: LaunchConfig,
) -> jax.Array:
    """Packs weights: float32 of shape (thread blocks, words). XLA would transpose each in several passes.

    `inverses`: for each part `None`, or a vector of one power of two, by which the weight is divided.
    """
    blocks = unit // config.hb
    words = sum(part.words(config.precision) for part in parts)
    shares = 1 << (_BLOCKS // blocks).bit_length() - 1  # a power of two, so that threads have equally much to do

    def body(*refs: Ref) -> None:
        @inline_mgpu(arg_types=([REF] * len(refs), SCALAR, SCALAR))
        def emit(ctx: Context, refs: list[MemRef], cta: Scalar, share: Scalar) -> None:
            *given, out = refs
            block, thread = scalar(cta), scalar(share) * 128 + thread_index()
            place = address(out, 1) + int64(block) * (4 * words)
            # If thread blocks divide K, each of them has a part of K for the columns of all of them.
            split, columns = config.split, config.hb * config.split
            first, peer = block // split * columns, block % split
            for part, (ref, scale) in zip(parts, _paired(given, inverses), strict=True):
                at = (first, peer * part.k, unit, columns)
                _Packing(part, ref, scale, *at, config.precision, place, thread, 128 * shares).run()

        emit(list(refs), lax.axis_index("block"), lax.axis_index("share"))

    body.__name__ = "cavs_pack"
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, words), jnp.float32),
        grid=(blocks, shares),
        grid_names=("block", "share"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*weights, *(x[None] for x in inverses if x is not None))


def copy_weights(packed: Ref, cta: jax.Array, target: Ref, config: LaunchConfig) -> None:
    """Copies the thread block's packed weights into shared memory.

    Args:
        packed: The result of `pack_weights`, in global memory.
        cta: An int32 scalar: the number of this thread block in its group.
        target: A vector of 32-bit words in shared memory.
        config: The layout on the chip.
    """
    words = packed.shape[1]

    @inline_mgpu(arg_types=(REF, SCALAR, REF))
    def emit(ctx: Context, packed: MemRef, cta: Scalar, target: MemRef) -> None:
        source, place = address(packed, 1) + int64(scalar(cta)) * (4 * words), address(target, 3)

        def copy(n: I32) -> None:
            ptx("cp.async.cg.shared.global [$0], [$1], 16;", [], place + n * 16, source + int64(n * 16))

        for_each(thread_index(), words // 4, 128 * config.warpgroups, copy)
        ptx("cp.async.wait_all;", [])

    emit(packed, cta, target)


def _paired(given: Sequence[MemRef], inverses: Sequence[object]) -> list[tuple[MemRef, F32 | None]]:
    """Returns each weight with its scale, given the weights, and then the inverses of the scales that are not `None`."""
    weights, rest, zero = given[: len(inverses)], iter(given[len(inverses) :]), as_index(0)
    powers = [None if x is None else load_element(next(rest), zero, zero) for x in inverses]
    of_bits = int32(254 << 23)  # minus the bits of a power of two, whose mantissa is zero: those of 1 / x
    scales = [None if x is None else bitcast(x.type, of_bits - bitcast(of_bits.type, x)) for x in powers]
    return list(zip(weights, scales, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class _Packing:
    """Packs a thread block's part of one weight."""

    part: PackedWeight
    ref: MemRef  # the weight in global memory, a float32 matrix
    scale: F32 | None  # what elements are multiplied by, if anything
    first: I32  # the first unit
    first_k: I32  # the first element of K
    unit: int  # the width of a unit vector in memory
    hb: int  # the number of units
    precision: str  # see `LaunchConfig`
    place: GlobalAddress  # of the thread block's packed words
    thread: I32  # the number of this thread among those that divide the work
    threads: int

    @property
    def steps(self) -> int:
        """The steps of K."""
        return 2 * (self.part.k // PRECISIONS[self.precision].chunk)

    def run(self) -> None:
        """Packs the columns."""
        part = self.part
        if part.tight:
            self.triples()
            return
        whole = part.width // 16 * 16
        self.tiles(part.offset, 0, whole // 16, 2)
        if part.width > whole:
            self.tiles(part.offset + whole * part.words(self.precision) // part.width, whole, 1, 1)

    def read(self, lane: I32, tile: I32, step: I32, column: int = 0, halves: int = 2) -> Fragment:
        """Returns the elements that a lane holds of a tile of 8 * `halves` columns for one step of K, before rounding.

        Tiles are counted from `column` on.
        """
        chunk = PRECISIONS[self.precision].chunk  # the elements of K in two steps
        group, quad = lane >> 2, lane & 3
        k = self.first_k + (step >> 1) * chunk + quad * (chunk // 4) + (step & 1) * (chunk // 8)
        out = []
        for pair in range(2):
            for half in range(halves):
                c = tile * (8 * halves) + group + (column + 8 * half)
                block, inside = c // self.hb, c % self.hb
                c = as_index(block * self.unit + self.first + inside)
                got = []
                for e in range(chunk // 16):
                    at = as_index(k + (pair * (chunk // 16) + e))
                    got.append(load_element(self.ref, *((at, c) if self.part.axis == 0 else (c, at))))
                out.append(got)
        return out

    def rounded(self, got: list[F32]) -> Register:
        """Rounds the elements of a register to the precision of the products."""
        i32, how = ir.IntegerType.get_signless(32), PRECISIONS[self.precision]
        got = got if self.scale is None else [x * self.scale for x in got]
        if how.dtype is not None:
            return ptx(f"cvt.rn.{how.kind}x2.f32 $0, $1, $2;", i32, got[1], got[0])
        if how.rounded:
            near = ptx("cvt.rna.tf32.f32 $0, $1;", i32, got[0])
            lost: Any = arith.cmpf(arith.CmpFPredicate.UNO, got[0], got[0])  # a NaN, whose bits may carry into the sign
            return select(lost, 0x7FC00000, near)
        return bitcast(i32, got[0])

    def tiles(self, offset: int, column: int, tiles: int, halves: int) -> None:
        """Copies `tiles` tiles of 8 * `halves` columns from `column` on to word `offset`.

        At a time, each thread copies what one lane of a product reads for one step of K.
        """

        def read(u: I32) -> Fragment:
            lane, step = u & 31, u >> 5
            return self.read(lane, step // self.steps, step % self.steps, column, halves)

        def write(u: I32, values: Fragment) -> None:
            store_words(self.place + int64(u * (8 * halves)), [self.rounded(v) for v in values], offset * 4)

        self.spread(tiles * self.steps * 32, 8, read, write)

    def triples(self) -> None:
        """Copies a weight that is packed tightly, three fragments in the words of two.

        At a time, each thread copies what one lane of a product reads of a triple.
        """
        part, tiles = self.part, self.part.width // 16
        count, steps = part.fragments(), self.steps // part.splits
        triples = -(-count // 3)

        def read(u: I32) -> list[Fragment]:
            lane, rest = u & 31, u >> 5
            warp, triple = rest // triples, rest % triples
            out = []
            for n in range(3):
                i = binary("minui", triple * 3 + n, count - 1)
                step, m = i // tiles, i % tiles
                out.append(self.read(lane, m, warp * steps + step))
            return out

        def write(u: I32, values: list[Fragment]) -> None:
            one, two, three = ([self.rounded(v) for v in fragment] for fragment in values)
            above = [((z >> 19) - (y >> 13)) & 0x1FFF for y, z in zip(two, three, strict=True)]
            below = [z >> 6 & 0x1F80 for z in three]
            lane, triple = u & 31, u >> 5
            for n, (high, low) in enumerate(((one, above), (two, below))):
                words = [x | y for x, y in zip(high, low, strict=True)]
                store_words(self.place + int64(triple * 1024 + lane * 16), words, part.offset * 4 + n * 512)

        self.spread(part.splits * triples * 32, 2, read, write)

    def spread(self, total: int, most: int, read: Callable[[I32], _Values], write: Callable[[I32, _Values], None]) -> None:
        """Distributes `total` pieces of work over the threads.

        Each thread runs up to `most` pieces at once, so that their reads are in flight together: `read(n)` returns what
        `write(n, ...)` is given.
        """
        if not total:
            return
        count = self.threads
        unroll = next(n for n in (8, 4, 2, 1) if n <= most and (total % (count * n) == 0 or n == 1))

        def item(start: I32) -> None:
            units = [start + count * n for n in range(unroll)]
            for u, values in zip(units, [read(u) for u in units], strict=True):
                write(u, values)

        for_each(self.thread, total, count * unroll, item)
