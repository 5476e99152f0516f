"""Copies weights into shared memory in the order in which `mma.sync` reads them; `_layout.pack` packs the same words."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, scf

from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.pack import PackedWeight
from cavs.kernels._mosaic.mlir import REF, SCALAR, address, inline_mgpu, ptx, thread_index
from cavs.kernels._mosaic.types import F32, I32, Context, MemRef, Register, Scalar, SharedAddress
from cavs.kernels._mosaic.value import as_index, binary, bitcast, int32, load_element, scalar, select
from cavs.kernels._program.arrays import Ref
from cavs.kernels.precision import PRECISIONS

Fragment: TypeAlias = list[list[F32]]  # what a lane holds of a fragment: for each register one element, or two that share it
_Values = TypeVar("_Values")


def copy_weights(
    parts: Sequence[PackedWeight], refs: Sequence[Ref], cta: jax.Array, target: Ref, unit: int, hb: int, config: LaunchConfig
) -> None:
    """Copies the thread block's columns of every weight into shared memory.

    Args:
        parts: How each weight is packed.
        refs: The weights in global memory, float32 matrices.
        cta: An int32 scalar: the number of this thread block in its group.
        target: The packed weights in shared memory, a vector of 32-bit words.
        unit: The width of a unit vector in memory.
        hb: The units that a thread block owns.
        config: The layout on the chip.
    """
    threads = 128 * config.warpgroups

    @inline_mgpu(arg_types=([REF] * len(refs), SCALAR, REF))
    def emit(ctx: Context, refs: list[MemRef], cta: Scalar, target: MemRef) -> None:
        place = address(target, 3)
        # If thread blocks divide K, each of them has a part of K for the columns of all of them.
        split = config.split
        first = scalar(cta) // split * (hb * split)
        peer = scalar(cta) % split
        for part, ref in zip(parts, refs, strict=True):
            source = _Source(part, ref, first, peer * part.k, unit, hb * split, config.precision)
            if part.tight:
                _copy_triples(source, place, threads)
                continue
            whole = part.width // 16 * 16
            _copy_tiles(source, place, part.offset, 0, whole // 16, 2, threads)
            if part.width > whole:
                offset = part.offset + whole * part.words(config.precision) // part.width
                _copy_tiles(source, place, offset, whole, 1, 1, threads)

    emit(list(refs), cta, target)


class _Source:
    """Reads the thread block's part of one weight.

    Args:
        part: How the weight is packed.
        ref: The weight in global memory, a float32 matrix.
        first: The first unit that the thread block copies.
        first_k: The first element of K that it copies.
        unit: The width of a unit vector in memory.
        hb: The number of units that it copies.
        precision: See `LaunchConfig`.
    """

    def __init__(self, part: PackedWeight, ref: MemRef, first: I32, first_k: I32, unit: int, hb: int, precision: str):
        self.part, self.ref, self.first, self.unit, self.hb, self.precision = part, ref, first, unit, hb, precision
        self.first_k = first_k
        self.chunk = PRECISIONS[precision].chunk
        self.steps = 2 * (part.k // self.chunk)  # of K

    def read(self, lane: I32, tile: I32, step: I32, column: int = 0, halves: int = 2) -> Fragment:
        """Returns the elements that a lane holds of a tile of 8 * `halves` columns for one step of K, before rounding.

        Tiles are counted from `column` on.
        """
        chunk = self.chunk
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
        if how.dtype is not None:
            return ptx(f"cvt.rn.{how.kind}x2.f32 $0, $1, $2;", i32, got[1], got[0])
        if how.rounded:
            near = ptx("cvt.rna.tf32.f32 $0, $1;", i32, got[0])
            lost: Any = arith.cmpf(arith.CmpFPredicate.UNO, got[0], got[0])  # a NaN, whose bits may carry into the sign
            return select(lost, 0x7FC00000, near)
        return bitcast(i32, got[0])


def _copy_tiles(source: _Source, place: SharedAddress, offset: int, column: int, tiles: int, halves: int, threads: int) -> None:
    """Copies `tiles` tiles of 8 * `halves` columns from `column` on to word `offset`.

    At a time, each thread copies what one lane of a product reads for one step of K.
    """
    steps = source.steps

    def read(u: I32) -> Fragment:
        lane, step = u & 31, u >> 5
        return source.read(lane, step // steps, step % steps, column, halves)

    def write(u: I32, values: Fragment) -> None:
        size = 2 * halves
        at = place + u * (4 * size)
        args = ", ".join(f"${i + 1}" for i in range(size))
        ptx(f"st.shared.v{size}.b32 [$0+{offset * 4}], {{{args}}};", [], at, *[source.rounded(v) for v in values])

    _spread(tiles * steps * 32, threads, 8, read, write)


def _copy_triples(source: _Source, place: SharedAddress, threads: int) -> None:
    """Copies a weight that is packed tightly, three fragments in the words of two.

    At a time, each thread copies what one lane of a product reads of a triple.
    """
    part, tiles = source.part, source.part.width // 16
    count, steps = part.fragments(), source.steps // part.splits
    triples = -(-count // 3)

    def read(u: I32) -> list[Fragment]:
        lane, rest = u & 31, u >> 5
        warp, triple = rest // triples, rest % triples
        out = []
        for n in range(3):
            i = binary("minui", triple * 3 + n, count - 1)
            step, m = i // tiles, i % tiles
            out.append(source.read(lane, m, warp * steps + step))
        return out

    def write(u: I32, values: list[Fragment]) -> None:
        one, two, three = ([source.rounded(v) for v in fragment] for fragment in values)
        above = [((z >> 19) - (y >> 13)) & 0x1FFF for y, z in zip(two, three, strict=True)]
        below = [z >> 6 & 0x1F80 for z in three]
        lane, triple = u & 31, u >> 5
        at = place + (triple * 1024 + lane * 16)
        for n, (high, low) in enumerate(((one, above), (two, below))):
            words = [x | y for x, y in zip(high, low, strict=True)]
            ptx(f"st.shared.v4.b32 [$0+{part.offset * 4 + n * 512}], {{$1, $2, $3, $4}};", [], at, *words)

    _spread(part.splits * triples * 32, threads, 2, read, write)


def _spread(total: int, threads: int, most: int, read: Callable[[I32], _Values], write: Callable[[I32, _Values], None]) -> None:
    """Distributes `total` pieces of work over the threads of a thread block.

    Each thread runs up to `most` pieces at once, so that their reads are in flight together: `read(n)` returns what
    `write(n, ...)` is given.
    """
    if not total:
        return
    unroll = next(n for n in (8, 4, 2, 1) if n <= most and (total % (threads * n) == 0 or n == 1))
    loop = scf.ForOp(as_index(thread_index()), as_index(total), as_index(threads * unroll))
    with ir.InsertionPoint(loop.body):
        start = int32(loop.induction_variable)
        units = [start + threads * n for n in range(unroll)]
        for u, values in zip(units, [read(u) for u in units], strict=True):
            write(u, values)
        scf.yield_([])
