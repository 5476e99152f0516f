"""Weights in registers (VPPS, section III-A): each warp keeps its part of K for the whole launch.

Products then read no weights from shared memory, whose bandwidth limits tiles of few rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import ProductSpec, WeightSpec
from cavs.kernels._mosaic.mlir import REF, address, inline_mgpu, thread_index
from cavs.kernels._mosaic.operands import WeightReader
from cavs.kernels._mosaic.types import I32, Context, Fragments, MemRef, Register, SharedAddress
from cavs.kernels._mosaic.value import element, minimum
from cavs.kernels._program.arrays import Ref


class HeldWeights(NamedTuple):
    """Weights in registers.

    Attributes:
        registers: int32, four of each thread for each of its `_fragments`: what `WeightReader.read` returns.
        specs: The products of all phases.
    """

    registers: jax.Array
    specs: Sequence[ProductSpec]


def hold_weights(specs: Sequence[ProductSpec], weights: Ref) -> HeldWeights:
    """Reads each warp's part of the weights of all products: `weights` is the thread block's vector in shared memory."""
    shape = (512 * len(_fragments(specs)),)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int32, plgpu.Layout.WG_STRIDED(shape, vec_size=1))

    @inline_mgpu(arg_types=(REF,), return_type=kind)
    def emit(ctx: Context, weights: MemRef) -> Fragments:
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        found = [vector.broadcast(one, x) for x in read_all(specs, address(weights, 3), thread_index())]
        strided = mgpu.WGStridedFragLayout(shape, 1)
        return mgpu.FragmentedArray(_registers=np.array(found, object), _layout=strided, _is_signed=True)

    return HeldWeights(emit(weights), specs)


def read_all(specs: Sequence[ProductSpec], start: SharedAddress, thread: I32) -> list[Register]:
    """Returns what a thread holds of the weights that begin at an address."""
    registers = []
    for (_, *place), (spec, weight) in _fragments(specs).items():
        warp = minimum(thread >> 5 & 3, spec.splits - 1)  # the others multiply nothing
        registers += WeightReader(start, warp, thread & 31).read(spec, weight, *place)
    return registers


class HeldReader:
    """Returns what `WeightReader` would read, from registers; see `HeldWeights`."""

    def __init__(self, registers: Fragments, specs: Sequence[ProductSpec]):
        self._registers, self._numbers = registers.registers.flat, {place: n for n, place in enumerate(_fragments(specs))}

    def read(self, spec: ProductSpec, weight: WeightSpec, tile: int, chunk: int, step: int) -> list[Register]:
        """See `WeightReader.read`."""
        first = 4 * self._numbers[weight.offset, tile, chunk, step]
        return [element(x) for x in self._registers[first : first + 4]]


def _fragments(specs: Sequence[ProductSpec]) -> dict[tuple[int, int, int, int], tuple[ProductSpec, WeightSpec]]:
    """The fragments that a warp multiplies: where the weight begins and where they are in it, and a product that reads them."""
    return {
        (weight.offset, tile, chunk, step): (spec, weight)
        for spec in specs
        for weight in spec.weights
        for chunk in range(spec.chunks // spec.splits)
        for step in range(2)
        for tile in range(weight.tiles)
    }
