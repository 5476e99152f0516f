"""MLIR and PTX in short, for the device operations."""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def tile_layout(tile: Tile) -> Any:
    """One element a register, row-major over the threads."""
    return plgpu.Layout.WG_STRIDED(tile.shape, vec_size=1)


def int32(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def true() -> Any:
    return arith.constant(ir.IntegerType.get_signless(1), 1)


def false() -> Any:
    return arith.constant(ir.IntegerType.get_signless(1), 0)


def as_index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def constant(dtype: Any, value: float) -> Any:
    kind = mgpu.utils.dtype_to_ir_type(dtype)
    return arith.constant(kind, ir.FloatAttr.get(kind, value) if jnp.issubdtype(dtype, jnp.floating) else int(value))


def scalar(array: Any) -> Any:
    """The value of a scalar that Pallas passed as an array."""
    return array.registers.flat[0]


def ptx(text: str, results: Sequence[Any], *args: Any) -> Any:
    """One volatile PTX statement; the compiler keeps such statements in order."""
    letter = {"f32": "f", "i32": "r", "i64": "l"}
    codes = [f"={letter[str(t)]}" for t in results] + [letter[str(a.type)] for a in args] + ["~{memory}"]
    kind = ir.Type.parse("!llvm.void") if not results else results[0]
    if len(results) > 1:
        kind = llvm.StructType.get_literal(list(results))
    out = llvm.inline_asm(kind, list(args), text, ",".join(codes), has_side_effects=True)
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)] if len(results) > 1 else out


def address(ref: Any, space: int) -> Any:
    """A ref's address: 64 bits in global memory (space 1), 32 in shared memory (space 3)."""
    pointer = mu.memref_ptr(ref)
    if space == 1:
        pointer = llvm.addrspacecast(llvm.PointerType.get(1), pointer)
    return llvm.ptrtoint(ir.IntegerType.get_signless(64 if space == 1 else 32), pointer)


def place(ref: Any, width: int, size: int, row: Any, column: Any) -> Any:
    """The address in global memory of `ref[row, column]`, of a ref that is `width` numbers of `size` bytes wide."""
    i64 = ir.IntegerType.get_signless(64)
    at = arith.addi(arith.muli(arith.extsi(i64, row), arith.constant(i64, width)), arith.extsi(i64, column))
    return arith.addi(address(ref, 1), arith.muli(at, arith.constant(i64, size)))


def await_phase(barrier: Any, which: int, parity: Any, acquire: str = "") -> None:
    """Waits, for ever if need be, for a phase of that parity at the mbarrier `which` bytes after `barrier` (shared memory)."""
    i32 = ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
        text = f"mbarrier.try_wait.parity{acquire}.shared::cta.b64 p, [$1+{which}], $2; selp.b32 $0, 0, 1, p;"
        early = ptx(f"{{.reg .pred p; {text}}}", [i32], barrier, parity)
        scf.condition(arith.cmpi(arith.CmpIPredicate.ne, early, int32(0)), [])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
        scf.yield_([])


def patience(lost: Any, turn: Any, spins: int) -> Any:
    """Whether to wait on after `turn` turns: these are fewer than `spins`, and as far as is known (it is looked up rarely)
    nobody has written at the address `lost` that a wait was in vain."""
    i32 = ir.IntegerType.get_signless(32)
    rare = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(turn, int32(1023)), int32(1023))
    asked = scf.IfOp(rare, [i32], has_else=True)
    with ir.InsertionPoint(asked.then_block):
        scf.yield_([ptx("ld.relaxed.gpu.global.u32 $0, [$1];", [i32], lost)])
    with ir.InsertionPoint(asked.else_block):
        scf.yield_([int32(0)])
    hope = arith.cmpi(arith.CmpIPredicate.eq, asked.results[0], int32(0))
    return arith.andi(arith.cmpi(arith.CmpIPredicate.ult, turn, int32(spins)), hope)


def elements(tile: Tile, dtype: Any, value: Callable[[Any, Any], Any]) -> Any:
    """An array of `tile` whose element at (i, j) is `value(i, j)`, given as 32-bit numbers."""
    i32 = ir.IntegerType.get_signless(32)
    layout = mgpu.WGStridedFragLayout(tile.shape, 1)
    signed = jnp.issubdtype(dtype, jnp.signedinteger) or None
    template = mgpu.FragmentedArray.splat(constant(dtype, 0), tile.shape, layout, is_signed=signed)

    def element(_: Any, at: Any) -> Any:
        return value(arith.index_cast(i32, at[0]), arith.index_cast(i32, at[1]))

    return template.foreach(element, create_array=True, is_signed=signed)
