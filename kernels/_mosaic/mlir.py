"""Helpers that emit MLIR and PTX, for the device operations."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm, scf
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._layout.specs import Tile
from cavs.kernels._mosaic.types import (
    I32,
    Address,
    ArgumentType,
    Element,
    Fragments,
    GlobalAddress,
    Layout,
    MemRef,
    Predicate,
    SharedAddress,
    Subscript,
)
from cavs.kernels._mosaic.value import Value, as_index, compare, constant, int32, int64

Values: TypeAlias = list[Value]
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())  # argument types of `inline_mgpu`


def tile_layout(tile: Tile) -> Layout:
    """The layout of an array of the tile's shape: one element per register, row-major over the threads of the warpgroup."""
    return plgpu.Layout.WG_STRIDED(tile.shape, vec_size=1)


def tile_type(tile: Tile, dtype: np.dtype | type) -> plgpu.ShapeDtypeStruct:
    """The type of an array of the tile's shape, for `inline_mgpu`."""
    return plgpu.ShapeDtypeStruct(tile.shape, np.dtype(dtype), tile_layout(tile))


@overload
def inline_mgpu(arg_types: Sequence[ArgumentType] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]: ...
@overload
def inline_mgpu(
    arg_types: Sequence[ArgumentType], return_type: plgpu.ShapeDtypeStruct
) -> Callable[[Callable[..., Fragments]], Callable[..., jax.Array]]: ...
def inline_mgpu(
    arg_types: Sequence[ArgumentType] = (), return_type: plgpu.ShapeDtypeStruct | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`plgpu.inline_mgpu`, with types: the decorated function gets a `Context` first, then MLIR values for its arguments."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def thread_index() -> I32:
    """The number of the thread in its thread block."""
    return Value(mu.thread_idx())


def false() -> Predicate:
    """The i1 constant 0."""
    return constant(ir.IntegerType.get_signless(1), 0)


def if_else(
    condition: Predicate, kinds: Sequence[ir.Type], then: Callable[[], Values | None], other: Callable[[], Values | None]
) -> Values:
    """Emits a branch. `then` and `other` emit its two sides; they return values of these types, which become the results."""
    branch = scf.IfOp(condition, kinds, has_else=True)
    for region, side in zip(branch.regions, (then, other), strict=True):
        with ir.InsertionPoint(region.blocks[0]):
            scf.yield_(side() or [])
    return [Value(x) for x in branch.results]


def repeat(start: Values, kinds: Sequence[ir.Type], turn: Callable[..., tuple[Predicate, Values]]) -> Values:
    """Emits a loop. Each turn gets values, at first `start`, and returns whether another turn follows, and its values.

    These are as many as `start`, for the next turn, and more of types `kinds`. The loop returns the values of the last turn.
    """
    loop = scf.WhileOp([*(x.type for x in start), *kinds], start)
    before = loop.before.blocks.append(*(x.type for x in start))
    with ir.InsertionPoint.at_block_begin(before):
        scf.condition(*turn(*map(Value, before.arguments)))
    after = loop.after.blocks.append(*(x.type for x in loop.results))
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_(list(after.arguments)[: len(start)])
    return [Value(x) for x in loop.results]


@overload
def ptx(text: str, results: ir.Type, *args: Value) -> Value: ...
@overload
def ptx(text: str, results: Sequence[ir.Type], *args: Value) -> Values: ...
def ptx(text: str, results: ir.Type | Sequence[ir.Type], *args: Value) -> Value | Values:
    """Emits inline PTX. It is volatile: the compiler keeps such statements in order.

    Args:
        text: The instructions, in which `$n` stands for the n-th operand; results come first.
        results: The type of the result, or the types of several or no results: f32, i32 or i64.
        *args: The operands.

    Returns:
        The result, or the list of results.
    """
    types = [results] if isinstance(results, ir.Type) else list(results)
    letter = {"f32": "f", "i32": "r", "i64": "l"}
    codes = [f"={letter[str(t)]}" for t in types] + [letter[str(a.type)] for a in args] + ["~{memory}"]
    kind = ir.Type.parse("!llvm.void") if not types else types[0]
    if len(types) > 1:
        kind = llvm.StructType.get_literal(types)
    out = Value(cast(Any, llvm.inline_asm(kind, list(args), text, ",".join(codes), has_side_effects=True)))
    if isinstance(results, ir.Type):
        return out
    return [Value(llvm.extractvalue(t, out, [i])) for i, t in enumerate(types)] if len(types) > 1 else [out] * len(types)


def address(ref: MemRef, space: int) -> Address:
    """The address of a buffer: an i64 in global memory (space 1), an i32 in shared memory (space 3)."""
    pointer = mu.memref_ptr(ref)
    if space == 1:
        pointer = llvm.addrspacecast(llvm.PointerType.get(1), pointer)
    return Value(llvm.ptrtoint(ir.IntegerType.get_signless(64 if space == 1 else 32), pointer))


def element_address(ref: MemRef, width: int, size: int, row: I32, column: I32) -> GlobalAddress:
    """The address of `ref[row, column]` in global memory, where each row has `width` elements of `size` bytes."""
    at = int64(row) * width + int64(column)
    return address(ref, 1) + at * size


def for_each(first: I32, count: int, threads: int, item: Callable[[I32], None]) -> None:
    """Emits a loop over items, which threads take in turns: this one those from `first` on, `threads` apart."""
    loop = scf.ForOp(as_index(first), as_index(count), as_index(threads))
    with ir.InsertionPoint(loop.body):
        item(int32(loop.induction_variable))
        scf.yield_([])


def store_words(place: GlobalAddress, words: Sequence[Value], offset: int = 0) -> None:
    """Stores 1, 2 or 4 registers at an address in global memory, plus a constant number of bytes."""
    args = ", ".join(f"${i + 1}" for i in range(len(words)))
    ptx(f"st.global.v{len(words)}.b32 [$0+{offset}], {{{args}}};", [], place, *words)


def wait_phase(barriers: SharedAddress, offset: int, parity: I32, acquire: str = "") -> None:
    """Waits until a phase of the mbarrier at `barriers + offset` completes. There is no limit on the wait.

    Args:
        barriers: The address of barriers in shared memory.
        offset: The offset of the barrier, in bytes.
        parity: The parity of the phase.
        acquire: A PTX qualifier, ".acquire.cluster" if other thread blocks arrive at the barrier.
    """

    def turn() -> tuple[Predicate, Values]:
        text = f"mbarrier.try_wait.parity{acquire}.shared::cta.b64 p, [$1+{offset}], $2; selp.b32 $0, 0, 1, p;"
        return ptx(f"{{.reg .pred p; {text}}}", ir.IntegerType.get_signless(32), barriers, parity) != 0, []

    repeat([], [], turn)


def keep_polling(failed: GlobalAddress, turn: I32, spins: int) -> Predicate:
    """Whether a thread that has polled `turn` times should poll again.

    It stops after `spins` times, or if another thread gave up: that thread wrote a nonzero value at `failed`, which is read
    only in every 1024th turn.
    """
    i32 = ir.IntegerType.get_signless(32)
    text = "ld.relaxed.gpu.global.u32 $0, [$1];"
    (gave_up,) = if_else(turn & 1023 == 1023, [i32], lambda: [ptx(text, i32, failed)], lambda: [int32(0)])
    hope = gave_up == 0
    return compare("ult", turn, spins) & hope


def poll(counter: GlobalAddress, target: I32, failed: GlobalAddress, spins: int) -> None:
    """Waits, in one thread, until a counter in global memory has at least a value; what was written before is then visible.

    After `spins` unsuccessful polls the thread writes 1 at `failed` and goes on, so that no launch hangs.
    """

    def turn(number: I32) -> tuple[Predicate, Values]:
        seen = ptx("ld.acquire.gpu.global.u32 $0, [$1];", number.type, counter)
        return compare("ult", seen, target) & keep_polling(failed, number, spins), [number + 1]

    (turns,) = repeat([int32(0)], [], turn)
    with mu.when(compare("ugt", turns, spins)):
        ptx("st.relaxed.gpu.global.u32 [$0], $1;", [], failed, int32(1))


def elements(tile: Tile, dtype: np.dtype, value: Callable[[I32, I32], Element]) -> Fragments:
    """Returns an array of the tile's shape whose element (i, j) is `value(i, j)`, in the layout of `tile_layout`."""
    layout, zero = mgpu.WGStridedFragLayout(tile.shape, 1), constant(mu.dtype_to_ir_type(dtype), 0)
    signed = jnp.issubdtype(dtype, jnp.signedinteger) or None
    template = mgpu.FragmentedArray.splat(zero, tile.shape, layout, is_signed=signed)

    def element(_: ir.Value, at: tuple[Subscript, ...]) -> Element:
        return value(int32(at[0]), int32(at[1]))

    return cast(Fragments, template.foreach(element, create_array=True, is_signed=signed))
