"""Names for the types that the device operations handle.

A device operation has two parts. Its outer function runs while Pallas traces the kernel and handles JAX arrays and `Ref`s
(`_program.arrays`). The function that it passes to `inline_mgpu` runs while Mosaic GPU lowers the kernel and handles the types
below: it emits MLIR operations. The aliases of `Value` and `ir.Value` say of which MLIR type a result is, and what it means.
"""

from typing import Any, TypeAlias

from jax._src.lib.mlir import ir
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._mosaic.value import Value

# MLIR values.
I32: TypeAlias = Value  # i32: a row, a column, a thread, a count
F32: TypeAlias = Value  # f32
Predicate: TypeAlias = Value  # i1
Element: TypeAlias = Value  # f32 or i32: an element of a tensor
Register: TypeAlias = Value  # f32 or i32: a 32-bit register; as i32 it holds a tf32 element, or two elements of 16 bits
Subscript: TypeAlias = ir.Value  # index: MLIR's type for positions in a buffer
MemRef: TypeAlias = ir.Value  # memref: a buffer in global or shared memory
SharedAddress: TypeAlias = Value  # i32: an address in shared memory
GlobalAddress: TypeAlias = Value  # i64: an address in global memory
Address: TypeAlias = Value  # a `SharedAddress` or a `GlobalAddress`

# What `inline_mgpu` passes to the inner function: a context, and for each array its registers.
Context: TypeAlias = mgpu.LaunchContext
Fragments: TypeAlias = mgpu.FragmentedArray  # an array in registers, distributed over the threads of a warpgroup
Scalar: TypeAlias = mgpu.FragmentedArray  # a scalar, which every thread holds; `mlir.scalar` returns its value

Layout: TypeAlias = Any  # a `plgpu.Layout` with its arguments: how threads hold an array; JAX exports no class for it
ArgumentType: TypeAlias = plgpu.RefType | Layout | list[plgpu.RefType] | list[Layout]  # for `inline_mgpu`
